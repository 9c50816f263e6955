"""Runs npattn's CUDA kernels on the CPU: g++ with cuda_host.h in place of a GPU.

``run`` takes the launches that ``npattn.kernels._cuda.run`` takes, with NumPy arrays behind the pointers.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from npattn.kernels._cuda import Kernel, Launch, source_text

HEADER = Path(__file__).with_name("cuda_host.h")
HEADERS = (HEADER, HEADER.with_name("hopper_host.h"))
FLAGS = ("-std=c++17", "-O1", "-mf16c", "-fPIC", "-w", "-fno-strict-aliasing")


def why_not() -> str | None:
    """None, or why the kernels cannot run here."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"cuda_host.h switches stacks on x86-64 only, this is {platform.machine()}"
    if shutil.which("g++") is None:
        return "there is no g++"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.partition(".")[0]) < 12:
        return f"_Float16 needs g++ 12 or newer, this is {version.strip()}"
    return None


class LaunchError(RuntimeError):
    """The model stopped a launch: deadlock, misalignment, a write outside shared memory."""


def _folder() -> Path:
    """Compiled kernels, by content; kept between runs."""
    folder = Path(tempfile.gettempdir()) / f"npattn-cuda-host-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


def _compile(arguments: list[str], target: Path) -> None:
    """Whole or not at all, whoever else is compiling the same."""
    building = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}")
    result = subprocess.run(["g++", *FLAGS, *arguments, "-o", str(building)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"g++ failed: {' '.join(arguments)}\n{result.stderr[:6000]}")
    os.replace(building, target)


@cache
def _header() -> Path:
    """Both headers as one file, precompiled."""
    text = b"".join(header.read_bytes() for header in HEADERS)
    digest = hashlib.sha256(text + repr(FLAGS).encode()).hexdigest()[:16]
    copy = _folder() / f"cuda_host_{digest}.h"
    if not copy.with_name(copy.name + ".gch").exists():
        copy.write_bytes(text)
        _compile(["-x", "c++-header", str(copy)], copy.with_name(copy.name + ".gch"))
    return copy


def library_file(text: str) -> Path:
    """Compile a translation unit, or find it compiled."""
    names = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^()]*\) )?(\w+)\(', text)
    text += "".join(f"\nNPATTN_HOST_EXPORT({name})" for name in dict.fromkeys(names)) + "\n"
    header = _header()
    digest = hashlib.sha256(header.name.encode() + text.encode()).hexdigest()[:24]
    library = _folder() / f"{digest}.so"
    if not library.exists():
        source = library.with_suffix(".cu")
        source.write_text(text)
        _compile(["-shared", "-x", "c++", "-include", str(header), str(source)], library)
    return library


@cache
def _load(kernel: Kernel) -> ctypes.CDLL:
    return ctypes.CDLL(str(library_file(source_text(kernel))))


def build_all(kernels: list[Kernel]) -> None:
    """Compile several specialisations, two at a time."""
    _header()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_load, dict.fromkeys(kernels)))


def run_library(library: ctypes.CDLL, launch: Launch) -> None:
    """One launch; raises LaunchError with the model's message."""
    function = getattr(library, launch.entry + "__host")
    function.restype = ctypes.c_char_p
    grid = (ctypes.c_uint * 3)(launch.grid, 1, 1)
    block = (ctypes.c_uint * 3)(launch.block, 1, 1)
    params = ctypes.c_void_p(launch.params.ctypes.data)
    message = function(grid, block, ctypes.c_size_t(launch.shared_bytes), params)
    if message:
        raise LaunchError(f"{launch.entry}: {message.decode()}")


def run(launches: list[Launch]) -> None:
    """Run launches in order, to their end."""
    build_all([launch.kernel for launch in launches if launch.grid > 0])
    for launch in launches:
        if launch.grid > 0:
            run_library(_load(launch.kernel), launch)

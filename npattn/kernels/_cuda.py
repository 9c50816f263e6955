"""The only loader of .cu files: from source text to a running kernel, through CuPy.

The kernels are text in this folder. One *specialisation* is a list of files and a list of macros: they are
joined into one string (nothing is found by #include, so the string is the whole truth), compiled by NVRTC for
the device's architecture, kept on disk under the hash of the string, and loaded once per device.

``import npattn`` and this module never touch CUDA; ``why_unavailable`` and ``run`` do.
"""

import hashlib
import os
import re
import sys
import tempfile
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._typing import Array

FOLDER: Final = Path(__file__).parent
INSTALL: Final = "pip install 'npattn[cuda13]' (or npattn[cuda12] for a CUDA 12 driver)"
MIN_CAPABILITY: Final = 80

_OPTIONS: Final = ("-std=c++17", "-default-device")
_NUMPY_TYPES: Final = {"i64": "i8", "double": "f8", "int": "i4", "u32": "u4", "float": "f4"}
_lock = threading.Lock()


class Kernel(NamedTuple):
    """One specialisation: what is compiled together."""

    files: tuple[str, ...]  # below npattn/kernels, in this order
    defines: tuple[tuple[str, str], ...]
    variant: str = ""  # "a" where it runs on one architecture only: compiled for sm_90a on an sm_90


class Launch(NamedTuple):
    """One kernel launch; grid and block are one-dimensional."""

    kernel: Kernel
    entry: str  # the extern "C" name
    grid: int
    block: int
    shared_bytes: int
    params: Array  # a record array of one element, passed by value


@lru_cache(maxsize=512)
def source_text(kernel: Kernel) -> str:
    """The whole translation unit.

    >>> text = source_text(Kernel(("device.cuh",), (("T", "float"),)))
    >>> text.splitlines()[0]
    '#define T float'
    """
    lines = [f"#define {name} {value}" for name, value in kernel.defines]
    for file in kernel.files:
        lines += [f'#line 1 "{file}"', (FOLDER / file).read_text(encoding="utf-8")]
    return "\n".join(lines)


def struct_dtype(file: str, name: str) -> np.dtype[Any]:
    """The NumPy record of a C struct, read from its declaration: the .cu files say it once.

    Members are pointers, i64, double, int, u32 or float, or fixed arrays of those, one declaration a line.
    """
    text = (FOLDER / file).read_text(encoding="utf-8")
    found = re.search(rf"^struct {name} \{{(.*?)^\}};", text, re.S | re.M)
    if found is None:
        raise ValueError(f"no struct {name} in {file}")
    fields: list[tuple[Any, ...]] = []
    for line in found[1].splitlines():
        declaration = line.partition("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        parts = re.fullmatch(r"([\w ]+?\*?) *(\w+)(?:\[(\d+)\])?", declaration)
        if parts is None:
            raise ValueError(f"{file}: cannot read the member {declaration!r} of {name}")
        c_type, member, size = parts.groups()
        kind = "u8" if c_type.endswith("*") else _NUMPY_TYPES[c_type]
        fields.append((member, kind, (int(size),)) if size else (member, kind))
    return np.dtype(fields, align=True)


def pointer(array: Any) -> int:
    """The address of an array's first element; 0 when it has none."""
    if array.size == 0:
        return 0
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.data.ptr)


@cache
def why_unavailable() -> str | None:
    """None when kernels can run on the current device, else one sentence: what is missing, how to get it."""
    try:
        import cupy
    except ModuleNotFoundError:
        return f"CuPy is not installed: {INSTALL}"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return f"CuPy is installed but cannot be imported ({what}): reinstall it, {INSTALL}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return (
            f"CuPy finds no usable NVIDIA driver ({error}): install the driver for your card, "
            "version 525 or newer for CUDA 12, 580 or newer for CUDA 13"
        )
    if count == 0:
        return "there is no CUDA device in this machine: use backend='numba' or 'numpy'"
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < MIN_CAPABILITY:
        return (
            f"the CUDA device has compute capability {capability / 10:.1f}, the kernels need 8.0 (Ampere) or "
            "newer: use another card, or backend='numpy', which computes with CuPy's own operations"
        )
    return None


def device_of(array: Any) -> Any:
    """A context in which the array's device is the current one."""
    return array.device


def require_gpu_array(array: Any) -> None:
    """TypeError unless ``array`` is a CuPy array: nothing is copied between devices silently."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"backend='cupy' computes on the GPU, but got a {type(array).__name__}: move the arrays with "
            "cupy.asarray(x), or choose backend='numba' or 'numpy'"
        )


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def shared_limit(device: int) -> int:
    """Bytes of shared memory one block may ask for."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def current_device() -> int:
    """Number of the current CUDA device."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@cache
def architecture(device: int) -> str:
    """The architecture kernels are compiled for, like "sm_90"."""
    import cupy

    return f"sm_{cupy.cuda.Device(device).compute_capability}"


def opted_in(variable: str, *more: str) -> str:
    """What an environment variable asks for that is off by default: "", "1" or one of ``more``.

    Read at every call, so that there is nothing to reset.

    Raises
    ------
    ValueError
        When it is set to anything else ("0" is "").
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1", *more):
        choices = " or ".join(("1", *more))
        raise ValueError(
            f"{variable} must be {choices} (on), 0 or unset (off), got {value!r}: see docs/gpu.md"
        )
    return "" if value == "0" else value


class Box(NamedTuple):
    """An array of 16-bit numbers and the box of it that TMA copies at a time: ``rows`` rows of 64."""

    address: int
    is_bf16: bool
    sizes: tuple[int, int, int, int]  # from the last axis to the first
    strides: tuple[int, int, int]  # bytes, of all axes but the last
    rows: int


@lru_cache(maxsize=1024)
def tensor_map(box: Box) -> bytes:
    """The 128 bytes by which the driver describes a box to TMA.

    Rows of 128 bytes, their chunks of 16 permuted (128-byte swizzle), zeros behind the ends of the array.

    Raises
    ------
    RuntimeError
        When the driver refuses.
    """
    import ctypes

    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    room = (ctypes.c_uint64 * 24)()  # 128 bytes aligned to 64 in it
    start = ctypes.addressof(room)
    start += -start % 64
    code = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        ctypes.c_int(9 if box.is_bf16 else 6),  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
        ctypes.c_uint32(4),
        ctypes.c_void_p(box.address),
        (ctypes.c_uint64 * 4)(*box.sizes),
        (ctypes.c_uint64 * 3)(*box.strides),
        (ctypes.c_uint32 * 4)(64, box.rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        ctypes.c_int(0),  # no interleave
        ctypes.c_int(3),  # CU_TENSOR_MAP_SWIZZLE_128B
        ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        ctypes.c_int(0),  # zeros outside
    )
    if code != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {code} for {box}; NPATTN_WGMMA=1 does without TMA")
    return ctypes.string_at(start, 128)


def compile_cubin(text: str, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile with NVRTC; needs no device.

    Parameters
    ----------
    text : str
        The whole translation unit.
    arch : str
        Like "sm_80".
    options : tuple of str
        Added to the loader's own, for example ``--ptxas-options=-v``.

    Returns
    -------
    (bytes, str)
        The cubin and the compiler's log.

    Raises
    ------
    RuntimeError
        With the log, when the text does not compile.
    """
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, "npattn.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *_OPTIONS, *options))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC: {error}\n{nvrtc.getProgramLog(program)}") from error
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


class Resources(NamedTuple):
    """What one compiled kernel takes, from the compiler's log."""

    entry: str
    arch: str
    registers: int  # a thread
    stack: int  # bytes of local memory a thread
    spills: int  # bytes stored and loaded because registers ran out


def resources(log: str) -> list[Resources]:
    r"""Read the log of ``compile_cubin(..., options=("--ptxas-options=-v",))``.

    >>> resources("ptxas info : Compiling entry function 'f' for 'sm_90'\n"
    ...           "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    ...           "ptxas info : Used 40 registers, used 1 barriers")
    [Resources(entry='f', arch='sm_90', registers=40, stack=8, spills=8)]
    """
    pattern = (
        r"entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return [
        Resources(entry, arch, int(registers), int(stack), int(stores) + int(loads))
        for entry, arch, stack, stores, loads, registers in re.findall(pattern, log, re.S)
    ]


def cache_folder() -> Path:
    """Where cubins are kept: NPATTN_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("NPATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npattn"


def _cubin_file(kernel: Kernel, arch: str) -> Path:
    """The file holding the compiled kernel, written if it is not there yet."""
    from cupy_backends.cuda.libs import nvrtc

    text = source_text(kernel)
    version = ".".join(map(str, nvrtc.getVersion()))
    digest = hashlib.sha256(f"{arch} {version} {_OPTIONS}\n{text}".encode()).hexdigest()[:32]
    path = cache_folder() / f"{digest}.cubin"
    if not path.exists():
        cubin, _ = compile_cubin(text, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin + b"\0")  # CuPy's getCUBIN drops the last byte
        os.replace(file.name, path)  # whole or not at all, whoever else is writing it
    return path


_functions: dict[tuple[Kernel, str, int], Any] = {}


def _function(launch: Launch, device: int) -> Any:
    """The loaded kernel; compiled and loaded once per device."""
    key = (launch.kernel, launch.entry, device)
    function = _functions.get(key)
    if function is None:
        import cupy

        with _lock:
            path = _cubin_file(launch.kernel, architecture(device) + launch.kernel.variant)
            function = cupy.RawModule(path=str(path)).get_function(launch.entry)
            _functions[key] = function
    if launch.shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = launch.shared_bytes
    return function


def run(launches: list[Launch]) -> None:
    """Put the launches on the current stream of the current device, in order. Does not wait for them."""
    device = current_device()
    for launch in launches:
        if launch.grid > 0:
            function = _function(launch, device)
            function((launch.grid,), (launch.block,), (launch.params,), shared_mem=launch.shared_bytes)


__all__ = [
    "INSTALL",
    "Box",
    "Kernel",
    "Launch",
    "Resources",
    "architecture",
    "cache_folder",
    "compile_cubin",
    "current_device",
    "device_of",
    "opted_in",
    "pointer",
    "processors",
    "require_gpu_array",
    "resources",
    "run",
    "shared_limit",
    "source_text",
    "struct_dtype",
    "tensor_map",
    "why_unavailable",
]

"""The only spelling of Numba's options, and where compiled code is kept between runs.

``jit`` compiles a function without the interpreter lock, without bounds checks and with IEEE arithmetic (no
``fastmath=True``: it promises that no infinities occur, and empty rows are made of them). Vectors and fused
multiplications are written out in `_simd`, so nothing is left for such a promise to win.

**Cache.** Numba's own cache compares one file only, that of the decorated function, while these kernels are
made of many. Here the stamp of every index is a hash over the sources of *all* compiled kernels, the
processor and the vector width: a change in any of them invalidates everything, and two widths live side by
side. The place is Numba's (``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the user's cache folder);
where none is writable, or the package is imported from a zip, functions compile anew in each process,
silently.
"""

import ctypes
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import caching

from npattn.kernels._simd import _host

_COMPILED = {
    "_jit",
    "_parts",
    "_simd",
    "_team",
    "numba_cpu",
}  # files and folders of this name hold compiled code

INTERPRETED = bool(numba.config.DISABLE_JIT)
"""NUMBA_DISABLE_JIT is set: explicit vectors cannot run interpreted, so these kernels decline all work."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first use for each set of argument types; kept on disk where possible."""
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    if not INTERPRETED:
        _keep_on_disk(compiled, function)
    return compiled


def compiled_sources() -> list[Path]:
    """Every file whose text or constants end up in machine code."""
    kernels = Path(__file__).parent
    chosen = [path for path in kernels.rglob("*.py") if _COMPILED & {*path.parts, path.stem}]
    package = kernels.parent
    constants = [
        package / "_dropout.py",
        package / "plans" / "tiles.py",
        kernels / "pointwise" / "erf.py",
        kernels / "pointwise" / "arrays.py",
    ]
    return sorted(chosen + constants)


@lru_cache(maxsize=1)
def source_stamp() -> str:
    """Hash of everything machine code depends on besides Numba's version and the argument types."""
    digest = hashlib.sha256()
    for path in compiled_sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    digest.update(f"{_host.CPU_NAME} {sorted(_host.CPU_FEATURES)} {_host.WIDTH}".encode())
    return digest.hexdigest()


def _keep_on_disk(compiled: Any, function: Callable[..., Any]) -> None:
    """Give ``compiled`` a disk cache under our stamp; leave it without one where there is no place for it."""
    if not os.path.isfile(inspect.getfile(function)):  # imported from a zip: nothing to hash
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = caching.FunctionCache(function)
        cache._cache_file = caching.IndexDataCacheFile(
            cache_path=cache._cache_path,
            filename_base=f"{cache._impl.filename_base}.w{_host.WIDTH}",
            source_stamp=source_stamp(),
        )
    except (RuntimeError, OSError, AttributeError):  # no writable place, or another layout inside Numba
        return
    compiled._cache = cache


# --- addresses ---------------------------------------------------------------------------------------------

_DATA_OFFSET = object.__basicsize__  # PyArrayObject: the object header, then the data pointer
_pointer_at = ctypes.c_void_p.from_address


def _address_from_object(array: Any) -> int:
    return _pointer_at(id(array) + _DATA_OFFSET).value or 0


def _address_from_interface(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _object_layout_is_known() -> bool:
    """Whether the quick way agrees with the official one on this interpreter."""
    for array in (np.zeros(3), np.zeros((2, 3))[1:, ::-1]):
        if _address_from_object(array) != _address_from_interface(array):
            return False
    return True


address: Callable[[Any], int] = (
    _address_from_object
    if hasattr(ctypes, "pythonapi") and _object_layout_is_known()
    else _address_from_interface
)
"""Where an ndarray's first element lies, as an int. Kernels take addresses and strides, so that layouts,
strides and read-only flags are data and not types. Reading the pointer out of the array object takes 0.15 us
against 1 us for ``__array_interface__``; it is checked once against it and not used where they differ."""


__all__ = ["INTERPRETED", "address", "jit", "source_stamp"]

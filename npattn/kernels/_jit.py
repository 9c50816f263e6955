"""Compiling kernels, calling them, and keeping their machine code between runs.

A kernel is a function of numbers (addresses, counts, and ``one``, whose type says which precision is meant)
whose body `_parts` can lower. Numba's code generator turns it into a C function with IEEE arithmetic (no fast
math: it promises that no infinities occur, and empty rows are made of them), and ctypes calls that without
the interpreter lock. Numba's dispatcher is not used: before its first call it sets up everything Numba knows
of Python and NumPy, 0.25 s, where loading a kernel's machine code takes 0.01; a call costs 0.7 us for 0.3.

**Disk cache.** Numba's own cache compares one file only, that of the decorated function, while these kernels
are made of many. Here the stamp of every index is a hash over the sources of *all* compiled kernels, the
processor and the vector width: a change in any of them invalidates everything, and two widths live side by
side. The place is Numba's (``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the user's cache folder);
where none is writable, or the package is imported from a zip, functions compile anew in each process,
silently.
"""

import ctypes
import functools
import hashlib
import inspect
import operator
import os
import pickle
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from npattn.kernels._parts import lowered
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


_C_TYPES: dict[Any, Any] = {
    types.intp: ctypes.c_int64,
    types.float32: ctypes.c_float,
    types.float64: ctypes.c_double,
}


class Kernel:
    """A compiled function; for each type of the last argument one version, made when it is first wanted.

    The other arguments are integers, or floats of one fixed precision. Of a tuple (the parameter
    ``length_of``) only the length counts: each length has versions of its own.
    """

    def __init__(self, function: Callable[..., Any], returns: Any, length_of: str | None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.returns = returns
        names = list(inspect.signature(function).parameters)
        self._tuple = None if length_of is None else names.index(length_of)
        self._versions: dict[Any, Any] = {}
        self._libraries: list[Any] = []  # what owns the machine code
        self.origins: list[str] = []  # of each version: "disk" or "compiler"

    def __call__(self, *arguments: Any) -> Any:
        """Run it; blocks no other Python thread."""
        version = self.version(arguments)
        if self._tuple is not None:
            arguments = arguments[: self._tuple] + arguments[self._tuple + 1 :]
        try:
            return version(*arguments)
        except ctypes.ArgumentError:  # NumPy's integers
            return version(*map(_plain, arguments))

    def version(self, arguments: tuple[Any, ...]) -> Any:
        """The C function for arguments of these types, without the tuple."""
        key: Any = arguments[-1].__class__
        if self._tuple is not None:
            key = key, len(arguments[self._tuple])
        found = self._versions.get(key)
        if found is None:
            with global_compiler_lock:
                found = self._versions.get(key)
                if found is None:
                    found = self._versions[key] = self._make(tuple(_kind(value) for value in arguments))
        return found

    def _make(self, kinds: tuple[Any, ...]) -> Any:
        passed = [kind for kind in kinds if kind in _C_TYPES]
        name = f"{self.function.__module__}.{self.function.__qualname__}({', '.join(map(str, kinds))})"
        codegen = cpu_target.target_context.codegen()
        kept = _kept(self.function)
        state = _load(kept, name)
        if state is not None:
            library = codegen.unserialize_library(state)
            self.origins.append("disk")
        else:
            library = codegen.create_library(name)
            library.enable_object_caching()
            _optimise_once(library, codegen)
            library.add_ir_module(self._module(library, name, kinds, passed))
            library.finalize()
            _save(kept, name, library)
            self.origins.append("compiler")
        self._libraries.append(library)
        result = None if self.returns == types.void else _C_TYPES[self.returns]
        kind = ctypes.CFUNCTYPE(result, *(_C_TYPES[kind] for kind in passed))
        return kind(library.get_pointer_to_function(name))

    def _module(self, library: Any, name: str, kinds: tuple[Any, ...], passed: list[Any]) -> ir.Module:
        """The function in LLVM's language: what is exported under ``name`` calls the lowered Python."""
        context = cpu_target.target_context
        module = library.create_ir_module(name)
        inner = lowered(context, module, self.function, kinds, self.returns)
        parameters = [context.get_value_type(kind) for kind in passed]
        exported = ir.Function(module, ir.FunctionType(inner.function_type.return_type, parameters), name)
        builder = ir.IRBuilder(exported.append_basic_block())
        value = builder.call(inner, exported.args)
        if self.returns == types.void:
            builder.ret_void()
        else:
            builder.ret(value)
        return module


def jit(
    function: Callable[..., Any] | None = None, *, returns: Any = types.void, length_of: str | None = None
) -> Any:
    """Make a Kernel of a function. ``returns``: the Numba type of its result, if it has one."""
    if function is None:
        return lambda wanted: Kernel(wanted, returns, length_of)
    return Kernel(function, returns, length_of)


def _optimise_once(library: Any, codegen: Any) -> None:
    """Leave one of Numba's three rounds of optimisation out of it.

    The others serve the removal of reference counts, which kernels have none of, and the vectorisers find
    nothing to do: the code is as fast, and compiled in 0.85 s for 1.25 (forward, float32).
    """
    try:
        passes, builder = codegen._module_pass_manager(
            opt=3, cost="cheap", loop_vectorize=False, slp_vectorize=False
        )
    except (AttributeError, TypeError, ValueError):  # a Numba that is built otherwise: all three
        return

    def functions(module: Any) -> None:
        module.data_layout = codegen._data_layout

    library._optimize_functions = functions
    library._optimize_final_module = lambda: passes.run(library._final_module, builder)


def _kind(value: Any) -> Any:
    """The Numba type of an argument."""
    if isinstance(value, tuple):
        return types.UniTuple(types.boolean, len(value))  # type: ignore[attr-defined]
    if isinstance(value, np.float32):
        return types.float32
    return types.float64 if isinstance(value, float) else types.intp


def _plain(value: Any) -> Any:
    return value if isinstance(value, float | np.float32) else operator.index(value)


# --- the disk cache ----------------------------------------------------------------------------------------


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


def _kept(function: Callable[..., Any]) -> Any:
    """The disk cache of one function under our stamp; None where there is no place for it."""
    if not os.path.isfile(inspect.getfile(function)):  # imported from a zip: nothing to hash
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            place = caching.FunctionCache(function)
        return caching.IndexDataCacheFile(
            cache_path=place._cache_path,
            filename_base=f"{place._impl.filename_base}.w{_host.WIDTH}",
            source_stamp=source_stamp(),
        )
    except (RuntimeError, OSError, AttributeError):  # no writable place, or another layout inside Numba
        return None


def _load(kept: Any, name: str) -> Any:
    """The serialised library, None when it is not there or not readable."""
    if kept is None:
        return None
    try:
        return kept.load((name, numba.__version__))
    except Exception:  # whatever a damaged file makes of itself: compile again
        return None


def _save(kept: Any, name: str, library: Any) -> None:
    """Keep a library, unless a source has changed since the stamp was taken: its text may be in the code."""
    if kept is None or source_stamp.__wrapped__() != source_stamp():
        return
    try:
        os.makedirs(kept._cache_path, exist_ok=True)
        state = library.serialize_using_object_code()
        try:
            kept.save((name, numba.__version__), state)
        except pickle.UnpicklingError:  # a damaged index: begin it anew
            kept.flush()
            kept.save((name, numba.__version__), state)
    except (OSError, pickle.UnpicklingError, EOFError):  # a full disk, a folder that was taken away
        return


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


__all__ = ["INTERPRETED", "Kernel", "address", "jit", "source_stamp"]

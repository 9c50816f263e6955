"""A stand-in for CuPy: NumPy arrays of another type, kernels run by the CPU model of ``host``.

It lets npattn's GPU paths run from end to end without a GPU, and is strict where CuPy is: NumPy arrays do
not mix with its arrays.
"""

import contextlib
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from npattn.kernels import _cuda

from . import host


class _Device:
    id = 0

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Memory:
    def __init__(self, address: int) -> None:
        self.ptr = address


class ndarray(np.ndarray):
    """An array that claims to be on a GPU."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return _Device()

    @property
    def data(self) -> Any:  # type: ignore[override]
        return _Memory(self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        _refuse_numpy(ufunc.__name__, inputs)
        plain = [_plain(x) for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(_plain(x) for x in out)
            getattr(ufunc, method)(*plain, **kwargs)
            return out[0] if len(out) == 1 else out
        return _ours(getattr(ufunc, method)(*plain, **kwargs))

    def __array_function__(self, function: Any, types_: Any, args: Any, kwargs: Any) -> Any:
        return getattr(MODULE, function.__name__)(*args, **kwargs)


def _refuse_numpy(name: str, arguments: Any) -> None:
    for x in arguments:
        if type(x) is np.ndarray and x.ndim > 0:
            raise TypeError(f"{name}: unsupported type <class 'numpy.ndarray'>: not on the GPU")


def _plain(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x.view(np.ndarray)
    if isinstance(x, (tuple, list)):
        return type(x)(_plain(y) for y in x) if type(x) in (tuple, list) else x
    return x


def _ours(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.view(ndarray)
    if isinstance(x, np.generic):  # CuPy's reductions give arrays without axes, not scalars
        return np.asarray(x).view(ndarray)
    if type(x) in (tuple, list):
        return type(x)(_ours(y) for y in x)
    return x


_COPIES_IN = ("asarray", "array", "ascontiguousarray")  # the functions that take NumPy arrays to the device


class _Ufunc:
    """One of CuPy's: ``at`` for sums and extremes, ``reduceat`` for sums only."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_numpy(self._ufunc.__name__, args)
        return _ours(self._ufunc(*(_plain(x) for x in args), **{k: _plain(v) for k, v in kwargs.items()}))

    def at(self, a: ndarray, indices: Any, b: Any) -> None:
        if self._ufunc not in (np.add, np.maximum, np.minimum):
            raise NotImplementedError(f"`{self._ufunc.__name__}.at` is not supported yet")
        _refuse_numpy("at", (a, indices, b))
        self._ufunc.at(*(_plain(x) for x in (a, indices, b)))

    def reduceat(self, array: ndarray, indices: Any, axis: int = 0) -> Any:
        if self._ufunc is not np.add:
            raise NotImplementedError(f"`{self._ufunc.__name__}.reduceat` is not supported yet")
        _refuse_numpy("reduceat", (array, indices))
        return _ours(self._ufunc.reduceat(_plain(array), _plain(indices), axis=axis))


def _wrapped(name: str) -> Any:
    function = getattr(np, name)
    if isinstance(function, np.ufunc):
        return _Ufunc(function)
    if isinstance(function, type) or not callable(function):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in _COPIES_IN:
            _refuse_numpy(name, args)
        return _ours(function(*(_plain(x) for x in args), **{k: _plain(v) for k, v in kwargs.items()}))

    return call


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _wrapped(name)


MODULE = _Module("cupy")
MODULE.ndarray = ndarray  # type: ignore[attr-defined]
MODULE.asnumpy = lambda x: np.array(_plain(x))  # type: ignore[attr-defined]
MODULE.get_array_module = lambda *xs: MODULE if any(isinstance(x, ndarray) for x in xs) else np  # type: ignore[attr-defined]


def tensor_map(box: _cuda.Box) -> bytes:
    """``_cuda.tensor_map`` for hopper_host.h: its BoxMap."""
    # what cuTensorMapEncodeTiled would refuse
    assert box.address % 16 == 0
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in box.strides)
    assert all(0 < size <= 2**32 for size in box.sizes)
    assert 0 < box.rows <= 256
    return struct.pack("<Q4Q3QI", box.address, *box.sizes, *box.strides, box.rows).ljust(128, b"\0")


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """``cupy`` is the stand-in, and ``_cuda`` runs kernels on the CPU model, until the end of the block."""
    replaced = {
        "why_unavailable": lambda: None,
        "current_device": lambda: 0,
        "architecture": lambda device: "sm_90",
        "tensor_map": tensor_map,
        "processors": lambda device: 4,
        "shared_limit": lambda device: 227 * 1024,
        "run": host.run,
    }
    before = {name: getattr(_cuda, name) for name in replaced}
    real = sys.modules.get("cupy")
    sys.modules["cupy"] = MODULE
    for name, function in replaced.items():
        setattr(_cuda, name, function)
    try:
        yield MODULE
    finally:
        for name, function in before.items():
            setattr(_cuda, name, function)
        if real is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = real

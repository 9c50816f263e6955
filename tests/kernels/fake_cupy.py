"""A stand-in for CuPy that computes with NumPy and is as strict: it shows where host and device arrays mix.

Its arrays refuse conversion to NumPy, operations with NumPy arrays, and attributes CuPy's arrays do not have.
What it cannot show is a function that CuPy lacks or treats differently.
"""

import types

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class ndarray(NDArrayOperatorsMixin):
    def __init__(self, host):
        self.host = host

    def __array__(self, *args, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if out is not None:
            options["out"] = tuple(unwrap(x) for x in out)
        result = getattr(ufunc, method)(*map(unwrap, inputs), **options)
        return out[0] if out is not None else wrap(result)

    def __array_function__(self, function, kinds, args, options):
        raise TypeError(f"numpy.{function.__name__} was called with a CuPy array")

    def __getattr__(self, name):
        if name in ("ctypes", "data", "base", "__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        value = getattr(self.host, name)
        return device(value) if callable(value) else wrap(value)

    @property
    def flags(self):
        flags = self.host.flags
        return types.SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    def __getitem__(self, index):
        return wrap(self.host[unwrap_index(index)])

    def __setitem__(self, index, value):
        self.host[unwrap_index(index)] = unwrap(value)

    def __len__(self):
        return len(self.host)

    def __bool__(self):
        return bool(self.host)

    def __float__(self):
        return float(self.host)

    def get(self):
        return np.array(self.host)


def wrap(x):
    """NumPy's arrays and scalars become device arrays; CuPy has no scalars of its own."""
    return ndarray(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x


def unwrap(x):
    if isinstance(x, ndarray):
        return x.host
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, tuple | list):
        return type(x)(map(unwrap, x))
    return x


def unwrap_index(index):
    if isinstance(index, tuple):
        return tuple(map(unwrap_index, index))
    return index.host if isinstance(index, ndarray) else index


def device(function):
    def call(*args, **options):
        result = function(*map(unwrap, args), **{name: unwrap(x) for name, x in options.items()})
        return type(result)(map(wrap, result)) if isinstance(result, tuple | list) else wrap(result)

    return call


class Module(types.ModuleType):
    """``cupy``: NumPy's functions over device arrays."""

    ndarray = ndarray

    @staticmethod
    def asarray(x, *args):
        return ndarray(np.asarray(x.host if isinstance(x, ndarray) else x, *args))

    array = asarray

    @staticmethod
    def asnumpy(x):
        return x.get() if isinstance(x, ndarray) else np.asarray(x)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(np, name)
        return device(value) if callable(value) and not isinstance(value, type) else value

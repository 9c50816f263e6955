"""Fixtures that put the CPU model of a GPU behind ``backend="cupy"``."""

from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.kernels import select

from . import fake_cupy, host

WHY_NOT = host.why_not()


@pytest.fixture
def cupy():
    """The stand-in for CuPy; kernels run on the CPU."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with fake_cupy.installed() as module:
        yield module


def to_gpu(x):
    return x.view(fake_cupy.ndarray) if type(x) is np.ndarray else x


def to_cpu(x):
    if isinstance(x, fake_cupy.ndarray):
        return x.view(np.ndarray)
    if isinstance(x, tuple):
        moved = [to_cpu(y) for y in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def through(function):
    """A function of arrays called with GPU arrays, its results (a pullback among them) brought back."""

    def call(*args, **options):
        result = function(*map(to_gpu, args), **{name: to_gpu(x) for name, x in options.items()})
        if isinstance(result, tuple) and callable(result[-1]):
            return (*map(to_cpu, result[:-1]), through(result[-1]))
        return to_cpu(result)

    return call


@pytest.fixture
def attend(cupy):
    """What tests/conftest.py gives for the CPU: attention and attention_vjp, here by the CUDA kernels."""

    def asking(function):
        def call(*args, **options):
            try:
                return through(function)(*args, backend="cupy", **options)
            except select.BackendError as error:
                pytest.skip(str(error))

        return call

    return SimpleNamespace(
        backend="cupy",
        attention=asking(npattn.attention),
        attention_vjp=asking(npattn.attention_vjp),
    )

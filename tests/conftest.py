"""Fixtures for every test: a random generator, and attention by each implementation in turn."""

from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

import npattn
from npattn.kernels import select
from npattn.kernels.tile import numpy_tiled

# The products in tests are small, and idle BLAS threads spin: on a machine with other work a test takes ten
# times as long with them.
threadpoolctl.threadpool_limits(1, user_api="blas")

#: Every implementation that runs on a CPU; numpy twice, as small inputs would fill just one of its tiles.
IMPLEMENTATIONS = ("oracle", "numpy", "numpy, small tiles", "numba")


@pytest.fixture
def rng():
    return np.random.default_rng(20240229)


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request, monkeypatch):
    """attention and attention_vjp of one implementation; a case it does not support must say why.

    Skipped tests show the reason; ``test_select.py`` asserts that nothing is skipped where numba runs.
    """
    backend = request.param
    if backend == "numpy, small tiles":
        monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: (16, 32))
        backend = "numpy"

    def asking(function):
        def call(*args, **options):
            try:
                return function(*args, backend=backend, **options)
            except select.BackendError as error:
                refusal = str(error)
            reason = refusal.partition(": ")[2]
            assert len(reason) > 10, f"{backend} refused without a reason: {refusal}"
            pytest.skip(f"{backend}: {reason}")

        return call

    return SimpleNamespace(
        backend=backend,
        attention=asking(npattn.attention),
        attention_vjp=asking(npattn.attention_vjp),
    )


@pytest.fixture
def poisoned_empty(monkeypatch):
    """np.empty and np.empty_like give NaN and other garbage instead of the zeros of fresh memory."""

    def poison(make):
        def made(*args, **options):
            array = make(*args, **options)
            if array.dtype.kind in "fV":
                array[...] = np.nan
            elif array.dtype.kind in "iu":
                array[...] = np.iinfo(array.dtype).max // 3
            elif array.dtype.kind == "b":
                array[...] = True
            return array

        return made

    monkeypatch.setattr(np, "empty", poison(np.empty))
    monkeypatch.setattr(np, "empty_like", poison(np.empty_like))

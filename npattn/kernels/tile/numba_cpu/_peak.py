"""The processor's speed limit, measured by the kernels' own inner loop on data that stays in the L1 cache."""

import time
from typing import Any

import numpy as np

from npattn import _threads
from npattn.kernels._jit import jit
from npattn.kernels._simd import _host
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.vectors import scalar_bytes, vector_bytes

_ROWS, _DEPTH = 48, 64


@jit
def products(a, b, c, repeat, one):
    """``repeat`` products of (48, 64) by (64, register tile)."""
    size = scalar_bytes(one)
    row = _VECTORS * vector_bytes(one)
    for _ in range(repeat):
        matmul(a, _DEPTH * size, size, b, row, c, row, _ROWS, _VECTORS, _DEPTH, True, one)


_VECTORS = _host.TILE_VECTORS


def fma_peak(dtype: Any = np.float32, seconds: float = 0.5) -> float:
    """Floating-point operations per second of all threads together, each busy with fused multiply-adds.

    The best of several runs, ``seconds`` in all.
    """
    one = np.dtype(dtype).type(1)
    lanes = _host.lanes(one.itemsize * 8)
    threads = _threads.get_num_threads()
    work = 2.0 * _ROWS * _DEPTH * _VECTORS * lanes

    def spin(repeat: int) -> None:
        size = _ROWS * _DEPTH + (_DEPTH + _ROWS) * _VECTORS * lanes
        array = np.zeros(size, dtype)
        a = array.__array_interface__["data"][0]
        b = a + _ROWS * _DEPTH * one.itemsize
        products(a, b, b + _DEPTH * _VECTORS * lanes * one.itemsize, repeat, one)

    spin(1)
    best = 0.0
    repeat = 2000
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        _threads.run(spin, [repeat] * threads)
        best = max(best, work * repeat * threads / (time.perf_counter() - start))
    return best


__all__ = ["fma_peak"]

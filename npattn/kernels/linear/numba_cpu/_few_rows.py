# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""``y = x · weightᵀ`` for a few rows of x, float32, reading the weight once and in order.

Outputs are cut into ranges, one a work item, each written by one thread alone. A thread walks its range of
the weight as one stream, four vectors at a time into four sums. On a Zen 5 machine one thread reads 31 GB/s
so, as fast as it can add numbers up; walking two or four rows of the weight side by side, as BLAS does to use
each load of x twice, 13: the prefetcher loses the streams. With several rows of x, a row of the weight is in
the first-level cache from the second on.

An output is the sum over four vectors of lanes, then over the last elements that fill no four: an order of
its own, so it does not depend on the number of rows, of threads, or on where the ranges are cut.
"""

from typing import Final

import numpy as np

from npattn import _threads
from npattn._typing import Array
from npattn.kernels import _jit
from npattn.kernels._jit import address, jit
from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import add, fma, hsum, load, load_scalar, splat, store_scalar

USABLE: Final = not _jit.INTERPRETED

#: A work item reads at least this many bytes of weight: some 10 µs, a multiple of what waking a thread costs.
ITEM_BYTES: Final = 1 << 18
#: Work items for each thread, so that one that comes late costs little.
PIECES: Final = 4

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)


@jit
def _outputs(x, w, y, rows, n, width, start, stop):
    """Outputs [start, stop) of every row of x (rows, n): y (rows, width), w (width, n)."""
    fours = n - n % (4 * LANES)
    for o in range(start, stop):
        row = w + 4 * n * o
        for r in range(rows):
            xr = x + 4 * n * r
            a, b, c, d = splat(F(0)), splat(F(0)), splat(F(0)), splat(F(0))
            for i in range(0, 4 * fours, 16 * LANES):  # in bytes
                a = fma(load(row + i, ONE), load(xr + i, ONE), a)
                b = fma(load(row + i + 4 * LANES, ONE), load(xr + i + 4 * LANES, ONE), b)
                c = fma(load(row + i + 8 * LANES, ONE), load(xr + i + 8 * LANES, ONE), c)
                d = fma(load(row + i + 12 * LANES, ONE), load(xr + i + 12 * LANES, ONE), d)
            total = hsum(add(add(a, b), add(c, d)))
            for i in range(4 * fours, 4 * n, 4):
                total += load_scalar(row + i, ONE) * load_scalar(xr + i, ONE)
            store_scalar(y + 4 * (width * r + o), total)


def rows(x: Array, weight: Array) -> Array:
    """``x @ weight.T`` (rows, out_dim) of x (rows, in_dim) and weight (out_dim, in_dim), C-contiguous."""
    (count, n), width = x.shape, len(weight)
    y = np.empty((count, width), F)
    where = (address(x), address(weight), address(y), count, n, width)
    threads = _threads.get_num_threads()
    pieces = min(weight.nbytes // ITEM_BYTES, PIECES * threads)
    if threads == 1 or pieces < 2:
        _outputs(*where, 0, width)
        return y
    step = -(-width // pieces)
    items = [(start, min(start + step, width)) for start in range(0, width, step)]
    _threads.run(lambda item: _outputs(*where, *item), items)
    return y


__all__ = ["USABLE", "rows"]

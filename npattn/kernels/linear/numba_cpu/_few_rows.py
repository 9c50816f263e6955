# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""``y = x · weightᵀ`` for a few rows of x, float32, reading the weights once and in order.

Several weights may be asked for at once, as query, key and value are: their outputs count as one sequence,
which is cut into ranges, one a work item, each written by one thread alone. A thread walks its range of a
weight as one stream, four vectors at a time into four sums. On a Zen 5 machine one thread reads 31 GB/s so,
as fast as it can add numbers up; walking two or four rows of the weight side by side, as BLAS does to use
each load of x twice, 13: the prefetcher loses the streams. With several rows of x, a row of the weight is in
the first-level cache from the second on.

A token of SmolLM2-135M (two Zen 4 cores, 540 MB): ranges handed to a sleeping pool 27 ms, on one thread 24;
to a team that is awake, query, key and value together, gate and up together, 17.

An output is the sum over four vectors of lanes, then over the last elements that fill no four: an order of
its own, so it does not depend on the number of rows, of threads, on where the ranges are cut, or on which
weights are asked for together.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from npattn import _threads
from npattn._typing import Array
from npattn.kernels import _jit, _team
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import (
    add,
    fma,
    greater,
    hsum,
    lesser,
    load,
    load_int64,
    load_scalar,
    splat,
    store_scalar,
)

USABLE: Final = not _jit.INTERPRETED

#: A work item reads at least this many bytes of weight: some 10 µs.
ITEM_BYTES: Final = 1 << 18
#: Work items for each thread, so that one that comes late costs little.
PIECES: Final = 4

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)
STEP: Final = 4 * LANES  # bytes of a vector

ROWS, N, X, WEIGHTS = range(0, 8 * 4, 8)
EACH: Final = 8 * 3  # of every weight: its address, that of its outputs, how many there are


@part()
def _outputs(x, w, y, rows, n, width, start, stop):
    """Outputs [start, stop) of every row of x (rows, n): y (rows, width), w (width, n)."""
    fours = n - n % (4 * LANES)
    for o in range(start, stop):
        row = w + 4 * n * o
        for r in range(rows):
            xr = x + 4 * n * r
            a, b, c, d = splat(F(0)), splat(F(0)), splat(F(0)), splat(F(0))
            for i in range(0, 4 * fours, 4 * STEP):
                a = fma(load(row + i, ONE), load(xr + i, ONE), a)
                b = fma(load(row + i + STEP, ONE), load(xr + i + STEP, ONE), b)
                c = fma(load(row + i + 2 * STEP, ONE), load(xr + i + 2 * STEP, ONE), c)
                d = fma(load(row + i + 3 * STEP, ONE), load(xr + i + 3 * STEP, ONE), d)
            total = hsum(add(add(a, b), add(c, d)))
            for i in range(4 * fours, 4 * n, 4):
                total += load_scalar(row + i, ONE) * load_scalar(xr + i, ONE)
            store_scalar(y + 4 * (width * r + o), total)


@part()
def _units(where, start, stop):
    rows, n, x = load_int64(where + ROWS), load_int64(where + N), load_int64(where + X)
    first = 0
    for i in range(load_int64(where + WEIGHTS)):
        at = where + WEIGHTS + 8 + EACH * i
        width = load_int64(at + 16)
        begin, end = greater(start - first, 0), lesser(stop - first, width)
        if begin < end:
            _outputs(x, load_int64(at), load_int64(at + 8), rows, n, width, begin, end)
        first += width


@jit
def output_units(where, start, stop, scratch, one):
    """Outputs [start, stop), counted through all weights of the description at ``where``."""
    _units(where, start, stop)


def rows_of_each(x: Array, weights: Sequence[Array]) -> list[Array]:
    """``x @ weight.T`` (rows, out_dim) for each weight (out_dim, in_dim), x (rows, in_dim); C-contiguous."""
    count, n = x.shape
    ys = [np.empty((count, len(weight)), F) for weight in weights]
    call = array("q", (count, n, address(x), len(weights)))
    units = 0
    for weight, y in zip(weights, ys, strict=True):
        call.extend((address(weight), address(y), len(weight)))
        units += len(weight)
    items = max(1, min(4 * n * units // ITEM_BYTES, PIECES * _threads.get_num_threads()))
    _team.run(output_units, call.buffer_info()[0], units, items)
    return ys


__all__ = ["USABLE", "rows_of_each"]

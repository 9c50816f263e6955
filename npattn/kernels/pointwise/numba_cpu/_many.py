# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Work over many arrays of any sizes at once: Adam's step, the sum of all squares, a common factor.

A model has dozens of parameters, most of them small. All their pieces are the units of one call, in the order
of the arrays; a table says where each array begins.
"""

from collections.abc import Sequence

import numpy as np
from numba.types import float32, intp

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.scalar import sqrt, sqrt_scalar
from npattn.kernels._simd.vectors import (
    add,
    div,
    fma,
    hsum,
    lesser,
    load,
    load_scalar,
    mul,
    splat,
    store,
    store_scalar,
    sub,
)
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, PIECE, F, bits, number, run, word

#: Words of the table for each array: its first unit, its size, and up to five of the kernel's own.
ROW = 7


@part(intp)
def _row_of(table, unit):
    """Where the table describes the array that ``unit`` is a piece of."""
    row = table
    while word(row, ROW) <= unit:
        row += 8 * ROW
    return row


@part(intp)
def _start(row, unit):
    return (unit - word(row, 0)) * PIECE


@part()
def _adam_part(parameter, grad, m, v, start, stop, beta_1, beta_2, step_size, root, eps, shrink):
    i = start
    rest_1, rest_2 = F(1) - beta_1, F(1) - beta_2
    while i + LANES <= stop:
        g = load(grad + 4 * i, ONE)
        mi = fma(load(m + 4 * i, ONE), splat(beta_1), mul(g, splat(rest_1)))
        vi = fma(load(v + 4 * i, ONE), splat(beta_2), mul(mul(g, g), splat(rest_2)))
        store(m + 4 * i, mi)
        store(v + 4 * i, vi)
        step = mul(div(mi, fma(sqrt(vi), splat(root), splat(eps))), splat(step_size))
        store(parameter + 4 * i, sub(mul(load(parameter + 4 * i, ONE), splat(shrink)), step))
        i += LANES
    while i < stop:
        e = load_scalar(grad + 4 * i, ONE)
        me = load_scalar(m + 4 * i, ONE) * beta_1 + e * rest_1
        ve = load_scalar(v + 4 * i, ONE) * beta_2 + e * e * rest_2
        store_scalar(m + 4 * i, me)
        store_scalar(v + 4 * i, ve)
        step_e = me / (sqrt_scalar(ve) * root + eps) * step_size
        store_scalar(parameter + 4 * i, load_scalar(parameter + 4 * i, ONE) * shrink - step_e)
        i += 1


@part()
def _adam_pieces(where, start, stop):
    table = word(where, 0)
    for unit in range(start, stop):
        row = _row_of(table, unit)
        first = _start(row, unit)
        _adam_part(
            word(row, 2),
            word(row, 3),
            word(row, 4),
            word(row, 5),
            first,
            lesser(first + PIECE, word(row, 1)),
            number(where, 1),
            number(where, 2),
            number(where, 3),
            number(where, 4),
            number(where, 5),
            number(row, 6),
        )


@jit
def _adam_units(where, start, stop, scratch, one):
    """In place, so the elements behind the last whole vector are done one by one, not twice."""
    _adam_pieces(where, start, stop)


@part(float32)
def _square_sum(x, start, stop):
    a, b, c, d = splat(F(0)), splat(F(0)), splat(F(0)), splat(F(0))
    step = 4 * LANES
    whole = stop - (stop - start) % step
    for i in range(4 * start, 4 * whole, 4 * step):
        u, v = load(x + i, ONE), load(x + i + 4 * LANES, ONE)
        a, b = fma(u, u, a), fma(v, v, b)
        u, v = load(x + i + 8 * LANES, ONE), load(x + i + 12 * LANES, ONE)
        c, d = fma(u, u, c), fma(v, v, d)
    total = hsum(add(add(a, b), add(c, d)))
    for i in range(whole, stop):
        e = load_scalar(x + 4 * i, ONE)
        total += e * e
    return total


@part()
def _square_sum_pieces(where, start, stop):
    table, sums = word(where, 0), word(where, 1)
    for unit in range(start, stop):
        row = _row_of(table, unit)
        first = _start(row, unit)
        end = lesser(first + PIECE, word(row, 1))
        store_scalar(sums + 4 * unit, _square_sum(word(row, 2), first, end))


@jit
def _square_sum_units(where, start, stop, scratch, one):
    _square_sum_pieces(where, start, stop)


@part()
def _scale_part(x, y, start, stop, factor):
    whole = stop - (stop - start) % LANES
    for i in range(start, whole, LANES):
        store(y + 4 * i, mul(load(x + 4 * i, ONE), splat(factor)))
    for i in range(whole, stop):
        store_scalar(y + 4 * i, load_scalar(x + 4 * i, ONE) * factor)


@part()
def _scale_pieces(where, start, stop):
    table = word(where, 0)
    for unit in range(start, stop):
        row = _row_of(table, unit)
        first = _start(row, unit)
        _scale_part(word(row, 2), word(row, 3), first, lesser(first + PIECE, word(row, 1)), number(where, 1))


@jit
def _scale_units(where, start, stop, scratch, one):
    _scale_pieces(where, start, stop)


def adam(
    parameters: Sequence[Array],
    grads: Sequence[Array],
    ms: Sequence[Array],
    vs: Sequence[Array],
    shrinks: Sequence[float],
    betas: tuple[float, float],
    step_size: float,
    root: float,
    eps: float,
) -> None:
    """See ``arrays.adam``."""
    table, units = _table(
        [p.size for p in parameters],
        *(map(address, arrays) for arrays in (parameters, grads, ms, vs)),
        map(bits, shrinks),
    )
    numbers = map(bits, (*betas, step_size, root, eps))
    run(_adam_units, units, address(table), *numbers)


def square_sum(arrays: Sequence[Array]) -> float:
    """See ``arrays.square_sum``."""
    table, units = _table([x.size for x in arrays], map(address, arrays))
    sums = np.empty(units, F)
    run(_square_sum_units, units, address(table), address(sums))
    return float(sums.sum(dtype=np.float64))


def scaled(arrays: Sequence[Array], factor: float) -> list[Array]:
    """See ``arrays.scaled``."""
    results = [np.empty_like(x) for x in arrays]
    table, units = _table([x.size for x in arrays], map(address, arrays), map(address, results))
    run(_scale_units, units, address(table), bits(factor))
    return results


def _table(sizes, *columns):
    """The table of arrays, and how many units there are. Behind the last array stands the end."""
    table = np.zeros((len(sizes) + 1, ROW), np.int64)
    table[:-1, 1] = sizes
    counts = -(-table[:-1, 1] // PIECE)
    np.cumsum(counts, out=table[1:, 0])
    for index, column in enumerate(columns, 2):
        table[:-1, index] = list(column)
    return table, int(table[-1, 0])


__all__ = ["adam", "scaled", "square_sum"]

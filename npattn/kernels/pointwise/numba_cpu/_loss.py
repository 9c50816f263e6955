# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Cross-entropy, row by row, with the softmax inside."""

import numpy as np

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp, exp_scalar
from npattn.kernels._simd.scalar import log_scalar
from npattn.kernels._simd.vectors import (
    add,
    hmax,
    hsum,
    lesser,
    load,
    load_int64,
    load_scalar,
    maximum,
    mul,
    splat,
    store,
    store_scalar,
    sub,
)
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, F, bits, block, number, run, word
from npattn.kernels.pointwise.numba_cpu._norm import row_sum

_LOWEST = F(-np.inf)


@part()
def _cross_entropy_part(logits, targets, loss, lse, start, stop, n, ignore_index, smoothing):
    whole = n - n % LANES
    for row in range(start, stop):
        xr = logits + 4 * n * row
        top = splat(_LOWEST)
        for i in range(0, whole, LANES):
            top = maximum(load(xr + 4 * i, ONE), top)
        m = hmax(top)
        for i in range(whole, n):
            e = load_scalar(xr + 4 * i, ONE)
            if e > m:
                m = e
        if not (m > _LOWEST and m < -_LOWEST):
            m = F(0)
        acc, shift = splat(F(0)), splat(m)
        for i in range(0, whole, LANES):
            acc = add(acc, exp(sub(load(xr + 4 * i, ONE), shift)))
        total = hsum(acc)
        for i in range(whole, n):
            total += exp_scalar(load_scalar(xr + 4 * i, ONE) - m)
        value = m + log_scalar(total)
        store_scalar(lse + 4 * row, value)
        target = load_int64(targets + 8 * row)
        if target == ignore_index:
            value = F(0)
        else:
            value -= (F(1) - smoothing) * load_scalar(xr + 4 * target, ONE)
            if smoothing > F(0):
                value -= smoothing * row_sum(xr, n) / F(n)
        store_scalar(loss + 4 * row, value)


@part()
def _cross_entropy_blocks(where, start, stop):
    n, rows, height, ignore_index = word(where, 0), word(where, 1), word(where, 2), word(where, 3)
    logits, targets, loss, lse = word(where, 5), word(where, 6), word(where, 7), word(where, 8)
    first, end = start * height, lesser(stop * height, rows)
    _cross_entropy_part(logits, targets, loss, lse, first, end, n, ignore_index, number(where, 4))


@jit
def _cross_entropy_units(where, start, stop, scratch, one):
    _cross_entropy_blocks(where, start, stop)


@part()
def _cross_entropy_backward_part(
    scale, logits, targets, lse, dlogits, start, stop, n, ignore_index, smoothing
):
    whole = n - n % LANES
    share = smoothing / F(n)
    for row in range(start, stop):
        xr, dxr = logits + 4 * n * row, dlogits + 4 * n * row
        target = load_int64(targets + 8 * row)
        if target == ignore_index:  # not a product with 0: the row may hold NaN
            for i in range(0, whole, LANES):
                store(dxr + 4 * i, splat(F(0)))
            for i in range(whole, n):
                store_scalar(dxr + 4 * i, F(0))
        else:
            total = load_scalar(lse + 4 * row, ONE)
            for i in range(0, whole, LANES):
                p = exp(sub(load(xr + 4 * i, ONE), splat(total)))
                store(dxr + 4 * i, mul(sub(p, splat(share)), splat(scale)))
            for i in range(whole, n):
                p1 = exp_scalar(load_scalar(xr + 4 * i, ONE) - total)
                store_scalar(dxr + 4 * i, (p1 - share) * scale)
            at = dxr + 4 * target
            store_scalar(at, load_scalar(at, ONE) - scale * (F(1) - smoothing))


@part()
def _cross_entropy_backward_blocks(where, start, stop):
    n, rows, height, ignore_index = word(where, 0), word(where, 1), word(where, 2), word(where, 3)
    smoothing, scale = number(where, 4), number(where, 5)
    logits, targets, lse, dlogits = word(where, 6), word(where, 7), word(where, 8), word(where, 9)
    first, end = start * height, lesser(stop * height, rows)
    _cross_entropy_backward_part(scale, logits, targets, lse, dlogits, first, end, n, ignore_index, smoothing)


@jit
def _cross_entropy_backward_units(where, start, stop, scratch, one):
    _cross_entropy_backward_blocks(where, start, stop)


def cross_entropy(logits: Array, targets: Array, ignore_index: int, smoothing: float) -> tuple[Array, Array]:
    """See ``arrays.cross_entropy``."""
    rows, n = logits.shape
    loss, lse = np.empty(rows, F), np.empty(rows, F)
    where = (address(logits), address(targets), address(loss), address(lse))
    height = block(n)
    settings = (n, rows, height, ignore_index, bits(smoothing))
    run(_cross_entropy_units, -(-rows // height), *settings, *where)
    return loss, lse


def cross_entropy_backward(
    scale: float, logits: Array, targets: Array, lse: Array, ignore_index: int, smoothing: float
) -> Array:
    """See ``arrays.cross_entropy_backward``."""
    rows, n = logits.shape
    dlogits = np.empty_like(logits)
    where = (address(logits), address(targets), address(lse), address(dlogits))
    height = block(n)
    settings = (n, rows, height, ignore_index, bits(smoothing), bits(scale))
    run(_cross_entropy_backward_units, -(-rows // height), *settings, *where)
    return dlogits


__all__ = ["cross_entropy", "cross_entropy_backward"]

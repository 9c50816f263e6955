# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Layer norm and RMS norm, row by row.

Sums within a row run over vector lanes first, then over the lanes, then over the last elements that fill no
vector. Partial sums over rows (dweight, dbias), one for each block of rows, are added in the order of the
blocks: results are the same bit for bit for any number of threads.
"""

import numpy as np
from numba.types import float32

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.scalar import sqrt_scalar
from npattn.kernels._simd.vectors import (
    add,
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
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, F, bits, block, number, run, word


@part(float32)
def row_sum(x, n):
    acc = splat(F(0))
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        acc = add(acc, load(x + 4 * i, ONE))
    total = hsum(acc)
    for i in range(whole, n):
        total += load_scalar(x + 4 * i, ONE)
    return total


@part(float32)
def _row_square_sum(x, n, mean):
    acc = splat(F(0))
    shift = splat(mean)
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        d = sub(load(x + 4 * i, ONE), shift)
        acc = fma(d, d, acc)
    total = hsum(acc)
    for i in range(whole, n):
        e = load_scalar(x + 4 * i, ONE) - mean
        total += e * e
    return total


@part()
def _layer_norm_part(x, weight, bias, y, mean, rstd, start, stop, n, eps):
    whole = n - n % LANES
    for row in range(start, stop):
        xr, yr = x + 4 * n * row, y + 4 * n * row
        mu = row_sum(xr, n) / F(n)
        r = F(1) / sqrt_scalar(_row_square_sum(xr, n, mu) / F(n) + eps)
        store_scalar(mean + 4 * row, mu)
        store_scalar(rstd + 4 * row, r)
        shift, scale = splat(mu), splat(r)
        for i in range(0, whole, LANES):
            out = mul(mul(sub(load(xr + 4 * i, ONE), shift), scale), load(weight + 4 * i, ONE))
            if bias:
                out = add(out, load(bias + 4 * i, ONE))
            store(yr + 4 * i, out)
        for i in range(whole, n):
            value = (load_scalar(xr + 4 * i, ONE) - mu) * r * load_scalar(weight + 4 * i, ONE)
            if bias:
                value += load_scalar(bias + 4 * i, ONE)
            store_scalar(yr + 4 * i, value)


@part()
def _layer_norm_blocks(where, start, stop):
    n, rows, height = word(where, 0), word(where, 1), word(where, 2)
    x, weight, bias = word(where, 4), word(where, 5), word(where, 6)
    y, mean, rstd = word(where, 7), word(where, 8), word(where, 9)
    first, end = start * height, lesser(stop * height, rows)
    _layer_norm_part(x, weight, bias, y, mean, rstd, first, end, n, number(where, 3))


@jit
def _layer_norm_units(where, start, stop, scratch, one):
    """Without a bias its address is 0."""
    _layer_norm_blocks(where, start, stop)


@part()
def _norm_backward_part(dy, x, weight, mean, rstd, dx, dweight, dbias, start, stop, n):
    whole = n - n % LANES
    for row in range(start, stop):
        dyr, xr, dxr = dy + 4 * n * row, x + 4 * n * row, dx + 4 * n * row
        mu = load_scalar(mean + 4 * row, ONE) if mean else F(0)
        r = load_scalar(rstd + 4 * row, ONE)
        shift, scale = splat(mu), splat(r)
        sum_d, sum_dx = splat(F(0)), splat(F(0))
        for i in range(0, whole, LANES):
            d = load(dyr + 4 * i, ONE)
            xhat = mul(sub(load(xr + 4 * i, ONE), shift), scale)
            store(dweight + 4 * i, fma(d, xhat, load(dweight + 4 * i, ONE)))
            if mean:
                store(dbias + 4 * i, add(d, load(dbias + 4 * i, ONE)))
            d = mul(d, load(weight + 4 * i, ONE))
            sum_d = add(sum_d, d)
            sum_dx = fma(d, xhat, sum_dx)
        along, across = hsum(sum_dx), hsum(sum_d)
        for i in range(whole, n):
            e = load_scalar(dyr + 4 * i, ONE)
            h = (load_scalar(xr + 4 * i, ONE) - mu) * r
            store_scalar(dweight + 4 * i, load_scalar(dweight + 4 * i, ONE) + e * h)
            if mean:
                store_scalar(dbias + 4 * i, load_scalar(dbias + 4 * i, ONE) + e)
            e *= load_scalar(weight + 4 * i, ONE)
            across += e
            along += e * h
        along /= F(n)
        across = across / F(n) if mean else F(0)
        minus_along, minus_across = splat(-along), splat(-across)
        for i in range(0, whole, LANES):
            xhat = mul(sub(load(xr + 4 * i, ONE), shift), scale)
            d = fma(load(dyr + 4 * i, ONE), load(weight + 4 * i, ONE), minus_across)
            store(dxr + 4 * i, mul(fma(xhat, minus_along, d), scale))
        for i in range(whole, n):
            h = (load_scalar(xr + 4 * i, ONE) - mu) * r
            e = load_scalar(dyr + 4 * i, ONE) * load_scalar(weight + 4 * i, ONE) - across
            store_scalar(dxr + 4 * i, (e - h * along) * r)


@part()
def _norm_backward_blocks(where, start, stop):
    n, rows, height = word(where, 0), word(where, 1), word(where, 2)
    dy, x, weight, mean, rstd = word(where, 3), word(where, 4), word(where, 5), word(where, 6), word(where, 7)
    dx, dweights, dbiases = word(where, 8), word(where, 9), word(where, 10)
    for index in range(start, stop):
        dweight, dbias = dweights + 4 * n * index, dbiases + 4 * n * index
        for i in range(n):
            store_scalar(dweight + 4 * i, F(0))
            if mean:
                store_scalar(dbias + 4 * i, F(0))
        first, end = index * height, lesser((index + 1) * height, rows)
        _norm_backward_part(dy, x, weight, mean, rstd, dx, dweight, dbias, first, end, n)


@jit
def _norm_backward_units(where, start, stop, scratch, one):
    """Layer norm's pullback, or with mean = 0 (an address) that of RMS norm, which subtracts no means."""
    _norm_backward_blocks(where, start, stop)


@part()
def _rms_norm_part(x, weight, y, rstd, start, stop, n, eps):
    whole = n - n % LANES
    for row in range(start, stop):
        xr, yr = x + 4 * n * row, y + 4 * n * row
        r = F(1) / sqrt_scalar(_row_square_sum(xr, n, F(0)) / F(n) + eps)
        store_scalar(rstd + 4 * row, r)
        scale = splat(r)
        for i in range(0, whole, LANES):
            store(yr + 4 * i, mul(mul(load(xr + 4 * i, ONE), scale), load(weight + 4 * i, ONE)))
        for i in range(whole, n):
            store_scalar(yr + 4 * i, load_scalar(xr + 4 * i, ONE) * r * load_scalar(weight + 4 * i, ONE))


@part()
def _rms_norm_blocks(where, start, stop):
    n, rows, height = word(where, 0), word(where, 1), word(where, 2)
    x, weight, y, rstd = word(where, 4), word(where, 5), word(where, 6), word(where, 7)
    first, end = start * height, lesser(stop * height, rows)
    _rms_norm_part(x, weight, y, rstd, first, end, n, number(where, 3))


@jit
def _rms_norm_units(where, start, stop, scratch, one):
    _rms_norm_blocks(where, start, stop)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """See ``arrays.layer_norm``."""
    rows, n = x.shape
    weight, bias = np.ascontiguousarray(weight), None if bias is None else np.ascontiguousarray(bias)
    y, mean, rstd = np.empty_like(x), np.empty(rows, F), np.empty(rows, F)
    given = (address(x), address(weight), 0 if bias is None else address(bias))
    made = (address(y), address(mean), address(rstd))
    height = block(n)
    run(_layer_norm_units, -(-rows // height), n, rows, height, bits(eps), *given, *made)
    return y, mean, rstd


def layer_norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """See ``arrays.layer_norm_backward``."""
    dx, sums = _norm_backward(dy, x, weight, mean, rstd, 2)
    return dx, sums[0], sums[1]


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See ``arrays.rms_norm``."""
    rows, n = x.shape
    weight = np.ascontiguousarray(weight)
    y, rstd = np.empty_like(x), np.empty(rows, F)
    where = (address(x), address(weight), address(y), address(rstd))
    height = block(n)
    run(_rms_norm_units, -(-rows // height), n, rows, height, bits(eps), *where)
    return y, rstd


def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
    """See ``arrays.rms_norm_backward``."""
    dx, sums = _norm_backward(dy, x, weight, None, rstd, 1)
    return dx, sums[0]


def _norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array | None, rstd: Array, sums: int
) -> tuple[Array, Array]:
    """Gradient of x, and the sums over rows (dweight, and dbias when ``sums`` is 2)."""
    rows, n = x.shape
    height = block(n)
    blocks = -(-rows // height)
    weight = np.ascontiguousarray(weight)
    dx, partial = np.empty_like(x), np.empty((sums, blocks, n), F)
    given = (address(dy), address(x), address(weight), 0 if mean is None else address(mean), address(rstd))
    made = (address(dx), address(partial), address(partial) + 4 * n * blocks)
    run(_norm_backward_units, blocks, n, rows, height, *given, *made)
    return dx, partial.sum(axis=1)


__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]

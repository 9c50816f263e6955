# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Activations, element by element.

The last vector of the last piece is moved back over elements already done, which gives them the same values
again (results never share memory with arguments).
"""

import numpy as np
from numba.types import intp

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.activation import gelu as gelu_of
from npattn.kernels._simd.activation import gelu_slope, sigmoid, silu_slope
from npattn.kernels._simd.vectors import lesser, load, mul, store
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, PIECE, pieces, run, word


@part(intp)
def _end(where, stop):
    """One behind the last element of the units before ``stop``."""
    size = word(where, 0)
    return size if size - stop * PIECE < LANES else stop * PIECE


@part()
def _gelu_part(where, start, stop):
    x, y, approximate = word(where, 1), word(where, 2), word(where, 3)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        store(y + i, gelu_of(approximate, load(x + i, ONE)))


@jit
def _gelu_units(where, start, stop, scratch, one):
    _gelu_part(where, start, stop)


@part()
def _gelu_backward_part(where, start, stop):
    dy, x, dx, approximate = word(where, 1), word(where, 2), word(where, 3), word(where, 4)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        store(dx + i, mul(load(dy + i, ONE), gelu_slope(approximate, load(x + i, ONE))))


@jit
def _gelu_backward_units(where, start, stop, scratch, one):
    _gelu_backward_part(where, start, stop)


@part()
def _silu_part(where, start, stop):
    x, y = word(where, 1), word(where, 2)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        xi = load(x + i, ONE)
        store(y + i, mul(xi, sigmoid(xi)))


@jit
def _silu_units(where, start, stop, scratch, one):
    _silu_part(where, start, stop)


@part()
def _silu_backward_part(where, start, stop):
    dy, x, dx = word(where, 1), word(where, 2), word(where, 3)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        xi = load(x + i, ONE)
        store(dx + i, mul(load(dy + i, ONE), silu_slope(xi, sigmoid(xi))))


@jit
def _silu_backward_units(where, start, stop, scratch, one):
    _silu_backward_part(where, start, stop)


@part()
def _swiglu_part(where, start, stop):
    gate, up, y = word(where, 1), word(where, 2), word(where, 3)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        g = load(gate + i, ONE)
        store(y + i, mul(mul(g, sigmoid(g)), load(up + i, ONE)))


@jit
def _swiglu_units(where, start, stop, scratch, one):
    _swiglu_part(where, start, stop)


@part()
def _swiglu_backward_part(where, start, stop):
    dy, gate, up, dgate, dup = word(where, 1), word(where, 2), word(where, 3), word(where, 4), word(where, 5)
    end = _end(where, stop)
    for place in range(start * PIECE, end, LANES):
        i = 4 * lesser(place, end - LANES)
        g = load(gate + i, ONE)
        d = load(dy + i, ONE)
        s = sigmoid(g)
        store(dup + i, mul(d, mul(g, s)))
        store(dgate + i, mul(mul(d, load(up + i, ONE)), silu_slope(g, s)))


@jit
def _swiglu_backward_units(where, start, stop, scratch, one):
    _swiglu_backward_part(where, start, stop)


def gelu(x: Array, tanh: bool) -> Array:
    """See ``arrays.gelu``."""
    y = np.empty_like(x)
    run(_gelu_units, pieces(x.size), x.size, address(x), address(y), tanh)
    return y


def gelu_backward(dy: Array, x: Array, tanh: bool) -> Array:
    """See ``arrays.gelu_backward``."""
    dx = np.empty_like(x)
    run(_gelu_backward_units, pieces(x.size), x.size, address(dy), address(x), address(dx), tanh)
    return dx


def silu(x: Array) -> Array:
    """See ``arrays.silu``."""
    y = np.empty_like(x)
    run(_silu_units, pieces(x.size), x.size, address(x), address(y))
    return y


def silu_backward(dy: Array, x: Array) -> Array:
    """See ``arrays.silu_backward``."""
    dx = np.empty_like(x)
    run(_silu_backward_units, pieces(x.size), x.size, address(dy), address(x), address(dx))
    return dx


def swiglu(gate: Array, up: Array) -> Array:
    """See ``arrays.swiglu``."""
    y = np.empty_like(gate)
    run(_swiglu_units, pieces(y.size), y.size, address(gate), address(up), address(y))
    return y


def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """See ``arrays.swiglu_backward``."""
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    where = (address(dy), address(gate), address(up), address(dgate), address(dup))
    run(_swiglu_backward_units, pieces(dy.size), dy.size, *where)
    return dgate, dup


__all__ = ["gelu", "gelu_backward", "silu", "silu_backward", "swiglu", "swiglu_backward"]

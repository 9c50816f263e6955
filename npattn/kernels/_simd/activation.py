# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Activations and their slopes of a vector of float32."""

import numpy as np

from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp, tanh
from npattn.kernels._simd.vectors import add, div, fma, maximum, mul, splat, sub
from npattn.kernels.pointwise.arrays import CUBIC, FLAT, SQRT_2_OVER_PI, SQRT_HALF
from npattn.kernels.pointwise.erf import P32, Q32

F = np.float32

_CUBIC, _SLOPE, _HALF_ROOT = F(CUBIC), F(3.0 * CUBIC), F(SQRT_HALF)
_ROOT, _DENSITY = F(SQRT_2_OVER_PI), F(0.5 * SQRT_2_OVER_PI)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (F(c) for c in P32)
_Q0, _Q1, _Q2, _Q3, _Q4 = (F(c) for c in Q32)


@part("one")
def _clamp(most, x):
    """X between −most and most; NaN stays."""
    x = maximum(splat(-most), x)
    return sub(splat(F(0)), maximum(splat(-most), sub(splat(F(0)), x)))


@part("one")
def _erf(x):
    x = _clamp(F(4), x)
    z = mul(x, x)
    p = fma(fma(splat(_P0), z, splat(_P1)), z, splat(_P2))
    p = fma(fma(fma(fma(p, z, splat(_P3)), z, splat(_P4)), z, splat(_P5)), z, splat(_P6))
    q = fma(fma(splat(_Q0), z, splat(_Q1)), z, splat(_Q2))
    q = fma(fma(q, z, splat(_Q3)), z, splat(_Q4))
    return div(mul(x, p), q)


@part("one")
def sigmoid(x):
    return fma(tanh(mul(x, splat(F(0.5)))), splat(F(0.5)), splat(F(0.5)))


@part("one")
def _gelu_odd(approximate, x):
    """``2 Φ(x) − 1``, or what approximates it."""
    if approximate:
        x = _clamp(F(FLAT), x)
        return tanh(mul(mul(fma(mul(x, x), splat(_CUBIC), splat(F(1))), x), splat(_ROOT)))
    return _erf(mul(x, splat(_HALF_ROOT)))


@part("one")
def gelu(approximate, x):
    t = _gelu_odd(approximate, x)
    half = mul(x, splat(F(0.5)))
    return fma(half, t, half)


@part("one")
def gelu_slope(approximate, x):
    half = splat(F(0.5))
    t = _gelu_odd(approximate, x)
    x = _clamp(F(FLAT), x)
    z = mul(x, x)
    if approximate:
        du = mul(fma(z, splat(_SLOPE), splat(F(1))), splat(_ROOT))
        dt = mul(sub(splat(F(1)), mul(t, t)), du)
        return mul(half, add(fma(x, dt, t), splat(F(1))))
    density = mul(exp(mul(z, splat(F(-0.5)))), splat(_DENSITY))
    return fma(x, density, fma(half, t, half))


@part("one")
def silu_slope(x, s):
    return mul(s, fma(x, sub(splat(F(1)), s), splat(F(1))))


#: Numbers of the activations, for kernels that are told which.
GELU, GELU_TANH, SILU = 1, 2, 3


@part("one", static=("is_silu", "approximate"))
def activated(is_silu, approximate, x):
    """SiLU where ``is_silu``, else GELU."""
    if is_silu:
        return mul(x, sigmoid(x))
    return gelu(approximate, x)


@part("one", static=("is_silu", "approximate"))
def slope(is_silu, approximate, x):
    """Its slope there. Beside ``activated`` of the same x the compiler sees what is common."""
    if is_silu:
        return silu_slope(x, sigmoid(x))
    return gelu_slope(approximate, x)


__all__ = ["GELU", "GELU_TANH", "SILU", "activated", "gelu", "gelu_slope", "sigmoid", "silu_slope", "slope"]

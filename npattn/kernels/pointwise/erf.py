"""The error function as array code: NumPy has none, and SciPy is not loaded for it.

float32: a rational function of x on [−4, 4] (13th over 8th degree, the coefficients Eigen uses), absolute
error below 5e-7. float64: the three ranges of fdlibm's ``s_erf.c`` (Sun Microsystems, 1993; permission to
use, copy, modify and distribute granted), relative error below 2.3e-16.
"""

from typing import Final

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array

# x · P(x²) / Q(x²), highest power first
P32: Final = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
Q32: Final = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)

# |x| < 0.84375: x + x · PP(x²) / QQ(x²), lowest power first from here on
PP: Final = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
QQ: Final = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
# |x| < 1.25: ERX + PA(|x| − 1) / QA(|x| − 1)
ERX: Final = 8.45062911510467529297e-01
PA: Final = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
QA: Final = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
# beyond: 1 − exp(−x² − 0.5625 + RA(1 / x²) / SA(1 / x²)) / |x|, in two ranges
RA: Final = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
SA: Final = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
RB: Final = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
SB: Final = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)


def erf(x: Array) -> Array:
    """``2/√π ∫₀ˣ exp(−t²) dt`` of a float32 or float64 array, element by element, as a new array."""
    if x.dtype == np.float32:
        xp = array_module(x)
        c = xp.clip(x, -4.0, 4.0)
        square = c * c
        c *= _horner(square, P32)
        c /= _horner(square, Q32)
        return c  # type: ignore[no-any-return]
    return _erf64(x)


def _erf64(x: Array) -> Array:
    xp = array_module(x)
    a = xp.abs(x)
    inner = xp.minimum(a, 0.84375)
    square = inner * inner
    small = inner + inner * (_horner(square, PP[::-1]) / _horner(square, QQ[::-1]))
    s = xp.clip(a, 0.84375, 1.25) - 1.0
    middle = ERX + _horner(s, PA[::-1]) / _horner(s, QA[::-1])
    t = xp.clip(a, 1.25, 6.0)
    inverse = 1.0 / (t * t)
    ratio = xp.where(
        t < 1.0 / 0.35,
        _horner(inverse, RA[::-1]) / _horner(inverse, SA[::-1]),
        _horner(inverse, RB[::-1]) / _horner(inverse, SB[::-1]),
    )
    high = t.astype(np.float32).astype(np.float64)  # x² in two parts, so that exp sees no rounded square
    tail = 1.0 - xp.exp(-high * high - 0.5625) * xp.exp((high - t) * (high + t) + ratio) / t
    result = xp.where(a < 0.84375, small, xp.where(a < 1.25, middle, tail))
    result = xp.where(xp.isnan(x), x, xp.copysign(result, x))
    return result  # type: ignore[no-any-return]


def _horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    """The polynomial with these coefficients, highest power first."""
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y

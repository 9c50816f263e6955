"""exp and tanh of vectors, float32 and float64, within 2 units in the last place.

exp(x) = 2^n exp(r) with n = rint(x / ln 2) and r = x - n ln 2 in two steps (Cody and Waite), |r| <= ln(2)/2.
exp(r) is a polynomial: degree 6 with Cephes' coefficients in float32, Taylor's of degree 13 in float64
(remainder below 2**-57). 2^n is multiplied in by AVX-512's vscalef, which rounds into the denormals and
overflows to infinity by itself; elsewhere in two halves, which does the same. NaN stays NaN, -inf gives
exactly 0.

tanh is a polynomial (float32) or a rational function (float64) near 0, where 1 - 2 / (exp(2|x|) + 1) would
cancel, and that formula beyond.

References: S. Moshier, Cephes: expf.c, tanhf.c, tanh.c.
"""

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import Vec, call_same, constant, emit_fma, int_vector

_EXP_32 = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_EXP_64 = tuple(1.0 / math.factorial(n) for n in range(13, 1, -1))
# scalar bits: (lowest x, highest x, ln 2 high, ln 2 low, polynomial of r**2 and up, exponent bias, its place)
_EXP = {
    32: (-110.0, 110.0, 0.693359375, -2.12194440e-4, _EXP_32, 127, 23),
    64: (-760.0, 760.0, 6.93145751953125e-1, 1.42860682030941723212e-6, _EXP_64, 1023, 52),
}
_TANH_32 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_64_TOP = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
_TANH_64_BOTTOM = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = constant(x.type, coefficients[0])
    for coefficient in coefficients[1:]:
        value = emit_fma(builder, value, x, constant(x.type, coefficient))
    return value


def emit_exp(builder: Any, vec: Vec, x: Any) -> Any:
    """The exponential."""
    lowest, highest, ln2_high, ln2_low, coefficients, bias, mantissa = _EXP[vec.scalar.bitwidth]
    kind = x.type
    low, high = constant(kind, lowest), constant(kind, highest)
    x = builder.select(builder.fcmp_ordered(">", low, x), low, x)  # this order leaves NaN as it is
    x = builder.select(builder.fcmp_ordered("<", high, x), high, x)
    n = _emit_rint(builder, builder.fmul(x, constant(kind, 1.0 / math.log(2.0))), mantissa)
    r = emit_fma(builder, n, constant(kind, -ln2_high), x)
    r = emit_fma(builder, n, constant(kind, -ln2_low), r)
    tail = _polynomial(builder, r, coefficients)
    y = builder.fadd(emit_fma(builder, tail, builder.fmul(r, r), r), constant(kind, 1.0))
    if _host.HAS_SCALEF:
        return _emit_scalef(builder, vec, y, n)
    integers = int_vector(vec)
    whole = builder.fptosi(n, integers)
    half = builder.ashr(whole, constant(integers, 1))
    for part in (half, builder.sub(whole, half)):
        bits = builder.shl(builder.add(part, constant(integers, bias)), constant(integers, mantissa))
        y = builder.fmul(y, builder.bitcast(bits, kind))
    return y


def _emit_rint(builder: Any, x: Any, mantissa: int) -> Any:
    """The nearest whole number of small ``x``; without SSE4.1 by a sum that has no room for the fraction."""
    if _host.HAS_RINT:
        return call_same(builder, "llvm.rint", x)
    large = constant(x.type, 1.5 * 2.0**mantissa)
    return builder.fsub(builder.fadd(x, large), large)


def _emit_scalef(builder: Any, vec: Vec, y: Any, n: Any) -> Any:
    """Return y * 2**n by one AVX-512 instruction (mask all ones, rounding as the thread has it)."""
    name = "llvm.x86.avx512.mask.scalef." + ("ps.512" if vec.scalar.bitwidth == 32 else "pd.512")
    mask = ir.IntType(vec.lanes)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(y.type, [y.type, y.type, y.type, mask, ir.IntType(32)]), name
    )
    return builder.call(function, [y, n, y, ir.Constant(mask, -1), ir.Constant(ir.IntType(32), 4)])


def emit_tanh(builder: Any, vec: Vec, x: Any) -> Any:
    """The hyperbolic tangent."""
    kind = x.type
    one, two = constant(kind, 1.0), constant(kind, 2.0)
    size = call_same(builder, "llvm.fabs", x)
    z = builder.fmul(x, x)
    if vec.scalar.bitwidth == 32:
        tail = _polynomial(builder, z, _TANH_32)
    else:
        tail = builder.fdiv(_polynomial(builder, z, _TANH_64_TOP), _polynomial(builder, z, _TANH_64_BOTTOM))
    near = emit_fma(builder, builder.fmul(tail, z), x, x)
    grown = emit_exp(builder, vec, builder.fmul(two, size))
    far = builder.fsub(one, builder.fdiv(two, builder.fadd(grown, one)))
    far = _emit_with_sign(builder, vec, far, x)
    return builder.select(builder.fcmp_ordered("<", size, constant(kind, 0.625)), near, far)


def _emit_with_sign(builder: Any, vec: Vec, size: Any, sign_of: Any) -> Any:
    integers = int_vector(vec)
    sign_bit = constant(integers, -(1 << (vec.scalar.bitwidth - 1)))
    sign = builder.and_(builder.bitcast(sign_of, integers), sign_bit)
    return builder.bitcast(builder.or_(builder.bitcast(size, integers), sign), sign_of.type)


@intrinsic
def exp(typingctx: Any, vector: Any) -> Any:
    """The exponential of each lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_exp(builder, signature.return_type, arguments[0])

    return vector(vector), codegen


@intrinsic
def exp_scalar(typingctx: Any, x: Any) -> Any:
    """The exponential of one scalar, with the vector's bits: libm's would differ between machines."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vec = Vec(signature.return_type)
        kind = ir.VectorType(arguments[0].type, vec.lanes)
        wide = builder.insert_element(constant(kind, 0.0), arguments[0], ir.Constant(ir.IntType(32), 0))
        return builder.extract_element(emit_exp(builder, vec, wide), ir.Constant(ir.IntType(32), 0))

    return x(x), codegen


@intrinsic
def tanh(typingctx: Any, vector: Any) -> Any:
    """The hyperbolic tangent of each lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_tanh(builder, signature.return_type, arguments[0])

    return vector(vector), codegen


__all__ = ["emit_exp", "emit_tanh", "exp", "exp_scalar", "tanh"]

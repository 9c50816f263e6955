"""float16 and bfloat16 in memory, float32 in registers.

``load_half`` and ``load_bfloat`` widen while loading (exact), ``store_half`` and ``store_bfloat`` round to
nearest even while storing. With ``one`` float64 they do not occur: float64 is stored as float64.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import (
    I32,
    Vec,
    constant,
    emit_load,
    emit_store,
    llvm_scalar,
    llvm_vector,
)

I16 = ir.IntType(16)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know: enough to name it in an intrinsic's signature."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def _widen_half(builder: Any, bits: Any, kind: Any) -> Any:
    """float16 bits (i16 or a vector of them) to ``kind``."""
    if not _host.HAS_HALF:  # such calls are declined; LLVM would look for a function to convert with
        return ir.Constant(kind, ir.Undefined)
    if isinstance(bits.type, ir.VectorType):
        half: Any = ir.VectorType(ir.HalfType(), bits.type.count)
    else:
        half = ir.HalfType()
    return builder.fpext(builder.bitcast(bits, half), kind)


def _as_float32(builder: Any, value: Any) -> tuple[Any, Any]:
    """(``value`` as float32, the integer type of the same shape)."""
    if isinstance(value.type, ir.VectorType):
        count = value.type.count
        single: Any = ir.VectorType(ir.FloatType(), count)
        integers: Any = ir.VectorType(I32, count)
    else:
        single, integers = ir.FloatType(), I32
    if value.type != single:
        value = builder.fptrunc(value, single)
    return value, integers


def _fill(kind: Any, value: int) -> Any:
    return constant(kind, value) if isinstance(kind, ir.VectorType) else kind(value)


def _widen_bfloat(builder: Any, bits: Any, kind: Any) -> Any:
    """bfloat16 bits to ``kind``: the upper half of a float32."""
    vector = isinstance(bits.type, ir.VectorType)
    integers = ir.VectorType(I32, bits.type.count) if vector else I32
    single = ir.VectorType(ir.FloatType(), bits.type.count) if vector else ir.FloatType()
    wide = builder.bitcast(builder.shl(builder.zext(bits, integers), _fill(integers, 16)), single)
    return wide if single == kind else builder.fpext(wide, kind)


def _round_bfloat(builder: Any, value: Any) -> Any:
    """To bfloat16 bits, nearest even; NaN stays a (quiet) NaN."""
    value, integers = _as_float32(builder, value)
    bits = builder.bitcast(value, integers)
    odd = builder.and_(builder.lshr(bits, _fill(integers, 16)), _fill(integers, 1))
    rounded = builder.add(builder.add(bits, _fill(integers, 0x7FFF)), odd)
    quiet = builder.or_(bits, _fill(integers, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    narrow = ir.VectorType(I16, integers.count) if isinstance(integers, ir.VectorType) else I16
    return builder.trunc(builder.lshr(chosen, _fill(integers, 16)), narrow)


def _round_half(builder: Any, value: Any) -> Any:
    """To float16 bits, nearest even."""
    value, integers = _as_float32(builder, value)
    vector = isinstance(integers, ir.VectorType)
    if not _host.HAS_HALF:
        return ir.Constant(ir.VectorType(I16, integers.count) if vector else I16, ir.Undefined)
    half: Any = ir.VectorType(ir.HalfType(), integers.count) if vector else ir.HalfType()
    narrow: Any = ir.VectorType(I16, integers.count) if vector else I16
    return builder.bitcast(builder.fptrunc(value, half), narrow)


def _loader(widen: Any) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any, one: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vec = signature.return_type
            bits = emit_load(builder, arguments[0], ir.VectorType(I16, vec.lanes))
            return widen(builder, bits, llvm_vector(vec))

        return Vec(one)(types.intp, one), codegen

    return operation


def _scalar_loader(widen: Any) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any, one: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return widen(builder, emit_load(builder, arguments[0], I16), llvm_scalar(signature.return_type))

        return one(types.intp, one), codegen

    return operation


def _storer(narrow: Any) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_store(builder, arguments[0], narrow(builder, arguments[1]))
            return context.get_dummy_value()

        return types.void(types.intp, value), codegen

    return operation


@intrinsic
def store_rounded(typingctx: Any, address: Any, vector: Any) -> Any:
    """Store a float32 vector as bfloat16, nearest even (AVX-512's instruction); returns what was stored."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[1]
        narrow = ir.VectorType(BFloat(), value.type.count)
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(narrow, [value.type]), name)
        bits = builder.bitcast(builder.call(function, [value]), ir.VectorType(I16, value.type.count))
        emit_store(builder, arguments[0], bits)
        return _widen_bfloat(builder, bits, value.type)

    return vector(types.intp, vector), codegen


@intrinsic
def store_rounded_pairs(typingctx: Any, address: Any, first: Any, second: Any) -> Any:
    """Store pairs of bfloat16: lane c of ``first`` and of ``second``, each rounded to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, first, second = arguments
        count = first.type.count
        narrow = ir.VectorType(BFloat(), 2 * count)
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(narrow, [first.type, first.type]), name
        )
        halves = ir.VectorType(I16, 2 * count)
        bits = builder.bitcast(builder.call(function, [second, first]), halves)  # the second operand is low
        order = [lane for c in range(count) for lane in (c, count + c)]
        places = ir.Constant(ir.VectorType(I32, 2 * count), order)
        emit_store(builder, address, builder.shuffle_vector(bits, ir.Constant(halves, ir.Undefined), places))
        return context.get_dummy_value()

    return types.void(types.intp, first, second), codegen


@intrinsic
def load_half_pair(typingctx: Any, address: Any) -> Any:
    """The 16 bits at ``address`` as the first of a pair whose second is zero."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(emit_load(builder, arguments[0], I16), I32)

    return types.int32(types.intp), codegen


@intrinsic
def store_pairs(typingctx: Any, first: Any, second: Any, target: Any, one: Any) -> Any:
    """Lane c of the vector stored is the pair of the c-th 16-bit elements at ``first`` and ``second``.

    ``second`` 0 stands for zeros.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second, target, _ = arguments
        count = Vec(signature.args[3]).lanes
        narrow, wide = ir.VectorType(I16, count), ir.VectorType(I32, count)
        missing = builder.icmp_signed("==", second, second.type(0))
        upper = emit_load(builder, builder.select(missing, first, second), narrow)
        upper = builder.shl(builder.zext(upper, wide), constant(wide, 16))
        upper = builder.select(missing, constant(wide, 0), upper)
        lower = builder.zext(emit_load(builder, first, narrow), wide)
        emit_store(builder, target, builder.or_(lower, upper))
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, i, one), codegen


load_half = _loader(_widen_half)
load_bfloat = _loader(_widen_bfloat)
load_scalar_half = _scalar_loader(_widen_half)
load_scalar_bfloat = _scalar_loader(_widen_bfloat)
store_half = _storer(_round_half)  # a vector or a scalar
store_bfloat = _storer(_round_bfloat)

__all__ = [
    "BFloat",
    "load_bfloat",
    "load_half",
    "load_half_pair",
    "load_scalar_bfloat",
    "load_scalar_half",
    "store_bfloat",
    "store_half",
    "store_pairs",
    "store_rounded",
    "store_rounded_pairs",
]

"""The vector type and its basic operations.

``Vec(scalar)`` is a Numba type whose value is one LLVM vector of float32 or float64 lanes (as many as the
host has, `_host.lanes`). Operations that make a vector out of an address take ``one``, any float32 or float64
scalar, whose *type* says which lanes are meant, so that one source text serves both precisions. Addresses
are plain integers (bytes). No operation assumes alignment or tells LLVM anything that may be false.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from npattn.kernels._simd import _host

I32 = ir.IntType(32)
I64 = ir.IntType(64)


class Vec(types.Type):  # type: ignore[misc]
    """A vector of the host's width with lanes of type ``scalar`` (float32 or float64)."""

    def __init__(self, scalar: Any) -> None:
        self.scalar = scalar
        self.lanes = _host.lanes(scalar.bitwidth)
        super().__init__(name=f"Vec({scalar} x {self.lanes})")


def llvm_scalar(scalar: Any) -> ir.Type:
    """LLVM's type of a lane."""
    return ir.FloatType() if scalar.bitwidth == 32 else ir.DoubleType()


def llvm_vector(vec: Vec) -> ir.VectorType:
    """LLVM's type of the whole vector."""
    return ir.VectorType(llvm_scalar(vec.scalar), vec.lanes)


def int_vector(vec: Vec) -> ir.VectorType:
    """The integer vector of the same shape and lane width."""
    return ir.VectorType(ir.IntType(vec.scalar.bitwidth), vec.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, llvm_vector(fe_type))


# --- pieces of code generation, shared with the neighbouring modules
# ------------------------------------------


def constant(vector_type: ir.VectorType, value: Any) -> ir.Constant:
    """``value`` in every lane."""
    return ir.Constant(vector_type, [value] * vector_type.count)


def suffix(vector_type: ir.VectorType) -> str:
    """The type's part of an LLVM intrinsic's name, such as v16f32."""
    element = vector_type.element
    if isinstance(element, ir.IntType):
        return f"v{vector_type.count}i{element.width}"
    return f"v{vector_type.count}f{32 if isinstance(element, ir.FloatType) else 64}"


def call_same(builder: Any, name: str, *operands: Any) -> Any:
    """Call the LLVM intrinsic ``name`` whose operands and result have one vector type."""
    kind = operands[0].type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(operands)), f"{name}.{suffix(kind)}"
    )
    return builder.call(function, operands)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused where the processor can (else two operations, not a call into libm)."""
    if _host.HAS_FMA:
        return call_same(builder, "llvm.fma", a, b, c)
    return builder.fadd(builder.fmul(a, b), c)


def emit_splat(builder: Any, vector_type: ir.VectorType, scalar: Any) -> Any:
    """``scalar`` in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(I32, vector_type.count), 0))


def emit_load(builder: Any, address: Any, kind: ir.Type) -> Any:
    """Load ``kind`` from an integer address, unaligned."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def emit_store(builder: Any, address: Any, value: Any) -> None:
    """Store to an integer address, unaligned."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def emit_lane_numbers(vec: Vec) -> ir.Constant:
    """0, 1, 2, ... as 32-bit integers."""
    return ir.Constant(ir.VectorType(I32, vec.lanes), list(range(vec.lanes)))


def emit_reduce(builder: Any, vector: Any, combine: Any) -> Any:
    """Fold the upper half onto the lower half until one lane is left."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        kind = ir.VectorType(I32, half)
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = builder.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(half))))
        high = builder.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(half, 2 * half))))
        vector = combine(low, high)
    return builder.extract_element(vector, I32(0))


# --- operations ---------------------------------------------------------------------------------------------


@intrinsic
def lanes(typingctx: Any, one: Any) -> Any:
    """How many lanes a vector of ``one``'s type has."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(Vec(signature.args[0]).lanes)

    return types.intp(one), codegen


@intrinsic
def scalar_bytes(typingctx: Any, one: Any) -> Any:
    """Bytes of one lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(signature.args[0].bitwidth // 8)

    return types.intp(one), codegen


@intrinsic
def vector_bytes(typingctx: Any, one: Any) -> Any:
    """Bytes of one vector."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(_host.WIDTH * 4)

    return types.intp(one), codegen


@intrinsic
def load(typingctx: Any, address: Any, one: Any) -> Any:
    """The vector at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, arguments[0], llvm_vector(signature.return_type))

    return Vec(one)(types.intp, one), codegen


@intrinsic
def store(typingctx: Any, address: Any, vector: Any) -> Any:
    """Write ``vector`` to ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store(builder, arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, vector), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """``scalar`` in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_splat(builder, llvm_vector(signature.return_type), arguments[0])

    return Vec(scalar)(scalar), codegen


@intrinsic
def first(typingctx: Any, vector: Any) -> Any:
    """Lane 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], I32(0))

    return vector.scalar(vector), codegen


@intrinsic
def only_first(typingctx: Any, scalar: Any) -> Any:
    """``scalar`` in lane 0, zero in the others."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = constant(llvm_vector(signature.return_type), 0.0)
        return builder.insert_element(zeros, arguments[0], I32(0))

    return Vec(scalar)(scalar), codegen


def _binary(name: str) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return a(a, b), codegen

    return operation


add = _binary("fadd")
sub = _binary("fsub")
mul = _binary("fmul")
div = _binary("fdiv")


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_fma(builder, *arguments)

    return a(a, b, c), codegen


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger lane; b where either is NaN."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), codegen


@intrinsic
def any_greater(typingctx: Any, a: Any, b: Any) -> Any:
    """Whether some lane of a is greater than that of b."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        greater = builder.fcmp_ordered(">", *arguments)
        bits = builder.bitcast(greater, ir.IntType(greater.type.count))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(a, b), codegen


@intrinsic
def any_nan(typingctx: Any, a: Any) -> Any:
    """Whether some lane is NaN."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        unordered = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        bits = builder.bitcast(unordered, ir.IntType(unordered.type.count))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(a), codegen


@intrinsic
def keep_where_equal(typingctx: Any, test: Any, scalar: Any, a: Any, b: Any) -> Any:
    """Take a where ``test`` equals ``scalar``, else b."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        test, scalar, a, b = arguments
        return builder.select(builder.fcmp_ordered("==", test, emit_splat(builder, test.type, scalar)), a, b)

    return a(test, scalar, a, b), codegen


@intrinsic
def keep_between(typingctx: Any, vector: Any, other: Any, j: Any, lo: Any, hi: Any) -> Any:
    """``vector`` where lo <= j + lane < hi, ``other`` elsewhere; j, lo and hi are integers."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, other, j, lo, hi = arguments
        numbers = emit_lane_numbers(signature.return_type)
        start = builder.trunc(builder.sub(lo, j), I32)
        stop = builder.trunc(builder.sub(hi, j), I32)
        above = builder.icmp_signed(">=", numbers, emit_splat(builder, numbers.type, start))
        below = builder.icmp_signed("<", numbers, emit_splat(builder, numbers.type, stop))
        return builder.select(builder.and_(above, below), vector, other)

    return vector(vector, vector, types.intp, types.intp, types.intp), codegen


@intrinsic
def keep_bits(typingctx: Any, vector: Any, other: Any, word: Any, shift: Any) -> Any:
    """``vector`` where bit shift + lane of the 32-bit ``word`` is set, ``other`` elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, other, word, shift = arguments
        count = signature.return_type.lanes
        bits = builder.trunc(builder.lshr(word, builder.trunc(shift, I32)), ir.IntType(count))
        return builder.select(builder.bitcast(bits, ir.VectorType(ir.IntType(1), count)), vector, other)

    return vector(vector, vector, types.int32, types.intp), codegen


@intrinsic
def hsum(typingctx: Any, vector: Any) -> Any:
    """The sum of all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_reduce(builder, arguments[0], builder.fadd)

    return vector.scalar(vector), codegen


@intrinsic
def hmax(typingctx: Any, vector: Any) -> Any:
    """The largest lane (NaN lanes are passed over where they can be)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return emit_reduce(builder, arguments[0], larger)

    return vector.scalar(vector), codegen


@intrinsic
def cast(typingctx: Any, value: Any, one: Any) -> Any:
    """The number ``value`` in the precision of ``one``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        have, want = signature.args
        number, target = arguments[0], llvm_scalar(want)
        if isinstance(have, types.Integer):
            return builder.sitofp(number, target)
        if have.bitwidth == want.bitwidth:
            return number
        return (
            builder.fpext(number, target)
            if have.bitwidth < want.bitwidth
            else builder.fptrunc(number, target)
        )

    return one(value, one), codegen


@intrinsic
def load_scalar(typingctx: Any, address: Any, one: Any) -> Any:
    """The scalar of ``one``'s type at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, arguments[0], arguments[1].type)

    return one(types.intp, one), codegen


@intrinsic
def store_scalar(typingctx: Any, address: Any, scalar: Any) -> Any:
    """Write ``scalar`` (of any number type) to ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store(builder, arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, scalar), codegen


@intrinsic
def cast_int32(typingctx: Any, value: Any) -> Any:
    """The lower 32 bits of an integer."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(arguments[0], I32)

    return types.int32(types.intp), codegen


def _prefetcher(near: int) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any) -> Any:
        """Begin to bring the cache line of ``address`` near; any address will do."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(function, [place, I32(0), I32(near), I32(1)])  # to read; data
            return context.get_dummy_value()

        return types.void(types.intp), codegen

    return operation


prefetch = _prefetcher(3)  # into the first-level cache
prefetch_2 = _prefetcher(2)  # into the second


def _chooser(comparison: str) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.select(builder.icmp_signed(comparison, *arguments), *arguments)

        return types.intp(types.intp, types.intp), codegen

    return operation


lesser = _chooser("<")  # of two integers; Numba's min and max take a third of a second to compile
greater = _chooser(">")


@intrinsic
def load_int64(typingctx: Any, address: Any) -> Any:
    """The int64 at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, arguments[0], ir.IntType(64))

    return types.int64(types.intp), codegen


@intrinsic
def load_int32(typingctx: Any, address: Any) -> Any:
    """The int32 at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, arguments[0], I32)

    return types.int32(types.intp), codegen


def record_reader(record: Any) -> Any:
    """An intrinsic ``read(address)`` that views memory as a record (Numba's type of a structured dtype)."""

    @intrinsic
    def record_at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(record))

        return record(types.intp), codegen

    return record_at

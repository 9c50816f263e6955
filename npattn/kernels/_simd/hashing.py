"""The dropout generator of ``npattn.functional.dropout`` on vectors: the same words, the same bits."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from npattn.kernels._simd.vectors import I32, constant, emit_lane_numbers, emit_splat, llvm_vector

GOLDEN = 0x9E3779B1
MIX_1 = 0x21F0AAAD
MIX_2 = 0xD35A2D97


def _fill(kind: Any, value: int) -> Any:
    return constant(kind, value) if isinstance(kind, ir.VectorType) else kind(value)


def _mix(builder: Any, x: Any) -> Any:
    kind = x.type
    x = builder.xor(x, builder.lshr(x, _fill(kind, 16)))
    x = builder.mul(x, _fill(kind, MIX_1))
    x = builder.xor(x, builder.lshr(x, _fill(kind, 15)))
    x = builder.mul(x, _fill(kind, MIX_2))
    return builder.xor(x, builder.lshr(x, _fill(kind, 15)))


def _fold(builder: Any, state: Any, word: Any) -> Any:
    return _mix(builder, builder.xor(state, builder.mul(word, _fill(word.type, GOLDEN))))


@intrinsic
def fold(typingctx: Any, state: Any, word: Any) -> Any:
    """mix(state ^ word * golden), modulo 2**32; int64 in and out, upper bits ignored and zero."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        state, word = (builder.trunc(argument, I32) for argument in arguments)
        return builder.zext(_fold(builder, state, word), ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def drop(typingctx: Any, vector: Any, r0: Any, r1: Any, j: Any, threshold: Any, factor: Any) -> Any:
    """``vector * factor`` where the weight of column j + lane in the row (r0, r1) is kept, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, r0, r1, j, threshold, factor = arguments
        numbers = emit_lane_numbers(signature.return_type)
        kind = numbers.type
        r0, r1, j, threshold = (
            emit_splat(builder, kind, builder.trunc(word, I32)) for word in (r0, r1, j, threshold)
        )
        columns = builder.add(j, numbers)
        x = _mix(builder, builder.xor(_fold(builder, r0, columns), r1))
        kept = builder.fmul(vector, emit_splat(builder, vector.type, factor))
        zeros = constant(llvm_vector(signature.return_type), 0.0)
        return builder.select(builder.icmp_unsigned(">=", x, threshold), kept, zeros)

    i = types.int64
    return vector(vector, i, i, i, i, vector.scalar), codegen


__all__ = ["drop", "fold"]

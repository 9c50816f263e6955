"""Transposing a square of lanes x lanes elements in registers.

log2(lanes) rounds; in round s the pairs of vectors s apart exchange the halves of every 2s lanes. For 16
lanes that is 64 shuffles for 256 elements, against 256 scalar loads and stores.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from npattn.kernels._simd.storage import _widen_bfloat, _widen_half
from npattn.kernels._simd.vectors import Vec, emit_load, emit_splat, emit_store, llvm_vector

I16 = ir.IntType(16)


def emit_transpose(builder: Any, vectors: list[Any]) -> list[Any]:
    """The transposed square: element i of vector j is element j of given vector i."""
    count = len(vectors)
    mask_type = ir.VectorType(ir.IntType(32), count)
    step = 1
    while step < count:
        low = [lane if not lane & step else count + lane - step for lane in range(count)]
        high = [lane + step if not lane & step else count + lane for lane in range(count)]
        result = list(vectors)
        for i in range(count):
            if not i & step:
                a, b = vectors[i], vectors[i + step]
                result[i] = builder.shuffle_vector(a, b, ir.Constant(mask_type, low))
                result[i + step] = builder.shuffle_vector(a, b, ir.Constant(mask_type, high))
        vectors = result
        step *= 2
    return vectors


def _square(widen: Any) -> Any:
    """``square(source, source_row, target, target_row, factor)``: target = factor * source transposed."""

    @intrinsic
    def square(
        typingctx: Any, source: Any, source_row: Any, target: Any, target_row: Any, factor: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, source_row, target, target_row, factor = arguments
            vec = Vec(signature.args[-1])
            kind = llvm_vector(vec)
            rows = []
            for r in range(vec.lanes):
                place = builder.add(source, builder.mul(source_row, source.type(r)))
                if widen is None:
                    rows.append(emit_load(builder, place, kind))
                else:
                    bits = emit_load(builder, place, ir.VectorType(I16, vec.lanes))
                    rows.append(widen(builder, bits, kind))
            scale = emit_splat(builder, kind, factor)
            for r, column in enumerate(emit_transpose(builder, rows)):
                place = builder.add(target, builder.mul(target_row, source.type(r)))
                emit_store(builder, place, builder.fmul(column, scale))
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, i, i, factor), codegen

    return square


@intrinsic
def square_pairs(typingctx: Any, source: Any, source_row: Any, target: Any, target_row: Any, one: Any) -> Any:
    """The square of 32-bit elements transposed as it is: nothing is computed with them."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, target, target_row, _ = arguments
        lanes = Vec(signature.args[-1]).lanes
        kind = ir.VectorType(ir.IntType(32), lanes)
        rows = [
            emit_load(builder, builder.add(source, builder.mul(source_row, source.type(r))), kind)
            for r in range(lanes)
        ]
        for r, column in enumerate(emit_transpose(builder, rows)):
            emit_store(builder, builder.add(target, builder.mul(target_row, source.type(r))), column)
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, i, i, one), codegen


square = _square(None)
square_half = _square(_widen_half)
square_bfloat = _square(_widen_bfloat)

__all__ = ["square", "square_bfloat", "square_half", "square_pairs"]

"""The register-tile matrix product: C (+)= A @ B with a tile of C kept in registers over the whole inner loop.

A is read one scalar at a time, broadcast to all lanes, at any two strides (so a transposed A costs nothing);
B and C are read by whole vectors along their rows. ``_micro(rows, vectors)`` emits the loop for one size of
tile; ``matmul`` covers any number of rows and of vectors with tiles of 6, 4, 2, 1 rows and 4, 2, 1 vectors
(2, 1 where there are 16 registers). All strides are in bytes.

Versions (one core; FMA peak measured by the same loop on data in L1):
    Zen 5, 16 lanes: 6x4 and 8x3 reach the peak (267 GFLOP/s), 14x2 266, 12x2 half of it.
    Zen 5, 8 lanes (AVX2): 6x2 and 4x3 reach 124 of 134.
    Rows that are no multiple of six run as 4x4, 2x4, 1x4: 4x4 has 16 chains and stays at the peak.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import (
    Vec,
    constant,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    vector_bytes,
    llvm_scalar,
    llvm_vector,
)


def _micro(rows: int, vectors: int) -> Any:
    """The product for one register tile: C[rows, vectors * lanes] (+)= A[rows, depth] @ B[depth, ...]."""

    @intrinsic
    def micro(
        typingctx: Any,
        a: Any,
        a_row: Any,
        a_col: Any,
        b: Any,
        b_row: Any,
        c: Any,
        c_row: Any,
        depth: Any,
        accumulate: Any,
        one: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, a_col, b, b_row, c, c_row, depth, accumulate, _ = arguments
            vec = Vec(signature.args[-1])
            kind, scalar, integer = llvm_vector(vec), llvm_scalar(vec.scalar), a.type
            width = integer(vec.lanes * vec.scalar.bitwidth // 8)
            places = [
                builder.add(builder.add(c, builder.mul(c_row, integer(r))), builder.mul(width, integer(v)))
                for r in range(rows)
                for v in range(vectors)
            ]
            a_starts = [builder.add(a, builder.mul(a_row, integer(r))) for r in range(rows)]

            before = builder.block
            read = builder.append_basic_block("read_c")
            loop = builder.append_basic_block("depth")
            done = builder.append_basic_block("write_c")
            builder.cbranch(accumulate, read, loop)
            builder.position_at_end(read)
            old = [emit_load(builder, place, kind) for place in places]
            builder.branch(loop)

            builder.position_at_end(loop)
            k = builder.phi(integer)
            offset = builder.phi(integer)
            b_at = builder.phi(integer)
            sums = [builder.phi(kind) for _ in places]
            for block, starts in ((before, [constant(kind, 0.0)] * len(places)), (read, old)):
                k.add_incoming(depth, block)
                offset.add_incoming(integer(0), block)
                b_at.add_incoming(b, block)
                for total, start in zip(sums, starts, strict=True):
                    total.add_incoming(start, block)
            b_now = [
                emit_load(builder, builder.add(b_at, builder.mul(width, integer(v))), kind)
                for v in range(vectors)
            ]
            new = []
            for r in range(rows):
                value = emit_splat(
                    builder, kind, emit_load(builder, builder.add(a_starts[r], offset), scalar)
                )
                for v in range(vectors):
                    new.append(emit_fma(builder, value, b_now[v], sums[r * vectors + v]))
            left = builder.sub(k, integer(1))
            k.add_incoming(left, loop)
            offset.add_incoming(builder.add(offset, a_col), loop)
            b_at.add_incoming(builder.add(b_at, b_row), loop)
            for total, value in zip(sums, new, strict=True):
                total.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed(">", left, integer(0)), loop, done)

            builder.position_at_end(done)
            for place, value in zip(places, new, strict=True):
                emit_store(builder, place, value)
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, i, i, i, i, i, i, types.boolean, one), codegen

    return micro


_6x4, _4x4, _2x4, _1x4 = (_micro(rows, 4) for rows in (6, 4, 2, 1))
_6x2, _4x2, _2x2, _1x2 = (_micro(rows, 2) for rows in (6, 4, 2, 1))
_6x1, _4x1, _2x1, _1x1 = (_micro(rows, 1) for rows in (6, 4, 2, 1))

_WIDE = _host.TILE_VECTORS == 4


@part()
def _columns4(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, one):
    r = 0
    while r + 6 <= rows:
        _6x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        _4x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        _2x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r < rows:
        _1x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)


@part()
def _columns2(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, one):
    r = 0
    while r + 6 <= rows:
        _6x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        _4x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        _2x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r < rows:
        _1x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)


@part()
def _columns1(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, one):
    r = 0
    while r + 6 <= rows:
        _6x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        _4x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        _2x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r < rows:
        _1x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)


@part()
def matmul(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, one):
    """C[rows, vectors] (+)= A[rows, depth] @ B[depth, vectors]; depth >= 1. Addresses and byte strides.

    ``vectors`` counts whole vectors of columns: B and C are padded to them.
    """
    width = vector_bytes(one)
    v = 0
    if _WIDE:
        while v + 4 <= vectors:
            _columns4(
                a, a_row, a_col, b + v * width, b_row, c + v * width, c_row, rows, depth, accumulate, one
            )
            v += 4
    while v + 2 <= vectors:
        _columns2(a, a_row, a_col, b + v * width, b_row, c + v * width, c_row, rows, depth, accumulate, one)
        v += 2
    if v < vectors:
        _columns1(a, a_row, a_col, b + v * width, b_row, c + v * width, c_row, rows, depth, accumulate, one)


__all__ = ["matmul"]

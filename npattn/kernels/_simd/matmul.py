"""The register-tile matrix product: C (+)= A @ B, a tile of C kept in registers over the whole inner loop.

A is read one scalar at a time, broadcast to all lanes, at any two strides (so a transposed A costs nothing);
B and C are read by whole vectors along their rows. ``_micro(rows, vectors)`` emits the loop for one size of
tile; ``matmul`` covers any number of rows and of vectors with tiles of 6, 4, 2, 1 rows and 4, 2, 1 vectors
(2, 1 where there are 16 registers). All strides are in bytes.

Versions (one core; FMA peak measured by the same loop on data in L1):
    Zen 5, 16 lanes: 6x4 and 8x3 reach the peak (267 GFLOP/s), 14x2 266, 12x2 half of it.
    Zen 5, 8 lanes (AVX2): 6x2 and 4x3 reach 124 of 134.
    Zen 4, one core: 6x4 114 GFLOP/s in float32, in pairs of bfloat16 229.
    Rows that are no multiple of six run as 4x4, 2x4, 1x4: 4x4 has 16 chains and stays at the peak.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.storage import BFloat
from npattn.kernels._simd.vectors import (
    Vec,
    constant,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    llvm_scalar,
    llvm_vector,
    vector_bytes,
)


def _micro(rows: int, vectors: int, pairs: bool = False) -> Any:
    """The product for one register tile: C[rows, vectors * lanes] (+)= A[rows, depth] @ B[depth, ...].

    ``pairs``: elements of A and B are pairs of bfloat16 along the depth, multiplied and added up in float32.
    """

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
            element = ir.IntType(32) if pairs else scalar
            loaded = ir.VectorType(element, vec.lanes)
            a_starts = [builder.add(a, builder.mul(a_row, integer(r))) for r in range(rows)]
            results: list[tuple[Any, Any]] = []

            before = builder.block
            loop = builder.append_basic_block("depth")
            read = builder.append_basic_block("add_c")
            done = builder.append_basic_block("write_c")
            builder.branch(loop)

            builder.position_at_end(loop)
            k = builder.phi(integer)
            offset = builder.phi(integer)
            b_at = builder.phi(integer)
            sums = [builder.phi(kind) for _ in places]
            k.add_incoming(depth, before)
            offset.add_incoming(integer(0), before)
            b_at.add_incoming(b, before)
            for total in sums:
                total.add_incoming(constant(kind, 0.0), before)
            b_now = [
                emit_load(builder, builder.add(b_at, builder.mul(width, integer(v))), loaded)
                for v in range(vectors)
            ]
            new = []
            for r in range(rows):
                value = emit_load(builder, builder.add(a_starts[r], offset), element)
                value = emit_splat(builder, loaded, value)
                for v in range(vectors):
                    multiply = emit_pair_products if pairs else emit_fma
                    new.append(multiply(builder, value, b_now[v], sums[r * vectors + v]))
            left = builder.sub(k, integer(1))
            k.add_incoming(left, loop)
            offset.add_incoming(builder.add(offset, a_col), loop)
            b_at.add_incoming(builder.add(b_at, b_row), loop)
            for total, value in zip(sums, new, strict=True):
                total.add_incoming(value, loop)
            whole = builder.append_basic_block("whole")
            builder.cbranch(builder.icmp_signed(">", left, integer(0)), loop, whole)

            # C is added behind the loop: the products of one tile are summed among themselves first, so that
            # the error of a long sum grows with the number of tiles, not of keys.
            builder.position_at_end(whole)
            builder.cbranch(accumulate, read, done)
            builder.position_at_end(read)
            added = [
                builder.fadd(emit_load(builder, place, kind), value)
                for place, value in zip(places, new, strict=True)
            ]
            builder.branch(done)

            builder.position_at_end(done)
            for place, alone, total in zip(places, new, added, strict=True):
                result = builder.phi(kind)
                result.add_incoming(alone, whole)
                result.add_incoming(total, read)
                results.append((place, result))
            for place, result in results:
                emit_store(builder, place, result)
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, i, i, i, i, i, i, types.boolean, one), codegen

    return micro


def emit_pair_products(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """C + a.first * b.first + a.second * b.second in each lane, by AVX-512's vdpbf16ps."""
    sixteens = ir.VectorType(BFloat(), 2 * a.type.count)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(c.type, [c.type, sixteens, sixteens]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return builder.call(function, [c, builder.bitcast(a, sixteens), builder.bitcast(b, sixteens)])


_6x4, _4x4, _2x4, _1x4 = (_micro(rows, 4) for rows in (6, 4, 2, 1))
_6x2, _4x2, _2x2, _1x2 = (_micro(rows, 2) for rows in (6, 4, 2, 1))
_6x1, _4x1, _2x1, _1x1 = (_micro(rows, 1) for rows in (6, 4, 2, 1))

_6x4p, _4x4p, _2x4p, _1x4p = (_micro(rows, 4, True) for rows in (6, 4, 2, 1))
_6x2p, _4x2p, _2x2p, _1x2p = (_micro(rows, 2, True) for rows in (6, 4, 2, 1))
_6x1p, _4x1p, _2x1p, _1x1p = (_micro(rows, 1, True) for rows in (6, 4, 2, 1))

_WIDE = _host.TILE_VECTORS == 4


@part(static=("pairs",))
def _columns4(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, pairs, one):
    r = 0
    while r + 6 <= rows:
        if pairs:
            _6x4p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _6x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        if pairs:
            _4x4p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _4x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        if pairs:
            _2x4p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _2x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r + 1 <= rows:
        if pairs:
            _1x4p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _1x4(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 1


@part(static=("pairs",))
def _columns2(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, pairs, one):
    r = 0
    while r + 6 <= rows:
        if pairs:
            _6x2p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _6x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        if pairs:
            _4x2p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _4x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        if pairs:
            _2x2p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _2x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r + 1 <= rows:
        if pairs:
            _1x2p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _1x2(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 1


@part(static=("pairs",))
def _columns1(a, a_row, a_col, b, b_row, c, c_row, rows, depth, accumulate, pairs, one):
    r = 0
    while r + 6 <= rows:
        if pairs:
            _6x1p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _6x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 6
    if r + 4 <= rows:
        if pairs:
            _4x1p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _4x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 4
    if r + 2 <= rows:
        if pairs:
            _2x1p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _2x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 2
    if r + 1 <= rows:
        if pairs:
            _1x1p(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        else:
            _1x1(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, accumulate, one)
        r += 1


@part(static=("pairs",))
def _cover(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, pairs, one):
    width = vector_bytes(one)
    v = 0
    if _WIDE:
        while v + 4 <= vectors:
            at = v * width
            _columns4(a, a_row, a_col, b + at, b_row, c + at, c_row, rows, depth, accumulate, pairs, one)
            v += 4
    while v + 2 <= vectors:
        at = v * width
        _columns2(a, a_row, a_col, b + at, b_row, c + at, c_row, rows, depth, accumulate, pairs, one)
        v += 2
    if v < vectors:
        at = v * width
        _columns1(a, a_row, a_col, b + at, b_row, c + at, c_row, rows, depth, accumulate, pairs, one)


@part()
def matmul(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, one):
    """C[rows, vectors] (+)= A[rows, depth] @ B[depth, vectors]; depth >= 1. Addresses and byte strides.

    ``vectors`` counts whole vectors of columns: B and C are padded to them.
    """
    _cover(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, False, one)


@part()
def matmul_pairs(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, one):
    """The same where an element of A and B is a pair of bfloat16 along the depth (32 bits); C is float32."""
    _cover(a, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, accumulate, True, one)


__all__ = ["matmul", "matmul_pairs"]

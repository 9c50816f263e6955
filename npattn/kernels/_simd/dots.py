"""Dot products of one row with as many rows as a vector has lanes.

For few queries this replaces a matrix product: the rows are read once, in order, as they lie, and nothing is
transposed in memory. A sum of products for each row is kept in a register; a tree of shuffles then adds up
the lanes of all of them at once: 15 additions and 30 shuffles for 16 rows of float32.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from npattn.kernels._simd.storage import I16, _widen_bfloat, _widen_half
from npattn.kernels._simd.vectors import I32, Vec, constant, emit_fma, emit_load, llvm_vector


def _load_wide(builder: Any, row: Any, offset: Any, kind: Any) -> Any:
    return emit_load(builder, builder.add(row, offset), kind)


def _load_narrow(widen: Any) -> Any:
    """Elements of 16 bits, widened."""

    def load_key(builder: Any, row: Any, offset: Any, kind: Any) -> Any:
        halvings = 2 if isinstance(kind.element, ir.DoubleType) else 1
        at = builder.add(row, builder.lshr(offset, offset.type(halvings)))
        return widen(builder, emit_load(builder, at, ir.VectorType(I16, kind.count)), kind)

    return load_key


def _dots(load_key: Any) -> Any:

    @intrinsic
    def dots(typingctx: Any, q: Any, k: Any, k_row: Any, last: Any, vectors: Any, one: Any) -> Any:
        """Lane j: ``vectors`` whole vectors at q times those at ``k + min(j, last) * k_row``."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, k, k_row, last, vectors, _ = arguments
            kind, integer = llvm_vector(signature.return_type), q.type
            rows = []
            for j in range(kind.count):
                step = integer(j)
                inside = builder.icmp_signed("<", step, last)
                rows.append(builder.add(k, builder.mul(k_row, builder.select(inside, step, last))))
            width = integer(signature.return_type.lanes * signature.return_type.scalar.bitwidth // 8)
            end = builder.mul(vectors, width)

            before = builder.block
            loop = builder.append_basic_block("products")
            done = builder.append_basic_block("sums")
            builder.branch(loop)
            builder.position_at_end(loop)
            offset = builder.phi(integer)
            offset.add_incoming(integer(0), before)
            sums = [builder.phi(kind) for _ in rows]
            value = emit_load(builder, builder.add(q, offset), kind)
            for total, row in zip(sums, rows, strict=True):
                total.add_incoming(constant(kind, 0.0), before)
                element = load_key(builder, row, offset, kind)
                total.add_incoming(emit_fma(builder, element, value, total), loop)
            after = builder.add(offset, width)
            offset.add_incoming(after, loop)
            builder.cbranch(builder.icmp_signed("<", after, end), loop, done)
            builder.position_at_end(done)
            return _sums_of_lanes(builder, [total.incomings[1][0] for total in sums])

        i = types.intp
        return Vec(one)(i, i, i, i, i, one), codegen

    return dots


dots = _dots(_load_wide)
dots_half = _dots(_load_narrow(_widen_half))
dots_bfloat = _dots(_load_narrow(_widen_bfloat))


def _sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane j is the sum of the lanes of ``vectors[j]``."""
    kind = vectors[0].type
    lanes, unit = kind.count, 1
    quarter = 2 if isinstance(kind.element, ir.DoubleType) else 4  # lanes of 128 bits: shuffled for free
    quarter = min(quarter, lanes)
    while len(vectors) > 1:
        low, high = _halves(lanes, unit, quarter)
        vectors = [
            builder.fadd(_shuffled(builder, a, b, low), _shuffled(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        unit *= 2
    return vectors[0]


def _halves(lanes: int, unit: int, quarter: int) -> tuple[list[int], list[int]]:
    """Which lanes of (a, b) meet while a and b hold ``unit`` finished sums side by side, many times over.

    Below 128 bits the two halves of each 128 bits meet, so that no lane crosses; above, whole groups of 128
    bits: first those two apart, then neighbours, which leaves the sums in order.
    """
    groups = range(0, lanes, quarter)
    if unit < quarter:
        half = range(0, quarter // 2, unit)
        low = [g + at + u + side for g in groups for at in half for side in (0, lanes) for u in range(unit)]
        return low, [lane + quarter // 2 for lane in low]
    count = lanes // quarter
    done = unit // quarter  # groups of finished sums in each vector

    def lanes_of(picked: list[int]) -> list[int]:
        return [side + g * quarter + u for side in (0, lanes) for g in picked for u in range(quarter)]

    if count // done == 4:
        return lanes_of([0, 1]), lanes_of([2, 3])
    return lanes_of(list(range(0, count, 2))), lanes_of(list(range(1, count, 2)))


def _shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


__all__ = ["dots", "dots_bfloat", "dots_half"]

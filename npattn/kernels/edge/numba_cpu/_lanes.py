"""Vector operations of the edge walk: many short dot products at once, and weighted sums of gathered rows.

A vector of W lanes stands for W (edge, head) pairs: with the number of heads rounded up to a power of two, P,
lane t is edge t // P, head t % P. P is known when compiling: it is the length of the tuple ``pairs`` that
every kernel is given. Lanes of heads that only fill up repeat the last head.

One dot product leaves a vector of partial sums; summing it alone costs log2(W) shuffles and additions. Here W
of them are summed together by a transposing tree: W - 1 additions for W results.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from npattn.kernels._simd.hashing import _fold, _mix
from npattn.kernels._simd.row_sums import emit_sum_tree
from npattn.kernels._simd.vectors import (
    I32,
    Vec,
    constant,
    emit_fma,
    emit_lane_numbers,
    emit_load,
    emit_splat,
    emit_store,
    llvm_scalar,
    llvm_vector,
    suffix,
)

I1, I64 = ir.IntType(1), ir.IntType(64)
UNIT_BYTES = 24  # of a row of the unit table: three int64


def _emit_masked_load(builder: Any, address: Any, kind: Any, mask: Any) -> Any:
    """The lanes at ``address`` whose mask is set, 0 elsewhere; nothing else is touched in memory."""
    pointer = builder.inttoptr(address, kind.as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind]),
        f"llvm.masked.load.{suffix(kind)}.p0",
    )
    return builder.call(function, [pointer, I32(1), mask, constant(kind, 0.0)])


def _emit_mask(builder: Any, vec: Vec, count: Any) -> Any:
    """Lanes below the int64 ``count``."""
    numbers = emit_lane_numbers(vec)
    return builder.icmp_signed("<", numbers, emit_splat(builder, numbers.type, builder.trunc(count, I32)))


def _emit_leaky(builder: Any, x: Any, slope: Any) -> Any:
    positive = builder.fcmp_ordered(">", x, constant(x.type, 0.0))
    return builder.select(positive, x, builder.fmul(x, emit_splat(builder, x.type, slope)))


def _emit_head_offsets(builder: Any, count: int, heads: Any, step: Any) -> list[Any]:
    """Byte offsets of ``count`` heads, those beyond the last one repeating it."""
    last = builder.sub(heads, I64(1))
    offsets = []
    for head in range(count):
        clamped = builder.select(builder.icmp_signed("<", I64(head), last), I64(head), last)
        offsets.append(builder.mul(clamped, step))
    return offsets


def _emit_rows(builder: Any, rows: Any, count: int) -> list[Any]:
    """The first ``count`` addresses of a list."""
    return [emit_load(builder, builder.add(rows, I64(8 * e)), I64) for e in range(count)]


def _lane_products(dynamic: bool) -> Any:
    @intrinsic
    def lane_products(
        typingctx: Any,
        own: Any,
        rows: Any,
        att: Any,
        heads: Any,
        length: Any,
        slope: Any,
        pairs: Any,
        one: Any,
    ) -> Any:
        """Lane (e, h): the sum over d of ``own[h, d] * row[h, d]``, the row's address listed at rows + 8e.

        The dynamic kind: of ``att[h, d] * leaky_relu(own[h, d] + row[h, d])``. Rows are (heads, length).
        """
        vec, padded = Vec(one), len(pairs)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            own, rows, att, heads, length, slope = arguments[:6]
            kind, size = llvm_vector(vec), vec.scalar.bitwidth // 8
            offsets = _emit_head_offsets(builder, padded, heads, builder.mul(length, I64(size)))
            near = [builder.add(own, offset) for offset in offsets]
            weight = [builder.add(att, offset) for offset in offsets] if dynamic else []
            bases = _emit_rows(builder, rows, vec.lanes // padded)
            far = [builder.add(base, offset) for base in bases for offset in offsets]

            def add(totals: list[Any], load: Any) -> list[Any]:
                xs = [load(row) for row in near]
                weights = [load(row) for row in weight]
                sums = []
                for t, total in enumerate(totals):
                    y, head = load(far[t]), t % padded
                    if dynamic:
                        z = _emit_leaky(builder, builder.fadd(xs[head], y), slope)
                        sums.append(emit_fma(builder, weights[head], z, total))
                    else:
                        sums.append(emit_fma(builder, xs[head], y, total))
                return sums

            zero = constant(kind, 0.0)
            tail = builder.and_(length, I64(vec.lanes - 1))
            whole = builder.mul(builder.sub(length, tail), I64(size))
            entry = builder.block
            loop, body, after = (
                builder.append_basic_block(name) for name in ("dots", "dots.body", "dots.tail")
            )
            last, done = builder.append_basic_block("dots.last"), builder.append_basic_block("dots.done")
            builder.branch(loop)
            builder.position_at_end(loop)
            offset = builder.phi(I64)
            offset.add_incoming(I64(0), entry)
            totals = [builder.phi(kind) for _ in range(vec.lanes)]
            for total in totals:
                total.add_incoming(zero, entry)
            builder.cbranch(builder.icmp_signed("<", offset, whole), body, after)

            builder.position_at_end(body)
            sums = add(totals, lambda row: emit_load(builder, builder.add(row, offset), kind))
            for total, new in zip(totals, sums, strict=True):
                total.add_incoming(new, body)
            offset.add_incoming(builder.add(offset, I64(vec.lanes * size)), body)
            builder.branch(loop)

            builder.position_at_end(after)
            builder.cbranch(builder.icmp_signed(">", tail, I64(0)), last, done)
            builder.position_at_end(last)
            mask = _emit_mask(builder, vec, tail)
            ended = add(totals, lambda row: _emit_masked_load(builder, builder.add(row, offset), kind, mask))
            builder.branch(done)
            builder.position_at_end(done)
            merged = []
            for total, end in zip(totals, ended, strict=True):
                phi = builder.phi(kind)
                phi.add_incoming(total, after)
                phi.add_incoming(end, last)
                merged.append(phi)
            return emit_sum_tree(builder, merged)

        i = types.int64
        return vec(i, i, i, i, i, one, pairs, one), codegen

    return lane_products


lane_dots = _lane_products(dynamic=False)
lane_dynamic = _lane_products(dynamic=True)


def _accumulator(units: int, masked: bool, score: str) -> Any:
    @intrinsic
    def accumulate(
        typingctx: Any,
        acc: Any,
        acc_att: Any,
        table: Any,
        rows: Any,
        p: Any,
        p_bytes: Any,
        count: Any,
        own: Any,
        slope: Any,
    ) -> Any:
        """``acc[u] += p[e, head of u] * (row e's vector u)`` over ``count`` edges, for consecutive units u.

        A unit is one vector of one head's features; the table holds its byte offset in a row, its head's byte
        offset in p's rows and its number of valid lanes. The sums stay in registers. ``dynamic`` sums
        ``p * slope(own + row)`` instead, ``att`` also ``p * leaky_relu(own + row)`` into acc_att.
        """
        one = slope
        vec = Vec(one)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            acc, acc_att, table, rows, p, p_bytes, count, own, slope = arguments
            kind, size = llvm_vector(vec), vec.scalar.bitwidth // 8

            def entry_of(unit: int, column: int) -> Any:
                return emit_load(builder, builder.add(table, I64(UNIT_BYTES * unit + 8 * column)), I64)

            offsets = [entry_of(u, 0) for u in range(units if masked else 1)]
            if not masked:  # whole vectors follow each other through all heads
                offsets = [builder.add(offsets[0], I64(vec.lanes * size * u)) for u in range(units)]
            heads = [entry_of(u, 1) for u in range(units)]
            masks = [_emit_mask(builder, vec, entry_of(u, 2)) for u in range(units)] if masked else None

            def row_vector(row: Any, u: int) -> Any:
                place = builder.add(row, offsets[u])
                if masks is not None:
                    return _emit_masked_load(builder, place, kind, masks[u])
                return emit_load(builder, place, kind)

            bases = [acc] if score != "att" else [acc, acc_att]
            places = [[builder.add(base, I64(vec.lanes * size * u)) for u in range(units)] for base in bases]
            start = [[emit_load(builder, place, kind) for place in line] for line in places]
            owns = [row_vector(own, u) for u in range(units)] if score != "plain" else []
            unit_slope, leak = constant(kind, 1.0), emit_splat(builder, kind, slope)

            entry = builder.block
            loop, body, done = (builder.append_basic_block(n) for n in ("edges", "edges.body", "edges.done"))
            builder.branch(loop)
            builder.position_at_end(loop)
            e = builder.phi(I64)
            e.add_incoming(I64(0), entry)
            sums = [[builder.phi(kind) for _ in line] for line in start]
            for line, begun in zip(sums, start, strict=True):
                for phi, value in zip(line, begun, strict=True):
                    phi.add_incoming(value, entry)
            builder.cbranch(builder.icmp_signed("<", e, count), body, done)

            builder.position_at_end(body)
            row = emit_load(builder, builder.add(rows, builder.mul(e, I64(8))), I64)
            weights = builder.add(p, builder.mul(e, p_bytes))
            for u in range(units):
                weight = emit_load(builder, builder.add(weights, heads[u]), kind.element)
                weight = emit_splat(builder, kind, weight)
                vector = row_vector(row, u)
                if score == "plain":
                    sums[0][u].add_incoming(emit_fma(builder, weight, vector, sums[0][u]), body)
                    continue
                total = builder.fadd(owns[u], vector)
                positive = builder.fcmp_ordered(">", total, constant(kind, 0.0))
                weight = builder.fmul(weight, builder.select(positive, unit_slope, leak))
                sums[0][u].add_incoming(builder.fadd(sums[0][u], weight), body)
                if score == "att":
                    sums[1][u].add_incoming(emit_fma(builder, weight, total, sums[1][u]), body)
            e.add_incoming(builder.add(e, I64(1)), body)
            builder.branch(loop)

            builder.position_at_end(done)
            for line, where in zip(sums, places, strict=True):
                for phi, place in zip(line, where, strict=True):
                    emit_store(builder, place, phi)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i, i, one), codegen

    return accumulate


accumulate_8 = _accumulator(8, False, "plain")
accumulate_4 = _accumulator(4, False, "plain")
accumulate_1 = _accumulator(1, False, "plain")
accumulate_4_masked = _accumulator(4, True, "plain")
accumulate_1_masked = _accumulator(1, True, "plain")
accumulate_dynamic_4 = _accumulator(4, True, "dynamic")
accumulate_dynamic_1 = _accumulator(1, True, "dynamic")
accumulate_att_4 = _accumulator(4, True, "att")
accumulate_att_1 = _accumulator(1, True, "att")


def _emit_lanes(builder: Any, kind: Any, scalars: list[Any]) -> Any:
    """A vector of ``scalars``, repeated to fill it."""
    vector = ir.Constant(kind, ir.Undefined)
    for t in range(kind.count):
        vector = builder.insert_element(vector, scalars[t % len(scalars)], I32(t))
    return vector


@intrinsic
def gather_heads(typingctx: Any, rows: Any, heads: Any, step: Any, pairs: Any, one: Any) -> Any:
    """Lane (e, h): the scalar at the address listed at rows + 8e, plus h * step bytes."""
    vec, padded = Vec(one), len(pairs)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, heads, step = arguments[:3]
        kind = llvm_vector(vec)
        offsets = _emit_head_offsets(builder, padded, heads, step)
        places = [
            builder.add(base, offset)
            for base in _emit_rows(builder, rows, vec.lanes // padded)
            for offset in offsets
        ]
        return _emit_lanes(builder, kind, [emit_load(builder, place, kind.element) for place in places])

    i = types.int64
    return vec(i, i, i, pairs, one), codegen


@intrinsic
def spread_heads(typingctx: Any, row: Any, heads: Any, pairs: Any, one: Any) -> Any:
    """Lane (e, h): head h's scalar of the one row, for every e."""
    vec, padded = Vec(one), len(pairs)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, heads = arguments[:2]
        kind = llvm_vector(vec)
        offsets = _emit_head_offsets(builder, padded, heads, I64(vec.scalar.bitwidth // 8))
        scalars = [emit_load(builder, builder.add(row, offset), kind.element) for offset in offsets]
        return _emit_lanes(builder, kind, scalars)

    i = types.int64
    return vec(i, i, pairs, one), codegen


@intrinsic
def copy_heads(typingctx: Any, target: Any, source: Any, pairs: Any, one: Any) -> Any:
    """Copy one edge's values, P of them."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(llvm_scalar(one), len(pairs))
        emit_store(builder, arguments[0], emit_load(builder, arguments[1], kind))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, pairs, one), codegen


@intrinsic
def edges_per_vector(typingctx: Any, pairs: Any, one: Any) -> Any:
    """W // P."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(Vec(one).lanes // len(pairs))

    return types.int64(pairs, one), codegen


@intrinsic
def padded_heads(typingctx: Any, pairs: Any) -> Any:
    """P."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(len(pairs))

    return types.int64(pairs), codegen


def _folder(largest: bool) -> Any:
    @intrinsic
    def fold_edges(typingctx: Any, pairs: Any, vector: Any) -> Any:
        """Combine the lanes of one head; the result stands in each of them."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            folded = arguments[1]
            kind, step = folded.type, len(pairs)
            while step < kind.count:
                numbers = [lane ^ step for lane in range(kind.count)]
                mask = ir.Constant(ir.VectorType(I32, kind.count), numbers)
                other = builder.shuffle_vector(folded, ir.Constant(kind, ir.Undefined), mask)
                if largest:
                    folded = builder.select(builder.fcmp_ordered(">", folded, other), folded, other)
                else:
                    folded = builder.fadd(folded, other)
                step *= 2
            return folded

        return vector(pairs, vector), codegen

    return fold_edges


fold_max, fold_sum = _folder(largest=True), _folder(largest=False)


@intrinsic
def leaky(typingctx: Any, vector: Any, slope: Any) -> Any:
    """The leaky ReLU of each lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _emit_leaky(builder, *arguments)

    return vector(vector, vector.scalar), codegen


@intrinsic
def slope_where(typingctx: Any, test: Any, vector: Any, slope: Any) -> Any:
    """``vector`` where ``test > 0``, ``vector * slope`` elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        test, vector, slope = arguments
        positive = builder.fcmp_ordered(">", test, constant(test.type, 0.0))
        return builder.select(positive, vector, builder.fmul(vector, emit_splat(builder, vector.type, slope)))

    return vector(vector, vector, vector.scalar), codegen


@intrinsic
def drop_pairs(
    typingctx: Any, vector: Any, r0: Any, r1: Any, edges: Any, threshold: Any, factor: Any, pairs: Any
) -> Any:
    """``vector * factor`` where the pair is kept, else 0.

    r0 and r1 are addresses of the heads' hash words, one per lane; edge numbers are listed at ``edges``.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, r0, r1, edges, threshold, factor, _ = arguments
        kind, padded = ir.VectorType(I32, vector.type.count), len(pairs)
        numbers = _emit_rows(builder, edges, vector.type.count // padded)
        low = [builder.trunc(number, I32) for number in numbers for _ in range(padded)]
        high = [builder.trunc(builder.lshr(n, I64(32)), I32) for n in numbers for _ in range(padded)]
        low, high = _emit_lanes(builder, kind, low), _emit_lanes(builder, kind, high)
        r0, r1 = emit_load(builder, r0, kind), emit_load(builder, r1, kind)
        r0, r1 = _fold(builder, r0, high), _fold(builder, r1, high)
        x = _mix(builder, builder.xor(_fold(builder, r0, low), r1))
        limit = emit_splat(builder, kind, builder.trunc(threshold, I32))
        kept = builder.fmul(vector, emit_splat(builder, vector.type, factor))
        return builder.select(builder.icmp_unsigned(">=", x, limit), kept, constant(vector.type, 0.0))

    i = types.int64
    return vector(vector, i, i, i, i, vector.scalar, pairs), codegen


@intrinsic
def load_int64(typingctx: Any, address: Any) -> Any:
    """The int64 at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, arguments[0], I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_node(typingctx: Any, address: Any) -> Any:
    """The int32 at ``address`` as int64, so that products with strides cannot overflow."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(emit_load(builder, arguments[0], I32), I64)

    return types.int64(types.int64), codegen

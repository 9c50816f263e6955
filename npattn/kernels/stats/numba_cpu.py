"""Statistics of the weights on the CPU: explicit vectors inside Numba, two sweeps over a TilePlan.

Loop order, first sweep: a unit is a chunk of query tiles of one (batch element, key head). It packs the key
tiles it will see, transposed, then walks the group's query heads, the query tiles and their spans by query.
A row keeps, beside the running maximum m of ``kernels.contract``, two sums over its keys, one partial sum per
lane::

    l = sum(exp(s - m)),    a = sum(exp(s - m) * (s - m))

from which the entropy follows as log l - a / l: two terms of one sign. When the maximum grows by d they
become l * exp(-d) and (a - d * l) * exp(-d). Where the largest logits are is looked for only in tiles that
hold one larger than those noted so far, which is rare after the first few.

Second sweep, once every row's m and l are known: a unit is a chunk of key tiles, walked by key. It forms the
logits again and sums the weights of its own keys, in float64 from tile to tile.

A unit writes only its own rows or keys, so results do not depend on the number of threads. In scratch: the
packed keys, a query block, one tile of logits, the partial sums.
"""

# Numba's decorators carry no types, and neither do the functions below them
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import ctypes
import struct
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from npattn import _threads
from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels import _jit
from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.exp import exp, exp_scalar
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.vectors import (
    add,
    any_greater,
    cast,
    emit_store,
    fma,
    hmax,
    hsum,
    lanes,
    lesser,
    load,
    load_int32,
    load_int64,
    load_scalar,
    maximum,
    mul,
    record_reader,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.contract import Problem
from npattn.kernels.stats.contract import Statistics
from npattn.kernels.tile.numba_cpu._launch import _bias_in, supports
from npattn.kernels.tile.numba_cpu._params import _DTYPE, describe, params_at
from npattn.kernels.tile.numba_cpu._rows import NEGATIVE_INFINITY, copy_rows, fill_zero, pack_transposed
from npattn.kernels.tile.numba_cpu._tile import finish_logits, list_of
from npattn.plans.tiles import TilePlan

TILE_Q: Final = 48
TILE_K: Final = 64
_CHUNKS: Final = 16  # per (batch element, key head) at most
_SERIAL: Final = 200_000  # multiply-adds below which waking a helper costs more than it brings
_FLOOR: Final = -1000.0  # exp of it is 0 in both precisions, and 0 times it is 0, unlike 0 * -inf

_NAMES: Final = (
    *("m", "l", "tilt", "best", "own", "argmax", "top_values", "top_keys", "top_k"),
    *("received", "q_chunks", "k_chunks"),
)
_EXTRA: Final = np.dtype([(name, np.int64) for name in _NAMES])
_extra_at = record_reader(numba.from_dtype(_EXTRA))


@intrinsic
def _store_int64(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64 at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store(builder, arguments[0], builder.bitcast(arguments[1], ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@part()
def _logits(p, b, lst, h, i0, count, j0, width_k, kind, bitmap, q, q_row, packed, s, s_row, one):
    """The masked logits of one tile, into ``s``."""
    n = lanes(one)
    vectors = (width_k + n - 1) // n
    matmul(q, q_row, scalar_bytes(one), packed, s_row, s, s_row, count, vectors, p.dim, False, one)
    finish_logits(p, b, lst, h, 1, i0, count, j0, width_k, kind, bitmap, s, s_row, vectors, 0, one)


@part()
def _note_top(values, keys, top_k, t, j0, width_k, one):
    """Sort the logits of one row into its top_k; equal ones stay behind those that came first."""
    size = scalar_bytes(one)
    last = top_k - 1
    for j in range(width_k):
        value = load_scalar(t + j * size, one)
        if value > load_scalar(values + last * size, one):
            at = last
            while at > 0 and load_scalar(values + (at - 1) * size, one) < value:
                store_scalar(values + at * size, load_scalar(values + (at - 1) * size, one))
                _store_int64(keys + at * 8, load_int64(keys + (at - 1) * 8))
                at -= 1
            store_scalar(values + at * size, value)
            _store_int64(keys + at * 8, j0 + j)


@part()
def _note_row(p, x, row, t, own, l_part, a_part, j0, width_k, vectors, one):
    """What one row of one tile of logits adds to its row's statistics; ``row`` numbers all rows."""
    size = scalar_bytes(one)
    width = vector_bytes(one)
    ninf = cast(NEGATIVE_INFINITY, one)
    highest = load(t, one)
    for c in range(1, vectors):
        highest = maximum(highest, load(t + c * width, one))
    m = load_scalar(x.m + row * size, one)
    l = load(l_part, one)
    a = load(a_part, one)
    if any_greater(highest, splat(load_scalar(x.best + row * size, one))):
        new = hmax(highest)
        store_scalar(x.best + row * size, new)
        j = 0
        while j < width_k - 1 and load_scalar(t + j * size, one) != new:
            j += 1
        _store_int64(x.argmax + row * 8, j0 + j)
        if new > m:
            if m > ninf:
                shift = m - new
                factor = exp_scalar(shift)
                if factor > cast(0.0, one):
                    a = mul(fma(splat(shift), l, a), splat(factor))
                    l = mul(l, splat(factor))
                else:
                    a = splat(cast(0.0, one))
                    l = a
            m = new
            store_scalar(x.m + row * size, m)
    if x.top_k > 0:
        values = x.top_values + row * x.top_k * size
        if any_greater(highest, splat(load_scalar(values + (x.top_k - 1) * size, one))):
            _note_top(values, x.top_keys + row * x.top_k * 8, x.top_k, t, j0, width_k, one)
    if own >= j0 and own < j0 + width_k:
        store_scalar(x.own + row * size, load_scalar(t + (own - j0) * size, one))
    base = splat(m if m > ninf else cast(0.0, one))
    floor = splat(cast(_FLOOR, one))
    for c in range(vectors):
        below = maximum(sub(load(t + c * width, one), base), floor)
        e = exp(below)
        l = add(l, e)
        a = fma(e, below, a)
    store(l_part, l)
    store(a_part, a)


@part()
def _query_unit(p, x, unit, scratch, one):
    """First sweep: unit = (q_chunks - 1 - chunk) * (batch * heads_kv) + b * heads_kv + g."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    pairs = p.batch * p.heads_kv
    q_row = (p.dim + n - 1) // n * width
    s_row = p.tile_k * size
    key_tile = p.dim * s_row
    s = scratch
    q = s + p.tile_q * s_row
    l_parts = q + p.tile_q * q_row
    a_parts = l_parts + p.tile_q * width
    keys = a_parts + p.tile_q * width
    chunk = x.q_chunks - 1 - unit // pairs
    b = unit % pairs // p.heads_kv
    g = unit % pairs % p.heads_kv
    row_first = p.num_rows * chunk // x.q_chunks
    row_stop = p.num_rows * (chunk + 1) // x.q_chunks
    # the key tiles this unit will see
    pack_first = p.num_cols
    pack_stop = 0
    for h in range(g * p.group, (g + 1) * p.group):
        lst = list_of(p, b, h)
        for row in range(row_first, row_stop):
            ptr = p.row_ptr + (lst * (p.num_rows + 1) + row) * 4
            low = load_int32(ptr)
            high = load_int32(ptr + 4)
            if low < high:
                if load_int32(p.row_first + low * 4) < pack_first:
                    pack_first = load_int32(p.row_first + low * 4)
                if load_int32(p.row_stop + high * 4 - 4) > pack_stop:
                    pack_stop = load_int32(p.row_stop + high * 4 - 4)
    for tile in range(pack_first, pack_stop):
        j0 = tile * p.tile_k
        count = lesser(p.tile_k, p.len_k - j0)
        source = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
        target = keys + (tile - pack_first) * key_tile
        pack_transposed(source, p.k_j, target, s_row, count, p.dim, cast(p.scale_before, one), p.kind, one)
    for h in range(g * p.group, (g + 1) * p.group):
        lst = list_of(p, b, h)
        for row in range(row_stop - 1, row_first - 1, -1):
            i0 = row * p.tile_q
            count = lesser(p.tile_q, p.len_q - i0)
            line = (b * p.heads_q + h) * p.len_q + i0
            source = p.q + b * p.q_b + h * p.q_h + i0 * p.q_i
            copy_rows(source, p.q_i, q, q_row, count, p.dim, p.kind, one)
            fill_zero(l_parts, count, one)
            fill_zero(a_parts, count, one)
            ptr = p.row_ptr + (lst * (p.num_rows + 1) + row) * 4
            for span in range(load_int32(ptr), load_int32(ptr + 4)):
                kind = load_int32(p.row_kind + span * 4)
                bitmap = load_int32(p.row_bits + span * 4)
                for tile in range(load_int32(p.row_first + span * 4), load_int32(p.row_stop + span * 4)):
                    j0 = tile * p.tile_k
                    width_k = lesser(p.tile_k, p.len_k - j0)
                    packed = keys + (tile - pack_first) * key_tile
                    _logits(
                        p, b, lst, h, i0, count, j0, width_k, kind,
                        bitmap, q, q_row, packed, s, s_row, one,
                    )  # fmt: skip
                    vectors = (width_k + n - 1) // n
                    for r in range(count):
                        own = i0 + r + p.len_k - p.len_q
                        _note_row(
                            p, x, line + r, s + r * s_row, own, l_parts + r * width, a_parts + r * width,
                            j0, width_k, vectors, one,
                        )  # fmt: skip
            for r in range(count):
                store_scalar(x.l + (line + r) * size, hsum(load(l_parts + r * width, one)))
                store_scalar(x.tilt + (line + r) * size, hsum(load(a_parts + r * width, one)))


@part()
def _add_columns(x, line, s, s_row, count, vectors, sums, one):
    """sums[j] += sum over the rows of exp(s - m) / l; x.l holds 1 / l here, 0 for rows that see nothing."""
    size = scalar_bytes(one)
    width = vector_bytes(one)
    for r in range(count):
        base = splat(load_scalar(x.m + (line + r) * size, one))
        share = splat(load_scalar(x.l + (line + r) * size, one))
        t = s + r * s_row
        for c in range(vectors):
            at = sums + c * width
            store(at, fma(exp(sub(load(t + c * width, one), base)), share, load(at, one)))


@part()
def _key_unit(p, x, unit, scratch, wide, one):
    """Second sweep: unit = chunk * (batch * heads_kv) + b * heads_kv + g."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    pairs = p.batch * p.heads_kv
    q_row = (p.dim + n - 1) // n * width
    s_row = p.tile_k * size
    s = scratch
    q = s + p.tile_q * s_row
    packed = q + p.tile_q * q_row
    sums = packed + p.dim * s_row
    chunk = unit // pairs
    b = unit % pairs // p.heads_kv
    g = unit % pairs % p.heads_kv
    for tile in range(p.num_cols * chunk // x.k_chunks, p.num_cols * (chunk + 1) // x.k_chunks):
        j0 = tile * p.tile_k
        width_k = lesser(p.tile_k, p.len_k - j0)
        vectors = (width_k + n - 1) // n
        source = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
        pack_transposed(source, p.k_j, packed, s_row, width_k, p.dim, cast(p.scale_before, one), p.kind, one)
        for h in range(g * p.group, (g + 1) * p.group):
            lst = list_of(p, b, h)
            target = x.received + ((b * p.heads_q + h) * p.len_k + j0) * 8
            ptr = p.col_ptr + (lst * (p.num_cols + 1) + tile) * 4
            for span in range(load_int32(ptr), load_int32(ptr + 4)):
                kind = load_int32(p.col_kind + span * 4)
                bitmap = load_int32(p.col_bits + span * 4)
                for row in range(load_int32(p.col_first + span * 4), load_int32(p.col_stop + span * 4)):
                    i0 = row * p.tile_q
                    count = lesser(p.tile_q, p.len_q - i0)
                    source = p.q + b * p.q_b + h * p.q_h + i0 * p.q_i
                    copy_rows(source, p.q_i, q, q_row, count, p.dim, p.kind, one)
                    _logits(
                        p, b, lst, h, i0, count, j0, width_k, kind,
                        bitmap, q, q_row, packed, s, s_row, one,
                    )  # fmt: skip
                    fill_zero(sums, vectors, one)
                    line = (b * p.heads_q + h) * p.len_q + i0
                    _add_columns(x, line, s, s_row, count, vectors, sums, one)
                    for j in range(width_k):
                        total = load_scalar(target + j * 8, wide)
                        store_scalar(target + j * 8, total + cast(load_scalar(sums + j * size, one), wide))


@part()
def _sweep(address, extra, by_key, first, stop, scratch, wide, one):
    p = params_at(address)
    x = _extra_at(extra)
    for unit in range(first, stop):
        if by_key:
            _key_unit(p, x, unit, scratch, wide, one)
        else:
            _query_unit(p, x, unit, scratch, one)


@jit
def sweep_units(address, extra, by_key, first, stop, scratch, wide, one):
    """Units first .. stop of one sweep; one kernel for both, so that their parts are compiled once."""
    _sweep(address, extra, by_key, first, stop, scratch, wide, one)


def tile_shape(problem: Problem) -> tuple[int, int]:
    """(tile_q, tile_k) of the plan it wants."""
    return TILE_Q, TILE_K


def _place(fields: dict[str, Any], name: str, array: Array, axes: str) -> None:
    """Enter the address of ``array`` and its strides along ``axes``, 0 where a length of 1 broadcasts."""
    fields[name] = _jit.address(array)
    for axis, stride, size in zip(axes, array.strides, array.shape, strict=False):
        fields[f"{name}_{axis}"] = stride if size > 1 else 0


def statistics(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    bias: Array | None,
    sinks: Array | None,
    top_k: int,
) -> Statistics:
    """See ``kernels.stats.contract.Implementation``."""
    acc = accumulation_dtype(problem.dtype)
    rows = (problem.batch, problem.heads_q, problem.len_q)
    m = np.full(rows, -np.inf, acc)
    if sinks is not None:
        m[...] = sinks[:, None]
    l, tilt = np.zeros(rows, acc), np.zeros(rows, acc)
    best, own = np.full(rows, -np.inf, acc), np.full(rows, -np.inf, acc)
    argmax = np.full(rows, -1, np.int64)
    top_values, top_keys = np.full((*rows, top_k), -np.inf, acc), np.full((*rows, top_k), -1, np.int64)
    received = np.zeros((problem.batch, problem.heads_q, problem.len_k))

    fields = describe(problem, plan)
    _place(fields, "q", q, "bhi")
    _place(fields, "k", k, "bhj")
    if bias is not None:
        bias, fields["bias_kind"] = _bias_in(bias, problem.dtype)
        _place(fields, "bias", bias, "bhij")
    record = np.zeros(1, _DTYPE)
    for name, value in fields.items():
        record[name] = value
    pairs = problem.batch * problem.heads_kv
    chunks = [min(_CHUNKS, max(1, lines.shape[1] - 1)) for lines in (plan.row_ptr, plan.col_ptr)]
    arrays = (m, l, tilt, best, own, argmax, top_values, top_keys)
    addresses = [_jit.address(array) for array in arrays]
    extra = ctypes.create_string_buffer(
        struct.pack(f"{len(_NAMES)}q", *addresses, top_k, _jit.address(received), *chunks)
    )
    where, more = _jit.address(record), ctypes.addressof(extra)
    one, wide = acc.type(1), np.float64(1)
    size, width = acc.itemsize, 4 * _host.WIDTH
    q_row = -(-problem.head_dim * size // width) * width
    block = TILE_Q * (TILE_K * size + q_row + 2 * width) + TILE_K * problem.head_dim * size + TILE_K * size
    every = TILE_K * problem.head_dim * size * (plan.col_ptr.shape[1] - 1)
    work = int(np.sum(plan.row_stop - plan.row_first, dtype=np.int64)) * TILE_Q * TILE_K * problem.head_dim
    serial = work * problem.batch * problem.heads_q // len(plan.row_ptr) < _SERIAL

    def run(by_key: bool, units: int, scratch: int) -> None:
        def item(unit: int) -> None:
            sweep_units(where, more, by_key, unit, unit + 1, _threads.scratch(scratch), wide, one)

        if serial:
            sweep_units(where, more, by_key, 0, units, _threads.scratch(scratch), wide, one)
        else:
            _threads.run(item, list(range(units)))

    run(False, chunks[0] * pairs, block + every)
    seen = best > -np.inf
    with np.errstate(all="ignore"):  # 0 / 0 in rows that see nothing, replaced at once
        m[m == -np.inf] = 0
        total = l.copy() if sinks is None else l + np.exp(sinks[:, None] - m)
        inverse = np.where(total > 0, 1 / total, 0).astype(acc)
        entropy = np.where(seen, (l * np.log(total) - tilt) * inverse, 0)

        def weight(logit: Array, rows_m: Array, rows_inverse: Array) -> Array:
            return np.where(logit > -np.inf, np.exp(logit - rows_m) * rows_inverse, 0).astype(acc)

        statistics = Statistics(
            m=m,
            l=total,
            entropy=entropy.astype(acc, copy=False),
            max_weight=weight(best, m, inverse),
            argmax_key=argmax,
            self_weight=weight(own, m, inverse),
            top_weights=weight(top_values, m[..., None], inverse[..., None]),
            top_keys=top_keys,
            received=received,
        )
    l[...] = inverse  # what the second sweep multiplies by
    run(True, chunks[1] * pairs, block)
    _threads.trim_scratch()
    return statistics._replace(received=received.astype(acc, copy=False))


__all__ = ["statistics", "supports", "tile_shape"]

"""The protocol's functions: check, allocate, cut into work items, call the kernels.

Units (what a kernel counts) are fixed by the problem; items (ranges of units) may follow the number of
threads, because a unit's result does not depend on which thread computes it or in which company.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from npattn import _threads
from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels import _jit, _team
from npattn.kernels._simd import _host
from npattn.kernels.contract import AttentionGrads, Forward, Problem, dbias_of_rows
from npattn.kernels.tile.numba_cpu import _backward, _forward, _merge
from npattn.kernels.tile.numba_cpu._params import at, broadcast_at, describe, record, storage_kind, template
from npattn.plans.tiles import TilePlan

TILE_Q: Final = 48  # a multiple of the register tile's six rows
TILE_K: Final = 64
_HALF: Final = np.dtype(np.float16)
_SERIAL: Final = 200_000  # multiply-adds below which waking a helper costs more than it brings
_ITEM: Final = 400_000  # multiply-adds an item should hold at least


def supports(problem: Problem) -> str | None:
    """None when this module computes ``problem``, else why not."""
    if _jit.INTERPRETED:
        return "NUMBA_DISABLE_JIT is set, and explicit vectors exist only in compiled code"
    if problem.dtype == _HALF and not _host.HAS_HALF:
        return "this processor has no float16 conversion (F16C)"
    return None


def tile_shape(problem: Problem) -> tuple[int, int]:
    """(tile_q, tile_k) of the plan it wants."""
    return TILE_Q, TILE_K


def _round_up(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def _bias_in(bias: Array, dtype: np.dtype[Any]) -> tuple[Array, int]:
    """The bias in a form the kernels read, and its storage kind."""
    accumulation = accumulation_dtype(dtype)
    if bias.dtype == accumulation:
        return bias, 0
    kind = storage_kind(bias.dtype)
    if kind and accumulation == np.float32 and (kind == 2 or _host.HAS_HALF):
        return bias, kind
    return bias.astype(accumulation), 0


def _visible_tiles(plan: TilePlan) -> int:
    """Tiles that all lists together visit."""
    return int(np.sum(plan.row_stop, dtype=np.int64) - np.sum(plan.row_first, dtype=np.int64))


class _Launch(NamedTuple):
    """What is the same for every call of one problem and plan in one direction."""

    plan: TilePlan  # kept alive: the record holds addresses of its arrays, and the cache its id
    kept: tuple[Any, ...]  # further arrays the record points to
    accumulation: np.dtype[Any]
    one: Any
    prefilled: bytes
    scratch_bytes: int
    serial: bool  # all on the calling thread
    units: int
    items: int  # ranges of units the threads share
    work: int
    splits: int
    kernel: Any
    direct: Any = None  # its C function for ``one``: half a microsecond saved


_launches: dict[tuple[Any, ...], _Launch] = {}
_MOST_LAUNCHES: Final = 64


def _launch(make: Callable[[Problem, TilePlan, int], _Launch], problem: Problem, plan: TilePlan) -> _Launch:
    """``make(problem, plan, threads)``, remembered."""
    threads = _threads.get_num_threads()
    key = (make, problem, id(plan), threads)
    launch = _launches.get(key)
    if launch is None:
        launch = make(problem, plan, threads)
        launch = launch._replace(direct=launch.kernel.version((0, 0, 0, 0, launch.one)))
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        if problem.dropout_p == 0.0 and plan.bits.size < 1 << 18:  # seeds rarely come twice; big plans may go
            _launches[key] = launch
    return launch


def _work(problem: Problem, plan: TilePlan, per_pair: int) -> int:
    """Multiply-adds of all visible tiles, ``per_pair`` for each pair in them."""
    tiles = _visible_tiles(plan) * problem.batch * problem.heads_q // plan.row_ptr.shape[0]
    work: int = tiles * min(TILE_Q, problem.len_q) * min(TILE_K, problem.len_k) * per_pair
    return work


def _make_forward(problem: Problem, plan: TilePlan, threads: int) -> _Launch:
    accumulation = accumulation_dtype(problem.dtype)
    fields = describe(problem, plan)
    group = problem.heads_q // problem.heads_kv
    together = min(group, max(1, TILE_Q // problem.len_q)) if plan.list_of.shape[1] == 1 else 1
    fields["heads_together"] = together
    pairs = problem.batch * problem.heads_kv
    rows = fields["num_rows"]
    work = _work(problem, plan, problem.head_dim + problem.head_dim_v)
    serial = threads == 1 or work < _SERIAL
    chunks = 1 if serial else max(1, min(-(-8 * threads // pairs), rows // 4, work // _ITEM // pairs))
    # few queries, many keys: splits of at least 1,024 keys, some thirty units in all; fixed by the problem
    lazy = rows == 1 and together >= group
    splits = max(1, min(fields["num_cols"] // 16, -(-32 // pairs))) if lazy else 1
    fields["chunks"], fields["splits"], fields["lazy"] = chunks, splits, lazy
    items = 1 if serial else min(8 * threads, max(1, work // _ITEM))

    size, width = accumulation.itemsize, 4 * _host.WIDTH
    q_row, v_row = _round_up(problem.head_dim * size, width), _round_up(problem.head_dim_v * size, width)
    scratch_bytes = TILE_Q * (2 * TILE_K * size + width + q_row + v_row) + 4 * TILE_Q * size
    kernel = _forward.forward_units
    if fields["kind"] == 2 and _host.HAS_BF16_DOT:
        kernel = _forward.forward_units_of_pairs
        # weights are rounded: 1 stays 1 if what dropout multiplies them by waits for the output
        fields["keep_factor"], fields["out_factor"] = 1.0, fields["keep_factor"]
        fields["scale_before"], fields["scale_after"] = 1.0, problem.scale  # keys keep their bits
        scratch_bytes += TILE_K * (v_row + TILE_Q * 2) + TILE_K // 2 * v_row
    tiles = 1 if lazy else fields["num_cols"]
    scratch_bytes += tiles * TILE_K * problem.head_dim * size
    if fields["kind"] or v_row != problem.head_dim_v * size:
        scratch_bytes += tiles * TILE_K * v_row
    units = splits * chunks * pairs
    return _Launch(
        plan, (), accumulation, accumulation.type(1), template(fields), scratch_bytes, serial, units,
        min(units, items), work, splits, kernel,
    )  # fmt: skip


_NO_BIAS: Final[tuple[int, ...]] = (0, 0, 0, 0, 0)


def forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
) -> Forward:
    """See ``kernels.contract.Implementation``."""
    rows = (problem.batch, problem.heads_q, problem.len_q)
    accumulation = accumulation_dtype(problem.dtype)
    m = np.empty(rows, accumulation)
    l = np.empty(rows, accumulation)
    launch = _launch(_make_forward, problem, plan) if m.size else None
    out = _empty_out(problem, side_by_side=_is_side_by_side(q))
    rest = np.empty(out.shape, out.dtype) if problem.keeps_rest else None
    result = Forward(out, m, l, rest)
    if launch is None:
        return result
    address = _jit.address
    bias_at, bias_kind = _NO_BIAS, 0
    if bias is not None:
        bias, bias_kind = _bias_in(bias, problem.dtype)
        bias_at = broadcast_at(bias)
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, accumulation)
    if launch.splits > 1:
        return _forward_in_splits(problem, launch, q, k, v, bias_kind, bias_at, sinks, result)
    rest_at = 0 if rest is None else address(rest)
    values = (
        bias_kind, *at(q), *at(k), *at(v), *at(out), 0, rest_at, address(m), address(l), *bias_at,
        0 if sinks is None else address(sinks),
    )  # fmt: skip
    call = record(launch.prefilled, values)
    where = ctypes.addressof(call)
    if launch.serial and launch.work < _SERIAL:  # nothing between us and the kernel
        launch.direct(where, 0, launch.units, _threads.scratch(launch.scratch_bytes), 1.0)
    else:
        _run(launch.kernel, where, launch.units, launch.items, launch)
    return result


def _is_side_by_side(q: Array) -> bool:
    """Whether the heads of a row are neighbours in memory, as a projection leaves them."""
    return q.shape[1] > 1 and q.strides[1] < q.strides[2]


def _empty_out(problem: Problem, side_by_side: bool) -> Array:
    """The array of the output. Side by side, the projection behind attention needs no copy of it."""
    batch, heads, length, dim = problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v
    if side_by_side:
        return np.empty((batch, length, heads, dim), problem.dtype).swapaxes(1, 2)
    return np.empty((batch, heads, length, dim), problem.dtype)


def _forward_in_splits(
    problem: Problem,
    launch: _Launch,
    q: Array,
    k: Array,
    v: Array,
    bias_kind: int,
    bias_at: tuple[int, ...],
    sinks: Array | None,
    result: Forward,
) -> Forward:
    """Fill ``result``: each split of the keys into arrays of its own, then the splits joined in order."""
    address = _jit.address
    width = _round_up(problem.head_dim_v, 4 * _host.WIDTH // launch.accumulation.itemsize)
    part = np.empty((launch.splits, *result.m.shape, width), launch.accumulation)
    part[..., problem.head_dim_v :] = 0  # read by whole vectors
    m = np.empty((launch.splits, *result.m.shape), launch.accumulation)
    l = np.empty_like(m)
    values = (
        bias_kind, *at(q), *at(k), *at(v), address(part), *part.strides[1:4], part.strides[0], 0, address(m),
        address(l), *bias_at, 0 if sinks is None else address(sinks),
    )  # fmt: skip
    call = record(launch.prefilled, values)
    _run(launch.kernel, ctypes.addressof(call), launch.units, launch.items, launch)
    joined = _merge.record(part, m, l, result)
    heads = problem.batch * problem.heads_q
    _run(_merge.merge_units, ctypes.addressof(joined), heads, launch.items, launch)
    return result


def _run(kernel: Any, where: int, units: int, items: int, launch: _Launch) -> None:
    _team.run(kernel, where, units, max(1, min(units, items)), launch.scratch_bytes, launch.one)


def _make_backward(problem: Problem, plan: TilePlan, threads: int) -> _Launch:
    accumulation = accumulation_dtype(problem.dtype)
    dim, dim_v = problem.head_dim, problem.head_dim_v
    fields = describe(problem, plan)
    pairs = problem.batch * problem.heads_kv
    starts, reach = _key_chunks(plan, pairs)
    chunks = len(starts) - 1
    size, width = accumulation.itemsize, 4 * _host.WIDTH
    q_row, v_row = _round_up(dim * size, width), _round_up(dim_v * size, width)
    fields["chunks"], fields["chunk_start"], fields["reach"] = (
        chunks,
        _jit.address(starts),
        _jit.address(reach),
    )
    fields["dq_row"] = q_row
    scratch_bytes = TILE_Q * (4 * TILE_K * size + q_row + v_row)
    scratch_bytes += TILE_K * (dim * size + dim_v * size + 2 * q_row + v_row)
    kernel = _backward.key_units
    if fields["kind"] == 2 and _host.HAS_BF16_DOT:
        kernel = _backward.key_units_of_pairs
        fields["scale_before"], fields["scale_after"] = 1.0, problem.scale  # keys keep their bits
        scratch_bytes += TILE_Q // 2 * (q_row + v_row) + 3 * TILE_Q * TILE_K * size // 2
        scratch_bytes += (TILE_Q + TILE_Q // 2) * (q_row + v_row) + (TILE_K + TILE_K // 2) * q_row
    work = _work(problem, plan, 3 * dim + 2 * dim_v)
    serial = threads == 1 or work < _SERIAL
    items = 1 if serial else min(8 * threads, max(1, work // _ITEM))
    return _Launch(
        plan, (starts, reach), accumulation, accumulation.type(1), template(fields), scratch_bytes, serial,
        chunks * pairs, min(chunks * pairs, items), work, 1, kernel,
    )  # fmt: skip


def backward(
    problem: Problem,
    plan: TilePlan,
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    m: Array,
    l: Array,
    bias: Array | None,
    sinks: Array | None,
    rest: Array | None = None,
) -> AttentionGrads:
    """See ``kernels.contract.Implementation``."""
    batch, heads_q, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
    len_q, len_k, dim, dim_v = problem.len_q, problem.len_k, problem.head_dim, problem.head_dim_v
    accumulation = accumulation_dtype(problem.dtype)
    address = _jit.address

    dk = np.empty((batch, heads_kv, len_k, dim), problem.dtype)
    dv = np.empty((batch, heads_kv, len_k, dim_v), problem.dtype)
    dbias = None if bias is None else np.zeros(bias.shape, accumulation)
    dsinks = None if sinks is None else np.zeros((batch, heads_q))
    if m.size == 0:
        dk[...] = 0
        dv[...] = 0
        dq = np.zeros((batch, heads_q, len_q, dim), problem.dtype)
        return AttentionGrads(
            dq, dk, dv, dbias, None if dsinks is None else dsinks.sum(0).astype(accumulation)
        )

    launch = _launch(_make_backward, problem, plan)
    chunks = launch.units // (batch * heads_kv)
    layers = int(launch.kept[1][:, 2].max()) + 1
    m = np.ascontiguousarray(m, accumulation)
    l = np.ascontiguousarray(l, accumulation)
    e, rl = np.empty_like(m), np.empty_like(m)
    q_row = _round_up(dim, 4 * _host.WIDTH // accumulation.itemsize)
    dq = np.zeros((layers, batch, heads_q, len_q, q_row), accumulation)
    in_place = problem.dtype == accumulation and q_row == dim and abs(problem.scale) <= 1.0
    dq_out = dq if in_place else np.empty((batch, heads_q, len_q, dim), problem.dtype)

    bias_at, dbias_at, bias_kind, own_bias_pass = _NO_BIAS, _NO_BIAS, 0, False
    if bias is not None:
        bias, bias_kind = _bias_in(bias, problem.dtype)
        bias_at = broadcast_at(bias)
    keys_share = bias is not None and bias.shape[3] == 1
    if bias is not None and dbias is not None and not keys_share:
        dbias_at = broadcast_at(dbias)
        own_bias_pass = (
            (bias.shape[0] == 1 and batch > 1) or (bias.shape[1] == 1 and heads_kv > 1) or chunks > 1
        )
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, accumulation)
    if dlse is not None:
        dlse = np.asarray(dlse, accumulation)

    def values(dbias_at: tuple[int, ...]) -> tuple[int, ...]:
        return (
            bias_kind, *at(q), *at(k), *at(v), *at(out), 0, 0 if rest is None else address(rest), address(m),
            address(l), *bias_at,
            0 if sinks is None else address(sinks), *at(dout), *((0, 0, 0, 0) if dlse is None else at(dlse)),
            address(dq), address(dk), address(dv), address(dq_out), address(e), address(rl),
            0 if dsinks is None else address(dsinks), *dbias_at,
            *((0, 0) if bias is None else bias.shape[1::-1]),
        )  # fmt: skip

    call = record(launch.prefilled, values(dbias_at))
    keys_call = record(launch.prefilled, values(_NO_BIAS)) if own_bias_pass else call
    where = ctypes.addressof(call)

    def phase(kernel: Any, units: int, items: int) -> None:
        _run(kernel, where, units, 1 if launch.serial else min(items, launch.items), launch)

    phase(_backward.row_units, batch * heads_q, batch * heads_q * len_q * dim_v // 50_000)
    _run(launch.kernel, ctypes.addressof(keys_call), launch.units, launch.items, launch)
    if layers > 1 or not in_place:
        phase(_backward.reduce_units, batch * heads_q, dq.size // 50_000)
    if in_place:
        dq.resize((1, *dq.shape[1:]), refcheck=False)  # gives the other layers' memory back
        dq_out = dq.reshape(dq.shape[1:])
    if own_bias_pass and dbias is not None:
        rows = launch.plan.row_ptr.shape[1] - 1 if dbias.shape[2] > 1 else 1
        phase(_backward.bias_units, dbias.shape[0] * dbias.shape[1] * rows, launch.work // _ITEM)
    if keys_share and dbias is not None:
        dbias[...] = dbias_of_rows(dbias.shape, m, l, e, dlse, sinks)
    total = None if dsinks is None else dsinks.sum(0).astype(accumulation)
    return AttentionGrads(dq_out, dk, dv, dbias, total)


def _key_chunks(plan: TilePlan, pairs: int) -> tuple[Array, Array]:
    """(first key tile of each chunk and the end, (first, stop) query tile each chunk reaches and its layer).

    With few (batch element, key head) pairs the key tiles are cut, at equal numbers of visible tiles, into as
    many chunks as give some thirty units, eight at most. Chunks that reach different queries share a layer of
    dQ: two layers are enough for a window, under a causal mask each has its own. Fixed by the problem.
    """
    cols = plan.col_ptr.shape[1] - 1
    chunks = max(1, min(8, -(-32 // pairs), cols // 8))
    if chunks == 1:
        return np.array([0, cols], np.int64), np.zeros((1, 3), np.int64)
    lengths = np.concatenate([[0], np.cumsum(plan.col_stop - plan.col_first, dtype=np.int64)])
    cost = np.zeros(cols, np.int64)
    for ptr in plan.col_ptr:
        cost += lengths[ptr[1:]] - lengths[ptr[:-1]]
    total = np.cumsum(cost)
    inner = np.searchsorted(total, total[-1] * np.arange(1, chunks) / chunks)
    starts = np.concatenate([[0], inner, [cols]]).astype(np.int64)
    reach = np.zeros((chunks, 3), np.int64)
    ends: list[int] = []  # of each layer: the query tiles up to here are taken
    for c in range(chunks):
        spans = [slice(ptr[starts[c]], ptr[starts[c + 1]]) for ptr in plan.col_ptr]
        firsts = [int(plan.col_first[s].min()) for s in spans if s.stop > s.start]
        stops = [int(plan.col_stop[s].max()) for s in spans if s.stop > s.start]
        if firsts:
            layer = next((n for n, end in enumerate(ends) if end <= min(firsts)), len(ends))
            ends[layer:] = [max(stops), *ends[layer + 1 :]]
            reach[c] = min(firsts), max(stops), layer
    return starts, reach

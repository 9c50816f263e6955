"""The protocol's functions: check, allocate, cut into work items, call the kernels.

Units (what a kernel counts) are fixed by the problem; items (ranges of units) may follow the number of
threads, because a unit's result does not depend on which thread computes it or in which company.
"""

import ctypes
from typing import Any, Final

import numpy as np

from npattn import _threads
from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels import _jit
from npattn.kernels._simd import _host
from npattn.kernels.contract import AttentionGrads, Forward, Problem
from npattn.kernels.tile.numba_cpu import _backward, _forward
from npattn.kernels.tile.numba_cpu._params import describe, pack, place, storage_kind
from npattn.plans.tiles import TilePlan

TILE_Q: Final = 48  # a multiple of the register tile's six rows
TILE_K: Final = 64
_SERIAL: Final = 200_000  # multiply-adds below which waking a helper costs more than it brings
_ITEM: Final = 400_000  # multiply-adds an item should hold at least


def supports(problem: Problem) -> str | None:
    """None when this module computes ``problem``, else why not."""
    if _jit.INTERPRETED:
        return "NUMBA_DISABLE_JIT is set, and explicit vectors exist only in compiled code"
    if problem.dtype.name == "float16" and not _host.HAS_HALF:
        return "this processor has no float16 conversion (F16C)"
    return None


def tile_shape(problem: Problem) -> tuple[int, int]:
    """(tile_q, tile_k) of the plan it wants."""
    return TILE_Q, TILE_K


def _one(dtype: np.dtype[Any]) -> Any:
    return accumulation_dtype(dtype).type(1)


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


def _ranges(units: int, items: int) -> list[tuple[int, int]]:
    """``units`` cut into at most ``items`` nearly equal ranges."""
    items = max(1, min(units, items))
    return [(units * n // items, units * (n + 1) // items) for n in range(items)]


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
    batch, heads_q, len_q = problem.batch, problem.heads_q, problem.len_q
    one = _one(problem.dtype)
    accumulation = accumulation_dtype(problem.dtype)
    out = np.empty((batch, heads_q, len_q, problem.head_dim_v), problem.dtype)
    m = np.empty((batch, heads_q, len_q), accumulation)
    l = np.empty((batch, heads_q, len_q), accumulation)
    if m.size == 0:
        return Forward(out, m, l)
    fields = describe(problem, plan)
    place(fields, "q", q, "bhi")
    place(fields, "k", k, "bhj")
    place(fields, "v", v, "bhj")
    place(fields, "out", out, "bhi")
    fields["m"], fields["l"] = _jit.address(m), _jit.address(l)
    if bias is not None:
        bias, fields["bias_kind"] = _bias_in(bias, problem.dtype)
        place(fields, "bias", bias, "bhij")
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, accumulation)
        fields["sinks"] = _jit.address(sinks)
    group = problem.heads_q // problem.heads_kv
    together = min(group, max(1, TILE_Q // len_q)) if plan.list_of.shape[1] == 1 else 1
    fields["heads_together"] = together

    pairs = batch * problem.heads_kv
    rows = plan.row_ptr.shape[1] - 1
    work = _visible_tiles(plan) * min(TILE_Q, len_q) * min(TILE_K, problem.len_k)
    work = work * (problem.head_dim + problem.head_dim_v) * batch * heads_q // plan.row_ptr.shape[0]
    threads = _threads.get_num_threads() if work >= _SERIAL else 1
    chunks = 1
    if threads > 1:
        chunks = max(1, min(-(-8 * threads // pairs), rows // 4, work // _ITEM // pairs))
    fields["chunks"] = chunks
    units = chunks * pairs
    items = min(8 * threads, max(1, work // _ITEM)) if threads > 1 else 1

    size = accumulation.itemsize
    width = 4 * _host.WIDTH
    q_row, v_row = _round_up(problem.head_dim * size, width), _round_up(problem.head_dim_v * size, width)
    cols = plan.col_ptr.shape[1] - 1
    scratch_bytes = TILE_Q * (2 * TILE_K * size + width + q_row + v_row) + (TILE_Q + 16) * size
    scratch_bytes += cols * TILE_K * problem.head_dim * size
    if fields["kind"] or v_row != problem.head_dim_v * size:
        scratch_bytes += cols * TILE_K * v_row
    record = pack(fields)
    where = ctypes.addressof(record)

    def work_item(item: tuple[int, int]) -> None:
        _forward.forward_units(where, item[0], item[1], _threads.scratch(scratch_bytes), one)

    _threads.run(work_item, _ranges(units, items))
    return Forward(out, m, l)


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
) -> AttentionGrads:
    """See ``kernels.contract.Implementation``."""
    batch, heads_q, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
    len_q, len_k, dim, dim_v = problem.len_q, problem.len_k, problem.head_dim, problem.head_dim_v
    one = _one(problem.dtype)
    accumulation = accumulation_dtype(problem.dtype)
    size, width = accumulation.itemsize, 4 * _host.WIDTH
    q_row, v_row = _round_up(dim * size, width), _round_up(dim_v * size, width)

    dk = np.empty((batch, heads_kv, len_k, dim), problem.dtype)
    dv = np.empty((batch, heads_kv, len_k, dim_v), problem.dtype)
    dbias = None if bias is None else np.zeros(bias.shape, accumulation)
    dsinks = None if sinks is None else np.zeros((batch, heads_q))
    if batch == 0 or heads_q == 0 or len_q == 0 or len_k == 0:
        dk[...] = 0
        dv[...] = 0
        if len_k or sinks is None or dlse is None or not l.size:
            dq = np.zeros((batch, heads_q, len_q, dim), problem.dtype)
            total = None if sinks is None else np.zeros(heads_q, accumulation)
            return AttentionGrads(dq, dk, dv, dbias, total)

    fields = describe(problem, plan)
    for name, array, axes in (
        ("q", q, "bhi"),
        ("k", k, "bhj"),
        ("v", v, "bhj"),
        ("out", out, "bhi"),
        ("dout", dout, "bhi"),
    ):
        place(fields, name, array, axes)
    m = np.ascontiguousarray(m, accumulation)
    l = np.ascontiguousarray(l, accumulation)
    e, rl = np.empty_like(m), np.empty_like(m)
    for name, array in (("m", m), ("l", l), ("e", e), ("rl", rl), ("dk", dk), ("dv", dv)):
        fields[name] = _jit.address(array)
    if dlse is not None:
        dlse = np.asarray(dlse, accumulation)
        place(fields, "dlse", dlse, "bhi")
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, accumulation)
        fields["sinks"], fields["dsinks"] = _jit.address(sinks), _jit.address(dsinks)

    pairs = batch * heads_kv
    starts, reach = _key_chunks(plan, pairs)
    chunks = len(starts) - 1
    fields["chunks"], fields["chunk_start"], fields["reach"] = chunks, _jit.address(starts), _jit.address(reach)
    straight = fields["kind"] == 0 and q_row == dim * size and fields["scale_after"] == 1.0
    if straight and chunks == 1:
        dq_out = np.zeros((batch, heads_q, len_q, dim), problem.dtype)
        dq = dq_out
    else:
        dq_out = np.empty((batch, heads_q, len_q, dim), problem.dtype)
        dq = np.zeros((chunks, batch, heads_q, len_q, q_row // size), accumulation)
    fields["dq"], fields["dq_row"], fields["dq_out"] = _jit.address(dq), q_row, _jit.address(dq_out)

    own_bias_pass = False
    if bias is not None:
        bias, fields["bias_kind"] = _bias_in(bias, problem.dtype)
        place(fields, "bias", bias, "bhij")
        own_bias_pass = (bias.shape[0] == 1 and batch > 1) or (bias.shape[1] == 1 and heads_kv > 1)
        own_bias_pass = own_bias_pass or chunks > 1
        place(fields, "dbias", dbias, "bhij")
        fields["dbias_batches"], fields["dbias_heads"] = bias.shape[:2]

    tiles = _visible_tiles(plan) * min(TILE_Q, len_q) * min(TILE_K, len_k)
    work = tiles * (3 * dim + 2 * dim_v) * batch * heads_q // plan.row_ptr.shape[0]
    threads = _threads.get_num_threads() if work >= _SERIAL else 1
    most = 8 * threads if threads > 1 else 1
    scratch_bytes = TILE_Q * (4 * TILE_K * size + q_row + v_row)
    scratch_bytes += TILE_K * (dim * size + dim_v * size + 2 * q_row + v_row)
    keys_record = pack({**fields, "dbias": 0} if own_bias_pass else fields)
    record = pack(fields)

    def phase(kernel: Any, units: int, items: int, where: int) -> None:
        def work_item(item: tuple[int, int]) -> None:
            kernel(where, item[0], item[1], _threads.scratch(scratch_bytes), one)

        _threads.run(work_item, _ranges(units, min(items, most)))

    where = ctypes.addressof(record)
    phase(_backward.row_units, batch * heads_q, batch * heads_q * len_q * dim_v // 50_000, where)
    phase(_backward.key_units, chunks * pairs, max(1, work // _ITEM), ctypes.addressof(keys_record))
    if dq_out is not dq:
        phase(_backward.reduce_units, batch * heads_q, dq.size // 50_000, where)
    if own_bias_pass:
        units = dbias.shape[0] * dbias.shape[1] * (fields["num_rows"] if fields["dbias_i"] else 1)
        phase(_backward.bias_units, units, max(1, work // _ITEM), where)
    total = None if dsinks is None else dsinks.sum(0).astype(accumulation)
    return AttentionGrads(dq_out, dk, dv, dbias, total)


def _key_chunks(plan: TilePlan, pairs: int) -> tuple[Array, Array]:
    """(first key tile of each chunk and the end, (first, stop) query tile each chunk reaches).

    With few (batch element, key head) pairs the key tiles are cut, at equal numbers of visible tiles, into as
    many chunks as give some thirty units, eight at most: each has a dQ of its own. Fixed by the problem.
    """
    cols = plan.col_ptr.shape[1] - 1
    chunks = max(1, min(8, -(-32 // pairs), cols // 8))
    if chunks == 1:
        return np.array([0, cols], np.int64), np.zeros((1, 2), np.int64)
    lengths = np.concatenate([[0], np.cumsum(plan.col_stop - plan.col_first, dtype=np.int64)])
    cost = np.zeros(cols, np.int64)
    for ptr in plan.col_ptr:
        cost += lengths[ptr[1:]] - lengths[ptr[:-1]]
    total = np.cumsum(cost)
    inner = np.searchsorted(total, total[-1] * np.arange(1, chunks) / chunks)
    starts = np.concatenate([[0], inner, [cols]]).astype(np.int64)
    reach = np.zeros((chunks, 2), np.int64)
    for c in range(chunks):
        spans = [slice(ptr[starts[c]], ptr[starts[c + 1]]) for ptr in plan.col_ptr]
        firsts = [int(plan.col_first[s].min()) for s in spans if s.stop > s.start]
        stops = [int(plan.col_stop[s].max()) for s in spans if s.stop > s.start]
        reach[c] = (min(firsts), max(stops)) if firsts else (0, 0)
    return starts, reach

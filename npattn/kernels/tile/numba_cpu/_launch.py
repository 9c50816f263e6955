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
    raise NotImplementedError

"""Calls with few queries: what goes to the decode kernel, and how it is cut into work items."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np

from npattn import _threads
from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels import _jit, _team
from npattn.kernels._simd import _host
from npattn.kernels.contract import Forward, Problem
from npattn.kernels.tile.numba_cpu import _decode, _launch, _merge
from npattn.kernels.tile.numba_cpu._decode_params import record, template
from npattn.kernels.tile.numba_cpu._params import at, broadcast_at, describe, storage_kind
from npattn.plans.tiles import TilePlan

#: One query has its keys from memory, where reading them as they lie is 1.25 (8 rows to a key head) to 1.8
#: times (2 rows) as fast. With more rows, or several queries, whose keys tend to be in a cache, keys that
#: need no widening are better transposed for all of them (1.2 times at 8 rows).
MOST_ROWS: Final = 8
#: Keys of 16 bits are widened for each of so many rows; for more, once and into scratch.
MOST_WIDENINGS: Final = 4
#: Bytes of keys and values below which waking a helper costs more than it brings.
_SERIAL: Final = 1 << 18
_ITEM: Final = 1 << 17  # bytes an item should read at least


def reads_pages(problem: Problem, plan: TilePlan, storage: Any) -> bool:
    """Whether ``paged_forward`` computes this call with pages of dtype ``storage``."""
    if storage != problem.dtype and storage == np.float16 and not _host.HAS_HALF:
        return False
    return takes(problem, plan, _launch.TILE_Q) and not plan.bits.size


def takes(problem: Problem, plan: TilePlan, most_rows: int) -> bool:
    """Whether all rows of a group fit into one block of at most ``most_rows``, under one mask."""
    rows = problem.len_q * problem.heads_q // problem.heads_kv
    return rows <= most_rows and plan.list_of.shape[1] == 1 and plan.row_ptr.shape[1] == 2


def forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
) -> Forward:
    """See ``kernels.contract.Implementation``; k and v may be stored in 16 bits where q is float32."""
    narrow = k.dtype != problem.dtype
    if narrow and k.dtype == np.float16 and not _host.HAS_HALF:
        k, v, narrow = k.astype(problem.dtype), v.astype(problem.dtype), False
    pairs = _host.HAS_BF16_DOT and storage_kind(problem.dtype) == 2
    is_decoding = narrow or (problem.len_q == 1 and not pairs and not problem.keeps_rest)
    if is_decoding and takes(problem, plan, _launch.TILE_Q if narrow else MOST_ROWS):
        return _decode_call(problem, plan, q, k, v, bias, sinks, None)
    if narrow:  # many queries: one widened copy for all of them
        k, v = k.astype(problem.dtype), v.astype(problem.dtype)
    return _launch.forward(problem, plan, q, k, v, bias, sinks)


def paged_forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> Forward:
    """``forward`` with keys and values in pages, for few queries a sequence (decoding).

    Parameters
    ----------
    problem : Problem
        len_q times heads_q / heads_kv at most 48; len_k is that of the longest sequence (the plan's mask ends
        the others).
    plan : TilePlan
        Of intervals, equal for all heads of a group.
    q : (batch, heads_q, len_q, head_dim) array
    key_pages, value_pages : (num_pages, heads_kv, page_size, head_dim or head_dim_v) array
        Any strides but in the last axis; stored as q, or in 16 bits where q is float32.
    page_table : (batch, pages_per_sequence) int32 array
        Page of keys 0 .. page_size - 1, page_size .. and so on; entries behind the last key are not read.
    bias, sinks : array, optional
        As in ``forward``.

    Returns
    -------
    Forward

    Raises
    ------
    ValueError
        When there are too many queries, or page_table is not int32 or too short.
    """
    page_size, pages = key_pages.shape[2], page_table.shape[1]
    if not reads_pages(problem, plan, key_pages.dtype):
        raise ValueError(
            f"paged attention takes up to {_launch.TILE_Q} queries times heads of a group and one mask of "
            f"intervals for all heads; got len_q={problem.len_q}, heads_q={problem.heads_q}, "
            f"heads_kv={problem.heads_kv}"
        )
    if page_table.dtype != np.int32 or pages * page_size < problem.len_k:
        raise ValueError(
            f"page_table must be int32 and cover len_k={problem.len_k} keys; got {page_table.dtype} and "
            f"{pages} pages of {page_size}"
        )
    return _decode_call(problem, plan, q, key_pages, value_pages, bias, sinks, page_table)


@lru_cache(maxsize=64)
def _maker(kind_kv: int, page_size: int, pages_touch: bool) -> Callable[[Problem, TilePlan, int], Any]:
    """What makes the launch of a problem whose keys are stored so."""

    def make(problem: Problem, plan: TilePlan, threads: int) -> Any:
        accumulation = accumulation_dtype(problem.dtype)
        fields = describe(problem, plan)
        size, width = accumulation.itemsize, 4 * _host.WIDTH
        q_row = _launch._round_up(problem.head_dim * size, width)
        v_row = _launch._round_up(problem.head_dim_v * size, width)
        fields["kind_kv"], fields["page_size"], fields["pages_touch"] = kind_kv, page_size, pages_touch
        fields["item"] = item = 2 if kind_kv else size
        rows = problem.len_q * problem.heads_q // problem.heads_kv
        padded = q_row != problem.head_dim * size
        fields["copies_keys"] = padded or (kind_kv != 0 and rows > MOST_WIDENINGS)
        fields["copies_values"] = kind_kv != 0 or v_row != problem.head_dim_v * size
        pairs = problem.batch * problem.heads_kv
        # splits of at least 512 keys, some thirty units in all; fixed by the problem
        splits = max(1, min(fields["num_cols"] // 8, -(-32 // pairs)))
        fields["splits"] = splits
        numbers = _launch._round_up(rows * size, width)
        scratch_bytes = rows * (2 * plan.tile_k * size + 3 * width + q_row + v_row) + 3 * numbers
        scratch_bytes += plan.tile_k * (q_row + v_row)
        tiles = _launch._visible_tiles(plan) * problem.batch * problem.heads_kv // plan.row_ptr.shape[0]
        read = tiles * min(plan.tile_k, problem.len_k) * (problem.head_dim + problem.head_dim_v) * item
        serial = threads == 1 or read < _SERIAL
        units = splits * pairs
        items = 1 if serial else min(8 * threads, max(1, read // _ITEM))
        return _launch._Launch(
            plan, (), accumulation, accumulation.type(1), template(fields), scratch_bytes, serial, units,
            min(units, items), read, splits, _decode.decode_units,
        )  # fmt: skip

    return make


_NO_BIAS: Final[tuple[int, ...]] = (0, 0, 0, 0, 0)


def _decode_call(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
    page_table: Array | None,
) -> Forward:
    rows = (problem.batch, problem.heads_q, problem.len_q)
    accumulation = accumulation_dtype(problem.dtype)
    result = Forward(
        np.empty((*rows, problem.head_dim_v), problem.dtype),
        np.empty(rows, accumulation),
        np.empty(rows, accumulation),
    )
    if result.m.size == 0:
        return result
    kind_kv = storage_kind(k.dtype)
    pages_at, page_size, touch = (0, 0), 0, False
    if page_table is not None:
        page_table = np.ascontiguousarray(page_table)
        page_size = k.shape[2]
        pages_at = (_jit.address(page_table), page_table.strides[0])
        touch = k.strides[0] == page_size * k.strides[2] and v.strides[0] == page_size * v.strides[2]
    launch = _launch._launch(_maker(kind_kv, page_size, touch), problem, plan)
    address = _jit.address
    bias_at, bias_kind = _NO_BIAS, 0
    if bias is not None:
        bias, bias_kind = _launch._bias_in(bias, problem.dtype)
        bias_at = broadcast_at(bias)
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, accumulation)
    out, m, l = result[:3]
    out_split = 0
    if launch.splits > 1:
        width = _launch._round_up(problem.head_dim_v, 4 * _host.WIDTH // accumulation.itemsize)
        out = np.empty((launch.splits, *rows, width), accumulation)
        out[..., problem.head_dim_v :] = 0  # read by whole vectors
        m = np.empty((launch.splits, *rows), accumulation)
        l = np.empty_like(m)
        out_split = out.strides[0]
    values = (
        bias_kind, *at(q), *at(k), *at(v), address(out), *out.strides[-4:-1], out_split, address(m),
        address(l), *bias_at, 0 if sinks is None else address(sinks), *pages_at,
    )  # fmt: skip
    call = record(launch.prefilled, values)
    where = ctypes.addressof(call)
    items, scratch_bytes = launch.items, launch.scratch_bytes
    if launch.serial:  # nothing between us and the kernel
        launch.direct(where, 0, launch.units, _threads.scratch(scratch_bytes), 1.0)
    else:
        _team.run(launch.kernel, where, launch.units, items, scratch_bytes, launch.one)
    if launch.splits > 1:
        joined, heads = _merge.record(out, m, l, result), rows[0] * rows[1]
        _team.run(
            _merge.merge_units, ctypes.addressof(joined), heads, min(heads, items), scratch_bytes, launch.one
        )
    return result


__all__ = ["forward", "paged_forward", "reads_pages", "takes"]

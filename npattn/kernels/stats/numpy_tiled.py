"""Statistics of the weights, one row of tiles at a time, in plain array code.

For each (batch element, query head) and each tile of queries the logits against all keys that some query of
the tile sees are formed as one strip, (tile_q, visible keys); everything is read off the strip, and its
weights are added to what the keys have received. Memory is the strip, O(len_k), besides the results. Works on
NumPy and CuPy.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.kernels.contract import Problem, split_scale
from npattn.kernels.stats.contract import Statistics
from npattn.plans.tiles import BITS, FULL, INTERVAL, TilePlan

_STRIP = 2**21  # weights in a strip


def supports(problem: Problem) -> str | None:
    """Everything."""
    return None


def tile_shape(problem: Problem) -> tuple[int, int]:
    """Strips of some two million weights."""
    rows = min(128, max(8, _STRIP // max(problem.len_k, 1)))
    return max(1, min(rows, problem.len_q)), min(256, max(32, -(-problem.len_k // 32) * 32))


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
    xp = array_module(q)
    acc = accumulation_dtype(problem.dtype)
    rows_shape = (problem.batch, problem.heads_q, problem.len_q)
    result = Statistics(
        m=xp.zeros(rows_shape, acc),
        l=xp.zeros(rows_shape, acc),
        entropy=xp.zeros(rows_shape, acc),
        max_weight=xp.zeros(rows_shape, acc),
        argmax_key=xp.full(rows_shape, -1, np.int64),
        self_weight=xp.zeros(rows_shape, acc),
        top_weights=xp.zeros((*rows_shape, top_k), acc),
        top_keys=xp.full((*rows_shape, top_k), -1, np.int64),
        received=xp.zeros((problem.batch, problem.heads_q, problem.len_k), np.float64),
    )
    group = problem.heads_q // problem.heads_kv if problem.heads_kv else 1
    before, after = split_scale(problem.scale)
    lists = plan.list_of
    with np.errstate(all="ignore"):  # masked NaN and inf may warn on their way to being dropped
        for b in range(problem.batch):
            for h in range(problem.heads_q):
                keys = k[b, h // group].astype(acc, copy=False)
                n = int(lists[b % lists.shape[0], h % lists.shape[1]])
                for r in range(plan.row_ptr.shape[1] - 1):
                    rows = slice(r * plan.tile_q, min((r + 1) * plan.tile_q, problem.len_q))
                    j, visible = _visible_keys(plan, n, r, rows)
                    if not isinstance(j, slice):
                        j = xp.asarray(j)
                    q_tile = q[b, h, rows].astype(acc, copy=False) * acc.type(before)
                    s = q_tile @ keys[j].T * acc.type(after)
                    if problem.softcap > 0:
                        s = problem.softcap * xp.tanh(s / problem.softcap)
                    if bias is not None:
                        part = bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0]
                        part = part[rows] if part.shape[0] > 1 else part
                        part = part[:, j] if part.shape[1] > 1 else part
                        s = xp.where(part == -np.inf, -np.inf, s + part.astype(acc))
                    if visible is not None:
                        s = xp.where(xp.asarray(visible), s, -np.inf)
                    sink = -np.inf if sinks is None else sinks[h]
                    _read_strip(result, (b, h), rows, j, s, sink, top_k)
    return result._replace(received=result.received.astype(acc, copy=False))


def _read_strip(
    result: Statistics, place: tuple[int, int], rows: slice, j: Any, s: Array, sink: Any, top_k: int
) -> None:
    """Write what one strip of logits says into ``result``; ``j`` are its keys, a slice or indices."""
    xp = array_module(s)
    at = (*place, rows)
    top = xp.full(s.shape[:1], sink, s.dtype)
    if s.shape[1]:
        top = xp.maximum(top, s.max(axis=1))
    pivot = xp.where(top == -np.inf, 0, top)[:, None]
    e = xp.exp(s - pivot)  # 0 where not visible
    l = e.sum(axis=1, keepdims=True) + xp.exp(sink - pivot)
    result.m[at] = pivot[:, 0]
    result.l[at] = l[:, 0]
    if s.shape[1] == 0:
        return
    keys = xp.arange(j.start, j.stop) if isinstance(j, slice) else j
    p = e / xp.where(l == 0, 1, l)
    # -log p = log l + pivot - s
    result.entropy[at] = xp.where(p > 0, p * (xp.log(l) + pivot - s), 0).sum(axis=1)
    first = s.argmax(axis=1)
    line = xp.arange(len(s))
    seen = s[line, first] > -np.inf
    result.argmax_key[at] = xp.where(seen, keys[first], -1)
    result.max_weight[at] = p[line, first]

    own = line + rows.start + result.received.shape[-1] - result.m.shape[-1]
    position = xp.minimum(xp.searchsorted(keys, own), len(keys) - 1)
    result.self_weight[at] = xp.where(keys[position] == own, p[line, position], 0)
    result.received[(*place, j)] += p.sum(axis=0, dtype=np.float64)

    count = min(top_k, s.shape[1])
    if count:
        chosen = _largest(xp, s, count)
        value = xp.take_along_axis(s, chosen, axis=1)
        result.top_keys[at][:, :count] = xp.where(value > -np.inf, keys[chosen], -1)
        result.top_weights[at][:, :count] = xp.take_along_axis(p, chosen, axis=1)


def _largest(xp: Any, s: Array, count: int) -> Array:
    """Columns of the ``count`` largest of each row, largest first; of equal ones the leftmost first."""
    width = s.shape[1]
    least = xp.partition(s, width - count, axis=1)[:, width - count, None]
    above, equal = s > least, s == least
    room = count - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (xp.cumsum(equal, axis=1) <= room))
    columns = xp.nonzero(chosen)[1].reshape(len(s), count)
    order = xp.argsort(-xp.take_along_axis(s, columns, axis=1), axis=1, kind="stable")
    largest: Array = xp.take_along_axis(columns, order, axis=1)
    return largest


def _visible_keys(plan: TilePlan, n: int, r: int, rows: slice) -> tuple[Any, Array | None]:
    """The keys of the tiles of row r, as a slice or as indices, and which of them each query sees."""
    spans = range(plan.row_ptr[n, r], plan.row_ptr[n, r + 1])
    ranges: list[tuple[int, int]] = []
    for span in spans:
        first, stop = (int(end[span]) * plan.tile_k for end in (plan.row_first, plan.row_stop))
        ranges.append((first, min(stop, plan.len_k)))
    if not ranges:
        return slice(0, 0), None
    joined = all(a[1] == b[0] for a, b in pairwise(ranges))
    keys: Any = slice(ranges[0][0], ranges[-1][1])
    if not joined:
        keys = np.concatenate([np.arange(first, stop) for first, stop in ranges])
    if all(plan.row_kind[span] == FULL for span in spans):
        return keys, None
    count = rows.stop - rows.start
    pieces = []
    for span, (first, stop) in zip(spans, ranges, strict=True):
        j = np.arange(first, stop)
        if plan.row_kind[span] == INTERVAL:
            piece = (plan.lo[n, rows, None] <= j) & (j < plan.hi[n, rows, None])
        elif plan.row_kind[span] == BITS:
            words = plan.bits[plan.row_bits[span], :count].view(np.uint32)
            j = j % plan.tile_k
            piece = (words[:, j // 32] >> (j % 32).astype(np.uint32) & 1).astype(bool)
        else:
            piece = np.ones((count, len(j)), bool)
        pieces.append(piece)
    return keys, np.concatenate(pieces, axis=1)


__all__ = ["statistics", "supports", "tile_shape"]

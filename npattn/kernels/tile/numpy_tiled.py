"""Attention over a TilePlan in plain array code: the algorithm to read before any other tile kernel.

Forward, for each tile of queries (Milakov and Gimelshein 2018, algorithm 3; Dao 2023, algorithm 1)::

    m, l, acc = -inf, 0, 0
    for each tile of keys in the plan, ascending:
        s     = logits of the tile, -inf where not visible
        m_new = max(m, max(s));  p = exp(s - m_new);  shrink = exp(m - m_new)
        l     = l * shrink + sum(p)
        acc   = acc * shrink + p @ v
    out = acc / l

Backward, for each tile of keys: the weights are recomputed from m and l, then the five products of the
contract. dk and dv of the tile are complete when it is done, dq is summed over tiles.

All batch elements and heads that share a list of tiles are computed at once: every array below has the axes
(batch, heads_kv, group, length, dim), where query head h is (h // group, h % group) and keys have group 1.
Extra memory is O(length * dim) plus one tile per head. Works on NumPy and CuPy; results are repeatable bit by
bit as far as BLAS is.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype, array_module, to_numpy
from npattn._dropout import keep_mask
from npattn._typing import Array
from npattn.kernels.contract import AttentionGrads, Forward, Problem, split_scale
from npattn.plans.tiles import BITS, FULL, INTERVAL, TilePlan


class _Block(NamedTuple):
    """Batch elements and query heads that share one list of the plan."""

    lists: int
    batch: slice
    heads_q: slice
    heads_kv: slice


class _Tile(NamedTuple):
    """One tile of the matrix."""

    rows: slice  # queries
    cols: slice  # keys
    visible: Array | None  # bool (rows, cols); None when every pair is visible


class _Logits(NamedTuple):
    """The logits of one tile, all (batch, heads_kv, group, rows, cols)."""

    s: Array  # -inf where not visible
    visible: Array | None  # bool; None when every pair is
    slope: Array | None  # d logits after softcap / d logits before; None without softcap


def supports(problem: Problem) -> str | None:
    """Everything."""
    return None


def tile_shape(problem: Problem) -> tuple[int, int] | None:
    """Tiles whose few temporaries stay in a processor's cache while the products are still large."""
    heads = problem.batch * problem.heads_q
    side = 512 if heads <= 4 else 256 if heads <= 64 else 128
    return min(128, problem.len_q), min(side, -(-problem.len_k // 32) * 32)


def forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
) -> Forward:
    """Online softmax over the tiles of each tile of queries."""
    xp = array_module(q)
    acc_dtype = accumulation_dtype(problem.dtype)
    rows_shape = (problem.batch, problem.heads_q, problem.len_q)
    out = xp.zeros((*rows_shape, problem.head_dim_v), problem.dtype)
    rest = xp.zeros_like(out) if problem.keeps_rest else None
    m = xp.zeros(rows_shape, acc_dtype)
    l = xp.zeros(rows_shape, acc_dtype)
    with np.errstate(all="ignore"):  # masked NaN and inf may warn on their way to being dropped
        for block in _blocks(plan, problem):
            call = _Call(problem, block, q, k, v, bias, sinks)
            for rows, tiles in _tiles_by_query(plan, block.lists):
                out_rows, m_rows, l_rows = _forward_rows(call, rows, tiles)
                place = (block.batch, block.heads_q, rows)
                out_rows = out_rows.reshape(out[place].shape)
                out[place] = out_rows.astype(problem.dtype)
                if rest is not None:
                    lost = out_rows - out[place].astype(acc_dtype)
                    rest[place] = xp.where(xp.isfinite(lost), lost, 0).astype(problem.dtype)
                m[place] = m_rows.reshape(m[place].shape)
                l[place] = l_rows.reshape(l[place].shape)
    return Forward(out, m, l, rest)


def _forward_rows(call: "_Call", rows: slice, tiles: Iterator[_Tile]) -> tuple[Array, Array, Array]:
    """Out, m and l of one tile of queries."""
    xp = call.xp
    q_tile = call.q_tile(rows)
    m = xp.full((*q_tile.shape[:-1], 1), -np.inf, q_tile.dtype)
    l = xp.zeros_like(m)
    acc = xp.zeros((*q_tile.shape[:-1], call.problem.head_dim_v), q_tile.dtype)
    for tile in tiles:
        s, visible, _ = call.logits(q_tile, tile)
        m_new = xp.maximum(m, s.max(-1, keepdims=True))
        pivot = _finite(m_new)
        p = xp.exp(s - pivot)  # 0 where not visible: s is -inf there
        shrink = xp.exp(m - pivot)
        l = l * shrink + p.sum(-1, keepdims=True)
        # Halved until the weights of a row sum to at most 1, so that acc is within the range of v
        pd = _times(p * call.halving, call.dropout_factor(tile))
        acc = acc * shrink + _product(pd, visible, call.tile(call.v, tile.cols))
        m = m_new
    m, l, acc = _add_sink(call, m, l, acc)
    normaliser = xp.where(l == 0, 1, l) * call.halving
    return acc / normaliser, m, l


def _add_sink(call: "_Call", m: Array, l: Array, acc: Array) -> tuple[Array, Array, Array]:
    """One more key, whose logit is the sink and whose value is 0; makes m finite in any case."""
    xp = call.xp
    if call.sinks is None:
        return _finite(m), l, acc
    m_new = xp.maximum(m, call.sinks)
    pivot = _finite(m_new)
    shrink = xp.exp(m - pivot)
    return pivot, l * shrink + xp.exp(call.sinks - pivot), acc * shrink


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
    """Recompute the weights tile by tile; walk the plan by key."""
    xp = array_module(q)
    acc_dtype = accumulation_dtype(problem.dtype)
    dq = xp.zeros(q.shape, acc_dtype)
    dk = xp.zeros(k.shape, acc_dtype)
    dv = xp.zeros(v.shape, acc_dtype)
    dbias = None if bias is None else xp.zeros(bias.shape, acc_dtype)
    with np.errstate(all="ignore"):
        # rowsum(p * dp); out is 0 in rows that see nothing, whatever their dout holds
        whole = out.astype(acc_dtype)
        if rest is not None:
            whole = whole + rest.astype(acc_dtype)
        delta = xp.where(whole != 0, dout.astype(acc_dtype) * whole, 0).sum(-1)
        if dlse is not None:
            delta = delta - dlse
        for block in _blocks(plan, problem):
            call = _Call(problem, block, q, k, v, bias, sinks)
            residuals = _Residuals(
                *(call.queries(x) for x in (dout, m[..., None], l[..., None], delta[..., None]))
            )
            sums = _Sums(
                call.queries(dq), call.keys(dk), call.keys(dv), None if dbias is None else call.pairs(dbias)
            )
            for tiles in _tiles_by_key(plan, block.lists):
                for tile in tiles:
                    _backward_tile(call, tile, residuals, sums)
        dsinks = None
        if sinks is not None:
            p_sink = xp.where(l > 0, xp.exp(sinks[:, None] - m) / l, 0)
            dsinks = xp.where(p_sink > 0, -p_sink * delta, 0).sum((0, 2))
        dq, dk, dv = (grad.astype(problem.dtype, copy=False) for grad in (dq, dk, dv))
    return AttentionGrads(dq, dk, dv, dbias, dsinks)


class _Residuals(NamedTuple):
    """What the forward pass and the cotangents leave for the backward pass, by query."""

    dout: Array  # (batch, heads_kv, group, len_q, head_dim_v), any float dtype
    m: Array  # (batch, heads_kv, group, len_q, 1)
    l: Array
    delta: Array  # rowsum(dout * out) - dlse


class _Sums(NamedTuple):
    """Views of the gradients, to be added to."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


def _backward_tile(call: "_Call", tile: _Tile, residuals: _Residuals, sums: _Sums) -> None:
    """Add one tile's part of every gradient to ``sums``."""
    xp = call.xp
    rows, cols = tile.rows, tile.cols
    dout, m, l, delta = (x[..., rows, :] for x in residuals)
    dout = dout.astype(m.dtype, copy=False)
    q_tile, k_tile, v_tile = call.q_tile(rows), call.tile(call.k, cols), call.tile(call.v, cols)
    s, visible, slope = call.logits(q_tile, tile)
    p = _where(visible, xp.exp(s - m) / l)
    factor = call.dropout_factor(tile)
    before, after = split_scale(call.problem.scale)

    # out = (p * factor) @ v
    sums.dv[..., cols, :] += _sum_group(_product(_t(_times(p, factor)), _t(visible), dout))
    dp = _times(dout @ _t(v_tile), factor)

    # p = exp(s - lse)
    ds = _where(visible, p * (dp - delta))

    # s = softcap * tanh(scale * (q @ k.T) / softcap) + bias
    if sums.dbias is not None:
        place = call.pairs_place(sums.dbias, tile)
        sums.dbias[place] += _sum_to_shape(ds, sums.dbias[place].shape)
    if slope is not None:
        ds = _where(visible, ds * slope)
    sums.dq[..., rows, :] += _times(_product(_times(ds, before), visible, k_tile), after)
    sums.dk[..., cols, :] += _times(_sum_group(_product(_t(ds), _t(visible), q_tile)), after)


class _Call:
    """The arrays of one block, cut by head groups, and the tiles read from them."""

    def __init__(
        self,
        problem: Problem,
        block: _Block,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None,
        sinks: Array | None,
    ) -> None:
        self.problem = problem
        self.block = block
        self.xp: Any = array_module(q)
        self.acc_dtype = accumulation_dtype(problem.dtype)
        self.groups = block.heads_kv.stop - block.heads_kv.start
        self.halving = 2.0 ** -float(np.ceil(np.log2(problem.len_k)))
        self.q = self.queries(q)
        self.k = self.keys(k)
        self.v = self.keys(v)
        self.bias = None if bias is None else self.pairs(bias)
        self.sinks = None
        if sinks is not None:
            self.sinks = sinks[block.heads_q].reshape(1, self.groups, -1, 1, 1)

    # the block's part of an array, as a view with the heads in groups

    def queries(self, x: Array) -> Array:
        """(batch, heads_q, len_q, dim) -> (batch, heads_kv, group, len_q, dim)."""
        x = x[self.block.batch, self.block.heads_q]
        return x.reshape(x.shape[0], self.groups, -1, *x.shape[2:])

    def keys(self, x: Array) -> Array:
        """(batch, heads_kv, len_k, dim) -> (batch, heads_kv, 1, len_k, dim)."""
        return x[self.block.batch, self.block.heads_kv, None]

    def pairs(self, x: Array) -> Array:
        """(batch or 1, heads_q or 1, ...) -> (batch or 1, heads_kv or 1, group or 1, ...)."""
        if x.shape[0] != 1:
            x = x[self.block.batch]
        if x.shape[1] == 1:
            return x[:, :, None]
        x = x[:, self.block.heads_q]
        return x.reshape(x.shape[0], self.groups, -1, *x.shape[2:])

    # one tile of it, in accumulation dtype

    def tile(self, x: Array, rows: slice) -> Array:
        """Some rows of q, k or v."""
        return x[..., rows, :].astype(self.acc_dtype, copy=False)

    def q_tile(self, rows: slice) -> Array:
        """Some queries, times the part of the scale that belongs before the product."""
        return _times(self.tile(self.q, rows), split_scale(self.problem.scale)[0])

    def pairs_place(self, x: Array, tile: _Tile) -> tuple[Any, ...]:
        """Where the tile lies in an array that may broadcast along queries or keys."""
        every = slice(None)
        return (..., every if x.shape[-2] == 1 else tile.rows, every if x.shape[-1] == 1 else tile.cols)

    def logits(self, q_tile: Array, tile: _Tile) -> _Logits:
        """``q @ k.T`` of the tile with softcap, bias and mask."""
        xp, problem = self.xp, self.problem
        s = _times(q_tile @ _t(self.tile(self.k, tile.cols)), split_scale(problem.scale)[1])
        visible, slope = tile.visible, None
        if visible is not None:
            visible = xp.asarray(visible)
        if problem.softcap > 0:
            t = xp.tanh(s / problem.softcap)
            s = problem.softcap * t
            slope = 1 - t * t
        if self.bias is not None:
            bias = self.bias[self.pairs_place(self.bias, tile)]
            s = s + bias.astype(self.acc_dtype)
            not_masked = bias != -np.inf
            visible = not_masked if visible is None else visible & not_masked
        if visible is not None:
            visible = xp.broadcast_to(visible, s.shape)
            s = xp.where(visible, s, -np.inf)
        return _Logits(s, visible, slope)

    def dropout_factor(self, tile: _Tile) -> Array | None:
        """What dropout multiplies each weight by, 0 or 1 / (1 - p); None without dropout."""
        xp, problem, block = self.xp, self.problem, self.block
        if problem.dropout_p == 0.0:
            return None
        b, h, i, j = (xp.arange(s.start, s.stop) for s in (block.batch, block.heads_q, tile.rows, tile.cols))
        places = (b[:, None, None, None], h[:, None, None], i[:, None], j)
        keep = keep_mask(problem.seed, places, problem.dropout_p)
        keep = keep.reshape(len(b), self.groups, -1, len(i), len(j))
        factor: Array = keep * self.acc_dtype.type(1 / (1 - problem.dropout_p))
        return factor


# The plan


def _blocks(plan: TilePlan, problem: Problem) -> Iterator[_Block]:
    """Cut batch and heads so that each part uses one list of the plan."""
    lists = plan.list_of
    group = problem.heads_q // problem.heads_kv
    batches = [slice(0, problem.batch)]
    if lists.shape[0] > 1:
        batches = [slice(b, b + 1) for b in range(problem.batch)]
    heads = [(slice(0, problem.heads_q), slice(0, problem.heads_kv))]
    if lists.shape[1] > 1:
        heads = [(slice(h, h + 1), slice(h // group, h // group + 1)) for h in range(problem.heads_q)]
    for batch in batches:
        for heads_q, heads_kv in heads:
            n = lists[batch.start % lists.shape[0], heads_q.start % lists.shape[1]]
            yield _Block(int(n), batch, heads_q, heads_kv)


def _tiles_by_query(plan: TilePlan, n: int) -> Iterator[tuple[slice, Iterator[_Tile]]]:
    """Each tile of queries with the tiles of keys it needs, ascending."""
    for r in range(plan.row_ptr.shape[1] - 1):

        def tiles(r: int = r) -> Iterator[_Tile]:
            for s in range(plan.row_ptr[n, r], plan.row_ptr[n, r + 1]):
                for c in range(plan.row_first[s], plan.row_stop[s]):
                    yield _tile(plan, n, r, c, plan.row_kind[s], plan.row_bits[s])

        yield slice(r * plan.tile_q, min((r + 1) * plan.tile_q, plan.len_q)), tiles()


def _tiles_by_key(plan: TilePlan, n: int) -> Iterator[Iterator[_Tile]]:
    """For each tile of keys, the tiles of queries that need it, ascending."""
    for c in range(plan.col_ptr.shape[1] - 1):

        def tiles(c: int = c) -> Iterator[_Tile]:
            for s in range(plan.col_ptr[n, c], plan.col_ptr[n, c + 1]):
                for r in range(plan.col_first[s], plan.col_stop[s]):
                    yield _tile(plan, n, r, c, plan.col_kind[s], plan.col_bits[s])

        yield tiles()


def _tile(plan: TilePlan, n: int, r: int, c: int, kind: int, bitmap: int) -> _Tile:
    """Tile (r, c) of list n."""
    rows = slice(r * plan.tile_q, min((r + 1) * plan.tile_q, plan.len_q))
    cols = slice(c * plan.tile_k, min((c + 1) * plan.tile_k, plan.len_k))
    if kind == FULL:
        return _Tile(rows, cols, None)
    if kind == INTERVAL:
        j = np.arange(cols.start, cols.stop)
        return _Tile(rows, cols, (j >= plan.lo[n, rows, None]) & (j < plan.hi[n, rows, None]))
    assert kind == BITS
    words = plan.bits[bitmap, : rows.stop - rows.start].astype("<i4").view(np.uint8)
    bits = np.unpackbits(words, axis=1, count=cols.stop - cols.start, bitorder="little")
    return _Tile(rows, cols, bits.view(bool))


# Small arrays


def _product(weight: Array, visible: Array | None, x: Array) -> Array:
    """``weight @ x``, where pairs that are not visible add nothing even if ``x`` holds NaN or inf there.

    Rows of x that are finite throughout go through one matrix product, the others are added one by one.
    """
    if visible is None:
        return weight @ x
    xp = array_module(weight)
    finite = xp.isfinite(x).all(-1, keepdims=True)
    if finite.all():
        return weight @ x
    result: Array = weight @ xp.where(finite, x, 0)
    for j in np.flatnonzero(to_numpy(~finite.all((0, 1, 2, 4)))):
        bad = ~finite[..., j : j + 1, :] & visible[..., j : j + 1]
        result = result + xp.where(bad, weight[..., j : j + 1] * x[..., j : j + 1, :], 0)
    return result


def _sum_group(x: Array) -> Array:
    """Sum over the query heads that share a key head."""
    return x if x.shape[2] == 1 else x.sum(2, keepdims=True)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast to ``x.shape``."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    return x.sum(axes, keepdims=True) if axes else x


def _where(visible: Array | None, x: Array) -> Array:
    return x if visible is None else array_module(x).where(visible, x, 0)


def _times(x: Array, factor: Array | float | None) -> Array:
    """``x * factor``, where None and 1.0 cost nothing."""
    return x if factor is None or (isinstance(factor, float) and factor == 1.0) else x * factor


def _finite(m: Array) -> Array:
    """A maximum to subtract: -inf (nothing visible yet) becomes 0, which leaves every exp 0."""
    pivot: Array = array_module(m).where(m == -np.inf, 0, m)
    return pivot


def _t(x: Any) -> Any:
    return None if x is None else x.swapaxes(-1, -2)

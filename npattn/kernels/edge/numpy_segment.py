"""Attention along edges in plain NumPy (or CuPy): segment reductions over the plan's two edge lists.

Logits and weights are (num_edges, heads) arrays in slot order. Whatever has a feature axis is made for a
chunk of edges at a time, so that no num_edges x heads x head_dim array exists. The masked edges of a chunk
have their gathered rows replaced by zeros before any product, so that NaN in them stays where it is.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype, array_module, to_numpy
from npattn._dropout import keep_mask
from npattn._typing import Array
from npattn.kernels.edge.contract import EdgeArrays, EdgeForward, EdgeGrads, EdgeProblem
from npattn.plans.edges import EdgePlan, max_by_target, sum_by_target, target_of_slot

#: Elements of the largest temporary array.
CHUNK_ELEMENTS = 1 << 20


class _Chunk(NamedTuple):
    """A run of edges in one of the plan's two orders; its first and last node may be cut."""

    edges: slice  # slots, or places of the order by sending node
    nodes: slice  # the nodes they belong to
    owner: Array  # (edges,) the node of each
    ptr: Array  # offsets of the nodes inside the chunk; on the CPU

    def sum(self, values: Array) -> Array:
        """(edges, ...) -> (nodes, ...), 0 for a node without edges."""
        xp = array_module(values)
        total: Array = xp.zeros((len(self.ptr) - 1, *values.shape[1:]), values.dtype)
        filled = np.flatnonzero(self.ptr[1:] > self.ptr[:-1])
        total[xp.asarray(filled)] = xp.add.reduceat(values, xp.asarray(self.ptr[filled]), axis=0)
        return total


class _Inputs(NamedTuple):
    """``EdgeArrays`` in the accumulation dtype, per-edge ones in slot order."""

    xp: Any  # numpy or cupy
    q: Any
    k: Any
    v: Any
    bias: Any
    att: Any
    edge_features: Any
    edge_weight: Any
    visible: Any  # (num_edges, heads) bool, or None when no edge is masked


def supports(problem: EdgeProblem) -> str | None:
    """Everything."""
    return None


def forward(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> EdgeForward:
    """Out, m and l: see the contract."""
    plan = _where(plan, arrays.q)
    x = _prepare(problem, plan, arrays)
    xp = x.xp
    target = xp.asarray(target_of_slot(plan))
    logits = _all_logits(problem, plan, x)
    m = max_by_target(plan, logits)
    m[xp.isneginf(m)] = 0
    p = xp.exp(logits - m[target])  # not yet divided by l
    l = sum_by_target(plan, p)
    pd = p * xp.asarray(_keep(problem, plan))
    out = xp.zeros((problem.num_targets, problem.heads, problem.head_dim_v), p.dtype)
    for c in _chunks(plan.row_ptr, problem.heads * problem.head_dim_v, xp):
        out[c.nodes] += c.sum(pd[c.edges][:, :, None] * _values(problem, plan, x, c.edges))
    out /= xp.where(l > 0, l, l.dtype.type(1))[:, :, None]
    return EdgeForward(out.astype(problem.dtype), m, l)


def weights(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays, m: Array, l: Array) -> Array:
    """``p`` in the caller's edge order: see the contract."""
    plan = _where(plan, arrays.q)
    p: Array = array_module(m).empty((problem.num_edges, problem.heads), m.dtype)
    p[plan.row_edge] = _probs(plan, _all_logits(problem, plan, _prepare(problem, plan, arrays)), m, l)
    return p


def backward(
    problem: EdgeProblem,
    plan: EdgePlan,
    dout: Array,
    arrays: EdgeArrays,
    out: Array,
    m: Array,
    l: Array,
) -> EdgeGrads:
    """Gradients: first a walk by receiving node (ds, dq and what belongs to edges), then by sending node."""
    plan = _where(plan, arrays.q)
    x = _prepare(problem, plan, arrays)
    xp = x.xp
    dout = dout.astype(m.dtype, copy=False)
    delta = xp.einsum("nhd,nhd->nh", dout, out.astype(m.dtype, copy=False))
    keep = xp.asarray(_keep(problem, plan))
    width = problem.heads * max(problem.head_dim, problem.head_dim_v, 1)
    dq = _zeros_like(x.q)
    datt = _zeros_like(x.att)
    dfeatures, dweight = _zeros_like(x.edge_features), _zeros_like(x.edge_weight)
    pd = xp.empty((problem.num_edges, problem.heads), m.dtype)
    ds = xp.empty_like(pd)
    dbias = xp.empty_like(pd)

    for c in _chunks(plan.row_ptr, width, xp):
        logits, inner = _logits(problem, plan, x, c.edges, c.owner)
        p = _probs(plan, logits, m, l, c)
        dout_rows = _rows(dout, c.owner, x.visible, c.edges)
        dp = xp.einsum("ehd,ehd->eh", dout_rows, _values(problem, plan, x, c.edges)) * keep[c.edges]
        pd[c.edges] = p * keep[c.edges]
        ds_c = p * (dp - delta[c.owner])
        if x.visible is not None:  # delta is NaN where all edges of a node with NaN in dout are masked
            ds_c[~x.visible[c.edges]] = 0
        ds[c.edges] = dbias[c.edges] = ds_c
        ds_c = ds[c.edges]
        if problem.score == "dot":
            if problem.softcap:
                ds_c *= 1 - (inner / problem.softcap) ** 2
            ds_c *= problem.scale
            dq[c.nodes] += c.sum(ds_c[:, :, None] * _keys(problem, plan, x, c.edges))
            if problem.edge_dim:
                dkey = ds_c[:, :, None] * _rows(x.q, c.owner, x.visible, c.edges)
                dkey += pd[c.edges][:, :, None] * dout_rows
        elif problem.score == "additive":
            ds_c *= _slope(problem, inner)
            dbias[c.edges] = ds_c
            dq[c.nodes] += c.sum(ds_c)[:, :, None]
        elif problem.score == "dynamic":
            slope = _slope(problem, inner)
            datt += xp.einsum("eh,ehd->hd", ds_c, slope * inner)
            dkey = ds_c[:, :, None] * slope * x.att
            dq[c.nodes] += c.sum(dkey)
        if problem.edge_dim:
            dfeatures[plan.row_edge[c.edges]] = xp.einsum("ehd,fhd->ef", dkey, x.edge_weight)
            dweight += xp.einsum("ef,ehd->fhd", x.edge_features[c.edges], dkey)

    dk, dv = _zeros_like(x.k), _zeros_like(x.v)
    visible = None if x.visible is None else x.visible[plan.col_slot]
    for c in _chunks(plan.col_ptr, width, xp):
        slots, targets = plan.col_slot[c.edges], plan.col_target[c.edges]
        dv[c.nodes] += c.sum(pd[slots][:, :, None] * _rows(dout, targets, visible, c.edges))
        if problem.score == "dot":
            dk[c.nodes] += c.sum(ds[slots][:, :, None] * _rows(x.q, targets, visible, c.edges))
        elif problem.score == "additive":
            dk[c.nodes] += c.sum(ds[slots])[:, :, None]
        elif problem.score == "dynamic":
            inner = _keys(problem, plan, x, slots) + x.q[targets]
            slope = _slope(problem, inner)
            dk[c.nodes] += c.sum(ds[slots][:, :, None] * slope * x.att)

    cast = problem.dtype
    return EdgeGrads(
        q=dq.astype(cast),
        k=dk.astype(cast),
        v=dv.astype(cast),
        bias=None if arrays.bias is None else _bias_gradient(plan, dbias, arrays.bias.shape),
        att=None if arrays.att is None else datt,
        edge_features=None if arrays.edge_features is None else dfeatures,
        edge_weight=None if arrays.edge_weight is None else dweight,
    )


def _prepare(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> _Inputs:
    acc, xp = accumulation_dtype(problem.dtype), array_module(arrays.q)

    def cast(array: Array | None) -> Any:
        return None if array is None else array.astype(acc, copy=False)

    bias = visible = None
    if arrays.bias is not None:
        bias = xp.broadcast_to(cast(arrays.bias)[plan.row_edge], (problem.num_edges, problem.heads))
        visible = ~xp.isneginf(bias)
        visible = None if visible.all() else visible
    features = cast(arrays.edge_features)
    return _Inputs(
        xp=xp,
        q=cast(arrays.q),
        k=cast(arrays.k),
        v=cast(arrays.v),
        bias=bias,
        att=cast(arrays.att),
        edge_features=None if features is None else features[plan.row_edge],
        edge_weight=cast(arrays.edge_weight),
        visible=visible,
    )


def _logits(
    problem: EdgeProblem, plan: EdgePlan, x: _Inputs, edges: slice, target: Array
) -> tuple[Array, Any]:
    """The logits of some slots, and what the backward of the score needs: capped logits, or the sum."""
    xp = x.xp
    inner: Any = None
    if problem.score == "dot":
        inner = problem.scale * xp.einsum(
            "ehd,ehd->eh",
            _rows(x.q, target, x.visible, edges),
            _keys(problem, plan, x, edges),
        )
        if problem.softcap:
            inner = problem.softcap * xp.tanh(inner / problem.softcap)
        logits = inner if x.bias is None else inner + x.bias[edges]
    elif problem.score == "additive":
        inner = _rows(x.q, target, x.visible, edges)[:, :, 0] + _keys(problem, plan, x, edges)[:, :, 0]
        inner = inner if x.bias is None else inner + x.bias[edges]
        logits = xp.where(inner > 0, inner, problem.negative_slope * inner)
    else:
        inner = x.q[target] + _keys(problem, plan, x, edges)
        logits = xp.einsum("ehd,hd->eh", xp.where(inner > 0, inner, problem.negative_slope * inner), x.att)
    if x.visible is not None:
        logits = xp.where(x.visible[edges], logits, logits.dtype.type(-np.inf))
    return logits, inner


def _all_logits(problem: EdgeProblem, plan: EdgePlan, x: _Inputs) -> Array:
    """(num_edges, heads), slot order."""
    acc = accumulation_dtype(problem.dtype)
    logits: Array = x.xp.empty((problem.num_edges, problem.heads), acc)
    for c in _chunks(plan.row_ptr, problem.heads * max(problem.head_dim, 1), x.xp):
        logits[c.edges] = _logits(problem, plan, x, c.edges, c.owner)[0]
    return logits


def _probs(plan: EdgePlan, logits: Array, m: Array, l: Array, chunk: _Chunk | None = None) -> Array:
    xp = array_module(m)
    target = xp.asarray(target_of_slot(plan)) if chunk is None else chunk.owner
    p: Array = xp.exp(logits - m[target]) / xp.where(l > 0, l, l.dtype.type(1))[target]
    return p


def _keys(problem: EdgeProblem, plan: EdgePlan, x: _Inputs, slots: Any) -> Array:
    """``ke``: the sending nodes' key rows, plus the projected edge features."""
    keys = _rows(x.k, plan.row_source[slots], x.visible, slots)
    if problem.edge_dim:
        keys = keys + x.xp.tensordot(x.edge_features[slots], x.edge_weight, 1)
    return keys


def _values(problem: EdgeProblem, plan: EdgePlan, x: _Inputs, slots: Any) -> Array:
    """``ve``: the sending nodes' value rows, for the dot score plus the projected edge features."""
    values = _rows(x.v, plan.row_source[slots], x.visible, slots)
    if problem.edge_dim and problem.score == "dot":
        values = values + x.xp.tensordot(x.edge_features[slots], x.edge_weight, 1)
    return values


def _rows(array: Array, ids: Array, visible: Array | None, edges: Any) -> Array:
    """``array[ids]`` with zeros for masked edges."""
    rows: Array = array[ids]
    if visible is not None:
        rows[~visible[edges]] = 0
    return rows


def _keep(problem: EdgeProblem, plan: EdgePlan) -> Array:
    """Dropout's factors, 0 or 1 / (1 - p), in slot order."""
    acc = accumulation_dtype(problem.dtype)
    if not problem.dropout_p:
        return np.ones((problem.num_edges, problem.heads), acc)
    edge = to_numpy(plan.row_edge)[:, None]
    place = (np.zeros_like(edge), np.arange(problem.heads), edge >> 32, edge & 0xFFFFFFFF)
    keep: Array = keep_mask(problem.seed, place, problem.dropout_p).astype(acc)
    keep /= acc.type(1 - problem.dropout_p)
    return keep


def _bias_gradient(plan: EdgePlan, dbias: Array, shape: tuple[int, ...]) -> Array:
    """Slot order to the caller's, summed over the heads when one bias serves all."""
    gradient: Array = array_module(dbias).empty(shape, dbias.dtype)
    gradient[plan.row_edge] = dbias if shape[1] == dbias.shape[1] else dbias.sum(axis=1, keepdims=True)
    return gradient


def _zeros_like(array: Any) -> Any:
    return None if array is None else array_module(array).zeros_like(array)


def _slope(problem: EdgeProblem, inner: Array) -> Array:
    """The derivative of the leaky ReLU, in the dtype of its argument."""
    one, low = inner.dtype.type(1), inner.dtype.type(problem.negative_slope)
    slope: Array = array_module(inner).where(inner > 0, one, low)
    return slope


def _where(plan: EdgePlan, like: Array) -> EdgePlan:
    """The plan with the lists that index arrays on the device of ``like``; its offsets stay on the CPU."""
    xp = array_module(like)
    if xp is np:
        return plan
    names = ("row_source", "row_edge", "col_target", "col_slot")
    return plan._replace(**{name: xp.asarray(getattr(plan, name)) for name in names})


def _chunks(ptr: Array, width: int, xp: Any) -> Iterator[_Chunk]:
    """Runs of edges whose rows of ``width`` elements fit into CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    for begin in range(0, int(ptr[-1]), step):
        end = min(begin + step, int(ptr[-1]))
        first, stop = np.searchsorted(ptr, begin, "right") - 1, np.searchsorted(ptr, end, "left")
        local = np.clip(ptr[first : stop + 1], begin, end) - begin
        owner = xp.asarray(np.repeat(np.arange(first, stop), np.diff(local)))
        yield _Chunk(slice(begin, end), slice(first, stop), owner, local)

"""Attention along edges compiled by Numba: one fused pass per receiving node, all heads at once.

=========  ==================================================================================================
_lanes     vector operations: many dot products summed together, weighted sums of gathered rows
_chunk     what happens to a chunk of edges of one node
_forward   the walks forward and for the weights
_backward  the walks backward, by receiving and by sending node
_call      a call as a record of addresses and tables
this file  arrays in, arrays out; work items over threads; parts of hubs merged in order
=========  ==================================================================================================

float16 and bfloat16 are converted once, node by node; everything per edge is computed in float32 (float64 for
float64). More heads than a vector has lanes are walked in groups.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from npattn import _threads
from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels._jit import INTERPRETED, address
from npattn.kernels._simd._host import lanes
from npattn.kernels.edge.contract import EdgeArrays, EdgeForward, EdgeGrads, EdgeProblem
from npattn.kernels.edge.numba_cpu import _backward, _forward
from npattn.kernels.edge.numba_cpu._call import Call
from npattn.plans.edges import EdgePlan


def supports(problem: EdgeProblem) -> str | None:
    """Everything, unless Numba is switched off."""
    if INTERPRETED:
        return "NUMBA_DISABLE_JIT is set, and explicit vectors cannot be interpreted"
    return None


def forward(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> EdgeForward:
    """Out, m and l: see the contract."""
    arrays = _prepare(problem, arrays)
    acc = arrays.q.dtype
    rows = problem.num_targets, problem.heads
    out, m, l = np.empty((*rows, problem.head_dim_v), acc), np.empty(rows, acc), np.empty(rows, acc)
    hubs = _Hubs(plan.row_items)
    parts = hubs.count, problem.heads
    part_out, part_m, part_l = (
        np.empty((*parts, problem.head_dim_v), acc),
        np.empty(parts, acc),
        np.empty(parts, acc),
    )
    for call in _calls(problem, plan, arrays):
        _set_rows(call, out=out, m=m, l=l, part_out=part_out, part_m=part_m, part_l=part_l)
        _run_parts(_forward.forward_item, call, plan.row_items, hubs)
    for node, these in hubs.parts:
        top = np.where(part_l[these] != 0, part_m[these], -np.inf).max(axis=0)
        m[node] = np.where(np.isneginf(top), 0, top)
        share = np.where(part_l[these] != 0, np.exp(part_m[these] - m[node]), 0)
        l[node] = (share * part_l[these]).sum(axis=0)
        out[node] = (share[:, :, None] * part_out[these]).sum(axis=0)
        out[node] /= np.where(l[node] != 0, l[node], 1)[:, None]
    return EdgeForward(out.astype(problem.dtype, copy=False), m, l)


def weights(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays, m: Array, l: Array) -> Array:
    """``p`` in the caller's edge order: see the contract."""
    arrays = _prepare(problem, arrays)
    p = np.empty((problem.num_edges, problem.heads), arrays.q.dtype)
    for call in _calls(problem, plan, arrays):
        _set_rows(call, m=m, l=l, edge_out=p)
        call.set(needs_edges=True)
        _run(_forward.weights_item, call, len(plan.row_items))
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
    """Gradients: a walk by receiving node for dq, pd and ds, then one by sending node for dk and dv."""
    given = arrays
    arrays = _prepare(problem, arrays)
    acc = arrays.q.dtype
    dout, out = (np.ascontiguousarray(array, acc) for array in (dout, out))
    dq, dk, dv = (np.empty(array.shape, acc) for array in arrays[:3])
    dbias = np.empty((problem.num_edges, problem.heads), acc) if problem.has_bias else None
    dfeatures = None if arrays.edge_features is None else np.zeros_like(arrays.edge_features)
    datt = None if arrays.att is None else np.empty_like(arrays.att)
    dweight = None if arrays.edge_weight is None else np.empty_like(arrays.edge_weight)
    row_hubs, col_hubs = _Hubs(plan.row_items), _Hubs(plan.col_items)
    row_parts = np.empty((row_hubs.count, *dq.shape[1:]), acc)
    col_parts = np.empty((col_hubs.count, *dk.shape[1:]), acc)
    col_parts_v = np.empty((col_hubs.count, *dv.shape[1:]), acc)
    items = len(plan.row_items)
    for call in _calls(problem, plan, arrays):
        heads = call.heads.stop - call.heads.start
        edge_pairs = np.empty((problem.num_edges, 2, len(call.pairs)), acc)
        att_items = np.empty((items, heads, problem.head_dim), acc) if datt is not None else None
        weight_items = np.zeros((items, problem.edge_dim, call.edge_width), acc)
        features = None if dfeatures is None else np.empty_like(dfeatures)
        _set_rows(call, dout=dout, out=out, m=m, l=l, dq=dq, part_out=row_parts, edge_out=dbias)
        call.set(edge_pairs=edge_pairs, dedge_weight=weight_items)
        if att_items is not None:
            call.set(datt=att_items)
        if features is not None:
            call.set(dfeatures=features)
        _run_parts(_backward.backward_target_item, call, plan.row_items, row_hubs)
        _set_rows(call, dk=dk, dv=dv, part_out=col_parts, part_dv=col_parts_v)
        _run_parts(_backward.backward_source_item, call, plan.col_items, col_hubs)
        if datt is not None and att_items is not None:
            datt[call.heads] = att_items.sum(axis=0)
        if dfeatures is not None and features is not None and dweight is not None:
            dfeatures += features
            total = weight_items.sum(axis=0)[:, : heads * problem.head_dim]
            dweight[:, call.heads] = total.reshape(problem.edge_dim, heads, problem.head_dim)
    for node, these in row_hubs.parts:
        dq[node] = row_parts[these].sum(axis=0)
    for node, these in col_hubs.parts:
        dk[node] = col_parts[these].sum(axis=0)
        dv[node] = col_parts_v[these].sum(axis=0)
    if dbias is not None and given.bias is not None and given.bias.shape[1] != problem.heads:
        dbias = dbias.sum(axis=1, keepdims=True)
    cast = problem.dtype
    return EdgeGrads(
        q=dq.astype(cast, copy=False),
        k=dk.astype(cast, copy=False),
        v=dv.astype(cast, copy=False),
        bias=dbias,
        att=datt,
        edge_features=dfeatures,
        edge_weight=dweight,
    )


class _Hubs:
    """The items that are parts of hubs, each with a row of its own in the arrays of parts."""

    def __init__(self, items: Array) -> None:
        is_part = items[:, 4] >= 0
        self.count = int(is_part.sum())
        self.row_of_item = np.cumsum(is_part) - 1
        nodes = items[is_part, 0]
        bounds = [*np.flatnonzero(items[is_part, 4] == 0).tolist(), self.count]
        self.parts = [(int(nodes[a]), slice(a, b)) for a, b in pairwise(bounds)]


def _prepare(problem: EdgeProblem, arrays: EdgeArrays) -> EdgeArrays:
    """All arrays C-contiguous and in the accumulation dtype."""
    acc = accumulation_dtype(problem.dtype)
    return EdgeArrays(*(None if a is None else np.ascontiguousarray(a, acc) for a in arrays))  # type: ignore[arg-type]


def _calls(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> list[Call]:
    """One call, or several where there are more heads than lanes."""
    width = lanes(arrays.q.dtype.itemsize * 8)
    return [
        Call(problem, plan, arrays, first, min(width, problem.heads - first))
        for first in range(0, problem.heads, width)
    ]


def _set_rows(call: Call, **arrays: Array | None) -> None:
    """Addresses of arrays with a heads axis, beginning at the call's first head."""
    for name, array in arrays.items():
        if array is not None:
            call.keep.append(array)
            call.set(**{name: address(array) + call.heads.start * array.strides[1]})


def _run_parts(walk: Any, call: Call, items: Array, hubs: _Hubs) -> None:
    record = address(call.record)

    def work(item: int) -> None:
        scratch = _threads.scratch(call.scratch_size)
        walk(record, item, int(hubs.row_of_item[item]), scratch, call.pairs, call.one)

    _threads.run(work, list(range(len(items))))


def _run(walk: Any, call: Call, items: int) -> None:
    record = address(call.record)

    def work(item: int) -> None:
        walk(record, item, _threads.scratch(call.scratch_size), call.pairs, call.one)

    _threads.run(work, list(range(items)))


__all__ = ["backward", "forward", "supports", "weights"]

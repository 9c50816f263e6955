"""Attention along the edges of a graph on an NVIDIA GPU: forward.cu and backward.cu, launched through CuPy.

Nothing is copied back and nothing waits for the GPU. Every result is the same bit for bit each time.
"""

import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.kernels import _cuda
from npattn.kernels.edge import cuda_launch
from npattn.kernels.edge.contract import EdgeArrays, EdgeForward, EdgeGrads, EdgeProblem
from npattn.plans.edges import EdgePlan


class _DevicePlan(NamedTuple):
    """What the kernels read of an EdgePlan, on the device."""

    row_items: cuda_launch.Items
    col_items: cuda_launch.Items
    row_parts: int  # parts of all hubs
    col_parts: int
    lists: dict[str, Any]  # row_source, row_edge, col_target, col_slot


_MAX_PLANS: Final = 16
_plans: OrderedDict[tuple[int, int], tuple[EdgePlan, _DevicePlan]] = OrderedDict()
_plans_lock = threading.Lock()


def supports(problem: EdgeProblem) -> str | None:
    """None, or the one thing that stands in the way."""
    reason = _cuda.why_unavailable()
    if reason is not None:
        return reason
    if problem.dtype.name not in cuda_launch.C_TYPES:
        return f"the CUDA kernels take float16, bfloat16, float32 and float64, not {problem.dtype}"
    widest, limit = max(problem.head_dim, problem.head_dim_v), 32 * cuda_launch.MAX_PER_LANE
    if widest > limit:
        return f"the CUDA kernels hold rows of up to {limit} elements a head, got {widest}"
    return None


def forward(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> EdgeForward:
    """Out, m and l: see the contract."""
    xp, acc = _require(arrays), accumulation_dtype(problem.dtype)
    with _cuda.device_of(arrays.q):
        device = _on_device(plan, xp)
        rows = (problem.num_targets, problem.heads)
        named = _inputs(problem, arrays, device, xp) | {
            "out": xp.empty((*rows, problem.head_dim_v), problem.dtype),
            "m": xp.empty(rows, acc),
            "l": xp.empty(rows, acc),
            **_parts(xp, acc, problem, device.row_parts, out=problem.head_dim_v, m=0, l=0),
        }
        _cuda.run(cuda_launch.forward_launches(problem, device.row_items, named))
    return EdgeForward(named["out"], named["m"], named["l"])


def weights(problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays, m: Array, l: Array) -> Array:
    """``p`` in the caller's edge order: see the contract."""
    xp = _require(arrays)
    with _cuda.device_of(arrays.q):
        device = _on_device(plan, xp)
        p = xp.empty((problem.num_edges, problem.heads), accumulation_dtype(problem.dtype))
        named = _inputs(problem, arrays, device, xp) | {
            "m": xp.ascontiguousarray(m),
            "l": xp.ascontiguousarray(l),
            "p": p,
        }
        _cuda.run(cuda_launch.weights_launches(problem, device.row_items, named))
    weights: Array = p
    return weights


def backward(
    problem: EdgeProblem,
    plan: EdgePlan,
    dout: Array,
    arrays: EdgeArrays,
    out: Array,
    m: Array,
    l: Array,
) -> EdgeGrads:
    """Gradients: a walk by receiving node, then one by sending node."""
    xp, acc = _require(arrays), accumulation_dtype(problem.dtype)
    with _cuda.device_of(arrays.q):
        device = _on_device(plan, xp)
        heads, dim, edge_dim = problem.heads, problem.head_dim, problem.edge_dim
        shared = _inputs(problem, arrays, device, xp) | {
            "out": xp.ascontiguousarray(out),
            "m": xp.ascontiguousarray(m),
            "l": xp.ascontiguousarray(l),
            "dout": dout,
            "delta": xp.empty(m.shape, acc),
        }
        warps = cuda_launch.sharing_warps(problem, device.row_items)
        groups = cuda_launch.kernel_of("backward", problem)[1].groups(heads)
        by_row = {
            "dq": xp.empty((problem.num_targets, heads, dim), problem.dtype),
            "dbias": xp.empty((problem.num_edges, heads), acc) if problem.has_bias else None,
            "datt": xp.empty((warps, heads, dim), acc) if problem.score == "dynamic" else None,
            "dfeatures": xp.empty((groups, problem.num_edges, edge_dim), acc) if edge_dim else None,
            "dweight": xp.zeros((warps, edge_dim, heads, dim), acc) if edge_dim else None,
        }
        parts = _parts(xp, acc, problem, device.row_parts, out=dim)
        _cuda.run(cuda_launch.backward_rows_launches(problem, device.row_items, shared | by_row | parts))
        by_col = {
            "dk": xp.empty((problem.num_sources, heads, dim), problem.dtype),
            "dv": xp.empty((problem.num_sources, heads, problem.head_dim_v), problem.dtype),
        }
        parts = _parts(xp, acc, problem, device.col_parts, out=dim, v=problem.head_dim_v)
        _cuda.run(cuda_launch.backward_cols_launches(problem, device.col_items, shared | by_col | parts))

        dbias, datt, dfeatures, dweight = (by_row[name] for name in ("dbias", "datt", "dfeatures", "dweight"))
        if dbias is not None and arrays.bias is not None and arrays.bias.shape[1] == 1:
            dbias = dbias.sum(1, keepdims=True)
        return EdgeGrads(
            by_row["dq"],
            by_col["dk"],
            by_col["dv"],
            dbias,
            None if datt is None else datt.sum(0),
            None if dfeatures is None else dfeatures.sum(0),
            None if dweight is None else dweight.sum(0),
        )


def _require(arrays: EdgeArrays) -> Any:
    """The array module, once all rows are known to be on the GPU."""
    for array in (arrays.q, arrays.k, arrays.v):
        _cuda.require_gpu_array(array)
    return array_module(arrays.q)


def _inputs(problem: EdgeProblem, arrays: EdgeArrays, device: _DevicePlan, xp: Any) -> dict[str, Any]:
    """The fields of Params that every launch has."""
    acc = accumulation_dtype(problem.dtype)

    def whole(x: Array | None) -> Any:
        return None if x is None else xp.ascontiguousarray(x.astype(acc, copy=False))

    return {
        "q": arrays.q,
        "k": arrays.k,
        "v": arrays.v,
        "bias": whole(arrays.bias),
        "att": whole(arrays.att),
        "features": whole(arrays.edge_features),
        "weight": whole(arrays.edge_weight),
        **device.lists,
    }


def _parts(xp: Any, acc: Any, problem: EdgeProblem, parts: int, **width: int) -> dict[str, Any]:
    """Workspace for the parts of hubs: name -> row length, 0 for one number a head."""
    shape = (parts, problem.heads)
    return {f"part_{name}": xp.empty((*shape, size) if size else shape, acc) for name, size in width.items()}


def _on_device(plan: EdgePlan, xp: Any) -> _DevicePlan:
    """The lists on the current device; the last used ones are kept there."""
    key = (id(plan), _cuda.current_device())
    with _plans_lock:
        found = _plans.get(key)
        if found is not None and found[0] is plan:
            _plans.move_to_end(key)
            return found[1]
    on_host = [cuda_launch.items_of(np.asarray(ptr)) for ptr in (plan.row_ptr, plan.col_ptr)]
    row_items, col_items = (cuda_launch.Items(*map(xp.asarray, items)) for items in on_host)
    row_parts, col_parts = (int(items.hub_part[-1]) for items in on_host)
    lists = {
        name: xp.asarray(getattr(plan, name)) for name in ("row_source", "row_edge", "col_target", "col_slot")
    }
    moved = _DevicePlan(row_items, col_items, row_parts, col_parts, lists)
    with _plans_lock:
        _plans[key] = (plan, moved)  # the plan itself is kept too, so that its id stays its own
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    return moved


__all__ = ["backward", "forward", "supports", "weights"]

"""Attention along the edges of a graph, forward and backward; no graph library needed.

An ``adjacency`` here is an ``npattn.graph.Adjacency`` or a bare ``EdgePlan``. An edge u -> v carries from u
to v: v attends to u. Whatever has one row per edge is in the caller's edge order.
"""

from typing import Any, NamedTuple

import numpy as np

from npattn import _check
from npattn._arrays import accumulation_dtype, array_module, contiguous_last_axis, is_cupy
from npattn._typing import Array, Pullback
from npattn.functional._canonical import doubled, halvings
from npattn.kernels.edge.contract import EdgeArrays, EdgeForward, EdgeGrads, EdgeImplementation, EdgeProblem
from npattn.kernels.select import EDGE, select
from npattn.plans.edges import EdgePlan, max_by_target, sum_by_target, target_of_slot


class GraphAttentionGrads(NamedTuple):
    """Gradients of one ``graph_attention`` call; None where the argument was None."""

    query: Array
    key: Array
    value: Array
    edge_bias: Array | None = None


def edge_softmax(logits: Array, adjacency: Any) -> Array:
    """Softmax over the in-edges of each node.

    ``weights[e] = exp(logits[e] - m) / sum of exp(logits[f] - m)`` over the edges f with the target of e,
    where m is their maximum.

    Parameters
    ----------
    logits : (num_edges, heads) ndarray
        In the adjacency's input edge order, which may be any order. −inf masks an edge.
    adjacency : Adjacency or EdgePlan

    Returns
    -------
    weights : (num_edges, heads) ndarray
        In the same order and dtype. The edges into one node sum to 1; if all are masked they are 0.

    Raises
    ------
    TypeError
        When logits are not float16, bfloat16, float32 or float64.
    ValueError
        When the first axis is not num_edges.

    Notes
    -----
    O(num_edges · heads). float16 and bfloat16 are computed in float32.

    Examples
    --------
    >>> from npattn.graph import Adjacency
    >>> graph = Adjacency.from_edges([0, 1, 2], [1, 2, 1])
    >>> edge_softmax(np.array([[0.0], [5.0], [np.log(3.0)]]), graph).round(4).ravel()
    array([0.25, 1.  , 0.75])
    """
    return edge_softmax_vjp(logits, adjacency)[0]


def edge_softmax_vjp(logits: Array, adjacency: Any) -> tuple[Array, Pullback]:
    """``edge_softmax`` and its pullback ``pullback(dweights) -> dlogits``.

    ``dlogits = weights * (dweights - sum of weights * dweights over the edges with the same target)``.

    Parameters
    ----------
    logits, adjacency
        As in ``edge_softmax``.

    Returns
    -------
    weights : ndarray, shape of logits
    pullback : callable
        ``pullback(dweights) -> dlogits``, both of the shape of logits.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.graph import Adjacency, edge_softmax_vjp
    >>> two_into_one = Adjacency.from_edges([0, 1], [2, 2], 3)
    >>> weights, pullback = edge_softmax_vjp(np.zeros((2, 1)), two_into_one)
    >>> weights.ravel().tolist(), pullback(np.array([[4.0], [0.0]])).ravel().tolist()
    ([0.5, 0.5], [1.0, -1.0])
    """
    plan = as_edge_plan(adjacency)
    logits = _float_array("logits", logits)
    if logits.ndim < 1 or logits.shape[0] != plan.num_edges:
        raise ValueError(
            f"logits must be (num_edges, heads) with num_edges = {plan.num_edges}, got {logits.shape}"
        )
    dtype, acc = logits.dtype, accumulation_dtype(logits.dtype)
    xp = array_module(logits)
    target, row_edge = xp.asarray(target_of_slot(plan)), xp.asarray(plan.row_edge)
    slots = logits[row_edge].astype(acc, copy=False)
    m = max_by_target(plan, slots)
    m = xp.where(xp.isneginf(m), acc.type(0), m)
    p = xp.exp(slots - m[target])
    l = sum_by_target(plan, p)
    p /= xp.where(l > 0, l, acc.type(1))[target]
    masked = xp.isneginf(slots)

    def pullback(dweights: Array) -> Array:
        dweights = xp.asarray(dweights)
        if dweights.shape != p.shape:
            raise ValueError(f"dweights must have the shape of the weights, {p.shape}, got {dweights.shape}")
        dp = xp.where(masked, acc.type(0), dweights[row_edge].astype(acc, copy=False))
        return _to_caller_order(plan, p * (dp - sum_by_target(plan, p * dp)[target]), dtype)

    return _to_caller_order(plan, p, dtype), pullback


def graph_attention(
    query: Array,
    key: Array,
    value: Array,
    adjacency: Any,
    *,
    edge_bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_weights: bool = False,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:
    """Dot-product attention of every node over the nodes with an edge to it.

    For an edge e from u to v, ``logit = softcap(scale · query[v] · key[u]) + edge_bias[e]``;
    ``out[v] = sum of softmax(logit) · value[u]`` over the edges into v, per head.

    Parameters
    ----------
    query : (num_nodes, heads, head_dim) ndarray
        One row per receiving node.
    key : (num_nodes, heads, head_dim) ndarray
    value : (num_nodes, heads, head_dim_v) ndarray
        One row per sending node: another number than query's on a bipartite graph.
    adjacency : Adjacency or EdgePlan
    edge_bias : (num_edges, heads) or (num_edges, 1) ndarray, optional
        Added to the logits, in the adjacency's edge order. −inf masks the edge; whatever its nodes hold, a
        masked edge changes nothing.
    scale : float, optional
        None is ``1 / sqrt(head_dim)``.
    softcap : float, optional
        None or 0 is off; else logits become ``softcap · tanh(logits / softcap)`` before the bias.
    dropout_p : float
        Probability of dropping a weight; kept ones are divided by ``1 - dropout_p``.
    seed : int, optional
        Needed when dropout_p > 0. A weight's fate depends on (seed, edge, head) alone.
    return_weights : bool
        Also return the softmax weights, before dropout.
    backend : {"auto", "numba", "numpy", "cupy"}

    Returns
    -------
    out : (num_nodes, heads, head_dim_v) ndarray
        In the promoted dtype of query, key and value; 0 for a node without (unmasked) in-edges.
    weights : (num_edges, heads) ndarray
        With return_weights only; in the adjacency's edge order.

    Raises
    ------
    TypeError
        For dtypes other than float16, bfloat16, float32 and float64, or an integer or bool edge_bias.
    ValueError
        For shapes that do not fit the adjacency or each other, dropout without seed, a backend that cannot.

    Notes
    -----
    One pass per receiving node with an online softmax. No array of num_edges × heads × head_dim exists, and
    without return_weights none of num_edges × heads. Parallel edges count as often as they occur. The same
    bits for any number of threads.

    Examples
    --------
    Node 1 attends to nodes 0 and 2 with equal logits, nodes 0 and 2 to nobody:

    >>> from npattn.graph import Adjacency
    >>> graph = Adjacency.from_edges([0, 2], [1, 1], num_nodes=3)
    >>> x = np.array([[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 4.0]]])
    >>> graph_attention(x, x, x, graph)[:, 0]
    array([[0. , 0. ],
           [0.5, 2. ],
           [0. , 0. ]])
    """
    call = _dot_call(query, key, value, adjacency, edge_bias, scale, softcap, dropout_p, seed, backend)
    out = call.forward().out
    return (out, call.weights().astype(out.dtype)) if return_weights else out


def graph_attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    adjacency: Any,
    *,
    edge_bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    backend: str = "auto",
) -> tuple[Array, Pullback]:
    """``graph_attention`` and its pullback ``pullback(dout) -> GraphAttentionGrads``.

    Parameters
    ----------
    query, key, value, adjacency, edge_bias, scale, softcap, dropout_p, seed, backend
        As in ``graph_attention``.

    Returns
    -------
    out : ndarray, shape (num_nodes, heads, head_dim_v)
    pullback : callable
        ``pullback(dout) -> GraphAttentionGrads(query, key, value, edge_bias)``, each of its argument's
        shape and dtype, None where the argument was None.

    Notes
    -----
    The pullback keeps the inputs, out and two numbers per node and head; weights are recomputed. It walks the
    edges by receiving node for dquery and by sending node for dkey and dvalue, with two numbers per edge and
    head in between: no atomics, the same bits on every call.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import graph_attention_vjp
    >>> from npattn.graph import Adjacency
    >>> two_into_one = Adjacency.from_edges([0, 1], [2, 2], 3)
    >>> query = key = value = np.zeros((3, 1, 1))
    >>> out, pullback = graph_attention_vjp(query, key, value, two_into_one)
    >>> pullback(np.ones_like(out)).value.ravel().tolist()  # node 2 takes half of each
    [0.5, 0.5, 0.0]
    """
    call = _dot_call(query, key, value, adjacency, edge_bias, scale, softcap, dropout_p, seed, backend)
    result = call.forward()

    def pullback(dout: Array) -> GraphAttentionGrads:
        grads = call.backward(dout, result)
        return GraphAttentionGrads(
            grads.q.astype(call.dtypes[0], copy=False),
            grads.k.astype(call.dtypes[1], copy=False),
            grads.v.astype(call.dtypes[2], copy=False),
            None
            if edge_bias is None or grads.bias is None
            else grads.bias.astype(edge_bias.dtype, copy=False),
        )

    return result.out, pullback


class EdgeCall:
    """One validated call of an edge kernel, for ``graph_attention`` and the layers of ``npattn.graph``.

    Parameters
    ----------
    score : {"dot", "additive", "dynamic"}
        The formula of the logits, see ``npattn.kernels.edge.contract``.
    adjacency : Adjacency or EdgePlan
    query : (num_targets, heads, head_dim) ndarray
    key : (num_sources, heads, head_dim) ndarray
    value : (num_sources, heads, head_dim_v) ndarray
    edge_bias : (num_edges, heads) or (num_edges, 1) ndarray, optional
        "dot" and "additive" only.
    att : (heads, head_dim) ndarray, optional
        "dynamic" only.
    edge_features : (num_edges, edge_dim) ndarray, optional
    edge_weight : (edge_dim, heads, head_dim) ndarray, optional
        Projects edge features onto keys, for "dot" also onto values.
    scale, softcap, negative_slope, dropout_p, seed, backend
        As in ``graph_attention``.
    """

    def __init__(
        self,
        score: str,
        adjacency: Any,
        query: Array,
        key: Array,
        value: Array,
        *,
        edge_bias: Array | None = None,
        att: Array | None = None,
        edge_features: Array | None = None,
        edge_weight: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        negative_slope: float = 0.2,
        dropout_p: float = 0.0,
        seed: int | None = None,
        backend: str = "auto",
    ) -> None:
        self.plan = as_edge_plan(adjacency)
        q, k, v = (_float_array(n, a) for n, a in (("query", query), ("key", key), ("value", value)))
        array_module(q, k, v, edge_bias, att, edge_features, edge_weight)
        self.dtypes = (q.dtype, k.dtype, v.dtype)
        dtype = _check.promote("query, key and value", *self.dtypes)
        self._check_shapes(q, k, v)
        dropout_p, seed = _check.dropout_values(dropout_p, seed)
        self.drops_all = dropout_p == 1.0
        acc = accumulation_dtype(dtype)
        head_dim = q.shape[2]
        self.problem = EdgeProblem(
            score=score,
            dtype=dtype,
            num_targets=self.plan.num_targets,
            num_sources=self.plan.num_sources,
            num_edges=self.plan.num_edges,
            heads=q.shape[1],
            head_dim=head_dim,
            head_dim_v=v.shape[2],
            scale=_check.scale_value(scale, head_dim),
            softcap=_check.softcap_value(softcap),
            negative_slope=float(negative_slope),
            has_bias=edge_bias is not None,
            edge_dim=0 if edge_features is None else edge_features.shape[1],
            dropout_p=0.0 if self.drops_all else dropout_p,
            seed=seed,
        )
        self.arrays = EdgeArrays(
            q=contiguous_last_axis(q.astype(dtype, copy=False)),
            k=contiguous_last_axis(k.astype(dtype, copy=False)),
            v=contiguous_last_axis(v.astype(dtype, copy=False)),
            bias=self._check_bias(edge_bias),
            att=None if att is None else att.astype(acc, copy=False),
            edge_features=None if edge_features is None else edge_features.astype(acc, copy=False),
            edge_weight=None if edge_weight is None else edge_weight.astype(acc, copy=False),
        )
        self.kernel: EdgeImplementation = select(EDGE, self.problem, is_cupy(q), backend)

    def forward(self) -> EdgeForward:
        """Out, and the softmax statistics that ``weights`` and ``backward`` read."""
        result = self.kernel.forward(self.problem, self.plan, self.arrays)
        if self.drops_all:
            result = result._replace(out=array_module(result.out).zeros_like(result.out))
        return result

    def weights(self, result: EdgeForward | None = None) -> Array:
        """Softmax weights before dropout, (num_edges, heads), caller's edge order."""
        result = self.forward() if result is None else result
        return self.kernel.weights(self.problem, self.plan, self.arrays, result.m, result.l)

    def backward(self, dout: Array, result: EdgeForward) -> EdgeGrads:
        """The kernel's gradients, in the dtypes of its contract."""
        xp = array_module(result.out)
        dout = xp.asarray(dout)
        if dout.shape != result.out.shape:
            raise ValueError(f"dout must have the shape of out, {result.out.shape}, got {dout.shape}")
        if self.drops_all:
            return EdgeGrads(*(None if a is None else xp.zeros_like(a) for a in self.arrays))  # type: ignore[arg-type]
        times = halvings(dout, self.problem.dtype)
        dout = dout * 0.5**times if times else dout
        dout = contiguous_last_axis(dout.astype(self.problem.dtype, copy=False))
        grads = self.kernel.backward(
            self.problem, self.plan, dout, self.arrays, result.out, result.m, result.l
        )
        whole: EdgeGrads = doubled(grads, times)
        return whole

    def _check_shapes(self, q: Array, k: Array, v: Array) -> None:
        for name, array, count, role in (
            ("query", q, self.plan.num_targets, "receiving"),
            ("key", k, self.plan.num_sources, "sending"),
            ("value", v, self.plan.num_sources, "sending"),
        ):
            if array.ndim != 3:
                raise ValueError(f"{name} must be (num_nodes, heads, head_dim), got shape {array.shape}")
            if array.shape[0] != count:
                raise ValueError(
                    f"{name} has {array.shape[0]} rows, shape {array.shape}, but the adjacency has {count} "
                    f"{role} nodes"
                )
            if array.shape[1] != q.shape[1]:
                raise ValueError(
                    f"{name} has {array.shape[1]} heads, shape {array.shape}, query {q.shape[1]}"
                )
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"query {q.shape} and key {k.shape} must agree in head_dim, the last axis")

    def _check_bias(self, bias: Array | None) -> Array | None:
        if bias is None:
            return None
        bias = _float_array("edge_bias", bias)
        num_edges, heads = self.plan.num_edges, self.problem.heads
        if bias.shape not in ((num_edges, heads), (num_edges, 1)):
            raise ValueError(
                f"edge_bias must be (num_edges, heads) = {(num_edges, heads)} or {(num_edges, 1)}, one row "
                f"per edge in the adjacency's order, got {bias.shape}"
            )
        return bias


def as_edge_plan(adjacency: Any) -> EdgePlan:
    """The plan of an Adjacency, or the plan itself.

    Raises
    ------
    TypeError
        For anything else, naming the converters.
    """
    plan = adjacency if isinstance(adjacency, EdgePlan) else getattr(adjacency, "plan", None)
    if not isinstance(plan, EdgePlan):
        raise TypeError(
            f"adjacency must be a npattn.graph.Adjacency, got {type(adjacency).__name__}; make one with "
            "Adjacency.from_networkx, from_scipy or from_edges"
        )
    return plan


def _dot_call(
    query: Array,
    key: Array,
    value: Array,
    adjacency: Any,
    edge_bias: Array | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | None,
    backend: str,
) -> EdgeCall:
    return EdgeCall(
        "dot",
        adjacency,
        query,
        key,
        value,
        edge_bias=edge_bias,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=seed,
        backend=backend,
    )


def _float_array(name: str, array: Any) -> Array:
    checked: Array = array if is_cupy(array) else np.asarray(array)
    _check.float_dtype(name, checked.dtype)
    return checked


def _to_caller_order(plan: EdgePlan, slots: Array, dtype: Any) -> Array:
    xp = array_module(slots)
    result: Array = xp.empty(slots.shape, dtype)
    result[xp.asarray(plan.row_edge)] = slots
    return result


__all__ = [
    "EdgeCall",
    "GraphAttentionGrads",
    "as_edge_plan",
    "edge_softmax",
    "edge_softmax_vjp",
    "graph_attention",
    "graph_attention_vjp",
]

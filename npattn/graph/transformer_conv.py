"""TransformerConv: dot-product graph attention with edge features and a gated skip."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from npattn._arrays import accumulation_dtype
from npattn._typing import Array, Grads, Pullback
from npattn.functional.graph_attention import EdgeCall
from npattn.graph._inputs import (
    apply,
    both_ends,
    dropout_options,
    edge_inputs,
    join_heads,
    join_heads_pullback,
    plus,
    split_heads,
    with_edges,
)
from npattn.graph.adjacency import Adjacency
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join
from npattn.nn.linear import Linear


@dataclass(init=False, eq=False, repr=False)
class TransformerConv(Layer):
    """Multi-head dot-product attention of every node over its in-neighbours.

    Per head, with q, k, v the projections of x and for an edge e from u to v::

        f[e]     = edge_features[e] · lin_edge.weightᵀ                       # 0 without edge features
        logit[e] = q[v] · (k[u] + f[e]) / sqrt(out_dim)
        out[v]   = sum over the in-edges of v of softmax(logit)[e] * (v[u] + f[e])
        y        = out + r                     with r = lin_skip(x), when root_weight
        y        = b * r + (1 - b) * out       with b = sigmoid(lin_beta([out, r, out - r])), when beta

    Parameters
    ----------
    in_dim, out_dim : int
        Features of a node before, and per head after.
    heads : int, default 1
    concat : bool, default True
        Width of the output: heads · out_dim when True, out_dim (the heads' mean) when False.
    beta : bool, default False
        Gate the skip; without effect when root_weight is False.
    dropout_p : float, default 0.0
        Dropout of the attention weights, active only in calls with ``seed=``.
    edge_dim : int, optional
    bias : bool, default True
        Of the projections; lin_edge and lin_beta have none.
    root_weight : bool, default True
        Have a skip.
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    lin_query, lin_key, lin_value : weight (heads · out_dim, in_dim), bias (heads · out_dim,)
    lin_edge.weight : (heads · out_dim, edge_dim)
    lin_skip : weight (width, in_dim), bias (width,)
    lin_beta.weight : (1, 3 · width)

    Notes
    -----
    Names, shapes, mathematics and initialisation (uniform in ±1/√inputs) are those of PyTorch Geometric's
    TransformerConv. No self-loops are added: a node sees itself through the skip.

    References
    ----------
    Shi et al., Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification,
    IJCAI 2021, equations 3 to 5.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.graph import Adjacency, TransformerConv
    >>> graph = Adjacency.from_edges([0, 1, 2], [1, 2, 0])
    >>> layer = TransformerConv(4, 8, heads=2, edge_dim=3, rng=np.random.default_rng(0))
    >>> x, edge_features = np.ones((3, 4), np.float32), np.ones((3, 3), np.float32)
    >>> layer(x, graph, edge_features).shape
    (3, 16)
    """

    takes_seed: ClassVar[bool] = True

    lin_key: Linear
    lin_query: Linear
    lin_value: Linear
    lin_edge: Linear | None
    lin_skip: Linear | None
    lin_beta: Linear | None
    heads: int
    concat: bool
    dropout_p: float
    edge_dim: int | None

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        heads: int = 1,
        *,
        concat: bool = True,
        beta: bool = False,
        dropout_p: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        inner, width = heads * out_dim, heads * out_dim if concat else out_dim

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, rng=rng, dtype=dtype)

        self.lin_key = linear(in_dim, inner, bias)
        self.lin_query = linear(in_dim, inner, bias)
        self.lin_value = linear(in_dim, inner, bias)
        self.lin_edge = None if edge_dim is None else linear(edge_dim, inner, False)
        self.lin_skip = linear(in_dim, width, bias) if root_weight else None
        self.lin_beta = linear(3 * width, 1, False) if root_weight and beta else None
        self.heads = heads
        self.concat = concat
        self.dropout_p = dropout_p
        self.edge_dim = edge_dim

    def __call__(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None = None, *, seed: int | None = None
    ) -> Array:
        """New features of the receiving nodes; arguments as in ``GATConv.__call__``."""
        y: Array = self.vjp(x, adjacency, edge_features, seed=seed)[0]
        return y

    def weights(self, x: Any, adjacency: Adjacency, edge_features: Array | None = None) -> Array:
        """Attention weights without dropout, (num_edges, heads), in the order of ``adjacency.edges()``."""
        return self._attend(x, adjacency, edge_features, None)[0].weights()

    def vjp(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None = None, *, seed: int | None = None
    ) -> tuple[Array, Pullback]:
        """Output and pullback ``dy -> (dx, grads)``; dx is (dx, dedge_features) with edge features."""
        call, pull_projections = self._attend(x, adjacency, edge_features, seed)
        result = call.forward()
        out = join_heads(result.out, self.concat)
        y, pull_skip = self._skip(out, both_ends(x, adjacency).target)

        def pullback(dy: Array) -> tuple[Any, Grads]:
            dout, dtarget, skip_grads = pull_skip(dy)
            grads_of_call = call.backward(join_heads_pullback(dout, self.heads, self.concat), result)
            dx, dedge_features, grads = pull_projections(grads_of_call)
            if self.lin_skip is not None:
                dx = (dx[0], plus(dx[1], dtarget)) if isinstance(dx, tuple) else plus(dx, dtarget)
            grads.update(skip_grads)
            return with_edges(dx, dedge_features), {name: grads[name] for name in self.named_parameters()}

        return y, pullback

    def _attend(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None, seed: int | None
    ) -> tuple[EdgeCall, Pullback]:
        """The call of the edge kernel, and from its gradients to (dx, dedge_features, grads)."""
        ends = both_ends(x, adjacency)
        query, pull_query = apply(self.lin_query, ends.target)
        key, pull_key = apply(self.lin_key, ends.source)
        value, pull_value = apply(self.lin_value, ends.source)
        adjacency, features, pull_features = edge_inputs(
            adjacency, edge_features, self.edge_dim, self_loops=False, dtype=query.dtype
        )
        edge_weight = None
        if self.lin_edge is not None:
            by_head = self.lin_edge.weight.reshape(self.heads, query.shape[1] // self.heads, -1)
            edge_weight = np.moveaxis(by_head, -1, 0)
        call = EdgeCall(
            "dot",
            adjacency,
            *(split_heads(rows, self.heads) for rows in (query, key, value)),
            edge_features=features,
            edge_weight=edge_weight,
            **dropout_options(self.dropout_p, seed),
        )

        def pullback(grads_of_call: Any) -> tuple[Any, Array | None, Grads]:
            dx_target, query_grads = pull_query(grads_of_call.q.reshape(query.shape))
            dx_key, key_grads = pull_key(grads_of_call.k.reshape(key.shape))
            dx_value, value_grads = pull_value(grads_of_call.v.reshape(value.shape))
            grads = join(("lin_query", query_grads), ("lin_key", key_grads), ("lin_value", value_grads))
            dedge_features = None
            if self.lin_edge is not None:
                weight = self.lin_edge.weight
                dweight = np.moveaxis(grads_of_call.edge_weight, 0, -1).reshape(weight.shape)
                grads["lin_edge.weight"] = dweight.astype(weight.dtype, copy=False)
                dedge_features = pull_features(grads_of_call.edge_features)
            return ends.gradient(plus(dx_key, dx_value), dx_target), dedge_features, grads

        return call, pullback

    def _skip(self, out: Array, x_target: Array) -> tuple[Array, Pullback]:
        """Add or gate the skip: (y, pullback), pullback(dy) -> (dout, dx_target or None, grads)."""
        if self.lin_skip is None:
            return out, lambda dy: (dy, None, {})
        skip, pull_skip = apply(self.lin_skip, x_target)
        if self.lin_beta is None:

            def pull_sum(dy: Array) -> tuple[Array, Array, Grads]:
                dtarget, skip_grads = pull_skip(dy)
                return dy, dtarget, join(("lin_skip", skip_grads))

            return out + skip, pull_sum

        gate_input = np.concatenate([out, skip, out - skip], axis=1)
        logit, pull_beta = self.lin_beta.vjp(gate_input)
        dtype, wide = logit.dtype, accumulation_dtype(logit.dtype)
        gate = 0.5 * (1 + np.tanh(0.5 * logit.astype(wide, copy=False)))  # the sigmoid, without overflow

        def pull_gate(dy: Array) -> tuple[Array, Array, Grads]:
            # y = gate * skip + (1 - gate) * out
            dgate = (dy * (skip - out)).sum(axis=1, keepdims=True, dtype=wide)
            dinput, beta_grads = pull_beta((dgate * gate * (1 - gate)).astype(dtype, copy=False))
            from_out, from_skip, from_difference = np.split(dinput, 3, axis=1)
            dout = ((1 - gate) * dy + from_out + from_difference).astype(dtype, copy=False)
            dskip = (gate * dy + from_skip - from_difference).astype(dtype, copy=False)
            dtarget, skip_grads = pull_skip(dskip)
            return dout, dtarget, join(("lin_skip", skip_grads), ("lin_beta", beta_grads))

        return (gate * skip + (1 - gate) * out).astype(dtype, copy=False), pull_gate


__all__ = ["TransformerConv"]

"""GATv2Conv: graph attention with dynamic scores."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from npattn._typing import Array, Grads, Pullback
from npattn.functional._products import sum_rows
from npattn.functional.graph_attention import EdgeCall
from npattn.graph._inputs import (
    apply,
    both_ends,
    dropout_options,
    edge_inputs,
    glorot_linear,
    join_heads,
    join_heads_pullback,
    plus,
    project,
    split_heads,
    with_edges,
)
from npattn.graph.adjacency import Adjacency
from npattn.nn.init import generator, glorot_uniform
from npattn.nn.layer import Layer, join
from npattn.nn.linear import Linear


@dataclass(init=False, eq=False, repr=False)
class GATv2Conv(Layer):
    """Graph attention whose score looks at both ends together: the nonlinearity stands before ``att``.

    Per head, with ``l = lin_l(x)`` and ``r = lin_r(x)`` and for an edge e from u to v::

        logit[e] = att · leaky_relu(l[u] + r[v] + edge_features[e] · lin_edge.weightᵀ)
        out[v]   = sum over the in-edges of v of softmax(logit)[e] * l[u]

    then heads are concatenated (or averaged), and the residual ``x · res.weightᵀ`` and bias added.

    Parameters
    ----------
    in_dim, out_dim : int
        Features of a node before, and per head after.
    heads : int, default 1
    concat, negative_slope, dropout_p, self_loops, edge_dim, bias, residual
        As in GATConv; ``bias`` also gives lin_l and lin_r theirs.
    share_weights : bool, default False
        lin_r is lin_l.
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    lin_l.weight, lin_r.weight : (heads · out_dim, in_dim), with .bias (heads · out_dim,)
        No lin_r with share_weights.
    att : (1, heads, out_dim)
    lin_edge.weight : (heads · out_dim, edge_dim)
    bias : (heads · out_dim,) or (out_dim,)
    res.weight : (width of the output, in_dim)

    Notes
    -----
    Names, shapes, mathematics and initialisation are those of PyTorch Geometric's GATv2Conv; existing
    self-loops keep their features here. Twice the reading of GATConv: a score needs both ends' rows.

    References
    ----------
    Brody, Alon and Yahav, How Attentive are Graph Attention Networks?, ICLR 2022, equation 7.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.graph import Adjacency, GATv2Conv
    >>> graph = Adjacency.from_edges([0, 1, 2], [1, 2, 0])
    >>> layer = GATv2Conv(4, 8, heads=2, concat=False, rng=np.random.default_rng(0))
    >>> layer(np.ones((3, 4), np.float32), graph).shape
    (3, 8)
    """

    takes_seed: ClassVar[bool] = True

    lin_l: Linear
    lin_r: Linear | None
    att: Array
    lin_edge: Linear | None
    bias: Array | None
    res: Linear | None
    heads: int
    concat: bool
    negative_slope: float
    dropout_p: float
    self_loops: bool
    edge_dim: int | None

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        heads: int = 1,
        *,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout_p: float = 0.0,
        self_loops: bool = True,
        edge_dim: int | None = None,
        bias: bool = True,
        residual: bool = False,
        share_weights: bool = False,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        inner, width = heads * out_dim, heads * out_dim if concat else out_dim
        self.lin_l = glorot_linear(in_dim, inner, bias=bias, rng=rng, dtype=dtype)
        self.lin_r = None if share_weights else glorot_linear(in_dim, inner, bias=bias, rng=rng, dtype=dtype)
        self.att = glorot_uniform(rng, (1, heads, out_dim), dtype)
        self.lin_edge = None if edge_dim is None else glorot_linear(edge_dim, inner, rng=rng, dtype=dtype)
        self.bias = np.zeros(width, dtype) if bias else None
        self.res = glorot_linear(in_dim, width, rng=rng, dtype=dtype) if residual else None
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout_p = dropout_p
        self.self_loops = self_loops
        self.edge_dim = edge_dim

    def __call__(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None = None, *, seed: int | None = None
    ) -> Array:
        """New features of the receiving nodes; arguments as in ``GATConv.__call__``."""
        y: Array = self.vjp(x, adjacency, edge_features, seed=seed)[0]
        return y

    def weights(self, x: Any, adjacency: Adjacency, edge_features: Array | None = None) -> Array:
        """Attention weights without dropout, (num_edges, heads).

        In the order of ``adjacency.edges()``; with self_loops, of ``adjacency.with_self_loops().edges()``.
        """
        return self._attend(x, adjacency, edge_features, None)[0].weights()

    def vjp(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None = None, *, seed: int | None = None
    ) -> tuple[Array, Pullback]:
        """Output and pullback ``dy -> (dx, grads)``; dx is (dx, dedge_features) with edge features."""
        call, pull_scores = self._attend(x, adjacency, edge_features, seed)
        result = call.forward()
        y = join_heads(result.out, self.concat)
        pull_res: Pullback | None = None
        if self.res is not None:
            skip, pull_res = apply(self.res, both_ends(x, adjacency).target)
            y = y + skip
        if self.bias is not None:
            y = y + self.bias

        def pullback(dy: Array) -> tuple[Any, Grads]:
            grads_of_call = call.backward(join_heads_pullback(dy, self.heads, self.concat), result)
            dx, dedge_features, grads = pull_scores(grads_of_call)
            if self.bias is not None:
                grads["bias"] = sum_rows(dy)
            if pull_res is not None:
                dskip, res_grads = pull_res(dy)
                dx = (dx[0], plus(dx[1], dskip)) if isinstance(dx, tuple) else plus(dx, dskip)
                grads.update(join(("res", res_grads)))
            return with_edges(dx, dedge_features), {name: grads[name] for name in self.named_parameters()}

        return y, pullback

    def _attend(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None, seed: int | None
    ) -> tuple[EdgeCall, Pullback]:
        """The call of the edge kernel, and from its gradients to (dx, dedge_features, grads)."""
        ends = both_ends(x, adjacency)
        if self.lin_r is None:
            left, right, pull_both = project(self.lin_l, ends)
        else:
            left, pull_l = apply(self.lin_l, ends.source)
            right, pull_r = apply(self.lin_r, ends.target)
        walked, features, pull_features = edge_inputs(
            adjacency, edge_features, self.edge_dim, self_loops=self.self_loops, dtype=left.dtype
        )
        key = split_heads(left, self.heads)
        edge_weight = None
        if self.lin_edge is not None:
            edge_weight = np.moveaxis(self.lin_edge.weight.reshape(*key.shape[1:], -1), -1, 0)
        call = EdgeCall(
            "dynamic",
            walked,
            split_heads(right, self.heads),
            key,
            key,
            att=self.att[0],
            edge_features=features,
            edge_weight=edge_weight,
            negative_slope=self.negative_slope,
            **dropout_options(self.dropout_p, seed),
        )

        def pullback(grads_of_call: Any) -> tuple[Any, Array | None, Grads]:
            dleft = (grads_of_call.k + grads_of_call.v).reshape(left.shape)
            dright = grads_of_call.q.reshape(right.shape)
            if self.lin_r is None:
                dx, lin_grads = pull_both(dleft, dright)
                grads = join(("lin_l", lin_grads))
            else:
                dx_source, l_grads = pull_l(dleft)
                dx_target, r_grads = pull_r(dright)
                dx = ends.gradient(dx_source, dx_target)
                grads = join(("lin_l", l_grads), ("lin_r", r_grads))
            grads["att"] = grads_of_call.att.astype(self.att.dtype, copy=False)[None]
            dedge_features = None
            if self.lin_edge is not None:
                weight = self.lin_edge.weight
                dweight = np.moveaxis(grads_of_call.edge_weight, 0, -1).reshape(weight.shape)
                grads["lin_edge.weight"] = dweight.astype(weight.dtype, copy=False)
                dedge_features = pull_features(grads_of_call.edge_features)
            return dx, dedge_features, grads

        return call, pullback


__all__ = ["GATv2Conv"]

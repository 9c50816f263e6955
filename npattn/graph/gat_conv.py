"""GATConv: graph attention with additive scores."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array, Grads, Pullback
from npattn.functional._products import einsum, matmul, sum_rows
from npattn.functional.dropout import fold_seed, keep_mask
from npattn.functional.graph_attention import EdgeCall
from npattn.graph._inputs import (
    apply,
    both_ends,
    dropout_options,
    edge_inputs,
    glorot_linear,
    join_heads,
    join_heads_pullback,
    merge_heads,
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
class GATConv(Layer):
    """Graph attention: every node sums its neighbours' projected features by learned, additive scores.

    Per head, with ``h = x · lin.weightᵀ``, ``f = edge_features · lin_edge.weightᵀ`` and for an edge e from u
    to v::

        logit[e] = leaky_relu(att_src · h[u] + att_dst · h[v] + att_edge · f[e])
        out[v]   = sum over the in-edges of v of softmax(logit)[e] * h[u]

    then heads are concatenated (or averaged), and the residual ``x · res.weightᵀ`` and bias added.

    Parameters
    ----------
    in_dim, out_dim : int
        Features of a node before, and per head after.
    heads : int, default 1
    concat : bool, default True
        Width of the output: heads · out_dim when True, out_dim (the heads' mean) when False.
    negative_slope : float, default 0.2
    dropout_p : float, default 0.0
        Dropout of the attention weights, active only in calls with ``seed=``.
    message_dropout_p : float, default 0.0
        Dropout of the features h[u] where they are summed, not where they are scored; also only with
        ``seed=``. The original implementation has it, PyTorch Geometric has not.
    self_loops : bool, default True
        Walk ``adjacency.with_self_loops()``.
    edge_dim : int, optional
        Features of an edge; None takes none.
    bias, residual : bool
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    lin.weight : (heads · out_dim, in_dim)
    att_src, att_dst : (1, heads, out_dim)
    lin_edge.weight : (heads · out_dim, edge_dim), and att_edge : (1, heads, out_dim)
        With edge_dim only.
    bias : (heads · out_dim,) or (out_dim,)
    res.weight : (width of the output, in_dim)
        With residual only.

    Notes
    -----
    Names, shapes, mathematics and initialisation (Glorot uniform, bias 0) are those of PyTorch Geometric's
    GATConv, whose weights give the same numbers here, with one difference: there existing self-loops lose
    their features, here they keep them. Cost: one matmul, and O(num_edges · heads · out_dim) for the walk.
    The score is *static*: the order of neighbours by attention is the same for every receiving node.
    GATv2Conv lifts that.

    References
    ----------
    Veličković et al., Graph Attention Networks, ICLR 2018, equations 1 to 6.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.graph import Adjacency, GATConv
    >>> graph = Adjacency.from_edges([0, 1, 2], [1, 2, 0])
    >>> layer = GATConv(4, 8, heads=2, rng=np.random.default_rng(0))
    >>> x = np.ones((3, 4), np.float32)
    >>> layer(x, graph).shape
    (3, 16)
    >>> layer.weights(x, graph).sum(axis=0)  # three nodes whose weights sum to one
    array([3., 3.], dtype=float32)
    """

    takes_seed: ClassVar[bool] = True

    lin: Linear
    att_src: Array
    att_dst: Array
    lin_edge: Linear | None
    att_edge: Array | None
    bias: Array | None
    res: Linear | None
    heads: int
    concat: bool
    negative_slope: float
    dropout_p: float
    self_loops: bool
    edge_dim: int | None
    message_dropout_p: float

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
        message_dropout_p: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        width = heads * out_dim if concat else out_dim
        has_edges = edge_dim is not None
        self.lin = glorot_linear(in_dim, heads * out_dim, rng=rng, dtype=dtype)
        self.att_src = glorot_uniform(rng, (1, heads, out_dim), dtype)
        self.att_dst = glorot_uniform(rng, (1, heads, out_dim), dtype)
        self.lin_edge = (
            glorot_linear(edge_dim or 0, heads * out_dim, rng=rng, dtype=dtype) if has_edges else None
        )
        self.att_edge = glorot_uniform(rng, (1, heads, out_dim), dtype) if has_edges else None
        self.bias = np.zeros(width, dtype) if bias else None
        self.res = glorot_linear(in_dim, width, rng=rng, dtype=dtype) if residual else None
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout_p = dropout_p
        self.self_loops = self_loops
        self.edge_dim = edge_dim
        self.message_dropout_p = message_dropout_p

    def __call__(
        self, x: Any, adjacency: Adjacency, edge_features: Array | None = None, *, seed: int | None = None
    ) -> Array:
        """New features of the receiving nodes.

        Parameters
        ----------
        x : (num_nodes, in_dim) ndarray, or (x_source, x_target) on a bipartite adjacency
            A scipy sparse array is taken too; its gradient is None.
        adjacency : Adjacency
        edge_features : (num_edges, edge_dim) ndarray
            In the adjacency's edge order; required with edge_dim, refused without.
        seed : int, optional
            Turns dropout on.

        Returns
        -------
        y : (num_nodes, heads · out_dim) or (num_nodes, out_dim) ndarray
        """
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
        rows_source, rows_target, pull_lin = project(self.lin, ends)
        h_source = split_heads(rows_source, self.heads)
        h_target = split_heads(rows_target, self.heads)
        walked, features, pull_features = edge_inputs(
            adjacency, edge_features, self.edge_dim, self_loops=self.self_loops, dtype=rows_source.dtype
        )
        edge_map = self._edge_map()
        keep = self._message_factors(h_source, seed)
        call = EdgeCall(
            "additive",
            walked,
            einsum("nhd,hd->nh", h_target, self.att_dst[0])[:, :, None],
            einsum("nhd,hd->nh", h_source, self.att_src[0])[:, :, None],
            h_source if keep is None else h_source * keep,
            edge_bias=None if features is None else matmul(features, edge_map),
            negative_slope=self.negative_slope,
            **dropout_options(self.dropout_p, seed),
        )

        def pullback(grads_of_call: Any) -> tuple[Any, Array | None, Grads]:
            dscore_target, dscore_source = grads_of_call.q, grads_of_call.k  # (nodes, heads, 1)
            dmessage = grads_of_call.v if keep is None else grads_of_call.v * keep
            dh_source = dmessage + dscore_source * self.att_src
            dh_target = dscore_target * self.att_dst
            dx, lin_grads = pull_lin(merge_heads(dh_source), merge_heads(dh_target))
            grads = join(("lin", lin_grads))
            grads["att_src"] = einsum("nh,nhd->hd", dscore_source[:, :, 0], h_source)[None]
            grads["att_dst"] = einsum("nh,nhd->hd", dscore_target[:, :, 0], h_target)[None]
            dedge_features = None
            if self.lin_edge is not None and self.att_edge is not None and features is not None:
                # edge_map[f, h] = sum over d of lin_edge.weight[h, d, f] * att_edge[h, d]
                dbias = grads_of_call.bias.astype(features.dtype, copy=False)
                dmap = matmul(features.T, dbias)
                weight = self.lin_edge.weight.reshape(self.heads, -1, features.shape[1])
                dweight = einsum("fh,hd->hdf", dmap, self.att_edge[0])
                grads["lin_edge.weight"] = dweight.reshape(self.lin_edge.weight.shape)
                grads["att_edge"] = einsum("fh,hdf->hd", dmap, weight)[None]
                dedge_features = pull_features(matmul(dbias, edge_map.T))
            return dx, dedge_features, grads

        return call, pullback

    def _message_factors(self, h: Array, seed: int | None) -> Array | None:
        """Dropout's factors of the summed features, 0 or 1 / (1 - p)."""
        p = self.message_dropout_p
        if seed is None or p == 0:
            return None
        keep: Array = array_module(h).asarray(keep_mask(fold_seed(seed, 0), h.shape, p).astype(h.dtype))
        return keep / h.dtype.type(1 - p) if p < 1 else keep

    def _edge_map(self) -> Any:
        """(edge_dim, heads): edge features to scores in one step, without num_edges × heads × out_dim."""
        if self.lin_edge is None or self.att_edge is None:
            return None
        weight = self.lin_edge.weight.reshape(self.heads, self.att_edge.shape[2], -1)
        return einsum("hdf,hd->fh", weight, self.att_edge[0])


__all__ = ["GATConv"]

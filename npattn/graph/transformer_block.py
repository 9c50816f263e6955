"""GraphTransformerBlock: a transformer block over the nodes of a graph."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.functional.dropout import fold_seed
from npattn.graph._inputs import both_ends, dropout_options
from npattn.graph.adjacency import Adjacency
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join
from npattn.nn.linear import Linear
from npattn.nn.mlp import MLP
from npattn.nn.norm import LayerNorm


@dataclass(init=False, eq=False, repr=False)
class GraphTransformerBlock(Layer):
    """``h = x + attention(norm(x))``, then ``y = h + mlp(norm(h))``: along edges, or among all nodes.

    With an adjacency every node attends to the nodes with an edge to it; without one, to all nodes, and what
    it knows of the graph is the bias (``ShortestPathBias``) and encodings added to x.

    Parameters
    ----------
    dim : int
        Features of a node; a multiple of heads.
    heads : int
    hidden_dim : int, optional
        Of the MLP; None is 4 · dim.
    dropout_p : float, default 0.0
        Dropout of the attention weights, active only in calls with ``seed=``.
    rng : numpy Generator
    dtype : default float32

    Raises
    ------
    ValueError
        When dim is not a multiple of heads.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.graph import Adjacency, GraphTransformerBlock
    >>> block = GraphTransformerBlock(8, heads=2, rng=np.random.default_rng(0))
    >>> x = np.ones((3, 8), np.float32)
    >>> block(x, Adjacency.from_edges([0, 1], [1, 2])).shape, block(x).shape
    ((3, 8), (3, 8))
    """

    takes_seed: ClassVar[bool] = True

    norm_attention: LayerNorm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    norm_mlp: LayerNorm
    mlp: MLP
    heads: int
    dropout_p: float

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden_dim: int | None = None,
        dropout_p: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim}, heads={heads}")
        rng = generator(rng)
        self.norm_attention = LayerNorm(dim, dtype=dtype)
        self.query, self.key, self.value, self.out = (
            Linear(dim, dim, rng=rng, dtype=dtype) for _ in range(4)
        )
        self.norm_mlp = LayerNorm(dim, dtype=dtype)
        self.mlp = MLP(dim, hidden_dim or 4 * dim, rng=rng, dtype=dtype)
        self.heads = heads
        self.dropout_p = dropout_p

    def __call__(
        self,
        x: Array,
        adjacency: Adjacency | None = None,
        *,
        bias: Array | None = None,
        seed: int | None = None,
    ) -> Array:
        """New features of the nodes.

        Parameters
        ----------
        x : (num_nodes, dim) ndarray
        adjacency : Adjacency, optional
            None attends among all nodes.
        bias : ndarray, optional
            Added to the logits: (num_edges, heads or 1) along edges, (heads or 1, num_nodes, num_nodes) among
            all nodes.
        seed : int, optional
            Turns dropout on.

        Returns
        -------
        y : (num_nodes, dim) ndarray
        """
        y: Array = self.vjp(x, adjacency, bias=bias, seed=seed)[0]
        return y

    def vjp(
        self,
        x: Array,
        adjacency: Adjacency | None = None,
        *,
        bias: Array | None = None,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Output and pullback ``dy -> (dx, grads)``; dx is (dx, dbias) when there is a bias."""
        normed, pull_norm = self.norm_attention.vjp(x)
        attended, pull_attention = self._attend(normed, adjacency, bias, seed)
        h = x + attended
        normed_mlp, pull_norm_mlp = self.norm_mlp.vjp(h)
        fed, pull_mlp = self.mlp.vjp(normed_mlp)

        def pullback(dy: Array) -> tuple[Any, Grads]:
            dnormed_mlp, mlp_grads = pull_mlp(dy)
            dh, norm_mlp_grads = pull_norm_mlp(dnormed_mlp)
            dh = dh + dy
            dnormed, dbias, attention_grads = pull_attention(dh)
            dx, norm_grads = pull_norm(dnormed)
            grads = join(
                ("norm_attention", norm_grads),
                *attention_grads,
                ("norm_mlp", norm_mlp_grads),
                ("mlp", mlp_grads),
            )
            dx = dx + dh
            return (dx if dbias is None else (dx, dbias)), grads

        return h + fed, pullback

    def _attend(
        self, x: Array, adjacency: Adjacency | None, bias: Array | None, seed: int | None
    ) -> tuple[Array, Pullback]:
        """Attention with its projections: (y, pullback), pullback(dy) -> (dx, dbias, named gradients)."""
        names = "query", "key", "value"
        projected, pulls = zip(*(getattr(self, name).vjp(x) for name in names), strict=True)
        rows = [array.reshape(len(x), self.heads, -1) for array in projected]
        options = dropout_options(self.dropout_p, None if seed is None else fold_seed(seed, 0))
        if adjacency is None:
            mixed, pull_heads = F.attention_vjp(*(r.swapaxes(0, 1) for r in rows), bias=bias, **options)
            mixed = mixed.swapaxes(0, 1)
        else:
            both_ends(x, adjacency)
            q, k, v = rows
            mixed, pull_heads = F.graph_attention_vjp(q, k, v, adjacency, edge_bias=bias, **options)
        y, pull_out = self.out.vjp(mixed.reshape(x.shape))

        def pullback(dy: Array) -> tuple[Array, Array | None, list[tuple[str, Grads]]]:
            dmixed, out_grads = pull_out(dy)
            dmixed = dmixed.reshape(mixed.shape)
            *drows, dbias = pull_heads(dmixed.swapaxes(0, 1) if adjacency is None else dmixed)[:4]
            if adjacency is None:
                drows = [array.swapaxes(0, 1) for array in drows]
            pulled = [pull(array.reshape(x.shape)) for pull, array in zip(pulls, drows, strict=True)]
            dx = pulled[0][0] + pulled[1][0] + pulled[2][0]
            named = [(name, grads) for name, (_, grads) in zip(names, pulled, strict=True)]
            return dx, dbias, [*named, ("out", out_grads)]

        return y, pullback


__all__ = ["GraphTransformerBlock"]

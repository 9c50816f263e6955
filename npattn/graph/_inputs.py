"""What the graph layers share: both ends' features, edge features with self-loops, heads joined."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array, Grads, Pullback
from npattn.functional._products import sum_rows
from npattn.graph.adjacency import Adjacency, incoming_mean
from npattn.nn.init import glorot_uniform
from npattn.nn.linear import Linear


class Ends(NamedTuple):
    """Features of the sending and of the receiving nodes."""

    source: Array  # (num_sources, in_dim)
    target: Array  # (num_targets, in_dim)
    is_pair: bool  # whether the caller gave two arrays

    def gradient(self, dsource: Array | None, dtarget: Array | None) -> Any:
        """What the caller's x gets: the sum, or the pair; None for a sparse array."""
        return (dsource, dtarget) if self.is_pair else plus(dsource, dtarget)


def both_ends(x: Any, adjacency: Adjacency) -> Ends:
    """Split x, (num_nodes, in_dim) or a pair of those for a bipartite adjacency.

    Raises
    ------
    TypeError
        When adjacency is no Adjacency.
    ValueError
        When x does not fit it.
    """
    if not isinstance(adjacency, Adjacency):
        raise TypeError(
            f"adjacency must be a npattn.graph.Adjacency, got {type(adjacency).__name__}; make one with "
            "Adjacency.from_networkx, from_scipy or from_edges"
        )
    is_pair = isinstance(x, tuple | list)
    if is_pair and len(x) != 2:
        raise ValueError(f"x must be an array or the pair (x_source, x_target), got {len(x)} arrays")
    if adjacency.is_bipartite and not is_pair:
        raise ValueError("a bipartite adjacency needs x = (x_source, x_target), got one array")
    source, target = x if is_pair else (x, x)
    ends = Ends(source, target, is_pair)
    counts = adjacency.num_sources, adjacency.num_targets
    for name, array, count in zip(
        ("x_source", "x_target") if is_pair else ("x", "x"), ends[:2], counts, strict=True
    ):
        if array.ndim != 2 or array.shape[0] != count:
            raise ValueError(
                f"{name} must be (num_nodes, in_dim) with {count} nodes, got shape {array.shape}"
            )
    return ends


def plus(a: Array | None, b: Array | None) -> Array | None:
    """The sum of two gradients of one array; None for a sparse array, which has none."""
    return None if a is None or b is None else a + b


def apply(linear: Linear, x: Any) -> tuple[Array, Pullback]:
    """``linear.vjp(x)``, for a sparse x too (scipy's, or cupyx's on the GPU), whose gradient is None."""
    if not hasattr(x, "tocsr"):
        return linear.vjp(x)
    if x.shape[1] != linear.weight.shape[1]:
        raise ValueError(f"x must be (num_nodes, {linear.weight.shape[1]}), got shape {tuple(x.shape)}")
    rows = x.tocsr()
    wide = accumulation_dtype(linear.weight.dtype)  # scipy knows no halves
    xp = array_module(linear.weight)
    y = xp.asarray(rows @ linear.weight.T.astype(wide, copy=False))
    if linear.bias is not None:
        y += linear.bias

    def pullback(dy: Array) -> tuple[None, Grads]:
        grads = {"weight": xp.ascontiguousarray((rows.T @ dy.astype(wide, copy=False)).T)}
        if linear.bias is not None:
            grads["bias"] = sum_rows(dy)
        return None, grads

    return y, pullback


def project(linear: Linear, ends: Ends) -> tuple[Array, Array, Callable[[Array, Array], tuple[Any, Grads]]]:
    """One linear map on both ends: (source rows, target rows, pullback of both).

    The same array on both ends is projected once. The pullback gives x's gradient (a pair for a pair).
    """
    source, pull_source = apply(linear, ends.source)
    if ends.target is ends.source:

        def pull_shared(dsource: Array, dtarget: Array) -> tuple[Any, Grads]:
            dx, grads = pull_source(dsource + dtarget)
            return (
                (dx, None if dx is None else array_module(dx).zeros_like(dx)) if ends.is_pair else dx
            ), grads

        return source, source, pull_shared
    target, pull_target = apply(linear, ends.target)

    def pullback(dsource: Array, dtarget: Array) -> tuple[Any, Grads]:
        dx_source, grads_source = pull_source(dsource)
        dx_target, grads_target = pull_target(dtarget)
        grads = {name: grads_source[name] + grads_target[name] for name in grads_source}
        return ends.gradient(dx_source, dx_target), grads

    return source, target, pullback


def edge_inputs(
    adjacency: Adjacency,
    edge_features: Array | None,
    edge_dim: int | None,
    *,
    self_loops: bool,
    dtype: Any,
) -> tuple[Adjacency, Array | None, Pullback]:
    """The adjacency to walk, with self-loops if asked, and the features of all its edges in ``dtype``.

    Returns
    -------
    adjacency : Adjacency
    features : (num_edges, edge_dim) ndarray or None
        Those of added loops are the mean of the node's incoming ones.
    pullback : callable
        dfeatures -> dedge_features.

    Raises
    ------
    ValueError
        When features are given without edge_dim, missing with it, or of another shape.
    """
    if edge_dim is None and edge_features is not None:
        raise ValueError("edge_features were given, but the layer was made without edge_dim: pass edge_dim=")
    walked = adjacency.with_self_loops() if self_loops else adjacency
    if edge_dim is None:
        return walked, None, lambda dfeatures: None
    if edge_features is None:
        raise ValueError(
            f"the layer was made with edge_dim={edge_dim}: pass edge_features (num_edges, {edge_dim})"
        )
    if edge_features.shape != (adjacency.num_edges, edge_dim):
        raise ValueError(
            f"edge_features must be (num_edges, edge_dim) = {(adjacency.num_edges, edge_dim)}, "
            f"got {edge_features.shape}"
        )
    own_dtype = edge_features.dtype
    features = edge_features.astype(dtype, copy=False)
    xp = array_module(edge_features)
    added = xp.asarray(adjacency.loopless_nodes) if self_loops else ()
    if len(added):
        features = xp.concatenate([features, incoming_mean(adjacency, features)[added]])

    def pullback(dfeatures: Array) -> Array:
        own = dfeatures[: adjacency.num_edges]
        if len(added):  # mean[v] = sum of features over the in-edges of v / their number
            dmean = xp.zeros((adjacency.num_targets, edge_dim), dfeatures.dtype)
            dmean[added] = dfeatures[adjacency.num_edges :]
            count = np.maximum(np.diff(adjacency.plan.row_ptr), 1).astype(accumulation_dtype(dfeatures.dtype))
            own = own + (dmean / xp.asarray(count)[:, None])[xp.asarray(adjacency.target)]
        return own.astype(own_dtype)

    return walked, features, pullback


def split_heads(rows: Array, heads: int) -> Array:
    """(nodes, heads · dim) -> (nodes, heads, dim)."""
    return rows.reshape(len(rows), heads, rows.shape[1] // heads)


def merge_heads(rows: Array) -> Array:
    """(nodes, heads, dim) -> (nodes, heads · dim)."""
    return rows.reshape(len(rows), rows.shape[1] * rows.shape[2])


def join_heads(out: Array, concat: bool) -> Array:
    """(nodes, heads, out_dim) -> (nodes, heads · out_dim), or the mean over heads (nodes, out_dim)."""
    return (
        merge_heads(out)
        if concat
        else out.mean(axis=1, dtype=accumulation_dtype(out.dtype)).astype(out.dtype, copy=False)
    )


def join_heads_pullback(dy: Array, heads: int, concat: bool) -> Array:
    """The transpose of ``join_heads``."""
    if concat:
        return split_heads(dy, heads)
    xp = array_module(dy)
    share: Array = xp.repeat((dy / dy.dtype.type(heads))[:, None, :], heads, axis=1)
    return share


def glorot_linear(
    in_dim: int, out_dim: int, *, bias: bool = False, rng: np.random.Generator, dtype: Any
) -> Linear:
    """A Linear whose weight is Glorot uniform and whose bias, if any, is uniform in ±1/√in_dim."""
    layer = Linear(in_dim, out_dim, bias=bias, rng=rng, dtype=dtype)
    layer.weight[...] = glorot_uniform(rng, layer.weight.shape, dtype)
    return layer


def dropout_options(dropout_p: float, seed: int | None) -> dict[str, Any]:
    """Dropout is active only with a seed."""
    return {"dropout_p": dropout_p if seed is not None else 0.0, "seed": seed}


def with_edges(dx: Any, dedge_features: Array | None) -> Any:
    """A layer's first gradient: dx, or (dx, dedge_features) when it was called with edge features."""
    return dx if dedge_features is None else (dx, dedge_features)

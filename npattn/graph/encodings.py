"""Where a node stands in its graph, as numbers: what a graph transformer adds to features or logits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._typing import Array, Grads, Pullback
from npattn.graph.adjacency import Adjacency
from npattn.nn.init import generator, normal
from npattn.nn.layer import Layer

#: Nodes walked at once by random_walk_encoding, whose scratch is num_nodes × this.
_BLOCK = 256

#: Below this many nodes the dense eigensolver is quicker and exact.
_DENSE_NODES = 256


def degree_encoding(adjacency: Adjacency) -> Array:
    """In-degree and out-degree of every node, parallel edges counted each.

    Parameters
    ----------
    adjacency : Adjacency
        Not bipartite.

    Returns
    -------
    degrees : (num_nodes, 2) int64 ndarray

    Raises
    ------
    ValueError
        When it is bipartite.

    Examples
    --------
    >>> from npattn.graph import Adjacency
    >>> degree_encoding(Adjacency.from_edges([0, 1, 0], [1, 2, 2])).tolist()
    [[0, 2], [1, 1], [2, 0]]
    """
    num_nodes = _num_nodes(adjacency)
    degrees = [np.bincount(ids, minlength=num_nodes) for ids in (adjacency.target, adjacency.source)]
    return np.stack(degrees, axis=1).astype(np.int64)


def random_walk_encoding(adjacency: Adjacency, steps: int) -> Array:
    """Probability that a random walk from a node is back after 1, 2, ..., ``steps`` steps.

    Column t - 1 is the diagonal of ``(D⁻¹A)^t``: a walker leaves a node by any of its out-edges with equal
    probability. It ends at a node without any.

    Parameters
    ----------
    adjacency : Adjacency
        Not bipartite.
    steps : int
        At least 1.

    Returns
    -------
    encoding : (num_nodes, steps) float64 ndarray

    Raises
    ------
    ValueError
        When it is bipartite or steps < 1.

    Notes
    -----
    Time O(num_nodes · num_edges · steps), memory O(num_nodes): powers are applied to 256 nodes at a time and
    never formed.

    References
    ----------
    Dwivedi et al., Graph Neural Networks with Learnable Structural and Positional Representations, ICLR 2022,
    equation 12.

    Examples
    --------
    A cycle of three in one direction is back after three steps, and only then:

    >>> from npattn.graph import Adjacency
    >>> random_walk_encoding(Adjacency.from_edges([0, 1, 2], [1, 2, 0]), 4)[0].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    num_nodes = _num_nodes(adjacency)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    from scipy.sparse import csr_array

    out_degree = np.bincount(adjacency.source, minlength=num_nodes)
    chance = 1.0 / out_degree[adjacency.source]
    edges = (adjacency.target, adjacency.source)
    step = csr_array((chance, edges), shape=(num_nodes, num_nodes))  # column u: where a walker at u goes
    encoding = np.zeros((num_nodes, steps))
    for first in range(0, num_nodes, _BLOCK):
        nodes = np.arange(first, min(first + _BLOCK, num_nodes))
        walkers = np.zeros((num_nodes, len(nodes)))
        walkers[nodes, nodes - first] = 1
        for t in range(steps):
            walkers = np.asarray(step @ walkers)
            encoding[nodes, t] = walkers[nodes, nodes - first]
    return encoding


def laplacian_encoding(adjacency: Adjacency, k: int) -> Array:
    """The k smoothest nontrivial eigenvectors of the normalised Laplacian ``I - D^(-1/2) A D^(-1/2)``.

    Parameters
    ----------
    adjacency : Adjacency
        Not bipartite. Directions are ignored: A counts the edges between two nodes either way, loops once.
    k : int
        At least 1. Where the graph has fewer than k + 1 nodes the last columns are 0.

    Returns
    -------
    encoding : (num_nodes, k) float64 ndarray
        Columns of length 1 by ascending eigenvalue, without the first. An eigenvector's sign is arbitrary;
        here its entry of largest magnitude (the first of them) is positive.

    Raises
    ------
    ValueError
        When it is bipartite or k < 1.

    Notes
    -----
    The same result on every call: Lanczos (``scipy.sparse.linalg.eigsh``) begins with a fixed vector, and up
    to 256 nodes are solved densely. Equal eigenvalues leave a rotation open, as for every such encoding;
    models that train on it flip signs at random. A node without edges has an eigenvalue of its own, 1.

    References
    ----------
    Dwivedi and Bresson, A Generalization of Transformer Networks to Graphs, 2021, section 2.

    Examples
    --------
    On a path the first one runs from one end to the other:

    >>> from npattn.graph import Adjacency
    >>> laplacian_encoding(Adjacency.from_edges([0, 1], [1, 2]), 1).round(4).ravel().tolist()
    [0.7071, 0.0, -0.7071]
    """
    num_nodes = _num_nodes(adjacency)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    from scipy.sparse import csr_array

    ends = adjacency.source, adjacency.target
    counts = csr_array((np.ones(adjacency.num_edges), ends), shape=(num_nodes, num_nodes))
    symmetric = (counts + counts.T) / 2
    degree: Array = np.asarray(symmetric.sum(axis=1))
    scale = np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0)
    smooth = csr_array(symmetric.multiply(scale[:, None]).multiply(scale[None, :]))  # I - L
    if num_nodes <= max(_DENSE_NODES, k + 2):
        vectors = np.linalg.eigh(np.eye(num_nodes) - smooth.toarray())[1] if num_nodes else np.zeros((0, 0))
    else:
        from scipy.sparse.linalg import eigsh

        start = np.random.default_rng(0).standard_normal(num_nodes)
        values, vectors = eigsh(smooth, k=k + 1, which="LA", v0=start)
        vectors = vectors[:, np.argsort(-values, kind="stable")]
    chosen = vectors[:, 1 : k + 1]
    encoding = np.zeros((num_nodes, k))
    if chosen.size:
        magnitude = np.abs(chosen).round(10)  # rounding must not decide between equal entries
        sign = np.sign(chosen[magnitude.argmax(axis=0), np.arange(chosen.shape[1])])
        encoding[:, : chosen.shape[1]] = chosen * sign
    return encoding + 0.0  # no negative zeros


def shortest_path_distances(adjacency: Adjacency, max_distance: int) -> Array:
    """Number of edges on a shortest path from every node to every other, up to ``max_distance``.

    Parameters
    ----------
    adjacency : Adjacency
        Not bipartite.
    max_distance : int
        At least 1.

    Returns
    -------
    distances : (num_nodes, num_nodes) int64 ndarray
        ``distances[v, u]`` is the distance from u to v along edges, laid out as attention's logits are: row v
        attends to column u. ``max_distance + 1`` stands for everything farther or unreachable.

    Raises
    ------
    ValueError
        When it is bipartite or max_distance < 1.

    Examples
    --------
    >>> from npattn.graph import Adjacency
    >>> shortest_path_distances(Adjacency.from_edges([0, 1, 2], [1, 2, 3]), 2).tolist()
    [[0, 3, 3, 3], [1, 0, 3, 3], [2, 1, 0, 3], [3, 2, 1, 0]]
    """
    num_nodes = _num_nodes(adjacency)
    if max_distance < 1:
        raise ValueError(f"max_distance must be at least 1, got {max_distance}")
    from scipy.sparse import csr_array

    # reached[v, u]: a walk of t edges or fewer goes from u to v
    pairs = np.ones(adjacency.num_edges, np.float32), (adjacency.target, adjacency.source)
    edges = csr_array(pairs, shape=(num_nodes, num_nodes))
    distances = np.full((num_nodes, num_nodes), max_distance + 1, np.int64)
    reached = np.eye(num_nodes, dtype=bool)
    frontier = reached
    for distance in range(max_distance + 1):
        distances[frontier] = distance
        grown = (edges @ frontier.astype(np.float32)) > 0
        frontier = grown & ~reached
        reached = reached | grown
        if distance == max_distance or not frontier.any():
            break
    return distances


@dataclass(init=False, eq=False, repr=False)
class ShortestPathBias(Layer):
    """A learned number per head and distance, added to attention's logits: Graphormer's spatial encoding.

    Parameters
    ----------
    heads : int
    max_distance : int
        As given to ``shortest_path_distances``.
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    weight : (max_distance + 2, heads)
        Normal with standard deviation 0.02.

    References
    ----------
    Ying et al., Do Transformers Really Perform Bad for Graph Representation?, NeurIPS 2021, equation 6.

    Examples
    --------
    >>> from npattn.graph import Adjacency, ShortestPathBias, shortest_path_distances
    >>> distances = shortest_path_distances(Adjacency.from_edges([0, 1], [1, 2]), 4)
    >>> ShortestPathBias(heads=2, max_distance=4, rng=np.random.default_rng(0))(distances).shape
    (2, 3, 3)
    """

    weight: Array

    def __init__(
        self, heads: int, max_distance: int, *, rng: np.random.Generator, dtype: Any = np.float32
    ) -> None:
        self.weight = normal(generator(rng), (max_distance + 2, heads), 0.02, dtype)

    def __call__(self, distances: Array) -> Array:
        """Bias (heads, num_nodes, num_nodes) of distances (num_nodes, num_nodes)."""
        if distances.size and not 0 <= distances.min() <= distances.max() < len(self.weight):
            raise ValueError(
                f"distances must be in 0 .. {len(self.weight) - 1}, got {distances.min()} .. "
                f"{distances.max()}: use the same max_distance for both"
            )
        return np.moveaxis(self.weight[distances], -1, 0)

    def vjp(self, distances: Array) -> tuple[Array, Pullback]:
        """Output and pullback; distances have no gradient."""

        def pullback(dbias: Array) -> tuple[None, Grads]:
            flat = distances.ravel()
            rows = [np.bincount(flat, d.ravel(), minlength=len(self.weight)) for d in dbias]
            return None, {"weight": np.stack(rows, axis=1).astype(self.weight.dtype)}

        return self(distances), pullback


def _num_nodes(adjacency: Adjacency) -> int:
    if not isinstance(adjacency, Adjacency):
        raise TypeError(f"adjacency must be a npattn.graph.Adjacency, got {type(adjacency).__name__}")
    if adjacency.is_bipartite:
        raise ValueError("a bipartite adjacency has two kinds of nodes; this encoding needs one")
    return adjacency.num_targets


__all__ = [
    "ShortestPathBias",
    "degree_encoding",
    "laplacian_encoding",
    "random_walk_encoding",
    "shortest_path_distances",
]

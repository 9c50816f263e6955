"""Positional encodings and the graph-transformer block."""

import networkx as nx
import numpy as np
import pytest

from npattn import functional as F
from npattn.graph import (
    Adjacency,
    GraphTransformerBlock,
    ShortestPathBias,
    degree_encoding,
    laplacian_encoding,
    random_walk_encoding,
    shortest_path_distances,
)
from npattn.testing import check_vjp


@pytest.fixture(scope="module")
def karate():
    G = nx.karate_club_graph()
    return G, Adjacency.from_networkx(G)


def test_degrees_count_parallel_edges_and_loops():
    graph = Adjacency.from_edges([0, 0, 1, 2], [1, 1, 1, 0], 4)
    assert degree_encoding(graph).tolist() == [[1, 2], [3, 1], [0, 1], [0, 0]]


def test_random_walk_is_the_diagonal_of_the_powers(karate):
    G, graph = karate
    A = nx.to_numpy_array(G, weight=None)
    P = A / A.sum(1, keepdims=True)
    expected = np.stack([np.diag(np.linalg.matrix_power(P, t)) for t in range(1, 6)], axis=1)
    np.testing.assert_allclose(random_walk_encoding(graph, 5), expected, atol=1e-14)


def test_random_walk_ends_at_a_node_without_way_out():
    assert random_walk_encoding(Adjacency.from_edges([0], [1], 3), 3).tolist() == [[0, 0, 0]] * 3


def test_laplacian_vectors_are_eigenvectors_in_ascending_order(karate):
    G, graph = karate
    L = nx.normalized_laplacian_matrix(G, weight=None).toarray()
    vectors = laplacian_encoding(graph, 6)
    values = np.linalg.eigvalsh(L)[1:7]
    np.testing.assert_allclose(L @ vectors, vectors * values, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=0), 1)
    assert (vectors[np.abs(vectors).argmax(axis=0), range(6)] > 0).all()


def test_large_graphs_take_lanczos_and_give_the_same_twice():
    G = nx.random_geometric_graph(400, 0.12, seed=1)
    graph = Adjacency.from_networkx(G)
    first, second = laplacian_encoding(graph, 4), laplacian_encoding(graph, 4)
    np.testing.assert_array_equal(first, second)
    L = nx.normalized_laplacian_matrix(G).toarray()
    values = np.linalg.eigvalsh(L)[1:5]
    np.testing.assert_allclose(L @ first, first * values, atol=1e-6)


def test_laplacian_pads_small_graphs_with_zeros():
    assert laplacian_encoding(Adjacency.from_edges([0], [1]), 3)[:, 1:].tolist() == [[0, 0], [0, 0]]
    assert laplacian_encoding(Adjacency.from_edges([], []), 3).shape == (0, 3)
    assert np.isfinite(laplacian_encoding(Adjacency.from_edges([], [], 4), 2)).all()


def test_distances_are_networkx_ones():
    G = nx.gnp_random_graph(25, 0.07, seed=3, directed=True)
    distances = shortest_path_distances(Adjacency.from_networkx(G), 4)
    paths = dict(nx.all_pairs_shortest_path_length(G))
    for u in G:
        for v in G:
            assert distances[v, u] == min(paths[u].get(v, 5), 5)


def test_encodings_refuse_bipartite_graphs_and_bad_counts():
    bipartite = Adjacency.from_edges([0], [0], (2, 1))
    for call in (degree_encoding, lambda a: laplacian_encoding(a, 1), lambda a: random_walk_encoding(a, 1)):
        with pytest.raises(ValueError, match="bipartite"):
            call(bipartite)
    graph = Adjacency.from_edges([0], [1])
    for call in (laplacian_encoding, random_walk_encoding, shortest_path_distances):
        with pytest.raises(ValueError, match="at least 1"):
            call(graph, 0)
    with pytest.raises(TypeError, match="Adjacency"):
        degree_encoding(np.eye(3))


def test_shortest_path_bias_gradient_and_range(karate):
    _, graph = karate
    distances = shortest_path_distances(graph, 3)
    layer = ShortestPathBias(2, 3, rng=np.random.default_rng(0), dtype=np.float64)

    def f_vjp(weight):
        layer.weight[...] = weight
        bias, pullback = layer.vjp(distances)
        return bias.copy(), lambda dy: pullback(dy)[1]["weight"]

    check_vjp(f_vjp, [layer.weight.copy()])
    with pytest.raises(ValueError, match="max_distance"):
        layer(shortest_path_distances(graph, 9) + 2)


def block_vjp(block, *inputs, adjacency, seed):
    """The block as a function of x, bias and its parameters."""

    def f_vjp(x, bias, *values):
        block.load_parameters(dict(zip(block.named_parameters(), values, strict=True)))
        y, pullback = block.vjp(x, adjacency, bias=bias, seed=seed)

        def pull(dy):
            dx, grads = pullback(dy)
            dx, dbias = (dx, None) if bias is None else dx
            return dx, dbias, *grads.values()

        return y, pull

    values = [p.copy() for p in block.named_parameters().values()]
    check_vjp(f_vjp, [*inputs, *values], names=["x", "bias", *block.named_parameters()])


@pytest.mark.parametrize("along_edges", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("seed", [None, 4])
def test_block_gradients(along_edges, with_bias, seed):
    rng = np.random.default_rng(0)
    graph = Adjacency.from_edges(rng.integers(7, size=20), rng.integers(6, size=20), 7)
    block = GraphTransformerBlock(6, 2, hidden_dim=5, dropout_p=0.3, rng=rng, dtype=np.float64)
    shape = (20, 2) if along_edges else (2, 7, 7)
    bias = rng.standard_normal(shape) if with_bias else None
    block_vjp(block, rng.standard_normal((7, 6)), bias, adjacency=graph if along_edges else None, seed=seed)


def test_block_along_all_edges_is_the_block_among_all_nodes():
    rng = np.random.default_rng(1)
    source, target = np.divmod(np.arange(25), 5)
    graph = Adjacency.from_edges(source, target)
    block = GraphTransformerBlock(8, 2, rng=rng, dtype=np.float64)
    x = rng.standard_normal((5, 8))
    np.testing.assert_allclose(block(x, graph), block(x), rtol=1e-12)
    names = list(block.named_parameters())
    assert names[:3] == ["norm_attention.weight", "norm_attention.bias", "query.weight"]
    assert F.attention is not None
    with pytest.raises(ValueError, match="multiple of heads"):
        GraphTransformerBlock(7, 2, rng=rng)

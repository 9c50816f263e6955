"""Graphs of every kind and in every format become the same Adjacency, or a ValueError that says why not."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npattn
from npattn.graph import Adjacency

QUICK = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def edge_lists(draw, most_nodes=12):
    nodes = draw(st.integers(1, most_nodes))
    node = st.integers(0, nodes - 1)
    return nodes, draw(st.lists(st.tuples(node, node), max_size=40))


labels = st.one_of(
    st.integers(-100, 100),
    st.text(max_size=4),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.booleans(),
    st.frozensets(st.integers(0, 3), max_size=2),
)


@QUICK
@given(graph=edge_lists())
def test_edges_come_back_as_they_were_given(graph):
    nodes, edges = graph
    source, target = [u for u, _ in edges], [v for _, v in edges]
    adjacency = Adjacency.from_edges(source, target, nodes)
    assert [edge[:2] for edge in adjacency.edges()] == edges
    assert adjacency.num_nodes == nodes
    assert adjacency.reverse().reverse().edges() == adjacency.edges()


@QUICK
@given(
    graph=edge_lists(), form=st.sampled_from(["coo", "csr", "csc", "lil", "dok", "bsr"]), array=st.booleans()
)
def test_scipy_matrices_give_each_stored_entry_as_one_edge(graph, form, array):
    nodes, edges = graph
    edges = sorted(set(edges))
    values = np.arange(1.0, len(edges) + 1)
    places = ([u for u, _ in edges], [v for _, v in edges])
    make = scipy.sparse.coo_array if array else scipy.sparse.coo_matrix
    matrix = make((values, places), shape=(nodes, nodes)).asformat(form)
    adjacency = Adjacency.from_scipy(matrix)
    found = dict(
        zip([e[:2] for e in adjacency.edges()], adjacency.edge_attrs["weight"].tolist(), strict=True)
    )
    expected = dict(zip(edges, values.tolist(), strict=True))
    if form == "bsr":  # stores whole blocks: zeros among them are edges too
        assert {edge: found[edge] for edge in expected} == expected
    else:
        assert found == expected


@QUICK
@given(
    kind=st.sampled_from([nx.Graph, nx.DiGraph, nx.MultiGraph, nx.MultiDiGraph]),
    names=st.lists(labels, unique=True, min_size=1, max_size=8),
    pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.floats(-9, 9)), max_size=25),
)
def test_networkx_graphs_keep_nodes_edges_keys_and_weights(kind, names, pairs):
    graph = kind()
    graph.add_nodes_from(names)
    for u, v, weight in pairs:
        graph.add_edge(names[u % len(names)], names[v % len(names)], w=weight)
    adjacency = Adjacency.from_networkx(graph, edge_attrs=["w"])
    assert list(adjacency.nodes) == list(graph.nodes)
    expected = []
    for u, v, *rest in graph.edges(keys=True) if graph.is_multigraph() else graph.edges():
        weight = graph.edges[(u, v, *rest)]["w"]
        expected.append(((u, v, *rest), weight))
        if not graph.is_directed() and u != v:
            expected.append(((v, u, *rest), weight))
    found = list(zip(adjacency.edges(), adjacency.edge_attrs["w"].tolist(), strict=True))
    assert sorted(found, key=repr) == sorted(expected, key=repr)


@QUICK
@given(graph=edge_lists(), seed=st.integers(0, 2**32 - 1))
def test_attention_over_any_graph_is_attention_under_its_mask(graph, seed):
    nodes, edges = graph
    edges = sorted(set(edges), key=lambda edge: hash((edge, seed)))  # no parallel edges, any order
    adjacency = Adjacency.from_edges([u for u, _ in edges], [v for _, v in edges], nodes)
    query, key, value = np.random.default_rng(seed).standard_normal((3, nodes, 2, 5))
    visible = np.zeros((nodes, nodes), bool)
    visible[[v for _, v in edges], [u for u, _ in edges]] = True  # v attends to u
    dense = npattn.attention(*(x.swapaxes(0, 1) for x in (query, key, value)), mask=visible).swapaxes(0, 1)
    np.testing.assert_allclose(
        npattn.graph_attention(query, key, value, adjacency), dense, rtol=1e-10, atol=1e-12
    )
    masked = npattn.attention(*(x.swapaxes(0, 1) for x in (query, key, value)), mask=adjacency.to_mask())
    np.testing.assert_allclose(masked.swapaxes(0, 1), dense, rtol=1e-10, atol=1e-12)


anything = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-3, 9), st.floats(), st.text(max_size=2), st.none()), max_size=5),
    st.builds(lambda n: np.zeros((n, 2)), st.integers(0, 3)),
    st.builds(lambda n: np.arange(n, dtype=np.uint8), st.integers(0, 5)),
)


@settings(QUICK, max_examples=300)
@given(source=anything, target=anything, nodes=st.one_of(anything, st.tuples(anything, anything)))
def test_wrong_edges_are_a_value_or_type_error(source, target, nodes):
    try:
        adjacency = Adjacency.from_edges(source, target, nodes)
    except (ValueError, TypeError) as error:
        refusal = str(error)
    else:
        assert len(adjacency.edges()) == adjacency.num_edges
        return
    assert len(refusal) > 15


@pytest.mark.parametrize("wrong", [np.zeros((2, 3)), scipy.sparse.csr_array((2, 3)), "graph", None, 3])
def test_wrong_matrices_are_a_value_or_type_error(wrong):
    with pytest.raises((ValueError, TypeError)):
        Adjacency.from_scipy(wrong)
    with pytest.raises((ValueError, TypeError)):
        Adjacency.from_networkx(wrong)

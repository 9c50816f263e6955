"""Node order, edge order, direction, labels, keys, attributes: every rule of Adjacency."""

import copy
import pickle

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp

from npattn.graph import Adjacency
from npattn.plans.edges import check_edge_plan


def test_directed_edge_goes_from_source_to_target():
    graph = Adjacency.from_networkx(nx.DiGraph([("a", "b")]))
    assert (graph.source.tolist(), graph.target.tolist()) == ([0], [1])
    assert graph.edges() == [("a", "b")]
    assert graph.source.dtype == graph.target.dtype == np.int64


def test_undirected_edge_is_two_directed_ones_in_a_row():
    G = nx.Graph()
    G.add_edge("x", "y", w=1.0)
    G.add_edge("z", "y", w=2.0)
    graph = Adjacency.from_networkx(G, edge_attrs="w")
    first, second = list(G.edges)
    assert graph.edges() == [first, first[::-1], second, second[::-1]]
    assert graph.edge_attrs["w"].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_undirected_self_loop_is_one_edge():
    graph = Adjacency.from_networkx(nx.Graph([(1, 1), (1, 2)]))
    assert graph.edges() == [(1, 1), (1, 2), (2, 1)]


def test_node_order_is_insertion_order_not_sorted():
    G = nx.DiGraph()
    G.add_nodes_from(["z", 3, ("t", 1), "n", frozenset({1})])
    G.add_edge(3, "z")
    graph = Adjacency.from_networkx(G)
    assert list(graph.nodes) == list(G)
    assert graph.nodes[graph.source[0]] == 3


def test_nodelist_gives_order():
    G = nx.DiGraph([("a", "b"), ("b", "c")])
    graph = Adjacency.from_networkx(G, nodelist=["c", "b", "a"])
    assert list(graph.nodes) == ["c", "b", "a"]
    assert graph.edges() == [("a", "b"), ("b", "c")]
    assert graph.source.tolist() == [2, 1]


def test_partial_nodelist_is_the_induced_subgraph():
    graph = Adjacency.from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a")]), nodelist=["c", "a"])
    assert graph.edges() == [("c", "a")]


@pytest.mark.parametrize(
    ("nodelist", "named"), [(["a", "q"], "'q'"), (["a", "b", "a"], "'a'"), ([["unhashable"]], "unhashable")]
)
def test_bad_nodelist_names_the_labels(nodelist, named):
    with pytest.raises(ValueError, match=named):
        Adjacency.from_networkx(nx.DiGraph([("a", "b")]), nodelist=nodelist)


def test_multigraph_keeps_parallel_edges_and_keys():
    G = nx.MultiDiGraph()
    G.add_edge("a", "b", key="red")
    G.add_edge("a", "b", key="blue")
    G.add_edge("b", "a")
    graph = Adjacency.from_networkx(G)
    assert graph.edges() == [("a", "b", "red"), ("a", "b", "blue"), ("b", "a", 0)]
    assert graph.num_edges == 3


def test_undirected_multigraph_gives_both_directions_with_the_key():
    G = nx.MultiGraph()
    G.add_edge(0, 1, key=7, w=3)
    G.add_edge(0, 1, key=8, w=4)
    graph = Adjacency.from_networkx(G, edge_attrs=["w"])
    assert graph.edges() == [(0, 1, 7), (1, 0, 7), (0, 1, 8), (1, 0, 8)]
    assert graph.edge_attrs["w"].tolist() == [3, 3, 4, 4]


def test_zero_weight_is_an_edge():
    G = nx.DiGraph()
    G.add_edge(0, 1, weight=0)
    assert Adjacency.from_networkx(G, edge_attrs="weight").edge_attrs["weight"].tolist() == [0.0]


def test_isolated_nodes_and_empty_graphs():
    G = nx.Graph()
    assert Adjacency.from_networkx(G).num_nodes == 0
    G.add_nodes_from("abc")
    graph = Adjacency.from_networkx(G, edge_attrs="w")
    assert (graph.num_nodes, graph.num_edges, graph.edges()) == (3, 0, [])
    assert graph.edge_attrs["w"].shape == (0,)
    assert Adjacency.from_edges([], []).num_nodes == 0
    check_edge_plan(Adjacency.from_edges([], []).plan)


def test_a_changed_graph_does_not_change_the_adjacency():
    G = nx.DiGraph([("a", "b")])
    graph = Adjacency.from_networkx(G)
    G.add_edge("b", "c")
    assert graph.edges() == [("a", "b")]
    assert Adjacency.from_networkx(G).num_edges == 2
    ids = np.array([0, 1])
    graph = Adjacency.from_edges(ids, ids)
    ids[0] = 1
    assert graph.source.tolist() == [0, 1]
    matrix = sp.csr_array(np.array([[0.0, 1.0], [0.0, 0.0]]))
    graph = Adjacency.from_scipy(matrix)
    matrix.data[0] = 9
    matrix.indices[0] = 0
    assert (graph.edges(), graph.edge_attrs["weight"].tolist()) == ([(0, 1)], [1.0])
    with pytest.raises(ValueError, match="read-only"):
        graph.source[0] = 1


def test_not_a_networkx_graph_is_a_type_error():
    with pytest.raises(TypeError, match="networkx"):
        Adjacency.from_networkx([(0, 1)])


# --- attributes ---------------------------------------------------------------------------------------------


def attributed(*values):
    G = nx.DiGraph()
    for index, value in enumerate(values):
        if value is ...:
            G.add_edge(index, index + 1)
        else:
            G.add_edge(index, index + 1, a=value)
    return G


def test_missing_attribute_is_named():
    with pytest.raises(ValueError, match=r"\(1, 2\).*'a'"):
        Adjacency.from_networkx(attributed(1, ...), edge_attrs="a")


def test_default_serves_absent_attributes_only():
    graph = Adjacency.from_networkx(attributed(1, ..., True), edge_attrs="a", default=0.5)
    assert graph.edge_attrs["a"].tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("bad", [None, "3", b"3", {"x": 1}, 1j, object(), ["a"], [None, 1.0]])
@pytest.mark.parametrize("default", [None, 1.0])
def test_non_numeric_attribute_is_an_error_even_with_default(bad, default):
    with pytest.raises(ValueError, match="'a'"):
        Adjacency.from_networkx(attributed(1, bad), edge_attrs="a", default=default)


def test_vector_attributes_and_several_names():
    G = attributed([1, 2], np.array([3.0, 4.0]), ...)
    nx.set_edge_attributes(G, 7, "b")
    graph = Adjacency.from_networkx(G, edge_attrs=("a", "b"), default=[0, -1])
    assert graph.edge_attrs["a"].tolist() == [[1, 2], [3, 4], [0, -1]]
    assert graph.edge_attrs["b"].tolist() == [7, 7, 7]
    assert set(graph.edge_attrs) == {"a", "b"}
    scalar_default = Adjacency.from_networkx(G, edge_attrs="a", default=2)
    assert scalar_default.edge_attrs["a"][2].tolist() == [2, 2]


@pytest.mark.parametrize("values", [([1, 2], [1, 2, 3]), (1, [1, 2]), ([[1], [2, 3]],)])
def test_vectors_of_different_lengths_are_an_error(values):
    with pytest.raises(ValueError, match="'a'"):
        Adjacency.from_networkx(attributed(*values), edge_attrs="a")


# --- scipy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [sp.csr_array, sp.csc_array, sp.coo_array, sp.csr_matrix, sp.lil_matrix, sp.dok_array]
)
def test_entry_u_v_is_an_edge_from_u_to_v(make):
    matrix = make(np.array([[0.0, 2.0, 0.0], [0.0, 5.0, 3.0], [4.0, 0.0, 0.0]]))
    graph = Adjacency.from_scipy(matrix)
    found = dict(zip(graph.edges(), graph.edge_attrs["weight"].tolist(), strict=True))
    assert found == {(0, 1): 2.0, (1, 1): 5.0, (1, 2): 3.0, (2, 0): 4.0}


def test_stored_zeros_and_duplicates_are_edges_in_storage_order():
    data, row, col = [0.0, 7.0, 1.0, 2.0], [2, 0, 2, 2], [1, 1, 0, 1]
    graph = Adjacency.from_scipy(sp.coo_array((data, (row, col)), shape=(3, 3)))
    assert graph.edges() == [(2, 1), (0, 1), (2, 0), (2, 1)]
    assert graph.edge_attrs["weight"].tolist() == data
    unsorted = sp.csr_array((np.array([1.0, 2.0]), np.array([2, 0]), np.array([0, 2, 2, 2])), shape=(3, 3))
    assert Adjacency.from_scipy(unsorted).edges() == [(0, 2), (0, 0)]


def test_float32_values_stay_float32_and_bools_become_numbers():
    assert Adjacency.from_scipy(sp.eye_array(2, dtype=np.float32)).edge_attrs["weight"].dtype == np.float32
    assert Adjacency.from_scipy(sp.csr_array(np.eye(2, dtype=bool))).edge_attrs["weight"].tolist() == [
        1.0,
        1.0,
    ]


def test_non_square_matrix_names_its_shape():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        Adjacency.from_scipy(sp.csr_array((2, 3)))


@pytest.mark.parametrize("wrong", [np.eye(2), [[0, 1], [1, 0]], nx.Graph()])
def test_no_sparse_matrix_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="scipy sparse"):
        Adjacency.from_scipy(wrong)


def test_complex_values_are_an_error():
    with pytest.raises(ValueError, match="complex"):
        Adjacency.from_scipy(sp.csr_array(np.eye(2) * 1j))


# --- arrays -------------------------------------------------------------------------------------------------


def test_num_nodes_is_one_more_than_the_highest_id():
    assert Adjacency.from_edges([0, 5], [1, 2]).num_nodes == 6


@pytest.mark.parametrize(
    ("source", "target", "num_nodes", "named"),
    [
        ([0, 3], [1, 1], 3, r"source\[1\] = 3"),
        ([0, 1], [1, -1], None, r"target\[1\] = -1"),
        ([0, 1], [1, 2], (5, 2), r"target\[1\] = 2"),
        ([5], [0], (5, 2), r"source\[0\] = 5"),
        ([0], [0], 0, r"source\[0\] = 0"),
        ([2**40], [0], 10, str(2**40)),
    ],
)
def test_id_out_of_range_is_named(source, target, num_nodes, named):
    with pytest.raises(ValueError, match=named):
        Adjacency.from_edges(source, target, num_nodes)


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ([0, 1], [1], ValueError),
        ([[0]], [[0]], ValueError),
        ([0.0], [1.0], TypeError),
        ([True], [False], TypeError),
        (["a"], ["b"], TypeError),
    ],
)
def test_bad_edge_arrays(source, target, error):
    with pytest.raises(error):
        Adjacency.from_edges(source, target)


@pytest.mark.parametrize(
    ("num_nodes", "error"), [(-1, ValueError), (2.0, TypeError), ((1, 2, 3), ValueError)]
)
def test_bad_num_nodes(num_nodes, error):
    with pytest.raises(error):
        Adjacency.from_edges([0], [0], num_nodes)


def test_bipartite_counts_are_a_pair():
    graph = Adjacency.from_edges(np.array([4, 0], np.uint8), [1, 0], num_nodes=(5, 2))
    assert graph.num_nodes == (5, 2)
    assert graph.is_bipartite
    assert [list(nodes) for nodes in graph.nodes] == [[0, 1, 2, 3, 4], [0, 1]]
    assert graph.reverse().num_nodes == (2, 5)
    assert graph.reverse().edges() == [(1, 4), (0, 0)]
    check_edge_plan(graph.plan)


# --- derived graphs -----------------------------------------------------------------------------------------


def test_self_loops_are_added_behind_in_node_order_to_nodes_without():
    graph = Adjacency.from_edges([1, 2, 0], [1, 0, 2], num_nodes=4)
    looped = graph.with_self_loops()
    assert looped.edges() == [(1, 1), (2, 0), (0, 2), (0, 0), (2, 2), (3, 3)]
    assert looped.with_self_loops().edges() == looped.edges()
    assert graph.num_edges == 3


def test_added_loop_has_the_mean_of_incoming_attributes():
    G = nx.MultiDiGraph()
    G.add_nodes_from("abc")
    G.add_edge("a", "b", w=[1.0, 5.0])
    G.add_edge("c", "b", key="k", w=[3.0, 1.0])
    G.add_edge("c", "c", w=[8.0, 8.0])
    looped = Adjacency.from_networkx(G, edge_attrs="w").with_self_loops()
    assert looped.edges()[3:] == [("a", "a", 0), ("b", "b", 0)]
    assert looped.edge_attrs["w"][2:].tolist() == [[8, 8], [0, 0], [2, 3]]


def test_parallel_loops_are_kept():
    graph = Adjacency.from_edges([0, 0], [0, 0])
    assert graph.with_self_loops().num_edges == 2


def test_reverse_keeps_order_keys_and_attributes():
    G = nx.MultiDiGraph()
    G.add_edge("a", "b", key="k", w=2)
    G.add_edge("b", "c", key="l", w=3)
    graph = Adjacency.from_networkx(G, edge_attrs="w")
    back = graph.reverse()
    assert back.edges() == [("b", "a", "k"), ("c", "b", "l")]
    assert list(back.nodes) == list(graph.nodes)
    assert back.edge_attrs["w"].tolist() == [2, 3]
    assert back.reverse().edges() == graph.edges()


def test_mask_shows_key_u_to_query_v():
    graph = Adjacency.from_edges([0, 2], [1, 1], num_nodes=3)
    dense = graph.to_mask().to_dense(3, 3).reshape(3, 3)
    assert dense.tolist() == [[False] * 3, [True, False, True], [False] * 3]
    bipartite = Adjacency.from_edges([3, 0], [1, 0], num_nodes=(4, 2))
    assert np.argwhere(bipartite.to_mask().to_dense(2, 4).reshape(2, 4)).tolist() == [[0, 0], [1, 3]]


def test_parallel_edges_have_no_mask():
    with pytest.raises(ValueError, match="parallel"):
        Adjacency.from_edges([0, 0], [1, 1]).to_mask()


def test_pickled_and_copied_adjacency_is_the_same_and_immutable():
    """edge_attrs is a mappingproxy, which neither pickle nor copy takes: both failed."""
    G = nx.MultiGraph()
    G.add_edge("a", "b", key="k", weight=2.0)
    made = Adjacency.from_networkx(G, edge_attrs=("weight",))
    bipartite = Adjacency.from_edges([0, 4], [1, 0], num_nodes=(5, 2))
    for graph in (made, made.with_self_loops(), bipartite):
        assert graph.plan.num_edges == graph.num_edges
        for twin in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), copy.copy(graph)):
            assert (twin.edges(), twin.nodes, twin.num_nodes) == (graph.edges(), graph.nodes, graph.num_nodes)
            assert {name: a.tolist() for name, a in twin.edge_attrs.items()} == {
                name: a.tolist() for name, a in graph.edge_attrs.items()
            }
            arrays = [twin.source, twin.target, *twin.edge_attrs.values()]
            assert not any(array.flags.writeable for array in arrays)


def test_integer_attribute_beyond_float64_is_named():
    with pytest.raises(ValueError, match=r"'w'.*float64"):
        Adjacency.from_networkx(nx.DiGraph([(0, 1, {"w": 10**400})]), edge_attrs=("w",))


def test_edge_values_go_back_onto_the_graph():
    G = nx.MultiDiGraph([("a", "b"), ("a", "b"), ("b", "a")])
    graph = Adjacency.from_networkx(G)
    nx.set_edge_attributes(G, graph.edge_values(np.array([1.0, 2.0, 3.0])), "attention")
    assert [d["attention"] for *_, d in G.edges(keys=True, data=True)] == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="one row per edge"):
        graph.edge_values(np.zeros(2))
    with pytest.raises(ValueError, match="parallel"):
        Adjacency.from_edges([0, 0], [1, 1]).edge_values(np.zeros(2))


@pytest.mark.parametrize("seed", range(5))
def test_plan_invariants_on_random_graphs(seed):
    rng = np.random.default_rng(seed)
    counts = int(rng.integers(1, 200)), int(rng.integers(1, 200))
    edges = int(rng.integers(0, 3000))
    source, target = rng.integers(counts[0], size=edges), rng.integers(counts[1], size=edges)
    target[: edges // 3] = 0
    check_edge_plan(Adjacency.from_edges(source, target, counts).plan)


def test_plan_of_more_than_65536_nodes_and_of_hubs():
    rng = np.random.default_rng(0)
    source, target = rng.integers(100_000, size=40_000), rng.integers(100_000, size=40_000)
    target[:20_000] = 99_999
    plan = Adjacency.from_edges(source, target, 100_000).plan
    check_edge_plan(plan)
    parts = plan.row_items[plan.row_items[:, 0] == 99_999, 4]
    assert parts.tolist() == [0, 1, 2]

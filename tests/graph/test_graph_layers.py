"""GATConv, GATv2Conv, TransformerConv: gradients of every option, and the rules PyG's numbers do not show."""

import inspect

import ml_dtypes
import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp

from npattn.functional.dropout import keep_mask
from npattn.graph import Adjacency, GATConv, GATv2Conv, TransformerConv
from npattn.graph.adjacency import incoming_mean
from npattn.testing import check_vjp

LAYERS = [GATConv, GATv2Conv, TransformerConv]


def string_graph(seed=0):
    """String labels, directed, parallel edges, self-loops, a hub, isolated nodes."""
    rng = np.random.default_rng(seed)
    G = nx.MultiDiGraph()
    names = [f"node {c}" for c in "hgfedcba"]
    G.add_nodes_from(names)
    for _ in range(20):
        G.add_edge(names[rng.integers(6)], names[rng.integers(6)])
    for name in names[:6]:
        G.add_edge(name, "node h")
    G.add_edge("node g", "node g")
    return Adjacency.from_networkx(G)


def check_layer(layer, adjacency, *inputs, edge_features=None, seed=None):
    """The gradient of x (or both x), edge features and all parameters."""
    names = list(layer.named_parameters())

    def f_vjp(*arguments):
        x = arguments[0] if len(inputs) == 1 else tuple(arguments[: len(inputs)])
        features = arguments[len(inputs)]
        layer.load_parameters(dict(zip(names, arguments[len(inputs) + 1 :], strict=True)))
        y, pullback = layer.vjp(x, adjacency, features, seed=seed)
        if seed is None:
            np.testing.assert_array_equal(layer(x, adjacency, features), y)

        def pull(dy):
            dx, grads = pullback(dy)
            assert list(grads) == names
            dx, dfeatures = (dx, None) if features is None else dx
            dx = dx if isinstance(dx, tuple) else (dx,)
            return *dx, dfeatures, *grads.values()

        return y, pull

    parameters = [p.copy() for p in layer.named_parameters().values()]
    x_names = ["x"] if len(inputs) == 1 else ["x_source", "x_target"]
    check_vjp(f_vjp, [*inputs, edge_features, *parameters], names=[*x_names, "edge_features", *names])


OPTIONS = {
    "plain": (LAYERS, {}),
    "mean": (LAYERS, {"concat": False}),
    "no_bias": (LAYERS, {"bias": False}),
    "edges": (LAYERS, {"edge_dim": 3}),
    "dropout": (LAYERS, {"dropout_p": 0.4}),
    "edges_dropout": (LAYERS, {"edge_dim": 2, "dropout_p": 0.5, "concat": False}),
    "residual": ([GATConv, GATv2Conv], {"residual": True}),
    "residual_mean": ([GATConv, GATv2Conv], {"residual": True, "concat": False, "bias": False}),
    "no_loops": ([GATConv, GATv2Conv], {"self_loops": False, "edge_dim": 3}),
    "messages": ([GATConv], {"message_dropout_p": 0.4, "dropout_p": 0.3}),
    "slope": ([GATConv, GATv2Conv], {"negative_slope": 0.7}),
    "shared": ([GATv2Conv], {"share_weights": True, "edge_dim": 3}),
    "beta": ([TransformerConv], {"beta": True}),
    "beta_mean_edges": ([TransformerConv], {"beta": True, "concat": False, "edge_dim": 3}),
    "rootless": ([TransformerConv], {"root_weight": False, "beta": True}),
}


@pytest.mark.parametrize(("layer", "name"), [(c, name) for name, (cs, _) in OPTIONS.items() for c in cs])
def test_gradients(layer, name):
    options = OPTIONS[name][1]
    rng = np.random.default_rng(3)
    adjacency = string_graph()
    made = layer(4, 3, 2, rng=rng, dtype=np.float64, **options)
    if getattr(made, "bias", None) is not None:
        made.bias[...] = rng.standard_normal(made.bias.shape)
    features = (
        rng.standard_normal((adjacency.num_edges, options["edge_dim"])) if "edge_dim" in options else None
    )
    seed = 11 if "dropout_p" in options else None
    check_layer(made, adjacency, rng.standard_normal((8, 4)), edge_features=features, seed=seed)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("edge_dim", [None, 2])
def test_gradients_on_bipartite_graphs(layer, edge_dim):
    rng = np.random.default_rng(4)
    adjacency = Adjacency.from_edges(rng.integers(6, size=15), rng.integers(3, size=15), (6, 4))
    made = layer(4, 3, 2, edge_dim=edge_dim, rng=rng, dtype=np.float64)
    features = None if edge_dim is None else rng.standard_normal((15, edge_dim))
    x = rng.standard_normal((6, 4)), rng.standard_normal((4, 4))
    check_layer(made, adjacency, *x, edge_features=features)
    with pytest.raises(ValueError, match="x_source, x_target"):
        made(x[0], adjacency, features)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_array_at_both_ends_of_a_pair(layer):
    rng = np.random.default_rng(4)
    made = layer(4, 3, 2, rng=rng, dtype=np.float64)
    adjacency, x = string_graph(), rng.standard_normal((8, 4))
    y, pullback = made.vjp((x, x), adjacency)
    np.testing.assert_array_equal(y, made(x, adjacency))
    dy = rng.standard_normal(y.shape)
    np.testing.assert_allclose(sum(pullback(dy)[0]), made.vjp(x, adjacency)[1](dy)[0], rtol=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_empty_and_edgeless_graphs(layer):
    made = layer(4, 3, 2, rng=np.random.default_rng(0), dtype=np.float64)
    assert made(np.zeros((0, 4)), Adjacency.from_edges([], [])).shape == (0, 6)
    y, pullback = made.vjp(np.ones((3, 4)), Adjacency.from_edges([], [], 3))
    assert np.isfinite(y).all()
    assert all(np.isfinite(g).all() for g in pullback(y)[1].values())


# --- self-loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_existing_loops_keep_their_features_and_added_ones_get_the_mean(layer):
    rng = np.random.default_rng(5)
    adjacency = Adjacency.from_edges([0, 1, 2, 1], [1, 1, 1, 0], 3)  # node 1 has a loop
    features = rng.standard_normal((4, 2))
    made = layer(4, 3, 2, edge_dim=2, rng=rng, dtype=np.float64)
    x = rng.standard_normal((3, 4))
    explicit = Adjacency.from_edges([0, 1, 2, 1, 0, 2], [1, 1, 1, 0, 0, 2], 3)
    all_features = np.concatenate([features, features[3:], np.zeros((1, 2))])
    np.testing.assert_allclose(made(x, adjacency, features), made(x, explicit, all_features), rtol=1e-13)
    assert made.weights(x, adjacency, features).shape == (6, 2)


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_sum_to_one_over_the_in_edges_and_know_no_dropout(layer):
    rng = np.random.default_rng(6)
    made = layer(4, 3, 2, dropout_p=0.9, rng=rng)
    adjacency = string_graph()
    walked = adjacency if layer is TransformerConv else adjacency.with_self_loops()
    weights = made.weights(rng.standard_normal((8, 4), np.float32), adjacency)
    assert weights.shape == (len(walked.edges()), 2)
    sums = np.zeros((8, 2))
    np.add.at(sums, walked.target, weights)
    receives = np.isin(np.arange(8), walked.target)
    np.testing.assert_allclose(sums[receives], 1, rtol=1e-6)


def test_static_and_dynamic_attention():
    """GAT orders neighbours alike for every query; GATv2 need not (Brody et al.)."""
    rng = np.random.default_rng(7)
    source, target = np.divmod(np.arange(36), 6)
    adjacency = Adjacency.from_edges(source, target)
    x = rng.standard_normal((6, 4))
    orders = []
    for layer in (GATConv, GATv2Conv):
        made = layer(4, 8, rng=np.random.default_rng(1), dtype=np.float64)
        weights = made.weights(5 * x, adjacency).reshape(6, 6)
        orders.append(len({tuple(order) for order in weights.argsort(axis=0).T.tolist()}))
    assert orders[0] == 1
    assert orders[1] > 1


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_needs_a_seed_and_repeats_with_it(layer):
    rng = np.random.default_rng(8)
    made = layer(4, 3, 2, dropout_p=0.5, rng=rng)
    plain = layer(4, 3, 2, rng=np.random.default_rng(8))
    plain.load_parameters(made.named_parameters())
    x, adjacency = rng.standard_normal((8, 4), np.float32), string_graph()
    np.testing.assert_array_equal(made(x, adjacency), plain(x, adjacency))
    once = made(x, adjacency, seed=3)
    np.testing.assert_array_equal(once, made(x, adjacency, seed=3))
    assert (once != made(x, adjacency, seed=4)).any()
    assert (once != made(x, adjacency)).any()


def test_dropout_is_keyed_by_edge_in_input_order_and_head():
    rng = np.random.default_rng(9)
    made = TransformerConv(4, 3, 2, dropout_p=0.5, root_weight=False, rng=rng, dtype=np.float64)
    adjacency, x = string_graph(), rng.standard_normal((8, 4))
    edge, head = np.arange(adjacency.num_edges)[:, None], np.arange(2)[None]
    keep = keep_mask(21, (0 * edge, head, 0 * edge, edge), 0.5)
    weights = made.weights(x, adjacency) * keep / 0.5
    expected = np.zeros((8, 2, 3))
    value = made.lin_value(x).reshape(8, 2, 3)
    np.add.at(expected, adjacency.target, weights[:, :, None] * value[adjacency.source])
    np.testing.assert_allclose(made(x, adjacency, seed=21), expected.reshape(8, 6), rtol=1e-12, atol=1e-14)


# --- parameters, dtypes, errors -----------------------------------------------------------------------------


def test_names_and_shapes_are_pygs():
    rng = np.random.default_rng(0)
    expected = {
        GATConv(5, 4, 3, edge_dim=2, residual=True, rng=rng): {
            "lin.weight": (12, 5),
            "att_src": (1, 3, 4),
            "att_dst": (1, 3, 4),
            "lin_edge.weight": (12, 2),
            "att_edge": (1, 3, 4),
            "bias": (12,),
            "res.weight": (12, 5),
        },
        GATv2Conv(5, 4, 3, edge_dim=2, residual=True, concat=False, rng=rng): {
            "lin_l.weight": (12, 5),
            "lin_l.bias": (12,),
            "lin_r.weight": (12, 5),
            "lin_r.bias": (12,),
            "att": (1, 3, 4),
            "lin_edge.weight": (12, 2),
            "bias": (4,),
            "res.weight": (4, 5),
        },
        TransformerConv(5, 4, 3, edge_dim=2, beta=True, concat=False, rng=rng): {
            "lin_key.weight": (12, 5),
            "lin_key.bias": (12,),
            "lin_query.weight": (12, 5),
            "lin_query.bias": (12,),
            "lin_value.weight": (12, 5),
            "lin_value.bias": (12,),
            "lin_edge.weight": (12, 2),
            "lin_skip.weight": (4, 5),
            "lin_skip.bias": (4,),
            "lin_beta.weight": (1, 12),
        },
    }
    for layer, shapes in expected.items():
        assert {name: p.shape for name, p in layer.named_parameters().items()} == shapes


def test_initialisation_fills_its_bounds():
    rng = np.random.default_rng(0)
    gat = GATConv(50, 40, 4, edge_dim=30, residual=True, rng=rng)
    v2 = GATv2Conv(50, 40, 4, rng=rng)
    transformer = TransformerConv(50, 40, 4, edge_dim=30, beta=True, rng=rng)
    bounds = {
        (gat, "lin.weight"): (6 / 210) ** 0.5,
        (gat, "att_src"): (6 / 44) ** 0.5,
        (gat, "att_edge"): (6 / 44) ** 0.5,
        (gat, "lin_edge.weight"): (6 / 190) ** 0.5,
        (gat, "res.weight"): (6 / 210) ** 0.5,
        (gat, "bias"): 0,
        (v2, "lin_l.weight"): (6 / 210) ** 0.5,
        (v2, "lin_r.bias"): 50**-0.5,
        (v2, "bias"): 0,
        (transformer, "lin_key.weight"): 50**-0.5,
        (transformer, "lin_skip.bias"): 50**-0.5,
        (transformer, "lin_edge.weight"): 30**-0.5,
        (transformer, "lin_beta.weight"): 480**-0.5,
    }
    for (layer, name), bound in bounds.items():
        highest = np.abs(layer.named_parameters()[name]).max()
        assert 0.95 * bound <= highest <= bound, name


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtype_of_parameters_output_and_gradients(layer, dtype):
    made = layer(4, 3, 2, edge_dim=2, rng=np.random.default_rng(0), dtype=dtype)
    assert {p.dtype for p in made.named_parameters().values()} == {np.dtype(dtype)}
    adjacency = string_graph()
    features = np.ones((adjacency.num_edges, 2))
    y, pullback = made.vjp(np.ones((8, 4), dtype), adjacency, features)
    assert y.dtype == dtype
    (dx, dfeatures), grads = pullback(y)
    assert dx.dtype == dtype
    assert dfeatures.dtype == np.float64
    assert {g.dtype for g in grads.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("layer", "options"), [(TransformerConv, {"beta": True}), (GATConv, {"residual": True}), (GATv2Conv, {})]
)
def test_every_option_keeps_halves(layer, options, dtype):
    """A Python number times bfloat16 is float32: TransformerConv's gate answered in it."""
    adjacency = string_graph()
    for concat in (True, False):
        made = layer(4, 3, 2, concat=concat, rng=np.random.default_rng(0), dtype=dtype, **options)
        y, pullback = made.vjp(np.ones((8, 4), dtype), adjacency, seed=1)
        dx, grads = pullback(y)
        assert y.dtype == dx.dtype == dtype
        assert {g.dtype for g in grads.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_float16_gradients_of_many_nodes_are_summed_wide(layer):
    """float16 cannot count beyond 2,048 by ones: the bias's gradient stopped there."""
    made = layer(2, 2, rng=np.random.default_rng(0), dtype=np.float16)
    y, pullback = made.vjp(np.ones((3000, 2), np.float16), Adjacency.from_edges([0], [1], num_nodes=3000))
    assert pullback(np.ones_like(y))[1]["bias"].tolist() == [3000.0, 3000.0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_mean_of_incoming_half_features_is_taken_wide(dtype):
    """The sum of 3,000 features of 100 is beyond float16, their mean is not."""
    star = Adjacency.from_edges(np.arange(1, 3001), np.zeros(3000, int))
    assert incoming_mean(star, np.full((3000, 1), 100, dtype))[0, 0] == 100


@pytest.mark.parametrize("layer", LAYERS)
def test_wrong_edge_features_are_named(layer):
    adjacency, x = string_graph(), np.zeros((8, 4), np.float32)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="edge"):
        layer(4, 3, rng=rng)(x, adjacency, np.zeros((adjacency.num_edges, 2)))
    with pytest.raises(ValueError, match="edge"):
        layer(4, 3, edge_dim=2, rng=rng)(x, adjacency)
    with pytest.raises(ValueError, match="edge_features"):
        layer(4, 3, edge_dim=2, rng=rng)(x, adjacency, np.zeros((adjacency.num_edges, 3)))


@pytest.mark.parametrize("layer", LAYERS)
def test_wrong_inputs_are_named(layer):
    made = layer(4, 3, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="8 nodes"):
        made(np.zeros((7, 4), np.float32), string_graph())
    with pytest.raises(ValueError, match="4"):
        made(np.zeros((8, 5), np.float32), string_graph())
    with pytest.raises(TypeError, match="Adjacency"):
        made(np.zeros((8, 4), np.float32), np.eye(8))
    with pytest.raises(TypeError, match="rng"):
        layer(4, 3, rng=None)


@pytest.mark.parametrize("layer", LAYERS)
def test_sparse_features_give_the_dense_numbers_and_no_gradient(layer):
    rng = np.random.default_rng(10)
    x = rng.standard_normal((8, 4)) * (rng.random((8, 4)) < 0.4)
    made = layer(4, 3, 2, rng=rng, dtype=np.float64)
    y, pullback = made.vjp(sp.csr_array(x), string_graph())
    dense, dense_pullback = made.vjp(x, string_graph())
    np.testing.assert_allclose(y, dense, rtol=1e-12, atol=1e-14)
    dx, grads = pullback(np.cos(y))
    assert dx is None
    for name, gradient in dense_pullback(np.cos(y))[1].items():
        np.testing.assert_allclose(grads[name], gradient, rtol=1e-11, atol=1e-13)
    with pytest.raises(ValueError, match="num_nodes, 4"):
        made(sp.csr_array((8, 5)), string_graph())


@pytest.mark.parametrize("layer", LAYERS)
def test_sparse_features_of_a_bfloat16_layer(layer):
    """scipy multiplies no bfloat16; the weight goes to it in float32."""
    x = np.eye(8, 4, dtype=np.float32)
    made = layer(4, 3, 2, rng=np.random.default_rng(0), dtype=ml_dtypes.bfloat16)
    y, pullback = made.vjp(sp.csr_array(x), string_graph())
    np.testing.assert_allclose(y, made(x, string_graph()), rtol=1e-5, atol=1e-6)
    assert set(pullback(y)[1]) == set(made.named_parameters())


def test_signatures_are_the_contracts():
    names = {
        GATConv: (
            "in_dim out_dim heads concat negative_slope dropout_p self_loops edge_dim bias residual "
            "message_dropout_p rng dtype"
        ),
        TransformerConv: "in_dim out_dim heads concat beta dropout_p edge_dim bias root_weight rng dtype",
    }
    names[GATv2Conv] = names[GATConv].replace("message_dropout_p", "share_weights")
    for layer, expected in names.items():
        parameters = list(inspect.signature(layer.__init__).parameters.values())[1:]
        assert [p.name for p in parameters] == expected.split()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters[3:])


def test_attention_goes_back_onto_a_networkx_graph():
    G = nx.karate_club_graph().to_directed()
    adjacency = Adjacency.from_networkx(G)
    layer = GATConv(34, 4, self_loops=False, rng=np.random.default_rng(0))
    weights = layer.weights(np.eye(34, dtype=np.float32), adjacency)
    nx.set_edge_attributes(G, adjacency.edge_values(weights[:, 0]), "attention")
    total = sum(data["attention"] for _, _, data in G.in_edges(0, data=True))
    assert abs(total - 1) < 1e-6

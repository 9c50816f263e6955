"""graph_attention and edge_softmax against their definition, and the promises of the contract."""

import ml_dtypes
import numpy as np
import pytest
from naive import graph_attention as naive_attention
from naive import softmax_over_in_edges

import npattn
from npattn.functional.dropout import keep_mask
from npattn.graph import Adjacency, edge_softmax, edge_softmax_vjp, graph_attention, graph_attention_vjp
from npattn.testing import check_vjp

BACKENDS = ["numpy", "numba"]


def random_graph(seed=0, num_nodes=11, num_edges=50):
    """Directed, with parallel edges, loops, a hub (node 2) and nodes 9, 10 that receive nothing."""
    rng = np.random.default_rng(seed)
    source = rng.integers(num_nodes, size=num_edges)
    target = rng.integers(num_nodes - 2, size=num_edges)
    target[: num_edges // 3] = 2
    return Adjacency.from_edges(source, target, num_nodes), rng


def inputs(rng, targets, sources, heads, dim, dim_v, dtype=np.float64):
    shapes = (targets, heads, dim), (sources, heads, dim), (sources, heads, dim_v)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8},
    "bias": {"edge_bias": "heads"},
    "bias_shared": {"edge_bias": "shared", "softcap": 2.0},
    "masked": {"edge_bias": "masked"},
    "dropout": {"dropout_p": 0.4, "seed": 77},
    "everything": {"edge_bias": "masked", "dropout_p": 0.3, "seed": 2**63 + 5, "softcap": 3.0, "scale": 0.2},
}


def options_for(name, rng, num_edges, heads, dtype=np.float64):
    options = dict(OPTIONS[name])
    kind = options.pop("edge_bias", None)
    if kind is not None:
        bias = rng.standard_normal((num_edges, 1 if kind == "shared" else heads)).astype(dtype)
        if kind == "masked":
            bias[rng.random(bias.shape) < 0.4] = -np.inf
        options["edge_bias"] = bias
    return options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("heads", "dim", "dim_v"), [(2, 3, 5), (1, 8, 8), (3, 16, 16), (17, 2, 33)])
def test_forward_is_the_definition(backend, name, heads, dim, dim_v):
    graph, rng = random_graph()
    q, k, v = inputs(rng, 11, 11, heads, dim, dim_v)
    options = options_for(name, rng, graph.num_edges, heads)
    out, weights = graph_attention(q, k, v, graph, return_weights=True, backend=backend, **options)
    keep = None
    if "seed" in options:
        edge, head = np.ogrid[: graph.num_edges, :heads]
        p = options["dropout_p"]
        keep = keep_mask(options["seed"], (0 * edge, head, edge >> 32, edge), p) / (1 - p)
    formula = {key: options[key] for key in ("scale", "softcap") if key in options}
    expected, expected_weights = naive_attention(
        q, k, v, graph.source, graph.target, options.get("edge_bias"), keep=keep, **formula
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-12, atol=1e-14)
    assert (out[9:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(backend, name):
    graph, rng = random_graph(1)
    q, k, v = inputs(rng, 11, 11, 3, 5, 4)
    options = options_for(name, rng, graph.num_edges, 3)
    bias = options.pop("edge_bias", None)
    finite = None if bias is None else np.where(np.isinf(bias), 0, bias)

    def f_vjp(q, k, v, finite_bias):
        edge_bias = None if bias is None else np.where(np.isinf(bias), -np.inf, finite_bias)
        return graph_attention_vjp(q, k, v, graph, edge_bias=edge_bias, backend=backend, **options)

    check_vjp(f_vjp, [q, k, v, finite], names=["query", "key", "value", "edge_bias"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bipartite(backend):
    rng = np.random.default_rng(3)
    graph = Adjacency.from_edges(rng.integers(9, size=30), rng.integers(4, size=30), (9, 5))
    q, k, v = inputs(rng, 5, 9, 2, 3, 4)
    expected, _ = naive_attention(q, k, v, graph.source, graph.target)
    np.testing.assert_allclose(
        graph_attention(q, k, v, graph, backend=backend), expected, rtol=1e-12, atol=1e-13
    )
    check_vjp(lambda *args: _three(graph_attention_vjp(*args, graph, backend=backend)), [q, k, v])
    with pytest.raises(ValueError, match="9 sending"):
        graph_attention(q, k[:8], v, graph)


def _three(result):
    out, pullback = result
    return out, lambda dout: tuple(pullback(dout))[:3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_behind_masked_edges_leaks_nowhere(backend):
    graph = Adjacency.from_edges([0, 1, 2, 3, 1], [1, 0, 0, 4, 4], num_nodes=5)
    rng = np.random.default_rng(0)
    q, k, v = inputs(rng, 5, 5, 2, 4, 4)
    bias = np.zeros((5, 2))
    bias[[2, 3, 4], :] = -np.inf  # nobody sees 2 and 3; node 4 sees nobody
    bias[1, 1] = -np.inf  # and head 1 of node 0 sees nobody
    dout = rng.standard_normal((5, 2, 4))
    clean = graph_attention_vjp(q, k, v, graph, edge_bias=bias, backend=backend)
    clean_grads = clean[1](dout)
    for array in (k, v):
        array[[2, 3]] = np.nan
        array[1, 1] = np.inf
    q[4] = np.nan
    q[0, 1] = np.nan
    dout[4] = np.nan
    dout[0, 1] = np.nan
    dirty = graph_attention_vjp(q, k, v, graph, edge_bias=bias, backend=backend)
    np.testing.assert_array_equal(dirty[0], clean[0])
    for ours, theirs in zip(dirty[1](dout), clean_grads, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (clean_grads.key[[2, 3]] == 0).all()
    assert (clean_grads.value[[2, 3]] == 0).all()
    assert (clean[0][4] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_maximum_is_per_node(backend):
    """A global maximum would underflow the weights of every node but the one with the highest logits."""
    graph = Adjacency.from_edges([0, 1, 0, 1], [0, 0, 1, 1])
    q = np.array([[[1.0]], [[1e4]]], np.float32)
    k = np.array([[[1.0]], [[1.5]]], np.float32)
    v = np.array([[[1.0]], [[3.0]]], np.float32)
    out = graph_attention(q, k, v, graph, scale=1.0, backend=backend)
    weight = 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(out[:, 0, 0], [1 + 2 * weight, 3.0], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_of_1e5_give_the_mean(backend):
    graph = Adjacency.from_edges(np.arange(100), np.zeros(100, int))
    q = np.full((100, 1, 1), 1e5, np.float32)
    k = np.ones((100, 1, 1), np.float32)
    v = np.arange(100, dtype=np.float32).reshape(100, 1, 1)
    out, pullback = graph_attention_vjp(q, k, v, graph, scale=1.0, backend=backend)
    np.testing.assert_allclose(out[0], 49.5, rtol=1e-6)
    dout = np.zeros_like(out)
    dout[0] = 1
    np.testing.assert_allclose(pullback(dout).value, 0.01, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parallel_edges_count_as_often_as_they_occur(backend):
    graph = Adjacency.from_edges([0, 1, 1, 1], [0, 0, 0, 0])
    zero = np.zeros((2, 1, 2))
    v = np.array([[[0.0, 4.0]], [[8.0, 0.0]]])
    np.testing.assert_allclose(graph_attention(zero, zero, v, graph, backend=backend)[0, 0], [6.0, 1.0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_dtypes_are_computed_in_float32(backend, dtype):
    graph, rng = random_graph(2)
    q, k, v = inputs(rng, 11, 11, 2, 8, 8, dtype)
    wide = [a.astype(np.float64) for a in (q, k, v)]
    out, pullback = graph_attention_vjp(q, k, v, graph, backend=backend)
    exact, exact_pullback = graph_attention_vjp(*wide, graph, backend=backend)
    assert out.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=eps, atol=4 * eps)
    dout = rng.standard_normal(out.shape).astype(dtype)
    for ours, theirs in zip(pullback(dout)[:3], exact_pullback(dout.astype(np.float64))[:3], strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=4 * eps, atol=16 * eps)
    large = np.full((11, 2, 8), 200, dtype)  # logits beyond float16's range
    assert np.isfinite(graph_attention(large, large, v, graph, backend=backend).astype(np.float64)).all()


def test_a_gradient_beyond_float16_gives_what_fits():
    star = Adjacency.from_edges(np.arange(100), np.zeros(100, int), (100, 1))
    q, k = np.zeros((1, 2, 3), np.float16), np.zeros((100, 2, 3), np.float16)
    out, pullback = graph_attention_vjp(q, k, k, star)
    value = pullback(np.full(out.shape, 1e5, np.float32)).value
    np.testing.assert_allclose(value.astype(float), 1000.0, rtol=2e-3)


def test_mixed_dtypes_promote_and_gradients_keep_their_own():
    graph, rng = random_graph(2)
    q, k, v = inputs(rng, 11, 11, 2, 4, 4)
    bias = rng.standard_normal((graph.num_edges, 1)).astype(np.float16)
    out, pullback = graph_attention_vjp(q.astype(np.float16), k.astype(np.float32), v, graph, edge_bias=bias)
    assert out.dtype == np.float64
    assert [g.dtype for g in pullback(out)] == [np.float16, np.float32, np.float64, np.float16]


@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_attention_under_the_mask_of_the_graph(backend):
    rng = np.random.default_rng(5)
    pairs = rng.permutation(13 * 13)[:60]
    graph = Adjacency.from_edges(pairs % 13, pairs // 13, 13)
    q, k, v = inputs(rng, 13, 13, 3, 4, 6)
    dense, pull_dense = npattn.attention_vjp(
        *(a.swapaxes(0, 1) for a in (q, k, v)), mask=graph.to_mask(), backend="numpy"
    )
    out, pullback = graph_attention_vjp(q, k, v, graph, backend=backend)
    np.testing.assert_allclose(out, dense.swapaxes(0, 1), rtol=1e-12, atol=1e-14)
    dout = rng.standard_normal(out.shape)
    for ours, theirs in zip(pullback(dout)[:3], pull_dense(dout.swapaxes(0, 1))[:3], strict=True):
        np.testing.assert_allclose(ours, theirs.swapaxes(0, 1), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_edge_order_does_not_matter(backend):
    graph, rng = random_graph(4)
    q, k, v = inputs(rng, 11, 11, 2, 3, 3)
    order = rng.permutation(graph.num_edges)
    shuffled = Adjacency.from_edges(graph.source[order], graph.target[order], 11)
    out, weights = graph_attention(q, k, v, graph, return_weights=True, backend=backend)
    out_2, weights_2 = graph_attention(q, k, v, shuffled, return_weights=True, backend=backend)
    np.testing.assert_allclose(out_2, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(weights_2, weights[order], rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_graphs_and_axes(backend):
    for nodes, heads, dim, dim_v in [(0, 2, 3, 4), (3, 2, 3, 4), (3, 0, 3, 4), (3, 2, 3, 0), (3, 2, 0, 4)]:
        edges = [0, 1] if (nodes and dim == 0) or heads == 0 or dim_v == 0 else []
        graph = Adjacency.from_edges(edges, edges, nodes)
        q, k, v = inputs(np.random.default_rng(0), nodes, nodes, heads, dim, dim_v)
        out, pullback = graph_attention_vjp(q, k, v, graph, backend=backend)
        assert out.shape == (nodes, heads, dim_v)
        if not edges:
            assert (out == 0).all()
        grads = pullback(out)
        assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_and_read_only_arrays_are_read_as_they_are(backend):
    graph, rng = random_graph(6)
    q, k, v = inputs(rng, 11, 11, 4, 6, 6)
    expected = graph_attention(q, k, v, graph, backend=backend)
    odd = [np.asfortranarray(q), k[::-1].copy()[::-1], np.repeat(v, 2, axis=1)[:, ::2]]
    for array in odd:
        array.flags.writeable = False
    np.testing.assert_array_equal(graph_attention(*odd, graph, backend=backend), expected)


def hub_graph():
    rng = np.random.default_rng(8)
    source, target = rng.integers(300, size=60_000), rng.integers(300, size=60_000)
    target[:25_000] = 7
    source[30_000:50_000] = 11
    return Adjacency.from_edges(source, target, 300), rng


def test_hub_is_split_and_still_right():
    graph, rng = hub_graph()
    assert (graph.plan.row_items[:, 4] > 1).any()
    assert (graph.plan.col_items[:, 4] > 1).any()
    q, k, v = inputs(rng, 300, 300, 2, 8, 5)
    bias = rng.standard_normal((60_000, 2))
    bias[:9000] = -np.inf  # a whole part of the hub
    results = []
    for backend in BACKENDS:
        out, pullback = graph_attention_vjp(q, k, v, graph, edge_bias=bias, backend=backend)
        results.append((out, *pullback(np.cos(out))))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_same_bits_for_any_number_of_threads():
    graph, rng = hub_graph()
    q, k, v = inputs(rng, 300, 300, 3, 7, 9, np.float32)
    before = npattn.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            npattn.set_num_threads(threads)
            out, pullback = graph_attention_vjp(q, k, v, graph, dropout_p=0.2, seed=1, backend="numba")
            grads = pullback(np.cos(out))
            results.append([a.tobytes() for a in (out, *grads[:3])])
    finally:
        npattn.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_no_array_of_edges_times_heads_times_dim():
    import tracemalloc

    graph, rng = hub_graph()
    q, k, v = inputs(rng, 300, 300, 8, 32, 32, np.float32)
    one_array = graph.num_edges * 8 * 32 * 4
    for backend, share in (("numba", 0.1), ("numpy", 0.6)):
        out, pullback = graph_attention_vjp(q, k, v, graph, backend=backend)
        pullback(out)  # compiles
        tracemalloc.start()
        graph_attention(q, k, v, graph, backend=backend)
        forward = tracemalloc.get_traced_memory()[1]
        pullback(out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < share * one_array
        if backend == "numba":
            assert forward < 0.02 * one_array


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_of_everything_gives_zeros(backend):
    graph, rng = random_graph(7)
    q, k, v = inputs(rng, 11, 11, 2, 3, 3)
    out, pullback = graph_attention_vjp(q, k, v, graph, dropout_p=1.0, seed=0, backend=backend)
    assert (out == 0).all()
    assert all((g == 0).all() for g in pullback(np.ones_like(out))[:3])


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_dropout_outside_of_0_to_1(p):
    graph, rng = random_graph()
    with pytest.raises(ValueError, match="dropout_p"):
        graph_attention(*inputs(rng, 11, 11, 1, 2, 2), graph, dropout_p=p, seed=0)


def test_dropout_without_seed():
    graph, rng = random_graph()
    with pytest.raises(ValueError, match="seed"):
        graph_attention(*inputs(rng, 11, 11, 1, 2, 2), graph, dropout_p=0.5)


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"query": np.zeros((11, 2))}, ValueError, "heads"),
        ({"query": np.zeros((10, 2, 3))}, ValueError, "11 receiving"),
        ({"key": np.zeros((11, 3, 3))}, ValueError, "3 heads"),
        ({"key": np.zeros((11, 2, 4))}, ValueError, "head_dim"),
        ({"value": np.zeros((12, 2, 3))}, ValueError, "11 sending"),
        ({"value": np.zeros((11, 2, 3), int)}, TypeError, "value"),
        ({"edge_bias": np.zeros((50, 3))}, ValueError, "edge_bias"),
        ({"edge_bias": np.zeros(50)}, ValueError, "edge_bias"),
        ({"edge_bias": np.zeros((50, 2), int)}, TypeError, "edge_bias"),
        ({"edge_bias": np.zeros((50, 2), bool)}, TypeError, "edge_bias"),
        ({"scale": float("inf")}, ValueError, "scale"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": float("nan")}, ValueError, "softcap"),
        ({"backend": "cuda"}, ValueError, "cuda"),
        ({"adjacency": np.zeros((11, 11))}, TypeError, "Adjacency"),
    ],
)
def test_wrong_arguments_are_named(change, error, named):
    graph, rng = random_graph()
    q, k, v = inputs(rng, 11, 11, 2, 3, 3)
    arguments = {"query": q, "key": k, "value": v, "adjacency": graph} | change
    with pytest.raises(error, match=named):
        graph_attention(**arguments)


def test_dout_of_another_shape():
    graph, rng = random_graph()
    out, pullback = graph_attention_vjp(*inputs(rng, 11, 11, 2, 3, 3), graph)
    with pytest.raises(ValueError, match="dout"):
        pullback(out[:1])


# --- edge_softmax -------------------------------------------------------------------------------------------


def test_edge_softmax_is_the_definition_in_input_order():
    graph, rng = random_graph(9)
    logits = 50 * rng.standard_normal((graph.num_edges, 3))
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[graph.target == 4] = -np.inf
    weights = edge_softmax(logits, graph)
    np.testing.assert_allclose(weights, softmax_over_in_edges(logits, graph.target), rtol=1e-13)
    assert (weights[graph.target == 4] == 0).all()


def test_edge_softmax_gradient():
    graph, rng = random_graph(9)
    check_vjp(lambda x: edge_softmax_vjp(x, graph), [rng.standard_normal((graph.num_edges, 2))])


def test_edge_softmax_masked_edges_do_not_leak():
    graph = Adjacency.from_edges([0, 1], [0, 0])
    weights, pullback = edge_softmax_vjp(np.array([[1.0], [-np.inf]]), graph)
    assert weights.tolist() == [[1.0], [0.0]]
    assert pullback(np.array([[2.0], [np.nan]])).tolist() == [[0.0], [0.0]]


def test_edge_softmax_keeps_dtype_and_checks_shapes():
    graph, _rng = random_graph(9)
    assert edge_softmax(np.zeros((50, 2), np.float16), graph).dtype == np.float16
    assert edge_softmax(np.zeros((50, 2), ml_dtypes.bfloat16), graph).dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="50"):
        edge_softmax(np.zeros((49, 2)), graph)
    with pytest.raises(TypeError, match="logits"):
        edge_softmax(np.zeros((50, 2), int), graph)
    with pytest.raises(ValueError, match="dweights"):
        edge_softmax_vjp(np.zeros((50, 2)), graph)[1](np.zeros((50, 1)))

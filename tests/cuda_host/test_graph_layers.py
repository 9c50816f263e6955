"""Graph layers, edge_softmax and the plain implementation give on GPU arrays what they give on the CPU."""

import numpy as np
import pytest

from npattn.graph import Adjacency, GATConv, GATv2Conv, TransformerConv, edge_softmax_vjp, graph_attention
from npattn.kernels.edge import numpy_segment
from npattn.kernels.edge.contract import EdgeArrays

from . import test_edges
from .conftest import through
from .fake_cupy import ndarray

LAYERS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


@pytest.fixture
def graph():
    """Nodes without in-edges, with loops, with parallel edges."""
    rng = np.random.default_rng(3)
    return Adjacency.from_edges(rng.integers(0, 20, 60), rng.integers(3, 20, 60), 20)


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_on_the_gpu_gives_the_cpus_results(cupy, rng, graph, kind, edge_dim):
    x = rng.standard_normal((20, 6), dtype=np.float32)
    features = None if edge_dim is None else rng.standard_normal((60, edge_dim), dtype=np.float32)
    options = {"message_dropout_p": 0.3} if kind == "gat" else {}
    results = []
    for xp in (np, cupy):
        layer = LAYERS[kind](
            6, 4, 2, edge_dim=edge_dim, concat=False, dropout_p=0.4, rng=np.random.default_rng(1), **options
        )
        layer.move_to(xp)
        moved = [None if a is None else xp.asarray(a) for a in (x, features)]
        y, pullback = layer.vjp(moved[0], graph, moved[1], seed=5)
        dx, grads = pullback(xp.asarray(np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)))
        dx = dx if isinstance(dx, tuple) else (dx,)
        results.append([y, layer.weights(moved[0], graph, moved[1]), *dx, *grads.values()])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert isinstance(on_gpu, ndarray)
        np.testing.assert_allclose(on_gpu.get(), on_cpu, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_edge_softmax_on_the_gpu_gives_the_cpus_results(cupy, rng, graph, dtype):
    logits, dweights = rng.standard_normal((2, 60, 3)).astype(dtype)
    logits[::7] = -np.inf
    results = []
    for vjp in (edge_softmax_vjp, through(edge_softmax_vjp)):
        weights, pullback = vjp(logits, graph)
        results.append((weights, pullback(dweights)))
    for on_cpu, on_gpu in zip(*results, strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3 if dtype == np.float16 else 1e-13)


@pytest.mark.parametrize("case", test_edges.CASES)
def test_the_plain_implementation_runs_on_gpu_arrays(cupy, rng, case, monkeypatch):
    monkeypatch.setattr(numpy_segment, "CHUNK_ELEMENTS", 5000)
    problem, arrays, dout = test_edges.make(rng, case, np.float32)
    plan = test_edges.graph(rng)
    results = []
    for xp in (np, cupy):
        moved = EdgeArrays(*(None if x is None else xp.asarray(x) for x in arrays))
        result = numpy_segment.forward(problem, plan, moved)
        grads = numpy_segment.backward(problem, plan, xp.asarray(dout), moved, *result)
        results.append((*result, numpy_segment.weights(problem, plan, moved, result.m, result.l), *grads))
    for on_cpu, on_gpu in zip(*results, strict=True):
        if on_cpu is not None:
            assert isinstance(on_gpu, ndarray)
            np.testing.assert_array_equal(on_gpu.get(), on_cpu)


def test_rows_too_wide_for_the_kernels_are_computed_with_cupys_operations(cupy, rng, graph):
    q = rng.standard_normal((20, 1, 600), dtype=np.float32)
    on_gpu = graph_attention(*(cupy.asarray(q) for _ in range(3)), graph)
    assert isinstance(on_gpu, ndarray)
    np.testing.assert_allclose(on_gpu.get(), graph_attention(q, q, q, graph), rtol=2e-5, atol=1e-6)

"""Graph layers, edge_softmax and the plain implementation give on GPU arrays what they give on the CPU."""

import sys
from pathlib import Path

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


@pytest.mark.parametrize("edge_dim", [pytest.param(None, marks=pytest.mark.slow), 3])
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


@pytest.mark.slow
def test_graph_examples_run_with_device_gpu(cupy, monkeypatch, capsys):
    """As far as a model of a GPU can tell: nothing of theirs stays behind on the CPU, and they learn."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import _device
    import dictionary_lookup
    import gat_cora
    import karate_club
    from scipy.sparse import csr_array

    monkeypatch.setattr(_device, "arrays", lambda device: {"cpu": np, "gpu": cupy}[device])
    printed = {}
    for device in ("cpu", "gpu"):
        monkeypatch.setattr(sys, "argv", ["karate_club.py", "--device", device, "--epochs", "4"])
        karate_club.main()
        printed[device] = capsys.readouterr().out
    assert printed["gpu"] == printed["cpu"]

    found = [dictionary_lookup.train(GATv2Conv, 3, 3, np.random.default_rng(0), xp) for xp in (np, cupy)]
    assert found[0] == found[1]

    rng = np.random.default_rng(0)
    x = csr_array((rng.random((30, 12)) < 0.3) * rng.random((30, 12), dtype=np.float32))
    edges = Adjacency.from_edges(rng.integers(0, 30, 90), rng.integers(0, 30, 90), 30)
    parts = np.arange(10), np.arange(10, 20), np.arange(20, 30)
    data = gat_cora.Citations(x, rng.integers(0, 3, 30), edges, *parts)
    results = [gat_cora.train(data, 0, epochs=3, xp=xp) for xp in (np, cupy)]
    assert results[0] == results[1]

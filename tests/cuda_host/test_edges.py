"""Graph attention's CUDA kernels on the CPU model, against the NumPy implementation in float64."""

import numpy as np
import pytest

from npattn.graph import Adjacency, graph_attention_vjp
from npattn.kernels.edge import cuda_launch, cupy_cuda, numpy_segment
from npattn.kernels.edge.contract import EdgeArrays, EdgeProblem
from npattn.plans.edges import edge_plan

from .conftest import through

TARGETS, SOURCES, EDGES = 50, 60, 700
# score, head_dim, head_dim_v, heads, edge_dim, bias columns, dropout_p, softcap
CASES = {
    "dot": ("dot", 16, 16, 8, 0, 8, 0.3, 4.0),
    "dot, odd sizes": ("dot", 20, 40, 3, 0, 0, 0.0, 0.0),
    "dot, edge features": ("dot", 24, 24, 2, 5, 1, 0.1, 0.0),
    "additive": ("additive", 1, 16, 8, 0, 8, 0.2, 0.0),
    "dynamic": ("dynamic", 12, 12, 5, 0, 0, 0.0, 0.0),
    "dynamic, edge features, many heads": ("dynamic", 8, 8, 40, 3, 0, 0.0, 0.0),
}
QUICK = [("dot", np.float32), ("additive", np.float32), ("dynamic, edge features, many heads", np.float64)]


@pytest.fixture(params=[16, 1024], ids=["hubs in parts", "no hubs"])
def part_edges(request, monkeypatch):
    """Nodes with more edges than this are hubs; and few warps share the items, so that each has several."""
    original = cuda_launch.items_of
    monkeypatch.setattr(cuda_launch, "items_of", lambda ptr: original(ptr, request.param))
    monkeypatch.setattr(cuda_launch, "SHARING_WARPS", 7)
    return request.param


def graph(rng):
    """A hub that receives and one that sends, nodes without edges, parallel edges."""
    source, target = rng.integers(0, SOURCES, EDGES), rng.integers(0, TARGETS - 3, EDGES)
    target[:200], source[150:300] = 7, 5
    return edge_plan(source, target, SOURCES, TARGETS)


def make(rng, case, dtype):
    score, dim, dim_v, heads, edge_dim, bias_cols, dropout_p, softcap = CASES[case]
    dtype = np.dtype(dtype)
    acc = np.float64 if dtype == np.float64 else np.float32
    problem = EdgeProblem(
        *(score, dtype, TARGETS, SOURCES, EDGES, heads, dim, dim_v, dim**-0.5, softcap, 0.2),
        *(bias_cols > 0, edge_dim, dropout_p, 77 << 33 | 5),
    )

    def normal(*shape, as_dtype=acc):
        return rng.standard_normal(shape).astype(as_dtype)

    bias = None
    if bias_cols:
        bias = normal(EDGES, bias_cols)
        bias[rng.random(bias.shape) < 0.1] = -np.inf
    arrays = EdgeArrays(
        normal(TARGETS, heads, dim, as_dtype=dtype),
        normal(SOURCES, heads, dim, as_dtype=dtype),
        normal(SOURCES, heads, dim_v, as_dtype=dtype),
        bias,
        normal(heads, dim) if score == "dynamic" else None,
        normal(EDGES, edge_dim) if edge_dim else None,
        0.3 * normal(edge_dim, heads, dim) if edge_dim else None,
    )
    return problem, arrays, normal(TARGETS, heads, dim_v, as_dtype=dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case}, {dtype.__name__}",
            marks=[] if (case, dtype) in QUICK else pytest.mark.slow,
        )
        for case in CASES
        for dtype in (np.float64, np.float32, np.float16)
    ],
)
def test_all_results_agree_with_float64(cupy, rng, part_edges, case, dtype):
    problem, arrays, dout = make(rng, case, dtype)
    plan = graph(rng)
    wide = EdgeArrays(*(None if x is None else x.astype(np.float64) for x in arrays))
    wide_problem = problem._replace(dtype=np.dtype(np.float64))
    exact = numpy_segment.forward(wide_problem, plan, wide)
    exact_grads = numpy_segment.backward(wide_problem, plan, dout.astype(np.float64), wide, *exact)
    exact_weights = numpy_segment.weights(wide_problem, plan, wide, exact.m, exact.l)

    moved = EdgeArrays(*(None if x is None else cupy.asarray(x) for x in arrays))
    result = cupy_cuda.forward(problem, plan, moved)
    grads = cupy_cuda.backward(problem, plan, cupy.asarray(dout), moved, *result)
    weights = cupy_cuda.weights(problem, plan, moved, result.m, result.l)
    limit = {"float64": 1e-14, "float32": 3e-6, "float16": 3e-3}[np.dtype(dtype).name]
    for x, y in zip((*result, weights, *grads), (*exact, exact_weights, *exact_grads), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            error = np.linalg.norm(cupy.asnumpy(x).astype(np.float64) - y)
            assert error <= limit * np.linalg.norm(y)


def test_nan_in_masked_edges_stays_there(cupy, rng):
    source, target = rng.integers(0, 20, 100), rng.integers(0, 19, 100)
    source[:10] = 19  # node 19 only sends, and only along masked edges
    source[10:] %= 19
    edges = Adjacency.from_edges(source, target, 20)
    bias = rng.standard_normal((100, 2), dtype=np.float32)
    bias[:10] = -np.inf
    dout = rng.standard_normal((20, 2, 8), dtype=np.float32)
    q, k, v = (rng.standard_normal((20, 2, 8), dtype=np.float32) for _ in range(3))
    results = []
    for fill in (0.0, np.nan):
        k[19] = v[19] = fill
        out, pullback = through(graph_attention_vjp)(q, k, v, edges, edge_bias=bias, backend="cupy")
        results.append((out, *pullback(dout)))
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, poisoned)
    assert not results[1][2][19].any()  # dk of a node nobody looks at

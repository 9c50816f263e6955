"""The compiled kernels give what the NumPy one gives, for every score and option."""

import os
import subprocess
import sys

import numpy as np
import pytest

from npattn.kernels.edge import numpy_segment
from npattn.kernels.edge.contract import EdgeArrays, EdgeProblem
from npattn.plans.edges import edge_plan

numba_cpu = pytest.importorskip("npattn.kernels.edge.numba_cpu")
if numba_cpu.INTERPRETED:
    pytest.skip("NUMBA_DISABLE_JIT: explicit vectors cannot be interpreted", allow_module_level=True)


def problem_of(score, *, nodes=(30, 20), edges=400, heads=2, dim=5, dim_v=5, dtype=np.float64, **options):
    """(problem, plan, arrays, dout); bias is "one", "all" or "masked"; hub gives two nodes half the edges."""
    rng = np.random.default_rng(0)
    num_sources, num_targets = nodes
    source, target = rng.integers(num_sources, size=edges), rng.integers(num_targets - 2, size=edges)
    if options.get("hub"):
        target[: edges // 2] = 1
        source[edges // 2 :] = 0
    dim = 1 if score == "additive" else dim
    edge_dim, bias = options.get("edge_dim", 0), None
    if options.get("bias"):
        bias = rng.standard_normal((edges, 1 if options["bias"] == "one" else heads)).astype(dtype)
        if options["bias"] == "masked":
            bias[rng.random(bias.shape) < 0.3] = -np.inf

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    arrays = EdgeArrays(
        q=draw(num_targets, heads, dim),
        k=draw(num_sources, heads, dim),
        v=draw(num_sources, heads, dim_v),
        bias=bias,
        att=draw(heads, dim) if score == "dynamic" else None,
        edge_features=draw(edges, edge_dim) if edge_dim else None,
        edge_weight=draw(edge_dim, heads, dim) if edge_dim else None,
    )
    problem = EdgeProblem(
        score=score,
        dtype=np.dtype(dtype),
        num_targets=num_targets,
        num_sources=num_sources,
        num_edges=edges,
        heads=heads,
        head_dim=dim,
        head_dim_v=dim_v,
        scale=0.3,
        softcap=options.get("softcap", 0.0),
        negative_slope=0.2,
        has_bias=bias is not None,
        edge_dim=edge_dim,
        dropout_p=options.get("dropout_p", 0.0),
        seed=2**40 + 17,
    )
    plan = edge_plan(source, target, num_sources, num_targets)
    return problem, plan, arrays, draw(num_targets, heads, dim_v)


CASES = {
    "dot": ("dot", {"dim": 16, "dim_v": 8}),
    "dot_no_edges": ("dot", {"edges": 0}),
    "dot_bias_softcap": ("dot", {"heads": 3, "dim_v": 7, "bias": "one", "softcap": 2.0}),
    "dot_many_heads_dropout": ("dot", {"heads": 12, "dim": 33, "dim_v": 17, "bias": "all", "dropout_p": 0.3}),
    "dot_masked_hub": ("dot", {"edges": 40_000, "heads": 3, "bias": "masked", "hub": True}),
    "dot_edge_features": ("dot", {"heads": 4, "edge_dim": 3}),
    "dot_edge_features_masked": ("dot", {"edge_dim": 3, "bias": "masked"}),
    "additive": ("additive", {"heads": 8, "dim_v": 8}),
    "additive_hub": ("additive", {"edges": 40_000, "heads": 8, "bias": "all", "dropout_p": 0.5, "hub": True}),
    "additive_masked": ("additive", {"bias": "masked"}),
    "dynamic": ("dynamic", {"heads": 4, "dim": 8, "dim_v": 8}),
    "dynamic_hub": ("dynamic", {"edges": 40_000, "heads": 3, "dim": 19, "dropout_p": 0.5, "hub": True}),
    "dynamic_edge_features": ("dynamic", {"edge_dim": 4}),
}


def results(kernel, problem, plan, arrays, dout):
    """Everything a kernel computes, by name."""
    forward = kernel.forward(problem, plan, arrays)
    found = forward._asdict()
    found["weights"] = kernel.weights(problem, plan, arrays, forward.m, forward.l)
    grads = kernel.backward(problem, plan, dout, arrays, *forward)
    return found | {f"d{name}": gradient for name, gradient in grads._asdict().items()}


@pytest.mark.parametrize("name", CASES)
def test_numba_gives_what_numpy_gives(name):
    score, options = CASES[name]
    call = problem_of(score, **options)
    expected, found = results(numpy_segment, *call), results(numba_cpu, *call)
    for what, array in expected.items():
        if array is None:
            assert found[what] is None, what
            continue
        assert (found[what].shape, found[what].dtype) == (array.shape, array.dtype), what
        np.testing.assert_allclose(found[what], array, rtol=1e-10, atol=1e-11, err_msg=what)


@pytest.mark.parametrize("score", ["dot", "additive", "dynamic"])
def test_float32_has_float32_errors(score):
    """Against float64 on the same numbers; 16 heads fill a whole vector on the widest machines."""
    problem, plan, arrays, dout = problem_of(score, heads=16, dim=16, dim_v=16, dtype=np.float32)
    wide = EdgeArrays(*(None if a is None else a.astype(np.float64) for a in arrays))
    exact = results(
        numpy_segment, problem._replace(dtype=np.dtype(np.float64)), plan, wide, dout.astype(np.float64)
    )
    found = results(numba_cpu, problem, plan, arrays, dout)
    for what, array in exact.items():
        if array is not None:
            np.testing.assert_allclose(
                found[what], array, rtol=2e-5, atol=2e-5 * np.abs(array).max(), err_msg=what
            )


def test_kernels_write_to_no_argument_and_repeat_their_bits():
    problem, plan, arrays, dout = problem_of("dynamic", edge_dim=2, dropout_p=0.2)
    for array in (*arrays, dout):
        if array is not None:
            array.flags.writeable = False
    first, second = (results(numba_cpu, problem, plan, arrays, dout) for _ in range(2))
    for what, array in first.items():
        if array is not None:
            np.testing.assert_array_equal(array, second[what])


def test_plan_depends_on_the_graph_alone():
    rng = np.random.default_rng(1)
    source, target = rng.integers(50, size=9000), rng.integers(50, size=9000)
    one, two = (edge_plan(source, target, 50, 50) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("width", ["4", "8"])
def test_narrower_vectors_give_the_same(width):
    """The paths of processors with AVX2, SSE or NEON, on this one."""
    environment = os.environ | {"NPATTN_VECTOR_WIDTH": width}
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "numba_gives or float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

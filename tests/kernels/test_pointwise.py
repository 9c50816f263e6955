"""Pointwise kernels: both modules agree, and results do not depend on threads or the number of rows."""

import inspect
import math

import numpy as np
import pytest

import npattn
from npattn.kernels import pointwise
from npattn.kernels.pointwise import arrays
from npattn.kernels.pointwise.erf import erf

numba_cpu = pointwise._module("numba_cpu")
needs_numba = pytest.mark.skipif(numba_cpu is None, reason="Numba is missing or interpreted")

FLAT = {
    "gelu": lambda x, y, z: (x, False),
    "gelu tanh": lambda x, y, z: (x, True),
    "gelu_backward": lambda x, y, z: (y, x, False),
    "gelu_backward tanh": lambda x, y, z: (y, x, True),
    "silu": lambda x, y, z: (x,),
    "silu_backward": lambda x, y, z: (y, x),
    "swiglu": lambda x, y, z: (x, y),
    "swiglu_backward": lambda x, y, z: (z, x, y),
}


def by_rows(x, dy, weight, bias, targets):
    """name -> arguments, the residuals made in float64."""
    _, mean, rstd = arrays.layer_norm(x.astype(np.float64), weight, bias, 1e-5)
    _, rms = arrays.rms_norm(x.astype(np.float64), weight, 1e-6)
    _, lse = arrays.cross_entropy(x.astype(np.float64), targets, -100, 0.1)
    mean, rstd, rms, lse = (a.astype(np.float32) for a in (mean, rstd, rms, lse))
    return {
        "layer_norm": (x, weight, bias, 1e-5),
        "layer_norm ": (x, weight, None, 1e-5),
        "layer_norm_backward": (dy, x, weight, mean, rstd),
        "rms_norm": (x, weight, 1e-6),
        "rms_norm_backward": (dy, x, weight, rms),
        "cross_entropy": (x, targets, -100, 0.0),
        "cross_entropy smooth": (x, targets, -100, 0.1),
        "cross_entropy_backward": (0.01, x, targets, lse, -100, 0.0),
        "cross_entropy_backward smooth": (0.01, x, targets, lse, -100, 0.1),
    }


def row_arguments(rng, rows, n):
    x, dy = (3 * rng.standard_normal((2, rows, n))).astype(np.float32)
    weight, bias = rng.standard_normal((2, n)).astype(np.float32)
    targets = rng.integers(0, n, rows)
    targets[:: max(rows // 3, 1)] = -100
    return by_rows(x, dy, weight, bias, targets)


def call(module, name, args):
    result = getattr(module, name.split()[0])(*args)
    return result if isinstance(result, tuple) else (result,)


def wide(args):
    return tuple(
        a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a for a in args
    )


def assert_close(name, args):
    for got, expected in zip(call(numba_cpu, name, args), call(arrays, name, wide(args)), strict=True):
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() <= 3e-6 * np.abs(expected).max(), name


@needs_numba
def test_both_modules_have_the_same_functions_and_parameter_names():
    def public(module):
        return {
            name: list(inspect.signature(f).parameters)
            for name, f in vars(module).items()
            if inspect.isfunction(f) and not name.startswith("_") and f.__module__.startswith(module.__name__)
        }

    assert public(numba_cpu) == public(arrays)


@needs_numba
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("size", [17, 4096, 70001, 16384 * 5 + 3])
def test_flat_kernels_agree_with_float64_arrays(rng, name, size):
    x, y, z = (3 * rng.standard_normal((3, size))).astype(np.float32)
    assert_close(name, FLAT[name](x, y, z))


@needs_numba
@pytest.mark.parametrize(("rows", "n"), [(5, 3), (9, 16), (300, 65), (700, 128), (3, 30011)])
def test_row_kernels_agree_with_float64_arrays(rng, rows, n):
    for name, args in row_arguments(rng, rows, n).items():
        assert_close(name, args)


@needs_numba
def test_same_bits_for_any_number_of_threads(rng):
    before = npattn.get_num_threads()
    x, y, z = (3 * rng.standard_normal((3, 200003))).astype(np.float32)
    cases = [(name, FLAT[name](x, y, z)) for name in FLAT] + list(row_arguments(rng, 1500, 100).items())
    try:
        results = []
        for threads in (1, 2, 4):
            npattn.set_num_threads(threads)
            results.append([call(numba_cpu, name, args) for name, args in cases])
    finally:
        npattn.set_num_threads(before)
    for other in results[1:]:
        for (name, _), ones, others in zip(cases, results[0], other, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ones, others, strict=True)), name


@needs_numba
def test_a_row_does_not_depend_on_the_others(rng):
    args = row_arguments(rng, 1500, 100)
    for name in ("layer_norm", "rms_norm", "cross_entropy"):
        full = call(numba_cpu, name, args[name])
        first, *rest = args[name]
        if name == "cross_entropy":
            rest[0] = np.ascontiguousarray(rest[0][700:703])
        part = call(numba_cpu, name, (np.ascontiguousarray(first[700:703]), *rest))
        assert all(np.array_equal(a[700:703], b) for a, b in zip(full, part, strict=True)), name


@needs_numba
@pytest.mark.parametrize("module", [arrays, numba_cpu])
def test_extremes_stay_finite(module):
    x = np.array([-1e30, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e18] * 3, np.float32)
    for name in ("gelu", "silu"):
        options = (False,) if name == "gelu" else ()
        y = getattr(module, name)(x, *options)
        np.testing.assert_allclose(y, np.where(x > 0, x, 0), rtol=1e-6, atol=1e-7)
    for tanh in (False, True):
        slope = module.gelu_backward(np.ones_like(x), np.where(abs(x) > 50, x * np.float32(1e8), x), tanh)
        np.testing.assert_allclose(slope, np.where(x > 0, 1.0, np.where(x == 0, 0.5, 0.0)), atol=1e-6)
        y = module.gelu(x * np.float32(1e6), tanh)
        np.testing.assert_allclose(y, np.where(x > 0, x * np.float32(1e6), 0), rtol=1e-6, atol=1e-30)
    logits = np.array([[1e30, 0.0, -np.inf, 5.0], [-np.inf, 3.0, 3.0, -np.inf]], np.float32)
    targets = np.array([0, 1])
    loss, lse = module.cross_entropy(logits, targets, -100, 0.0)
    np.testing.assert_allclose(loss, [0.0, np.log(2.0)], rtol=1e-6)
    dlogits = module.cross_entropy_backward(1.0, logits, targets, lse, -100, 0.0)
    np.testing.assert_allclose(dlogits, [[0, 0, 0, 0], [0, -0.5, 0.5, 0]], atol=1e-6)


@needs_numba
def test_scratch_is_never_read(rng, poisoned_empty):
    for name, args in row_arguments(rng, 300, 65).items():
        assert_close(name, args)


def parameter_sets(rng, sizes):
    """Parameters, gradients, m, v of these sizes."""
    columns = [[rng.standard_normal(size).astype(np.float32) for size in sizes] for _ in range(4)]
    columns[3] = [np.abs(v) for v in columns[3]]
    return columns


SIZES = [(3,), (4099,), (200003,), (1, 0, 16384, 16385, 0, 7, 40000)]


@needs_numba
@pytest.mark.parametrize("sizes", SIZES)
def test_adam_agrees_with_float64_arrays_for_any_number_of_threads(rng, sizes):
    start = parameter_sets(rng, sizes)
    settings = ([0.98 + 0.001 * i for i in range(len(sizes))], (0.9, 0.99), 0.01, 3.0, 1e-8)
    exact = [[a.astype(np.float64) for a in column] for column in start]
    arrays.adam(*exact, *settings)
    before, results = npattn.get_num_threads(), []
    try:
        for threads in (1, 2):
            npattn.set_num_threads(threads)
            results.append([[a.copy() for a in column] for column in start])
            numba_cpu.adam(*results[-1], *settings)
    finally:
        npattn.set_num_threads(before)
    for ones, twos, expecteds in zip(*results, exact, strict=True):
        for one, two, expected in zip(ones, twos, expecteds, strict=True):
            assert np.array_equal(one, two)
            np.testing.assert_allclose(one, expected, rtol=2e-6, atol=2e-7)


@needs_numba
@pytest.mark.parametrize("sizes", SIZES)
def test_square_sum_and_scaled_agree_with_float64_arrays(rng, sizes):
    xs = parameter_sets(rng, sizes)[0]
    exact = sum((x.astype(np.float64) ** 2).sum() for x in xs)
    assert numba_cpu.square_sum(xs) == pytest.approx(exact, rel=1e-6)
    assert arrays.square_sum(xs) == pytest.approx(exact, rel=1e-6)
    for x, y, z in zip(xs, numba_cpu.scaled(xs, 0.3), arrays.scaled(xs, 0.3), strict=True):
        assert np.array_equal(y, x * np.float32(0.3))
        assert np.array_equal(z, y)


@needs_numba
@pytest.mark.parametrize(("count", "num", "dim"), [(700, 65, 128), (3, 90, 77), (0, 40, 130), (900, 2, 31)])
def test_rows_are_added_up_by_id_for_any_number_of_threads(rng, count, num, dim):
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    ids, like = rng.integers(0, num, count), np.empty((num, dim), np.float32)
    exact = np.zeros((num, dim))
    np.add.at(exact, ids, rows)
    before, results = npattn.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            npattn.set_num_threads(threads)
            results.append(numba_cpu.sum_of_rows(rows, ids, like))
    finally:
        npattn.set_num_threads(before)
    for result in (*results, arrays.sum_of_rows(rows, ids, like)):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-4)
    assert all(np.array_equal(results[0], other) for other in results[1:])


@needs_numba
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 4, 300, 32), (3, 1, 2, 16), (2, 0, 3, 4)])
def test_merged_heads_are_a_transposed_copy(rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    batch, heads, length, dim = shape
    for given in (x, np.asfortranarray(x), x[:, ::-1, ::-1], np.broadcast_to(x[:1], shape)):
        expected = given.swapaxes(1, 2).reshape(batch, length, heads * dim)
        for module in (arrays, numba_cpu):
            assert np.array_equal(module.merge_heads(given), expected)


def test_who_serves_what():
    big = np.zeros(pointwise.SMALL, np.float32)
    assert pointwise.implementation(big) is (numba_cpu or arrays)
    assert pointwise.implementation(big, None) is (numba_cpu or arrays)
    assert pointwise.implementation(big[:-1]) is arrays
    assert pointwise.implementation(big.astype(np.float64)) is arrays
    assert pointwise.implementation(big, big.astype(np.float64)) is arrays
    assert pointwise.implementation(big.astype(np.float16)) is arrays


def test_who_serves_what_of_several_arrays():
    big, small = np.zeros((64, 64), np.float32), np.zeros(3, np.float32)
    fast = numba_cpu or arrays
    assert pointwise.implementations([big, small]) == [(fast, [0, 1])]
    assert pointwise.implementations([small], [small]) == [(arrays, [0])]
    mixed = pointwise.implementations([small, big, big], [small, big.T, big])
    assert mixed == [(fast, [0, 1, 2])] if fast is arrays else mixed == [(fast, [0, 2]), (arrays, [1])]


def test_arrays_serve_when_numba_cannot(monkeypatch):
    monkeypatch.setattr(pointwise, "_module", lambda name: arrays if name == "arrays" else None)
    assert pointwise.implementation(np.zeros(1 << 14, np.float32)) is arrays


def test_erf():
    x = np.concatenate(
        [np.linspace(-7, 7, 5001), [0.84375, 1.25, 1 / 0.35, 6.0, 1e-300, -0.0, np.inf, -np.inf]]
    )
    exact = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), exact, rtol=4e-16, atol=0)
    x = x.astype(np.float32)
    exact = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), exact, rtol=0, atol=5e-7)
    assert np.isnan(erf(np.array([np.nan]))).all()
    assert np.isnan(erf(np.array([np.nan], np.float32))).all()

"""The backward pass that adds dq up atomically, which NPATTN_CUDA_ATOMICS=1 asks for, on the CPU model."""

import numpy as np
import pytest

import npattn
from npattn.kernels import _cuda

from . import test_shared_suites as shared
from .conftest import through


@pytest.fixture
def launched(cupy, monkeypatch):
    """Names of the kernels launched, with NPATTN_CUDA_ATOMICS=1."""
    monkeypatch.setenv("NPATTN_CUDA_ATOMICS", "1")
    entries = []
    run = _cuda.run
    monkeypatch.setattr(
        _cuda, "run", lambda launches: entries.extend(x.entry for x in launches) or run(launches)
    )
    return entries


QUICK = {"float32": ("all at once, causal",), "float16": ("all at once",)}


@pytest.mark.parametrize(("case", "dtype"), shared.choices("float32", "float16", "bfloat16", quick=QUICK))
def test_results_are_as_accurate_as_the_products_allow(launched, attend, case, dtype):
    shared.test_results_are_as_accurate_as_the_products_allow(attend, case, dtype)
    if max(case.head_dim, case.head_dim_v or 0) <= 128:
        assert "attention_backward_rows" not in launched
        assert launched.count("attention_dq_from_sum") == 1
    else:
        assert "attention_backward_rows" in launched


def test_float64_keeps_the_pass_without_atomics(launched, rng):
    x = rng.standard_normal((1, 1, 20, 16))
    _, pullback = through(npattn.attention_vjp)(x, x, x, backend="cupy")
    pullback(x)
    assert "attention_backward_rows" in launched
    assert "attention_dq_from_sum" not in launched


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_nan_in_masked_keys_does_not_reach_dq(launched, rng, dtype):
    q, k, v, dout = (rng.standard_normal((1, 1, 90, 16)).astype(dtype) for _ in range(4))
    mask = npattn.masks.Padding(np.array([70])) & npattn.masks.Causal()
    results = []
    for fill in (0.0, np.nan):
        k[:, :, 70:] = v[:, :, 70:] = fill
        _, pullback = through(npattn.attention_vjp)(q, k, v, mask=mask, backend="cupy")
        results.append(pullback(dout))
    for clean, poisoned in zip(*(x[:3] for x in results), strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_what_lies_behind_the_last_key_of_a_full_tile_does_not_reach_dq(launched, rng, dtype):
    """It is zero there, and exp(0 - m) overflows where all logits are low."""
    q, v, dout = (rng.standard_normal((1, 1, 70, 16)).astype(dtype) for _ in range(3))
    q = np.abs(q) * 15 + 15
    _, pullback = through(npattn.attention_vjp)(q, -q, v, backend="cupy")
    assert all(np.isfinite(x).all() for x in pullback(dout)[:3])


def test_another_value_of_the_variable_is_an_error(cupy, monkeypatch, rng):
    monkeypatch.setenv("NPATTN_CUDA_ATOMICS", "yes")
    x = rng.standard_normal((1, 1, 4, 16), dtype=np.float32)
    _, pullback = through(npattn.attention_vjp)(x, x, x, backend="cupy")
    with pytest.raises(ValueError, match="NPATTN_CUDA_ATOMICS must be 1"):
        pullback(x)

"""The sm_90a forward kernel, which NPATTN_WGMMA=1 asks for, on the CPU model of warpgroups."""

import numpy as np
import pytest

import npattn
from npattn.kernels import _cuda

from . import test_shared_suites as shared
from .conftest import through


@pytest.fixture
def launched(cupy, monkeypatch):
    """Names of the kernels launched, with NPATTN_WGMMA=1."""
    monkeypatch.setenv("NPATTN_WGMMA", "1")
    entries = []
    run = _cuda.run
    monkeypatch.setattr(
        _cuda, "run", lambda launches: entries.extend(x.entry for x in launches) or run(launches)
    )
    return entries


@pytest.mark.parametrize("reads", ["early", "late"])
@pytest.mark.parametrize(("case", "dtype"), shared.choices("float16", "bfloat16"))
def test_results_are_as_accurate_as_the_products_allow(launched, attend, monkeypatch, case, dtype, reads):
    monkeypatch.setenv("NPATTN_CUDA_WGMMA", reads)
    shared.test_results_are_as_accurate_as_the_products_allow(attend, case, dtype)
    if max(case.head_dim, case.head_dim_v or 0) <= 128 and "attention_merge" not in launched:
        assert "attention_forward_wgmma" in launched
        assert "attention_forward" not in launched


@pytest.mark.parametrize("order", ["forward", "backward", "starve:128-384"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_number_of_steps_goes_through_the_stages(launched, rng, monkeypatch, head_dim, order):
    """With as many steps as stages the copier once arrived twice at a barrier before anybody waited."""
    monkeypatch.setenv("NPATTN_CUDA_ORDER", order)
    q, k, v = (rng.standard_normal((1, 1, 800, head_dim)).astype(np.float16) for _ in range(3))
    for len_k in (0, 1, 128, 129, 256, 300, 512, 640, 800):
        arrays = q[:, :, :66], k[:, :, :len_k], v[:, :, :len_k]
        out = through(npattn.attention)(*arrays, backend="cupy")
        exact = npattn.attention(*(x.astype(float) for x in arrays), backend="oracle")
        assert np.linalg.norm(out - exact) <= 1e-3 * np.linalg.norm(exact)
    assert set(launched) == {"attention_forward_wgmma"}

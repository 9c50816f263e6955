"""The sm_90a forward kernel, which NPATTN_WGMMA=1 asks for, on the CPU model of warpgroups."""

import pytest

from npattn.kernels import _cuda

from . import test_shared_suites as shared


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
    print(launched)

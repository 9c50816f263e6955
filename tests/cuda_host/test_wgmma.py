"""The sm_90a forward kernel, which NPATTN_WGMMA=1 asks for, on the CPU model of warpgroups."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.kernels import _cuda

from . import test_shared_suites as shared
from .conftest import through


@pytest.fixture(params=["1", "tma"])
def copier(request):
    return request.param


@pytest.fixture
def launched(cupy, monkeypatch, copier):
    """The kernels launched, with NPATTN_WGMMA=1 or tma."""
    monkeypatch.setenv("NPATTN_WGMMA", copier)
    kernels = []
    run = _cuda.run
    monkeypatch.setattr(
        _cuda, "run", lambda launches: kernels.extend((x.entry, x.kernel) for x in launches) or run(launches)
    )
    return kernels


def entries(launched):
    return {entry for entry, _ in launched}


def uses_tma(launched):
    return {"tile/copy_tma.cuh" in k.files for entry, k in launched if entry == "attention_forward_wgmma"}


QUICK = {"float16": ("all at once",), "bfloat16": ("one short of a tile",)}


@pytest.mark.parametrize("reads", ["early", "late"])
@pytest.mark.parametrize(("case", "dtype"), shared.choices("float16", "bfloat16", quick=QUICK))
def test_results_are_as_accurate_as_the_products_allow(launched, attend, monkeypatch, case, dtype, reads):
    monkeypatch.setenv("NPATTN_CUDA_WGMMA", reads)
    shared.test_results_are_as_accurate_as_the_products_allow(attend, case, dtype)
    if max(case.head_dim, case.head_dim_v or 0) <= 128 and "attention_merge" not in entries(launched):
        assert "attention_forward_wgmma" in entries(launched)
        assert "attention_forward" not in entries(launched)


@pytest.mark.parametrize("order", ["forward", "backward", "starve:128-384"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_number_of_steps_goes_through_the_stages(launched, rng, monkeypatch, head_dim, order, copier):
    """With as many steps as stages the copier once arrived twice at a barrier before anybody waited."""
    monkeypatch.setenv("NPATTN_CUDA_ORDER", order)
    q, k, v = (rng.standard_normal((1, 1, 800, head_dim)).astype(np.float16) for _ in range(3))
    for len_k in (0, 1, 128, 129, 256, 300, 512, 640, 800):
        arrays = q[:, :, :66], k[:, :, :len_k], v[:, :, :len_k]
        out = through(npattn.attention)(*arrays, backend="cupy")
        exact = npattn.attention(*(x.astype(float) for x in arrays), backend="oracle")
        assert np.linalg.norm(out - exact) <= 1e-3 * np.linalg.norm(exact)
    assert entries(launched) == {"attention_forward_wgmma"}
    assert uses_tma(launched) == {copier == "tma"}


LAYOUTS = {  # (batch, heads, length, head_dim) arrays and whether TMA can describe them
    "heads behind positions": (lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2), True),
    "part of a wider row": (lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 16)])[..., : x.shape[-1]], True),
    "one row for all": (lambda x: np.broadcast_to(x[:, :, :1], x.shape), False),
    "backwards": (lambda x: x[:, :, ::-1], False),
    "odd rows": (lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 1)])[..., : x.shape[-1]], False),
    "odd width": (lambda x: x[..., :51].copy(), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_that_tma_cannot_describe_are_copied_by_cp_async(launched, rng, layout, copier):
    make, describable = LAYOUTS[layout]
    q, k, v = (make(rng.standard_normal((2, 2, 150, 64)).astype(np.float16)) for _ in range(3))
    out = through(npattn.attention)(q, k, v, mask=npattn.masks.Causal(), backend="cupy")
    exact = npattn.attention(
        *(x.astype(float) for x in (q, k, v)), mask=npattn.masks.Causal(), backend="oracle"
    )
    assert np.linalg.norm(out - exact) <= 1e-3 * np.linalg.norm(exact)
    assert uses_tma(launched) == {describable and copier == "tma"}


def test_the_driver_is_asked_for_the_box_that_the_kernel_copies(monkeypatch):
    """Every argument in its place; whether a driver likes them, only a driver can show."""
    asked = []

    def encode(*arguments):
        asked.append([getattr(x, "value", None) if not hasattr(x, "__len__") else list(x) for x in arguments])
        return 1 if len(asked) > 1 else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    box = _cuda.Box(4096, True, (64, 100, 8, 2), (128, 12800, 102400), 128)
    assert len(_cuda.tensor_map.__wrapped__(box)) == 128
    at, *rest = asked[0]
    assert at % 64 == 0
    assert rest == [9, 4, 4096, [64, 100, 8, 2], [128, 12800, 102400], [64, 128, 1, 1], [1] * 4, 0, 3, 2, 0]
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: error 1"):
        _cuda.tensor_map.__wrapped__(box)

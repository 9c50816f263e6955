"""From ``npattn.attention`` to the launch: what goes to the GPU, what is refused, and with which words."""

import subprocess
import sys

import numpy as np
import pytest

import npattn
from npattn import masks, nn
from npattn.kernels import _cuda
from npattn.kernels.contract import Problem
from npattn.kernels.tile import cuda_launch, cupy_cuda
from npattn.masks.base import Extent
from npattn.plans.build import tile_plan

from .fake_cupy import ndarray


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def test_cpu_arrays_are_refused(rng):
    x = normal(rng, 1, 1, 4, 16)
    with pytest.raises(TypeError, match=r"cupy\.asarray"):
        npattn.attention(x, x, x, backend="cupy")


def test_what_is_missing_is_said_in_one_sentence():
    """In a fresh interpreter without CuPy, or with CuPy and no driver."""
    code = "from npattn.kernels import _cuda; print(_cuda.why_unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reason = done.stdout.strip()
    if reason == "None":
        pytest.skip("there is a GPU here")
    assert "\n" not in reason
    assert "install" in reason or "no CUDA device" in reason or "compute capability" in reason


def test_auto_takes_the_cuda_kernels_for_gpu_arrays_and_stays_there(cupy, rng, monkeypatch):
    launched = []
    run = _cuda.run
    monkeypatch.setattr(_cuda, "run", lambda launches: launched.extend(launches) or run(launches))
    x = cupy.asarray(normal(rng, 1, 2, 40, 16))
    out, pullback = npattn.attention_vjp(x, x, x, mask=masks.Causal())
    grads = pullback(x)
    assert [launch.entry for launch in launched] == [
        *("attention_forward", "attention_delta", "attention_backward_rows", "attention_backward_cols")
    ]
    assert all(isinstance(y, ndarray) for y in (out, *grads[:3]))


def test_mixed_devices_are_refused(cupy, rng):
    x = normal(rng, 1, 1, 4, 16)
    with pytest.raises(TypeError, match="same device"):
        npattn.attention(cupy.asarray(x), x, x)


def test_too_wide_heads_say_so_and_numpy_computes_them_with_cupy_arrays(cupy, rng):
    x = cupy.asarray(normal(rng, 1, 1, 5, 300))
    with pytest.raises(ValueError, match="head_dim 256"):
        npattn.attention(x, x, x, backend="cupy")
    assert isinstance(npattn.attention(x, x, x), ndarray)


@pytest.mark.parametrize("len_q", [1, 5])
def test_paged_keys_and_values_equal_contiguous_ones(cupy, rng, len_q):
    batch, heads_q, heads_kv, dim, page = 3, 4, 2, 16, 32
    lengths = np.array([150, 70, 97])
    len_k = int(lengths.max())
    pages = -(-len_k // page)
    q = normal(rng, batch, heads_q, len_q, dim)
    key_pages, value_pages = (normal(rng, 20, heads_kv, page, dim) for _ in range(2))
    table = rng.permutation(20)[: batch * pages].reshape(batch, pages).astype(np.int32)
    k, v = (
        x[table].swapaxes(1, 2).reshape(batch, heads_kv, -1, dim)[:, :, :len_k]
        for x in (key_pages, value_pages)
    )
    mask = masks.Padding(lengths)
    problem = Problem(
        *(
            np.dtype(np.float32),
            batch,
            heads_q,
            heads_kv,
            len_q,
            len_k,
            dim,
            dim,
            0.25,
            0.0,
            False,
            False,
            0.0,
            0,
        )
    )
    plan = tile_plan(mask, Extent(batch, heads_q, len_q, len_k), *cuda_launch.tile_shape(problem))
    moved = [cupy.asarray(x) for x in (q, key_pages, value_pages, table)]
    out, m, l = map(cupy.asnumpy, cupy_cuda.paged_forward(problem, plan, *moved)[:3])
    exact, lse = npattn.attention(q, k, v, mask=mask, scale=0.25, return_lse=True, backend="oracle")
    np.testing.assert_allclose(out, exact, atol=2e-6)
    np.testing.assert_allclose(m + np.log(l), lse, rtol=1e-6)


def test_paged_attention_refuses_many_queries_and_short_tables(cupy, rng):
    pages = cupy.asarray(normal(rng, 4, 1, 32, 16))
    table = cupy.asarray(np.zeros((1, 2), np.int32))
    for len_q, len_k, words in ((100, 64, "gather the pages"), (1, 65, "page_table must")):
        problem = Problem(
            *(np.dtype(np.float32), 1, 1, 1, len_q, len_k, 16, 16, 0.25, 0.0, False, False, 0.0, 0)
        )
        plan = tile_plan(None, Extent(1, 1, len_q, len_k), *cuda_launch.tile_shape(problem))
        q = cupy.asarray(normal(rng, 1, 1, len_q, 16))
        with pytest.raises(ValueError, match=words):
            cupy_cuda.paged_forward(problem, plan, q, pages, pages, table)


def test_steps_and_blocks_divide_the_plans_tiles():
    for c_type, itemsize in (("f16", 2), ("bf16", 2), ("float", 4), ("double", 8)):
        dtype = {2: np.float16, 4: np.float32, 8: np.float64}[itemsize]
        for dim in (1, 16, 64, 100, 128, 200, 256):
            problem = Problem(np.dtype(dtype), 1, 1, 1, 8, 8, dim, dim, 1.0, 0.0, True, False, 0.0, 0)
            tile_q, tile_k = cuda_launch.tile_shape(problem)
            for family in ("forward", "decode", "backward_rows", "dbias"):
                cut = cuda_launch.config(family, c_type, dim, dim)
                assert tile_k % cut.step == 0
                assert tile_q % cut.block == 0 or family == "decode"
            cut = cuda_launch.config("backward_cols", c_type, dim, dim)
            assert tile_q % cut.step == 0
            assert tile_k % cut.block == 0
            assert cuda_launch.largest_shared_bytes(problem) <= 163 * 1024  # sm_80


def test_parameter_records_have_the_layout_of_the_c_structs():
    assert cuda_launch.PARAMS.fields["q"][1] == 0
    assert cuda_launch.PARAMS.itemsize % 8 == 0
    offsets = [cuda_launch.PARAMS.fields[name][1] for name in cuda_launch.PARAMS.names]
    assert offsets == sorted(offsets)
    assert cuda_launch.PARAMS.itemsize <= 4096  # what a launch takes by value


def test_a_layer_computes_and_differentiates_on_gpu_arrays(cupy, rng):
    layer = nn.MultiHeadAttention(32, 2, causal=True, rng=rng)
    x, dy = normal(rng, 2, 20, 32), normal(rng, 2, 20, 32)
    y, pullback = layer.vjp(x)
    dx, grads = pullback(dy)
    layer_on_gpu = nn.MultiHeadAttention(32, 2, causal=True, rng=rng)
    for name, array in layer.named_parameters().items():
        owner = layer_on_gpu
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, cupy.asarray(array))
    y_gpu, pullback = layer_on_gpu.vjp(cupy.asarray(x))
    dx_gpu, grads_gpu = pullback(cupy.asarray(dy))
    assert isinstance(y_gpu, ndarray)
    np.testing.assert_allclose(cupy.asnumpy(y_gpu), y, atol=2e-6)
    np.testing.assert_allclose(cupy.asnumpy(dx_gpu), dx, atol=2e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(cupy.asnumpy(grads_gpu[name]), grad, atol=5e-5, err_msg=name)


@pytest.mark.parametrize(
    ("len_q", "wgmma"), [(70, "0"), (70, "1"), (1, "0")], ids=["rows", "wgmma", "decode"]
)
def test_what_rounding_takes_from_a_16_bit_result_is_kept_for_the_pullback(
    cupy, rng, monkeypatch, len_q, wgmma
):
    monkeypatch.setenv("NPATTN_WGMMA", wgmma)
    v = normal(rng, 1, 1, 90, 16).astype(np.float16)
    zeros = np.zeros((1, 1, 90, 16), np.float16)
    problem = Problem(
        *(np.dtype(np.float16), 1, 1, 1, len_q, 90, 16, 16, 1.0, 0.0, False, False, 0.0, 0), keeps_rest=True
    )
    plan = tile_plan(None, Extent(1, 1, len_q, 90), *cupy_cuda.tile_shape(problem))
    arrays = [cupy.asarray(x) for x in (zeros[:, :, :len_q], zeros, v)]
    out, _, _, rest = cupy_cuda.forward(problem, plan, *arrays, None, None)
    exact = v.astype(float).mean(axis=2, keepdims=True)  # all weights are equal
    assert np.abs(cupy.asnumpy(out).astype(float) - exact).max() > 1e-5
    assert np.abs(cupy.asnumpy(out).astype(float) + cupy.asnumpy(rest) - exact).max() < 2e-7
    without = cupy_cuda.forward(problem._replace(keeps_rest=False), plan, *arrays, None, None)
    assert without.rest is None

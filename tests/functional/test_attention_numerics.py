"""Sums, maxima and ranges: exact where the contract says exact, finite wherever the true result is."""

import tracemalloc

import numpy as np
import pytest

import npattn
from npattn import masks

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_4096_equal_weights_is_exact(attend, dtype):
    q, k = np.zeros((1, 1, 3, 8), dtype), np.ones((1, 1, 4096, 8), dtype)
    v = np.zeros((1, 1, 4096, 3), dtype)
    v[..., 0] = 1
    v[:, :, ::4, 1] = 1
    v[:, :, 4095, 2] = 1
    out, lse = attend.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out.astype(float), np.broadcast_to([1, 0.25, 2.0**-12], out.shape))
    np.testing.assert_allclose(lse, np.log(4096), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_logits_beyond_their_range_are_right(attend, dtype):
    """q·k = 64 · 200 · 200 = 2.56e6; the largest float16 is 65504."""
    q = np.full((1, 1, 2, 64), 200, dtype)
    k = np.full((1, 1, 3, 64), 200, dtype)
    k[0, 0, 2] = 100
    v = np.array([[[[1.0], [3.0], [7.0]]]]).astype(dtype)
    out, lse = attend.attention(q, k, v, scale=1.0, return_lse=True)
    np.testing.assert_array_equal(out.astype(float), 2.0)
    np.testing.assert_allclose(lse, 64 * 200 * 200 + np.log(2), rtol=1e-6)


def test_float16_gradients_of_large_logits_are_finite(attend, rng):
    q = np.full((1, 1, 4, 64), 30, np.float16)
    k = (np.full((1, 1, 5, 64), 30) + rng.integers(0, 2, (1, 1, 5, 64))).astype(np.float16)
    v = rng.standard_normal((1, 1, 5, 8)).astype(np.float16)
    _, pullback = attend.attention_vjp(q, k, v)
    for grad in pullback(rng.standard_normal((1, 1, 4, 8)).astype(np.float16))[:3]:
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_end_of_the_range_come_out(attend, dtype):
    top = ml_dtypes.finfo(dtype).max
    q, k = np.zeros((1, 1, 2, 4), dtype), np.zeros((1, 1, 1, 4), dtype)
    out = attend.attention(q, k, np.full((1, 1, 1, 3), top, dtype))
    np.testing.assert_array_equal(out, np.full(out.shape, top, dtype))


def test_values_near_the_end_of_float32_do_not_overflow_on_the_way(attend):
    """The unnormalised sum of 256 weights times 2**126 is 2**134, beyond float32; their mean is not."""
    q, k = np.zeros((2, 1, 1, 256, 4), np.float32)
    out = attend.attention(q, k, np.full((1, 1, 256, 3), 2.0**126, np.float32))
    np.testing.assert_array_equal(out, np.full(out.shape, 2.0**126))


@pytest.mark.parametrize(
    ("dtype", "other", "size"),
    [("f2", "f4", 1e5), ("f2", ml_dtypes.bfloat16, 2.0**17), ("f2", "f8", 1e5), ("f4", "f8", 1e39)],
)
def test_a_gradient_beyond_the_dtype_gives_what_fits(attend, rng, dtype, other, size):
    """dout of 1e5 is beyond float16; the share of it that reaches one of 1000 values is not."""
    shapes = (1, 2, 3, 4), (1, 1, 1000, 4), (1, 1, 1000, 2), (3, 1000), (2,)
    q, k, v, bias, sinks = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    v /= 100
    dout = (rng.uniform(0.5, 1, (1, 2, 3, 2)) * size).astype(other)
    dlse = np.full((1, 2, 3), size / 100)
    _, pullback = attend.attention_vjp(q, k, v, bias=bias, sinks=sinks)
    q, k, v, bias, sinks = (x.astype(float) for x in (q, k, v, bias, sinks))
    _, exact = npattn.attention_vjp(q, k, v, bias=bias, sinks=sinks, backend="oracle")
    for x, y in zip(pullback(dout, dlse), exact(dout.astype(float), dlse), strict=True):
        assert np.abs(y).max() < np.finfo(dtype).max
        np.testing.assert_allclose(x.astype(float), y, rtol=0.01, atol=0.01 * np.abs(y).max())


def test_a_small_scale_comes_before_the_product(attend):
    """q·k = 4e40 is beyond float32, scale · q·k = 4 is not."""
    q = np.full((1, 1, 1, 4), 1e20, np.float32)
    k = np.array([1e20, 0.0], np.float32)[:, None] * np.ones((1, 1, 2, 4), np.float32)
    v = np.array([[[[1.0], [0.0]]]], np.float32)
    out, pullback = attend.attention_vjp(q, k, v, scale=1e-20)  # logits 4e20, 0
    assert out.item() == 1.0
    k *= np.float32(1e-20)
    out, pullback = attend.attention_vjp(q, k, v, scale=1e-20)  # logits 4, 0
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-4)), rtol=1e-6)
    grads = pullback(np.ones_like(out))
    p = float(out.item())
    np.testing.assert_allclose(grads.key[0, 0, 0], p * (1 - p), rtol=1e-5)  # scale · q = 1
    np.testing.assert_allclose(grads.query, p * (1 - p) * 1e-20, rtol=1e-5)


def test_a_large_scale_comes_after_the_product(attend):
    """scale · q = 1e39 is beyond float32, scale · q·k = 15 is not."""
    q = np.full((1, 1, 1, 1), 1e35, np.float32)
    k = np.array([1.5e-38, 1.4e-38], np.float32).reshape(1, 1, 2, 1)
    v = np.array([[[[1.0], [0.0]]]], np.float32)
    out, pullback = attend.attention_vjp(q, k, v, scale=1e4)
    p = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(out, p, rtol=1e-5)
    grads = pullback(np.ones_like(out))
    np.testing.assert_allclose(grads.key[0, 0, :, 0], [p * (1 - p) * 1e39, -p * (1 - p) * 1e39], rtol=1e-5)
    np.testing.assert_allclose(grads.query, p * (1 - p) * 1e-35, rtol=1e-4)


def test_a_scale_beyond_float32_is_finite(attend, rng):
    """0 · inf would be NaN: queries of zeros have equal logits whatever the scale."""
    k, v = rng.standard_normal((2, 1, 1, 5, 4)).astype(np.float32)
    for scale in (1e60, -1e60, 1e-60):
        out, pullback = attend.attention_vjp(np.zeros_like(k), k, v, scale=scale)
        np.testing.assert_allclose(out[0, 0], np.tile(v[0, 0].mean(0), (5, 1)), rtol=1e-5, atol=1e-6)
        assert not pullback(v).key.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_whole_row_at_finfo_min_gives_the_mean(attend, rng, dtype):
    v = rng.standard_normal((1, 1, 50, 3)).astype(dtype)
    q, k = np.zeros((2, 1, 1, 50, 4), dtype)
    bias = np.zeros((50, 50), dtype)
    bias[7] = np.finfo(dtype).min
    bias[8, :25] = np.finfo(dtype).min
    out, lse = attend.attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_allclose(out[0, 0, 7], v[0, 0].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[0, 0, 8], v[0, 0, 25:].mean(0), rtol=1e-5, atol=1e-6)
    assert lse[0, 0, 7] == np.finfo(dtype).min
    assert np.isfinite(lse).all()


def test_a_float64_bias_below_float32_is_still_no_mask(attend, rng):
    """Cast to float32, finfo(float64).min would become -inf, which masks."""
    v = rng.standard_normal((1, 1, 6, 3)).astype(np.float32)
    q, k = np.zeros((2, 1, 1, 6, 4), np.float32)
    bias = np.full((6, 6), np.finfo(np.float64).min)
    bias[0] = -np.inf
    out, pullback = attend.attention_vjp(q, k, v, bias=bias)
    np.testing.assert_allclose(out[0, 0, 1:], np.tile(v[0, 0].mean(0), (5, 1)), rtol=1e-5, atol=1e-6)
    assert not out[0, 0, 0].any()
    assert pullback(np.ones_like(out)).bias.dtype == np.float64


def test_equal_logits_of_1e5_give_the_mean(attend, rng):
    q, k = np.full((1, 1, 9, 1), 1e5, np.float32), np.ones((1, 1, 700, 1), np.float32)
    v = rng.standard_normal((1, 1, 700, 5)).astype(np.float32)
    out = attend.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(out[0, 0], np.tile(v[0, 0].mean(0, dtype=float), (9, 1)), atol=1e-6)


def test_differences_of_exact_logits_are_exact(attend):
    """Logits 2**24, 2**24 - 1, 2**24 - 2: times log2(e) they would round by whole units."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = (2.0**24 - np.arange(3)).astype(np.float32).reshape(1, 1, 3, 1)
    v = np.eye(3, dtype=np.float32)[None, None]
    out = attend.attention(q, k, v, scale=1.0)
    expected = np.exp(-np.arange(3.0))
    np.testing.assert_allclose(out[0, 0, 0], expected / expected.sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_from_end_to_end_of_the_range(attend, rng, dtype):
    q, k, v = rng.standard_normal((3, 1, 6, 9, 4)).astype(dtype)
    dout = rng.standard_normal(v.shape).astype(dtype)
    top = np.finfo(dtype).max
    sinks = np.array([-np.inf, -top, -1e4, 0.0, 1e4, top], dtype)
    (out, lse), pullback = attend.attention_vjp(q, k, v, sinks=sinks, return_lse=True)
    grads = pullback(dout, np.ones_like(lse))
    free, free_lse = attend.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out[:, :3], free[:, :3], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse[:, :3], free_lse[:, :3], rtol=1e-6)
    assert (np.abs(out[:, 3]) < np.abs(free[:, 3])).all()
    assert not out[:, 4:].any()
    np.testing.assert_array_equal(lse[0, 4:, 0], sinks[4:])
    for grad in (grads.query, grads.key, grads.value, grads.sinks):
        assert np.isfinite(grad).all()
    assert not grads.sinks[:3].any()
    np.testing.assert_allclose(grads.sinks[4:], 9, rtol=1e-6)  # each of 9 rows has lse = sink


def test_weights_of_dropout_close_to_one_are_finite(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 1, 40, 8)).astype(np.float32)
    for p in (1 - 1e-6, 1 - 2.0**-33, np.nextafter(1, 0)):
        out, pullback = attend.attention_vjp(q, k, v, dropout_p=p, seed=1)
        assert np.isfinite(out).all()
        for grad in pullback(v)[:3]:
            assert np.isfinite(grad).all()


def test_many_dominated_keys_do_not_disturb_the_dominant_one(attend, rng):
    """A maximum that comes last rescales everything before it."""
    k = np.zeros((1, 1, 1000, 1), np.float32)
    k[0, 0, -1] = 200.0
    v = rng.standard_normal((1, 1, 1000, 2)).astype(np.float32)
    out = attend.attention(np.ones((1, 1, 5, 1), np.float32), k, v, scale=1.0)
    np.testing.assert_array_equal(out[0, 0], np.tile(v[0, 0, -1], (5, 1)))


def test_lse_is_the_logarithm_of_the_denominator(attend, rng):
    q, k, v = rng.standard_normal((3, 2, 3, 40, 8))
    mask = masks.Causal(offset=-3)
    sinks = rng.standard_normal(3)
    _, lse = attend.attention(q, k, v, mask=mask, softcap=3.0, sinks=sinks, return_lse=True)
    logits = 3 * np.tanh(q @ k.swapaxes(-1, -2) / np.sqrt(8) / 3)
    e = np.where(mask.to_dense(40, 40), np.exp(logits), 0).sum(-1) + np.exp(sinks[:, None])
    np.testing.assert_allclose(lse, np.log(e), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_has_accumulation_dtype(attend, dtype):
    x = np.ones((1, 2, 3, 4), dtype)
    out, lse = attend.attention(x, x, x, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_no_warning_is_given_for_empty_rows(attend):
    """filterwarnings = error: log 0 and 0/0 stay inside."""
    x = np.ones((1, 1, 3, 2), np.float32)
    out, lse = attend.attention(x, x, x, mask=np.zeros((3, 3), bool), return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    "mask", [masks.Window(127), masks.Documents(np.full(512, 128))], ids=["window", "documents"]
)
@pytest.mark.parametrize("backend", ["auto", "numpy"])
def test_interval_masks_need_linear_memory(backend, mask):
    """65,536 tokens: the matrix would have 4 GiB as bool, 16 GiB as float32; each argument has 4 MiB."""
    x = np.zeros((1, 1, 65_536, 16), np.float32)
    short = x[:, :, :300]
    npattn.attention_vjp(short, short, short, mask=masks.Window(127), backend=backend)[1](short)  # compiles
    tracemalloc.start()
    try:
        out, pullback = npattn.attention_vjp(x, x, x, mask=mask, backend=backend)
        pullback(out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients_that_cancel_do_not_carry_the_rounding_of_out(attend, rng, dtype):
    """Adding one number to all logits of a row changes nothing: such a bias has the gradient 0.

    It is the sum of all dS; delta from a rounded out would leave 2**-9 of every row in it.
    """
    q, k, v, dout = (rng.standard_normal((1, 2, 60, 16)).astype(dtype) for _ in range(4))
    bias = np.zeros((1, 1, 1, 1), np.float32)
    _, pullback = attend.attention_vjp(q, k, v, bias=bias)
    (total,) = pullback(dout).bias.ravel()
    rows = np.sqrt(dout.shape[1] * dout.shape[2])
    assert abs(total) < rows * 2.0**-15


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_with_one_visible_key_dropout_leaves_queries_and_keys_no_gradient(attend, rng, dtype):
    """The weight is 1 whatever the logit; 1 / (1 - p) must not be rounded before it meets the value."""
    q, k, v, dout = (rng.standard_normal((1, 2, 40, 16)).astype(dtype) for _ in range(4))
    _, pullback = attend.attention_vjp(q, k, v, mask=masks.Window(0, 0), dropout_p=0.1, seed=3)
    grads = pullback(dout)
    assert max(abs(grads.query).max(), abs(grads.key).max()) < (2e-3 if dtype == ml_dtypes.bfloat16 else 2e-5)

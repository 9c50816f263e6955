"""Gradients of every argument, with each feature alone and with all of them, in float64 to 1e-6."""

import numpy as np
import pytest

from npattn import masks
from npattn.testing import case, cases, check_vjp

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
SMALL = [entry for entry in cases("shapes", "masks", "features") if entry.len_q * entry.len_k <= 15_000]


def check(attend, arguments, **options):
    options = {name: x for name, x in arguments.items() if name not in DIFFERENTIABLE} | options

    def f_vjp(query, key, value, bias, sinks):
        return attend.attention_vjp(query, key, value, bias=bias, sinks=sinks, **options)

    check_vjp(f_vjp, [arguments.get(name) for name in DIFFERENTIABLE], names=DIFFERENTIABLE)


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.name)
def test_gradients_of_out_and_lse(attend, entry):
    check(attend, entry.arguments(), return_lse=True)


@pytest.mark.parametrize("name", ["plain", "all at once", "all at once, causal"])
def test_gradients_without_dlse(attend, name):
    check(attend, case(name).arguments())


@pytest.mark.parametrize("shape", ["11qk", "b1q1", "1h1k", "bh11", "q1", "1", "b1qk"])
def test_dbias_is_summed_over_the_axes_it_broadcasts_along(attend, shape):
    arguments = case("gqa").arguments()
    rng = np.random.default_rng(3)
    arguments["bias"] = rng.standard_normal(case("gqa").shape(shape))
    check(attend, arguments, return_lse=True)


def test_gradients_with_several_leading_dimensions_that_broadcast(attend, rng):
    arguments = {
        "query": rng.standard_normal((2, 1, 4, 9, 5)),
        "key": rng.standard_normal((3, 2, 11, 5)),
        "value": rng.standard_normal((2, 3, 2, 11, 6)),
        "bias": rng.standard_normal((2, 1, 1, 9, 11)),
        "sinks": rng.standard_normal(4),
        "mask": masks.Window(6, 2),
        "softcap": 2.0,
    }
    check(attend, arguments, return_lse=True)


def test_gradients_of_2d_arrays_beside_4d_ones(attend, rng):
    query = rng.standard_normal((2, 4, 9, 5))
    key = rng.standard_normal((11, 5))
    value = rng.standard_normal((11, 6))
    check(attend, {"query": query, "key": key, "value": value}, return_lse=True)
    check(attend, {"query": key, "key": query, "value": rng.standard_normal((2, 4, 9, 3))}, return_lse=True)


def test_gradient_of_equal_logits_of_1e5_in_float32(attend, rng):
    """lse = 1e5 + log n has no room for log n in float32: weights from exp(s - lse) would not sum to 1."""
    length = 100
    query = np.full((1, 1, length, 1), 100.0, np.float32)
    key = np.full((1, 1, length, 1), 1000.0, np.float32)
    value = rng.standard_normal((1, 1, length, 8)).astype(np.float32)
    out, pullback = attend.attention_vjp(query, key, value, scale=1.0)
    np.testing.assert_allclose(out[0, 0], np.tile(value[0, 0].mean(0), (length, 1)), atol=1e-6)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    grads = pullback(dout)
    mean = np.tile(dout[0, 0].astype(float).sum(0) / length, (length, 1))
    np.testing.assert_allclose(grads.value[0, 0], mean, rtol=1e-5, atol=1e-6)
    dp = dout[0, 0].astype(float) @ value[0, 0].astype(float).T
    ds = (dp - dp.mean(1, keepdims=True)) / length
    np.testing.assert_allclose(grads.key[0, 0, :, 0], ds.sum(0) * 100, atol=2e-4)
    np.testing.assert_allclose(grads.query[0, 0], 0, atol=2e-2)  # 1000 · (a sum that is 0)


def test_gradient_of_a_row_at_finfo_min_is_that_of_equal_logits(attend, rng):
    """A finite bias is not a mask, however low."""
    query, key = np.zeros((2, 1, 1, 6, 4), np.float32)
    value = rng.standard_normal((1, 1, 6, 3)).astype(np.float32)
    bias = np.full((6, 6), np.finfo(np.float32).min)
    out, pullback = attend.attention_vjp(query, key, value, bias=bias)
    np.testing.assert_allclose(out[0, 0], np.tile(value[0, 0].mean(0), (6, 1)), rtol=1e-6, atol=1e-7)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    grads = pullback(dout)
    np.testing.assert_allclose(grads.value[0, 0], np.tile(dout[0, 0].mean(0), (6, 1)), rtol=1e-5, atol=1e-6)
    dp = dout[0, 0] @ value[0, 0].T
    np.testing.assert_allclose(grads.bias, (dp - dp.mean(1, keepdims=True)) / 6, atol=1e-6)


def test_dlse_reaches_the_sink_of_a_row_without_keys(attend):
    """Its lse is the sink; with dlse=None all its gradients are 0."""
    query, key, value = np.ones((3, 1, 2, 4, 3))
    sinks = np.array([0.5, -1.0])
    mask = np.zeros((4, 4), bool)
    (out, lse), pullback = attend.attention_vjp(query, key, value, mask=mask, sinks=sinks, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse[0], np.repeat(sinks[:, None], 4, axis=1))
    dlse = np.arange(8.0).reshape(1, 2, 4)
    grads = pullback(np.ones_like(out), dlse)
    np.testing.assert_allclose(grads.sinks, dlse.sum((0, 2)), rtol=1e-14)
    for grad in pullback(np.ones_like(out)):
        assert grad is None or not grad.any()


def test_dlse_is_accepted_when_the_call_did_not_return_lse(attend, rng):
    arguments = case("plain").arguments()
    out, pullback = attend.attention_vjp(**arguments)
    (_, lse), with_lse = attend.attention_vjp(**arguments, return_lse=True)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    for one, other in zip(pullback(dout, dlse), with_lse(dout, dlse), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_have_their_arguments_dtypes(attend, rng):
    query = rng.standard_normal((1, 2, 5, 4)).astype(np.float16)
    key = rng.standard_normal((1, 2, 6, 4)).astype(np.float32)
    value = rng.standard_normal((1, 2, 6, 4)).astype(np.float16)
    bias = rng.standard_normal((5, 6))
    sinks = rng.standard_normal(2).astype(np.float16)
    out, pullback = attend.attention_vjp(query, key, value, bias=bias, sinks=sinks)
    assert out.dtype == np.float32
    grads = pullback(rng.standard_normal(out.shape).astype(np.float32))
    assert [grad.dtype for grad in grads] == [x.dtype for x in (query, key, value, bias, sinks)]


def test_gradients_are_none_where_the_argument_was_none(attend):
    _, pullback = attend.attention_vjp(*np.ones((3, 1, 1, 2, 2)))
    grads = pullback(np.ones((1, 1, 2, 2)))
    assert grads._fields == ("query", "key", "value", "bias", "sinks")
    assert grads.bias is None
    assert grads.sinks is None


def test_softcap_saturated_in_either_direction_has_finite_gradients(attend, rng):
    """tanh is exactly ±1 there, its slope exactly 0; a cap so high that it does nothing changes nothing."""
    query, key, value = rng.standard_normal((3, 1, 2, 7, 5)).astype(np.float32)
    dout = rng.standard_normal((1, 2, 7, 5)).astype(np.float32)
    for softcap in (1e-30, 1e-45, 1e-300):
        out, pullback = attend.attention_vjp(query, key, value, softcap=softcap)
        grads = pullback(dout)
        np.testing.assert_allclose(out, np.broadcast_to(value.mean(2, keepdims=True), out.shape), atol=1e-6)
        assert not grads.query.any()
        assert not grads.key.any()
    free, free_pullback = attend.attention_vjp(query, key, value)
    for softcap in (1e9, 1e38, 1e300):
        out, pullback = attend.attention_vjp(query, key, value, softcap=softcap)
        np.testing.assert_allclose(out, free, rtol=2e-5, atol=2e-6)
        for grad, expected in zip(pullback(dout)[:3], free_pullback(dout)[:3], strict=True):
            np.testing.assert_allclose(grad, expected, rtol=2e-5, atol=2e-5)

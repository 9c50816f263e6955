"""The oracle against loops over Python numbers, and its backward against differences of its forward."""

import math

import numpy as np
import pytest

import npattn
from npattn.functional.dropout import keep_mask
from npattn.testing import case, check_vjp


def by_hand(query, key, value, mask, bias, scale, softcap, sinks, dropout_p, seed):
    """The contract's sentences, one pair at a time, in Python's own floats."""
    batch, heads_q, len_q, _ = query.shape
    heads_kv, len_k = key.shape[1], key.shape[2]
    mask = np.broadcast_to(mask, (batch, heads_q, len_q, len_k))
    bias = np.broadcast_to(bias, (batch, heads_q, len_q, len_k))
    out = np.zeros((batch, heads_q, len_q, value.shape[3]))
    lse = np.full((batch, heads_q, len_q), -np.inf)
    for b, h, i in np.ndindex(batch, heads_q, len_q):
        g = h // (heads_q // heads_kv)
        logits = {}
        for j in range(len_k):
            if mask[b, h, i, j] and bias[b, h, i, j] != -math.inf:
                logit = scale * sum(
                    float(x) * float(y) for x, y in zip(query[b, h, i], key[b, g, j], strict=True)
                )
                logits[j] = softcap * math.tanh(logit / softcap) + float(bias[b, h, i, j])
        total = sum(math.exp(logit) for logit in logits.values()) + math.exp(sinks[h])
        lse[b, h, i] = math.log(total)
        for j, logit in logits.items():
            if bool(keep_mask(seed, tuple(np.array(x) for x in (b, h, i, j)), dropout_p)):
                out[b, h, i] += math.exp(logit) / total / (1 - dropout_p) * value[b, g, j]
    return out, lse


def test_the_oracle_is_the_contract_word_by_word():
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(2, 4, 5, 3)),
        rng.normal(size=(2, 2, 6, 3)),
        rng.normal(size=(2, 2, 6, 2)),
    )
    mask, bias, sinks = rng.random((2, 1, 5, 6)) < 0.6, rng.normal(size=(4, 1, 6)), rng.normal(size=4)
    mask[0, 0, 2] = False
    bias[1, 0, 3] = -np.inf
    options = {
        "mask": mask,
        "bias": bias,
        "scale": 0.7,
        "softcap": 1.3,
        "sinks": sinks,
        "dropout_p": 0.3,
        "seed": 9,
    }
    out, lse = npattn.attention(query, key, value, **options, return_lse=True, backend="oracle")
    expected, expected_lse = by_hand(query, key, value, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_the_backward_pass_is_the_derivative(seed):
    arguments = case("all at once").arguments(seed=seed)
    names = ("query", "key", "value", "bias", "sinks")
    options = {name: x for name, x in arguments.items() if name not in names}

    def f_vjp(query, key, value, bias, sinks):
        return npattn.attention_vjp(
            *(query, key, value), bias=bias, sinks=sinks, **options, return_lse=True, backend="oracle"
        )

    check_vjp(f_vjp, [arguments[name] for name in names], names=names, seed=seed)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_dtypes_are_kept_through_every_step(dtype):
    """A Python scalar or an integer mask in the wrong place would promote float32 to float64."""
    arguments = case("all at once").arguments(dtype)
    (out, lse), pullback = npattn.attention_vjp(**arguments, return_lse=True, backend="oracle")
    grads = pullback(out, lse)
    assert {x.dtype for x in (out, *grads)} == {np.dtype(dtype)}
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)

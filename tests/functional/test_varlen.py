"""varlen_attention: packed segments equal attention over each of them alone."""

import numpy as np
import pytest

from npattn import attention, varlen_attention, varlen_attention_vjp
from npattn.masks import Causal, Window

QUERIES, KEYS = [5, 0, 3, 7, 2], [4, 6, 0, 9, 2]


def packed(rng, heads_q=4, heads_kv=2, dim=8, dim_v=6):
    return (
        rng.normal(size=(heads_q, sum(QUERIES), dim)),
        rng.normal(size=(heads_kv, sum(KEYS), dim)),
        rng.normal(size=(heads_kv, sum(KEYS), dim_v)),
    )


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, None),
        ({"causal": True}, Causal()),
        ({"window": 1}, Window(1, 1)),
        ({"causal": True, "window": 2}, Window(2, 0)),
        ({"window": (None, 1)}, Window(None, 1)),
    ],
)
def test_each_segment_is_attention_on_its_own(rng, options, mask):
    q, k, v = packed(rng)
    out, lse = varlen_attention(q, k, v, QUERIES, KEYS, return_lse=True, **options)
    i = j = 0
    for n, m in zip(QUERIES, KEYS, strict=True):
        alone, alone_lse = attention(
            q[:, i : i + n], k[:, j : j + m], v[:, j : j + m], mask=mask, return_lse=True
        )
        np.testing.assert_allclose(out[:, i : i + n], alone, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse[:, i : i + n], alone_lse, rtol=1e-10)
        i, j = i + n, j + m


def test_gradients_stay_within_segments(rng):
    q, k, v = packed(rng)
    out, pullback = varlen_attention_vjp(q, k, v, QUERIES, KEYS, causal=True, softcap=3.0)
    dout = np.zeros_like(out)
    dout[:, 8:15] = rng.normal(size=(4, 7, 6))  # the fourth segment alone
    grads = pullback(dout)
    assert not grads.query[:, :8].any()
    assert not grads.key[:, :10].any()
    assert not grads.value[:, 19:].any()
    from npattn import attention_vjp

    _, alone = attention_vjp(q[:, 8:15], k[:, 10:19], v[:, 10:19], mask=Causal(), softcap=3.0)
    expected = alone(dout[:, 8:15])
    np.testing.assert_allclose(grads.query[:, 8:15], expected.query, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grads.key[:, 10:19], expected.key, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grads.value[:, 10:19], expected.value, rtol=1e-9, atol=1e-12)


def test_queries_without_keys_get_zero(rng):
    q, k, v = packed(rng)
    out, lse = varlen_attention(q, k, v, QUERIES, KEYS, return_lse=True)
    assert not out[:, 5:8].any()
    assert np.all(lse[:, 5:8] == -np.inf)


@pytest.mark.parametrize(
    ("queries", "keys", "error", "text"),
    [
        ([5, 11], [4, 17], ValueError, r"query_lengths must sum.*16.*\(4, 17, 8\)"),
        ([5, 12], [4, 16], ValueError, r"key_lengths must sum.*20.*\(2, 21, 8\)"),
        ([17], [20, 1], ValueError, "1 query_lengths and 2 key_lengths"),
        ([18, -1], [20, 1], ValueError, "query_lengths must be at least 0"),
        ([8.5, 8.5], [20, 1], TypeError, "ints"),
    ],
)
def test_bad_lengths_are_refused(rng, queries, keys, error, text):
    with pytest.raises(error, match=text):
        varlen_attention(*packed(rng), queries, keys)

"""What is masked never leaks: NaN, inf and garbage in masked keys, values, queries, biases and cotangents.

Queries and keys are dealt into groups that see only each other. Group B holds poison everywhere, C are
queries that see nothing, D keys that nobody sees; group A must come out as if B, C and D held zeros.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from npattn import masks

A, B, C, D = range(4)
POISON = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38}


def deal(rng, len_q, len_k, sort):
    """Group of each query and of each key."""
    of_q, of_k = (
        rng.choice([A, B, C], len_q, p=[0.6, 0.2, 0.2]),
        rng.choice([A, B, D], len_k, p=[0.6, 0.2, 0.2]),
    )
    return (np.sort(of_q), np.sort(of_k)) if sort else (of_q, of_k)


def make(rng, dtype, *, poison, heads_q=4, heads_kv=2, len_q=70, len_k=83, sort=False, poison_b=True):
    """Two versions of the same call: clean (zeros) and poisoned."""
    of_q, of_k = deal(rng, len_q, len_k, sort)
    visible = (of_q[:, None] == of_k) & (of_q[:, None] != C)
    q = rng.standard_normal((2, heads_q, len_q, 12))
    k = rng.standard_normal((2, heads_kv, len_k, 12))
    v = rng.standard_normal((2, heads_kv, len_k, 9))
    bias = rng.standard_normal((heads_q, len_q, len_k))
    dout = rng.standard_normal((2, heads_q, len_q, 9))
    dlse = rng.standard_normal((2, heads_q, len_q))
    bad_q = (of_q == C) | ((of_q == B) & poison_b)
    bad_k = (of_k == D) | ((of_k == B) & poison_b)
    versions = []
    for fill in (0.0, poison):
        x = SimpleNamespace(
            q=q.copy(), k=k.copy(), v=v.copy(), bias=bias.copy(), dout=dout.copy(), dlse=dlse.copy()
        )
        x.q[:, :, bad_q] = fill
        x.dout[:, :, bad_q] = fill
        x.dlse[:, :, bad_q] = fill
        x.k[:, :, bad_k] = fill
        x.v[:, :, bad_k] = fill
        x.bias[:, ~visible] = fill
        with np.errstate(over="ignore"):
            for name in ("q", "k", "v", "bias", "dout"):
                setattr(x, name, getattr(x, name).astype(dtype))
        versions.append(x)
    return versions, visible, of_q, of_k


def run(attend, x, use_bias=True, **options):
    with np.errstate(over="ignore"):
        bias = x.bias if use_bias else None
        (out, lse), pullback = attend.attention_vjp(x.q, x.k, x.v, bias=bias, return_lse=True, **options)
        return out, lse, pullback(x.dout, x.dlse.astype(lse.dtype))


def check(clean, dirty, visible, of_q, of_k, poisoned=(B,)):
    """Group A agrees; C and D are exactly zero; with ``poisoned`` empty, B agrees too."""
    (out0, lse0, grads0), (out, lse, grads) = clean, dirty
    tolerance = {"rtol": 0, "atol": {2: 1e-2, 4: 2e-5, 8: 1e-12}[out.dtype.itemsize]}
    good_q = ~np.isin(of_q, [C, *poisoned])
    good_k = ~np.isin(of_k, [D, *poisoned])
    np.testing.assert_allclose(out[:, :, good_q], out0[:, :, good_q], **tolerance)
    np.testing.assert_allclose(lse[:, :, good_q], lse0[:, :, good_q], **tolerance)
    np.testing.assert_allclose(grads.query[:, :, good_q], grads0.query[:, :, good_q], **tolerance)
    np.testing.assert_allclose(grads.key[:, :, good_k], grads0.key[:, :, good_k], **tolerance)
    np.testing.assert_allclose(grads.value[:, :, good_k], grads0.value[:, :, good_k], **tolerance)
    assert not out[:, :, of_q == C].any()
    assert not grads.query[:, :, of_q == C].any()
    assert not grads.key[:, :, of_k == D].any()
    assert not grads.value[:, :, of_k == D].any()
    if grads.bias is not None:
        pairs = visible & good_q[:, None]
        np.testing.assert_allclose(grads.bias[:, pairs], grads0.bias[:, pairs], **tolerance)
        assert not grads.bias[:, ~visible].any()


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("sort", [False, True], ids=["interleaved", "sorted"])
def test_poison_under_a_bool_mask_is_silent(attend, rng, dtype, poison, sort):
    (clean, dirty), visible, of_q, of_k = make(rng, dtype, poison=poison, sort=sort)
    check(run(attend, clean, mask=visible), run(attend, dirty, mask=visible), visible, of_q, of_k)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("sort", [False, True], ids=["interleaved", "sorted"])
def test_poison_under_a_bias_of_minus_inf_is_silent(attend, rng, dtype, poison, sort):
    """The plan knows nothing of it: every tile is full there."""
    (clean, dirty), visible, of_q, of_k = make(rng, dtype, poison=poison, sort=sort)
    for x in (clean, dirty):
        x.bias[:, ~visible] = -np.inf
    check(run(attend, clean), run(attend, dirty), visible, of_q, of_k)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"dropout_p": 0.4, "seed": 3},
        {"scale": 3.0},
        {"scale": 3.0, "softcap": 2.0, "dropout_p": 0.4, "seed": 3},
    ],
    ids=lambda options: ", ".join(options),
)
def test_poison_is_silent_with_every_feature(attend, rng, dtype, options):
    (clean, dirty), visible, of_q, of_k = make(rng, dtype, poison=np.nan)
    check(
        run(attend, clean, mask=visible, **options),
        run(attend, dirty, mask=visible, **options),
        visible,
        of_q,
        of_k,
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_poisoned_empty_rows_are_silent_beside_sinks(attend, rng, dtype):
    """A row without keys has a sink's lse: its dlse reaches the sink, its dout may be NaN."""
    (clean, dirty), visible, of_q, of_k = make(rng, dtype, poison=np.nan, poison_b=False)
    dirty.dlse = clean.dlse
    sinks = rng.standard_normal(4).astype(dtype)
    clean = run(attend, clean, mask=visible, sinks=sinks)
    dirty = run(attend, dirty, mask=visible, sinks=sinks)
    check(clean, dirty, visible, of_q, of_k, poisoned=())
    np.testing.assert_allclose(dirty[2].sinks, clean[2].sinks, rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_between_documents_is_silent(attend, rng, poison):
    """Segments as intervals: the poisoned one lies inside tiles of the others."""
    lengths = np.array([50, 13, 60])
    of = np.repeat([A, B, A], lengths)
    mask = masks.Documents(lengths, causal=True)
    visible = mask.to_dense(123, 123)[0, 0]
    clean = SimpleNamespace(
        q=rng.standard_normal((1, 2, 123, 8), np.float32),
        k=rng.standard_normal((1, 2, 123, 8), np.float32),
        v=rng.standard_normal((1, 2, 123, 8), np.float32),
        dout=rng.standard_normal((1, 2, 123, 8), np.float32),
        dlse=rng.standard_normal((1, 2, 123), np.float32),
    )
    dirty = SimpleNamespace(**{name: x.copy() for name, x in vars(clean).items()})
    for x in vars(dirty).values():
        x[:, :, of == B] = poison
    check(
        run(attend, clean, use_bias=False, mask=mask),
        run(attend, dirty, use_bias=False, mask=mask),
        *(visible, of, of),
    )


def test_padding_of_a_batch_may_hold_anything(attend, rng):
    """Batch element 1 is all padding, element 2 has 30 real tokens of 80."""
    lengths = np.array([80, 0, 30])
    q, k, v, dout = rng.standard_normal((4, 3, 2, 80, 8), np.float32)
    real = np.arange(80) < lengths[:, None]
    for x in (q, k, v, dout):
        x.swapaxes(1, 2)[~real] = np.nan
    out, pullback = attend.attention_vjp(q, k, v, mask=masks.Padding(lengths, lengths))
    grads = pullback(dout)
    for x in (out, *grads[:3]):
        x = x.swapaxes(1, 2)
        assert np.isfinite(x[real]).all()
        assert x[real].any()
        assert not x[~real].any()


def test_a_key_seen_by_one_query_only_reaches_that_query_only(attend, rng):
    """Causal: the last key is NaN, and in the same tile as keys that all others see."""
    q, k, v, dout = rng.standard_normal((4, 1, 2, 40, 8), np.float32)
    k[:, :, -1] = np.nan
    v[:, :, -1] = np.nan
    out, pullback = attend.attention_vjp(q, k, v, mask=masks.Causal())
    assert np.isnan(out[:, :, -1]).all()
    assert np.isfinite(out[:, :, :-1]).all()
    grads = pullback(dout)
    assert np.isfinite(grads.query[:, :, :-1]).all()
    short, short_pullback = attend.attention_vjp(
        q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], mask=masks.Causal()
    )
    np.testing.assert_allclose(out[:, :, :-1], short, atol=1e-6)
    np.testing.assert_allclose(grads.query[:, :, :-1], short_pullback(dout[:, :, :-1]).query, atol=1e-6)


def test_a_nan_query_reaches_only_the_keys_it_sees(attend, rng):
    q, k, v, dout = rng.standard_normal((4, 1, 2, 40, 8), np.float32)
    q[:, :, 10] = np.nan
    out, pullback = attend.attention_vjp(q, k, v, mask=masks.Causal())
    assert np.isfinite(np.delete(out, 10, axis=2)).all()
    grads = pullback(dout)
    assert np.isnan(grads.key[:, :, :11]).all()
    assert np.isfinite(grads.key[:, :, 11:]).all()
    assert np.isfinite(grads.value[:, :, 11:]).all()
    assert np.isfinite(np.delete(grads.query, 10, axis=2)).all()


def test_nan_in_a_bias_under_a_masked_pair_is_silent(attend, rng):
    q, k, v, dout = rng.standard_normal((4, 2, 3, 40, 8))
    visible = masks.Causal().to_dense(40, 40)[0, 0]
    bias = rng.standard_normal((3, 40, 40))
    clean, clean_pullback = attend.attention_vjp(q, k, v, bias=bias, mask=visible)
    bias = np.where(visible, bias, np.nan)
    out, pullback = attend.attention_vjp(q, k, v, bias=bias, mask=visible)
    np.testing.assert_allclose(out, clean, atol=1e-14)
    for grad, expected in zip(pullback(dout)[:4], clean_pullback(dout)[:4], strict=True):
        np.testing.assert_allclose(grad, expected, atol=1e-12)


def test_nan_that_is_visible_shows(attend, rng):
    """Silence is for masked pairs only: a NaN that a query sees is not swept under the rug."""
    q, k, v = rng.standard_normal((3, 1, 1, 9, 4))
    k[0, 0, 3] = np.nan
    assert np.isnan(attend.attention(q, k, v)).all()
    k, v[0, 0, 3, 1] = rng.standard_normal(k.shape), np.nan
    out = attend.attention(q, k, v)
    assert np.isnan(out[..., 1]).all()
    assert np.isfinite(np.delete(out, 1, axis=-1)).all()
    bias = np.zeros((9, 9))
    bias[2, 5] = np.nan
    v[0, 0, 3, 1] = 0
    out = attend.attention(q, k, v, bias=bias)
    assert np.isnan(out[0, 0, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=2)).all()


@pytest.mark.parametrize(
    "features", [{}, {"dropout_p": 0.3, "seed": 1, "softcap": 2.0}], ids=["plain", "features"]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_nan_in_scratch_memory_is_silent(attend, rng, poisoned_empty, dtype, features):
    (clean, _), visible, *_ = make(rng, dtype, poison=0.0)
    out, lse, grads = run(attend, clean, mask=visible, **features)
    for x in (out, *grads[:4]):
        assert np.isfinite(x).all()
    assert not np.isnan(lse).any()
    again = run(attend, clean, mask=masks.Dense(visible) & masks.Causal(), **features)
    assert np.isfinite(again[0]).all()

"""Dropout by counter: the same weights fall for every backend, tile, thread, direction and shard."""

import numpy as np
import pytest

import npattn
from npattn import masks
from npattn.functional.dropout import dropout, dropout_vjp, fold_seed, keep_mask, threshold

WORD = 2**32


def mix(x):
    """The hash of the docstring in Python's integers, digit by digit."""
    x ^= x >> 16
    x = x * 0x21F0AAAD % WORD
    x ^= x >> 15
    x = x * 0xD35A2D97 % WORD
    return x ^ x >> 15


def fold(state, word):
    return mix(state ^ word * 0x9E3779B1 % WORD)


def is_kept(seed, b, h, i, j, p):
    r0, r1 = 0x243F6A88, 0x85A308D3
    for word in (seed % WORD, seed // WORD % WORD, b, h, i):
        r0, r1 = fold(r0, word), fold(r1, word)
    return mix(fold(r0, j) ^ r1) >= min(round(p * WORD), WORD - 1)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_keep_mask_is_the_published_hash(seed):
    keep = keep_mask(seed, (2, 3, 4, 5), 0.4)
    assert keep.dtype == bool
    for place in np.ndindex(2, 3, 4, 5):
        assert keep[place] == is_kept(seed, *place, 0.4)


def test_a_few_published_values():
    """These bits never change: a saved seed reproduces a training run."""
    bits = keep_mask(2024, (1, 2, 2, 8), 0.5).reshape(4, 8).astype(int)
    assert ["".join(map(str, row)) for row in bits] == PUBLISHED


PUBLISHED = ["10100101", "11111001", "00111000", "01111101"]


def test_keep_mask_of_single_places_equals_that_of_the_whole():
    keep = keep_mask(9, (3, 4, 20, 30), 0.3)
    rng = np.random.default_rng(0)
    b, h, i, j = (rng.integers(0, n, 100) for n in keep.shape)
    np.testing.assert_array_equal(keep_mask(9, (b, h, i, j), 0.3), keep[b, h, i, j])
    np.testing.assert_array_equal(keep_mask(9, (20, 30), 0.3), keep[0, 0])


def test_keep_mask_keeps_the_right_fraction_along_every_axis():
    keep = keep_mask(5, (16, 16, 64, 64), 0.3)
    for axis in range(4):
        rates = keep.mean(tuple(a for a in range(4) if a != axis))
        sigma = np.sqrt(0.21 / (keep.size / keep.shape[axis]))
        assert (np.abs(rates - 0.7) < 5 * sigma).all()
    flat = keep.reshape(-1) - 0.7
    for lag in (1, 64, 4096, 65536):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 5 * 0.21 / np.sqrt(flat.size)


def test_keep_mask_at_the_ends():
    assert keep_mask(1, (50, 50), 0.0).all()
    assert not keep_mask(1, (50, 50), 1.0).any()
    assert threshold(0.5) == 2**31
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        keep_mask(1, (2, 2), 1.5)
    with pytest.raises(ValueError, match="four axes"):
        keep_mask(1, (1, 2, 3, 4, 5), 0.5)


def test_a_shape_may_hold_any_ints_and_the_seed_be_any():
    keep = keep_mask(5, (2, 3, 4, 6), 0.5)
    np.testing.assert_array_equal(keep_mask(5, tuple(np.array([2, 3, 4, 6])), 0.5), keep)
    np.testing.assert_array_equal(keep_mask(5, [2, 3, 4, 6], 0.5), keep)
    for kind in (np.uint8, np.int32, np.int64, np.uint64):
        np.testing.assert_array_equal(keep_mask(kind(5), (2, 3, 4, 6), 0.5), keep)
    np.testing.assert_array_equal(keep_mask(np.int32(-1), (9, 9), 0.5), keep_mask(2**64 - 1, (9, 9), 0.5))
    with pytest.raises(TypeError, match="integer"):
        keep_mask(1.5, (2, 2), 0.5)
    with pytest.raises(ValueError, match="four arrays"):
        keep_mask(1, (np.arange(3), np.arange(3)), 0.5)


def test_folded_seeds_are_all_different():
    assert len({fold_seed(seed, index) for seed in range(50) for index in range(50)}) == 2500
    assert all(0 <= fold_seed(seed, 3) < 2**64 for seed in (0, 2**64 - 1))


def weighted(arguments, keep, p):
    """What attention with dropout is, from the weights."""
    value = arguments.pop("value")
    weights = npattn.attention_weights(**arguments) * keep / (1 - p)
    group = weights.shape[1] // value.shape[1]
    return weights @ value.repeat(group, axis=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_weights_are_those_of_keep_mask(attend, rng, p, dtype):
    arguments = {
        "query": rng.standard_normal((2, 6, 70, 8)).astype(dtype),
        "key": rng.standard_normal((2, 3, 90, 8)).astype(dtype),
        "value": rng.standard_normal((2, 3, 90, 5)).astype(dtype),
        "mask": masks.Causal(),
    }
    seed = 2**40 + 17
    out, lse = attend.attention(**arguments, dropout_p=p, seed=seed, return_lse=True)
    _, free_lse = attend.attention(**arguments, return_lse=True)
    np.testing.assert_allclose(lse, free_lse, rtol=1e-6, atol=1e-6)  # lse is that before dropout
    expected = weighted(arguments, keep_mask(seed, (2, 6, 70, 90), p), p)
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


def test_backward_drops_the_same_weights(attend, rng):
    """dv = (weights · keep / (1 − p))ᵀ dout, read off by unit cotangents."""
    q, k, v = rng.standard_normal((3, 1, 2, 40, 6))
    p, seed = 0.5, 11
    _, pullback = attend.attention_vjp(q, k, v, dropout_p=p, seed=seed)
    dropped = npattn.attention_weights(q, k) * keep_mask(seed, (1, 2, 40, 40), p) / (1 - p)
    for i in (0, 17, 39):
        dout = np.zeros_like(v)
        dout[:, :, i] = 1
        np.testing.assert_allclose(pullback(dout).value, dropped[:, :, i, :, None] * np.ones(6), atol=1e-14)


def test_p_0_is_the_path_without_dropout(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 2, 40, 6))
    np.testing.assert_array_equal(attend.attention(q, k, v, dropout_p=0.0, seed=3), attend.attention(q, k, v))


def test_p_1_gives_zeros_and_the_lse_as_it_is(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 2, 40, 6))
    v[0, 0, 3] = np.nan
    (out, lse), pullback = attend.attention_vjp(q, k, v, dropout_p=1.0, seed=3, return_lse=True)
    assert not out.any()
    (_, free_lse), free_pullback = attend.attention_vjp(q, k, np.zeros_like(v), return_lse=True)
    np.testing.assert_array_equal(lse, free_lse)
    assert not any(grad.any() for grad in pullback(np.ones_like(out))[:3])
    dlse = rng.standard_normal(lse.shape)
    grads, expected = pullback(np.ones_like(out), dlse), free_pullback(np.zeros_like(out), dlse)
    np.testing.assert_allclose(grads.query, expected.query, atol=1e-14)
    np.testing.assert_allclose(grads.key, expected.key, atol=1e-14)
    assert not grads.value.any()


def test_seeds_count_modulo_2_to_the_64(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 1, 9, 4))
    outs = [attend.attention(q, k, v, dropout_p=0.5, seed=seed) for seed in (3, 3 + 2**64, 3 + 2**32, 4, -1)]
    np.testing.assert_array_equal(outs[0], outs[1])
    for a in range(1, 5):
        for b in range(a):
            assert (a, b) == (1, 0) or not np.array_equal(outs[a], outs[b])


def test_several_leading_dimensions_count_as_one_batch(attend, rng):
    q, k, v = rng.standard_normal((3, 2, 3, 2, 9, 4))
    out = attend.attention(q, k, v, dropout_p=0.5, seed=1)
    flat = attend.attention(*(x.reshape(6, 2, 9, 4) for x in (q, k, v)), dropout_p=0.5, seed=1)
    np.testing.assert_allclose(out, flat.reshape(out.shape), atol=1e-15)


def test_dropout_of_an_array_and_its_pullback(rng):
    x, dy = rng.standard_normal((2, 30, 40)).astype(np.float32)[:, None]
    y, pullback = dropout_vjp(x, 0.25, seed=4)
    keep = keep_mask(4, x.shape, 0.25)
    np.testing.assert_allclose(y, np.where(keep, x / np.float32(0.75), 0), rtol=1e-6)
    np.testing.assert_allclose(pullback(dy), np.where(keep, dy / np.float32(0.75), 0), rtol=1e-6)
    assert y.dtype == np.float32
    assert not dropout(np.full(9, np.nan), 1.0, seed=1).any()

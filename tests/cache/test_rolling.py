import numpy as np
import pytest

from npattn import attention
from npattn.cache import RollingKVCache
from npattn.masks import Dense

BATCH, HEADS_Q, HEADS_KV, DIM, DIM_V = 2, 4, 2, 3, 5


def make(length, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((BATCH, HEADS_Q, length, DIM)),
        rng.standard_normal((BATCH, HEADS_KV, length, DIM)),
        rng.standard_normal((BATCH, HEADS_KV, length, DIM_V)),
    )


def window_mask(length, window, sinks):
    i, j = np.ogrid[:length, :length]
    return Dense((j <= i) & ((j > i - window) | (j < sinks)))


def new_cache(window, sinks, dtype=np.float64):
    return RollingKVCache(
        window, sinks, batch=BATCH, heads_kv=HEADS_KV, head_dim=DIM, head_dim_v=DIM_V, dtype=dtype
    )


CHUNKS = [[1] * 37, [37], [5, 5, 5, 5, 17], [20, *[1] * 10, 7], [3, *[1] * 20, 2, 2, 2, 8], [0, 12, 25]]


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 2, 7, 50])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_rolling_equals_a_window_mask_with_sinks_at_every_step(chunks, window, sinks):
    q, k, v = make(37)
    whole, whole_lse = attention(
        q, k, v, mask=window_mask(37, window, sinks), return_lse=True, backend="oracle"
    )
    cache = new_cache(window, sinks)
    start = 0
    for new in chunks:
        part = slice(start, start + new)
        cache.append(k[:, :, part], v[:, :, part])
        start += new
        out, lse = cache.attention(q[:, :, part], return_lse=True)
        np.testing.assert_allclose(out, whole[:, :, part], atol=1e-12)
        np.testing.assert_allclose(lse, whole_lse[:, :, part], atol=1e-12)
        kept = [p for p in range(start) if p < sinks or p >= start - window]
        assert cache.positions.tolist() == [kept] * BATCH
        np.testing.assert_array_equal(cache.arrays()[0], k[:, :, kept])
        np.testing.assert_array_equal(cache.arrays()[1], v[:, :, kept])
        assert cache.lengths.tolist() == [start] * BATCH


@pytest.mark.parametrize("sinks", [0, 2])
def test_ragged_batches_equal_each_sequence_alone(sinks):
    q, k, v = make(40, seed=1)
    cache = new_cache(5, sinks)
    seen = np.zeros(BATCH, int)
    for added in ([3, 1], [0, 4], [1, 1], [1, 0], [6, 2], [1, 1], [1, 1], [4, 9]):
        added, new = np.array(added), max(added)
        chunk = [np.full((BATCH, x.shape[1], new, x.shape[3]), np.nan) for x in (q, k, v)]
        for b, count in enumerate(added):
            for target, source in zip(chunk, (q, k, v), strict=True):
                target[b, :, :count] = source[b, :, seen[b] : seen[b] + count]
        cache.append(chunk[1], chunk[2], added)
        out = cache.attention(chunk[0], query_lengths=added)
        seen += added
        for b, count in enumerate(added):
            n = seen[b]
            alone = attention(
                q[b, :, :n], k[b, :, :n], v[b, :, :n], mask=window_mask(n, 5, sinks), backend="oracle"
            )
            np.testing.assert_allclose(out[b, :, :count], alone[:, n - count :], atol=1e-12)
            assert (out[b, :, count:] == 0).all()


def test_evicted_rows_never_show():
    """The evicted rows are NaN: one that is still read makes the output NaN."""
    q, k, v = make(30, seed=2)
    k[:, :, 2:20], v[:, :, 2:20] = np.nan, np.nan
    cache = new_cache(6, 2)
    for start, new in ((0, 10), (10, 10), (20, 1), (21, 1), (22, 4), (26, 4)):
        cache.append(k[:, :, start : start + new], v[:, :, start : start + new])
    expected = attention(
        q[:, :, 26:], k, v, mask=Dense(window_mask(30, 6, 2).to_dense(30, 30)[0, 0, 26:]), backend="oracle"
    )
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(cache.attention(q[:, :, 26:]), expected, atol=1e-12)


def test_learned_sink_logits_and_options_count_once():
    q, k, v = make(20, seed=3)
    options = {"sinks": np.array([0.5, -1.0, 2.0, 0.0]), "softcap": 1.5, "scale": 0.9}
    whole = attention(q, k, v, mask=window_mask(20, 4, 3), **options, backend="oracle")
    cache = new_cache(4, 3)
    for t, new in ((0, 12), (12, 1), (13, 7)):
        cache.append(k[:, :, t : t + new], v[:, :, t : t + new])
        out = cache.attention(q[:, :, t : t + new], **options)
        np.testing.assert_allclose(out, whole[:, :, t : t + new], atol=1e-12)


def test_a_bias_follows_positions_for_single_tokens():
    q, k, v = make(20, seed=4)
    cache = new_cache(4, 2)
    for t in range(20):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        distance = t - cache.positions[:, None, None, :].astype(float)
        out = cache.attention(q[:, :, t : t + 1], bias=-0.3 * distance)
    i, j = np.ogrid[:20, :20]
    whole = attention(q, k, v, mask=window_mask(20, 4, 2), bias=-0.3 * (i - j), backend="oracle")
    np.testing.assert_allclose(out, whole[:, :, 19:], atol=1e-12)
    with pytest.raises(ValueError, match=r"last axis of bias has 5 columns.*bias_positions, which has 6"):
        cache.attention(q[:, :, 19:], bias=np.zeros((1, 1, 1, 5)))


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_bias_of_several_tokens_follows_what_they_see(sinks):
    """Ragged chunks; NaN stands where the bias has no column, and in the padding rows."""
    q, k, v = make(40, seed=6)
    i, j = np.ogrid[:40, :40]
    bias = np.sin(i * 0.7 + j * 1.3)  # no two entries alike
    whole = attention(q, k, v, mask=window_mask(40, 5, sinks), bias=bias, backend="oracle")
    narrow = attention(q, k, v, mask=window_mask(40, 3, sinks), bias=bias, backend="oracle")
    cache = new_cache(5, sinks)
    seen = np.zeros(BATCH, int)
    for added in ([3, 1], [0, 4], [1, 1], [6, 2], [1, 1], [1, 1], [9, 9]):
        added, new = np.array(added), max(added)
        chunk = [np.full((BATCH, x.shape[1], new, x.shape[3]), np.nan) for x in (q, k, v)]
        for b, count in enumerate(added):
            for target, source in zip(chunk, (q, k, v), strict=True):
                target[b, :, :count] = source[b, :, seen[b] : seen[b] + count]
        cache.append(chunk[1], chunk[2], added)
        keys, rows = cache.bias_positions, np.minimum(seen[:, None] + np.arange(new), 39)
        chosen = np.where(keys[:, None] < 0, np.nan, bias[rows[:, :, None], keys[:, None]])[:, None]
        for expected, window in ((whole, None), (narrow, 2)):
            out, lse = cache.attention(
                chunk[0], query_lengths=added, bias=chosen, window=window, return_lse=True
            )
            for b, count in enumerate(added):
                part = slice(seen[b], seen[b] + count)
                np.testing.assert_allclose(out[b, :, :count], expected[b, :, part], atol=1e-12)
                assert (out[b, :, count:] == 0).all()
                assert (lse[b, :, count:] == -np.inf).all()
        seen += added


def test_a_layers_narrower_window_is_served_and_a_wider_one_refused():
    q, k, v = make(20, seed=5)
    cache = new_cache(8, 2)
    cache.append(k, v)
    expected = attention(q, k, v, mask=window_mask(20, 4, 2), backend="oracle")
    np.testing.assert_allclose(cache.attention(q, window=3), expected, atol=1e-12)
    with pytest.raises(ValueError, match="beyond the 8 kept"):
        cache.attention(q, window=8)


@pytest.mark.parametrize("last", [1, 3, 12])
def test_undo_brings_evicted_rows_back(last):
    q, k, v = make(40, seed=6)
    cache = new_cache(5, 2)
    for start, new in ((0, 20), (20, 1), (21, 3), (24, last)):
        before = cache.lengths
        kept, positions = [array.copy() for array in cache.arrays()], cache.positions
        cache.append(k[:, :, start : start + new], v[:, :, start : start + new])
    cache.undo()
    assert cache.lengths.tolist() == before.tolist()
    np.testing.assert_array_equal(cache.positions, positions)
    for now, then in zip(cache.arrays(), kept, strict=True):
        np.testing.assert_array_equal(now, then)
    cache.append(k[:, :, 24:30], v[:, :, 24:30])
    whole = attention(q, k, v, mask=window_mask(40, 5, 2), backend="oracle")
    np.testing.assert_allclose(cache.attention(q[:, :, 24:30]), whole[:, :, 24:30], atol=1e-12)


def test_memory_follows_the_window_and_not_the_tokens_seen():
    cache = new_cache(8, 2)
    _, k, v = make(200)
    cache.append(k, v)
    for t in range(50):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert cache._now.key.shape[2] == 10
    assert cache.lengths.tolist() == [250, 250]


def test_misuse_is_refused_and_changes_nothing():
    cache = new_cache(4, 1)
    _, k, v = make(6)
    cache.append(k, v)
    with pytest.raises(ValueError, match="shape"):
        cache.append(k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="window must be at least 1"):
        new_cache(0, 1)
    with pytest.raises(ValueError, match="dropout"):
        cache.attention(np.zeros((BATCH, HEADS_Q, 1, DIM)), dropout_p=0.1, seed=1)
    assert cache.positions.tolist() == [[0, 2, 3, 4, 5]] * BATCH
    cache.reset()
    assert cache.positions.shape == (BATCH, 0)
    assert (cache.attention(np.ones((BATCH, HEADS_Q, 1, DIM))) == 0).all()

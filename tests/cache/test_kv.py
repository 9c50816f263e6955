import numpy as np
import pytest

from npattn import attention
from npattn.cache import CacheFullError, KVCache
from npattn.masks import Causal, Dense


def rows(rng, *shape, dtype=np.float64):
    return rng.standard_normal(shape).astype(dtype)


def make(rng, batch=2, heads_q=6, heads_kv=3, length=23, head_dim=5, head_dim_v=7, dtype=np.float64):
    return (
        rows(rng, batch, heads_q, length, head_dim, dtype=dtype),
        rows(rng, batch, heads_kv, length, head_dim, dtype=dtype),
        rows(rng, batch, heads_kv, length, head_dim_v, dtype=dtype),
    )


@pytest.mark.parametrize("chunks", [[23], [1] * 23, [7, 1, 1, 9, 5], [0, 3, 0, 20]])
def test_any_chunking_equals_one_call_over_the_whole(chunks):
    q, k, v = make(np.random.default_rng(0))
    whole, whole_lse = attention(q, k, v, mask=Causal(), return_lse=True, backend="oracle")
    cache = KVCache(2, 3, 23, 5, 7, dtype=np.float64)
    start = 0
    for new in chunks:
        part = slice(start, start + new)
        cache.append(k[:, :, part], v[:, :, part])
        out, lse = cache.attention(q[:, :, part], return_lse=True)
        np.testing.assert_allclose(out, whole[:, :, part], atol=1e-12)
        np.testing.assert_allclose(lse, whole_lse[:, :, part], atol=1e-12)
        start += new
    assert cache.lengths.tolist() == [23, 23]
    np.testing.assert_array_equal(cache.arrays()[0], k)
    np.testing.assert_array_equal(cache.arrays()[1], v)
    np.testing.assert_array_equal(cache.positions, np.tile(np.arange(23), (2, 1)))


def test_growth_beyond_the_first_rows_keeps_everything():
    rng = np.random.default_rng(1)
    _, k, v = make(rng, length=300)
    cache = KVCache(2, 3, 300, 5, 7, dtype=np.float64)
    for start in range(0, 300, 43):
        cache.append(k[:, :, start : start + 43], v[:, :, start : start + 43])
    np.testing.assert_array_equal(cache.arrays()[0], k)
    assert cache._key.shape[2] == 300
    small = KVCache(2, 3, 10**9, 5)
    assert small._key.nbytes < 10**5


def test_each_sequence_of_a_ragged_batch_equals_itself_alone():
    """Rows beyond lengths are padding: NaN there reaches nothing, and padding queries give zeros."""
    rng = np.random.default_rng(2)
    q, k, v = make(rng, batch=3, length=20)
    steps = [np.array([5, 0, 3]), np.array([1, 1, 1]), np.array([0, 4, 2]), np.array([2, 5, 5])]
    cache = KVCache(3, 3, 20, 5, 7, dtype=np.float64)
    seen = np.zeros(3, int)
    for added in steps:
        new = max(added.max(), 1)
        chunk = [np.full((3, x.shape[1], new, x.shape[3]), np.nan) for x in (q, k, v)]
        for b, count in enumerate(added):
            for target, source in zip(chunk, (q, k, v), strict=True):
                target[b, :, :count] = source[b, :, seen[b] : seen[b] + count]
        cache.append(chunk[1], chunk[2], added)
        out, lse = cache.attention(chunk[0], query_lengths=added, return_lse=True)
        seen += added
        for b, count in enumerate(added):
            alone = attention(
                q[b, :, : seen[b]], k[b, :, : seen[b]], v[b, :, : seen[b]], mask=Causal(), backend="oracle"
            )
            np.testing.assert_allclose(out[b, :, :count], alone[:, seen[b] - count :], atol=1e-12)
            assert (out[b, :, count:] == 0).all()
            assert (lse[b, :, count:] == -np.inf).all()
    assert cache.lengths.tolist() == seen.tolist()
    last = np.stack([q[b, :, seen[b] - 1 : seen[b]] for b in range(3)])
    out = cache.attention(last)
    for b in range(3):
        alone = attention(last[b], k[b, :, : seen[b]], v[b, :, : seen[b]], backend="oracle")
        np.testing.assert_allclose(out[b], alone, atol=1e-12)
    assert cache.positions[0].tolist() == [*range(8), -1, -1, -1]


def test_options_of_attention_pass_through():
    rng = np.random.default_rng(3)
    q, k, v = make(rng)
    options = {
        "bias": rows(rng, 1, 6, 4, 23),
        "sinks": rows(rng, 6),
        "softcap": 2.0,
        "scale": 0.7,
    }
    cache = KVCache(2, 3, 64, 5, 7, dtype=np.float64)
    cache.append(k, v)
    expected = attention(q[:, :, -4:], k, v, mask=Causal(), **options, backend="oracle")
    np.testing.assert_allclose(cache.attention(q[:, :, -4:], **options), expected, atol=1e-12)
    i, j = np.ogrid[19:23, 0:23]
    expected = attention(q[:, :, -4:], k, v, mask=Dense((j <= i) & (j >= i - 6)), backend="oracle")
    np.testing.assert_allclose(cache.attention(q[:, :, -4:], window=6), expected, atol=1e-12)
    with pytest.raises(TypeError, match="mask"):
        cache.attention(q, mask=Causal())


def test_a_refused_append_changes_nothing():
    rng = np.random.default_rng(4)
    _, k, v = make(rng, length=8)
    cache = KVCache(2, 3, 10, 5, 7, dtype=np.float64)
    cache.append(k, v, [8, 3])
    before = [array.copy() for array in cache.arrays()]
    with pytest.raises(CacheFullError, match=r"11 tokens.*capacity is 10"):
        cache.append(k, v, [3, 3])
    with pytest.raises(CacheFullError):
        cache.check_room(3)
    assert issubclass(CacheFullError, ValueError)
    assert cache.lengths.tolist() == [8, 3]
    for now, then in zip(cache.arrays(), before, strict=True):
        np.testing.assert_array_equal(now[0], then[0])
        np.testing.assert_array_equal(now[1, :, :3], then[1, :, :3])
    cache.append(k, v, [2, 7])
    assert cache.lengths.tolist() == [10, 10]


@pytest.mark.parametrize(
    ("key", "value", "lengths", "reason"),
    [
        ((2, 2, 4, 5), (2, 2, 4, 7), None, r"key must have the shape \(2, 3, new, 5\)"),
        ((1, 3, 4, 5), (1, 3, 4, 7), None, "shape"),
        ((2, 3, 4, 6), (2, 3, 4, 7), None, "shape"),
        ((2, 3, 4, 5), (2, 3, 4, 5), None, r"value must have the shape \(2, 3, new, 7\)"),
        ((2, 3, 4, 5), (2, 3, 3, 7), None, "4 tokens but value 3"),
        ((3, 4, 5), (3, 4, 7), None, "shape"),
        ((2, 3, 4, 5), (2, 3, 4, 7), [5, 1], "from 0 to 4"),
        ((2, 3, 4, 5), (2, 3, 4, 7), [-1, 1], "from 0 to 4"),
        ((2, 3, 4, 5), (2, 3, 4, 7), [1], "batch"),
    ],
)
def test_wrong_shapes_are_refused_and_change_nothing(key, value, lengths, reason):
    cache = KVCache(2, 3, 10, 5, 7)
    cache.append(np.ones((2, 3, 1, 5)), np.ones((2, 3, 1, 7)))
    with pytest.raises(ValueError, match=reason):
        cache.append(np.zeros(key), np.zeros(value), lengths)
    assert cache.lengths.tolist() == [1, 1]
    assert (cache.arrays()[0] == 1).all()


def test_rows_in_another_byte_order_are_stored():
    key, value = np.random.default_rng(3).standard_normal((2, 1, 3, 4, 5))
    for dtype in (np.float64, ">f8"):
        cache = KVCache(1, 3, 10, 5, dtype=dtype)
        cache.append(key.astype(">f8"), value.astype(">f8"))
        assert cache.dtype.isnative
        np.testing.assert_array_equal(cache.arrays()[0], key)
        np.testing.assert_array_equal(cache.arrays()[1], value)


def test_wrong_types_are_refused():
    cache = KVCache(1, 3, 10, 5)
    with pytest.raises(TypeError, match="int64"):
        cache.append(np.zeros((1, 3, 2, 5), int), np.zeros((1, 3, 2, 5)))
    with pytest.raises(TypeError, match="integers"):
        cache.append(np.zeros((1, 3, 2, 5)), np.zeros((1, 3, 2, 5)), [1.0])
    with pytest.raises(TypeError, match="int32"):
        KVCache(1, 1, 4, 4, dtype=np.int32)
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        KVCache(1, 1, 4, 0)
    with pytest.raises(ValueError, match="multiple of heads_kv = 3"):
        cache.attention(np.zeros((1, 4, 1, 5)))
    with pytest.raises(ValueError, match="head_dim"):
        cache.attention(np.zeros((1, 3, 1, 4)))
    with pytest.raises(ValueError, match="4 axes"):
        cache.attention(np.zeros((3, 1, 5)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_storage_costs_only_its_rounding(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = make(np.random.default_rng(5), dtype=np.float32)
    cache = KVCache(2, 3, 23, 5, 7, dtype=dtype)
    cache.append(k, v)
    assert cache.arrays()[0].dtype == dtype
    out = cache.attention(q)
    expected = attention(
        q, k.astype(dtype).astype(np.float32), v.astype(dtype).astype(np.float32), mask=Causal()
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert out.dtype == np.float32


def test_truncate_undo_and_reset():
    rng = np.random.default_rng(6)
    q, k, v = make(rng)
    cache = KVCache(2, 3, 64, 5, 7, dtype=np.float64)
    cache.append(k, v)
    cache.append(np.full_like(k, np.nan), np.full_like(v, np.nan))
    cache.undo()
    assert cache.lengths.tolist() == [23, 23]
    np.testing.assert_allclose(cache.attention(q), attention(q, k, v, mask=Causal()), atol=1e-12)
    cache.truncate([4, 9])
    assert cache.lengths.tolist() == [4, 9]
    with pytest.raises(ValueError, match="exceed"):
        cache.truncate([5, 9])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert (cache.attention(q[:, :, :1]) == 0).all()


def test_views_are_read_only_and_empty_caches_work():
    cache = KVCache(2, 3, 8, 5)
    assert cache.arrays()[0].shape == (2, 3, 0, 5)
    cache.append(np.ones((2, 3, 1, 5)), np.ones((2, 3, 1, 5)))
    with pytest.raises(ValueError, match="read-only"):
        cache.arrays()[0][...] = 2
    none = KVCache(0, 3, 8, 5)
    none.append(np.ones((0, 3, 1, 5)), np.ones((0, 3, 1, 5)))
    assert none.attention(np.ones((0, 3, 1, 5))).shape == (0, 3, 1, 5)

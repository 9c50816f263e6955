"""attention_stats against the dense weights."""

import numpy as np
import pytest

from npattn import attention, attention_stats, attention_weights
from npattn.kernels.select import BackendError
from npattn.kernels.stats import numpy_tiled
from npattn.masks import Causal, Dense, Documents, Full, GlobalTokens, Padding, Window, local_strided

BACKENDS = ["numpy", "numpy, small tiles", "numba"]


@pytest.fixture(params=BACKENDS)
def stats_of(request, monkeypatch):
    backend = request.param
    if backend == "numpy, small tiles":
        monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: (16, 32))
        backend = "numpy"

    def call(*args, **options):
        try:
            return attention_stats(*args, backend=backend, **options)
        except BackendError as error:
            pytest.skip(str(error))

    return call


def from_weights(p, visible, top_k):
    """The definitions, read off the dense weights."""
    len_q, len_k = p.shape[-2:]
    with np.errstate(all="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
    seen = visible.any(-1)
    # of equal weights the smaller key: a stable sort of the visible ones
    order = np.argsort(np.where(visible, -p, np.inf), axis=-1, kind="stable")
    order = np.concatenate([order, np.zeros((*order.shape[:-1], top_k), int)], axis=-1)[..., :top_k]
    number = visible.sum(-1, keepdims=True)
    padding = np.arange(top_k) >= number
    own = np.arange(len_q) + len_k - len_q
    inside = (own >= 0) & (own < len_k)
    self_weight = np.zeros(p.shape[:-1])
    self_weight[..., inside] = p[..., np.flatnonzero(inside), own[inside]]
    return {
        "entropy": entropy,
        "max_weight": p.max(-1, initial=0),
        "argmax_key": np.where(seen, np.where(visible, p, -1).argmax(-1) if len_k else 0, -1),
        "self_weight": self_weight,
        "top_weights": np.where(padding, 0, np.take_along_axis(p, order, -1) if len_k else 0),
        "top_keys": np.where(padding, -1, order),
        "received": p.sum(-2),
    }


def assert_agrees(stats, q, k, v, top_k, atol, **options):
    p = attention_weights(q, k, **options).astype(np.float64)
    mask = options.get("mask")
    batch, heads, len_q, len_k = p.shape
    visible = np.ones(p.shape, bool)
    if mask is not None:
        visible = mask.to_dense(len_q, len_k, batch, heads)
    if options.get("bias") is not None:
        visible = visible & (options["bias"] != -np.inf)
    for name, expected in from_weights(p, visible, top_k).items():
        actual = getattr(stats, name)
        assert actual.shape == expected.shape, name
        if name in ("argmax_key", "top_keys"):
            assert actual.dtype == np.int64
            np.testing.assert_array_equal(actual, expected, err_msg=name)
        else:
            np.testing.assert_allclose(actual, expected, rtol=atol, atol=atol, err_msg=name)
    _, lse = attention(q, k, v, return_lse=True, backend="oracle", **options)
    np.testing.assert_allclose(stats.lse, lse, rtol=atol, atol=atol)


def arrays(rng, batch=2, heads_q=4, heads_kv=2, len_q=70, len_k=131, dim=16, dtype=np.float64):
    return (
        rng.normal(size=(batch, heads_q, len_q, dim)).astype(dtype) * 2,
        rng.normal(size=(batch, heads_kv, len_k, dim)).astype(dtype),
    )


MASKS = {
    "full": None,
    "causal": Causal(),
    "causal, top left": Causal(0),
    "window": Window(20, 3),
    "padding": Padding([100, 0]),
    "documents": Documents([30, 40], [0, 131]),
    "global": Window(5, 5) | GlobalTokens([0, 60]),
    "strided": local_strided(8, 16),
    "holes": ~Window(30, 10),
    "all but full": Full(),
}


@pytest.mark.parametrize("name", MASKS)
def test_agrees_with_the_dense_weights(stats_of, rng, name):
    q, k = arrays(rng)
    stats = stats_of(q, k, mask=MASKS[name], top_k=5)
    assert_agrees(stats, q, k, k, 5, 1e-10, mask=MASKS[name])


def test_agrees_with_bias_softcap_sinks_and_a_mask_per_head(stats_of, rng):
    q, k = arrays(rng)
    bias = rng.normal(size=(4, 70, 131))
    bias[:, :, 7] = -np.inf
    bias[2, 5] = -np.inf
    options = {
        "mask": Dense(rng.random((2, 4, 70, 131)) < 0.3),
        "bias": bias,
        "softcap": 2.0,
        "sinks": rng.normal(size=4),
        "scale": 0.7,
    }
    assert_agrees(stats_of(q, k, top_k=3, **options), q, k, k, 3, 1e-10, **options)


def test_top_k_beyond_the_keys_is_padded(stats_of, rng):
    q, k = arrays(rng, len_q=3, len_k=4)
    stats = stats_of(q, k, top_k=7, mask=Causal())
    assert stats.top_keys.shape == (2, 4, 3, 7)
    assert np.all(stats.top_keys[..., 4:] == -1)
    assert not stats.top_weights[..., 4:].any()
    assert_agrees(stats, q, k, k, 7, 1e-10, mask=Causal())


def test_of_equal_weights_the_first_keys_come_first(stats_of):
    q = np.zeros((1, 1, 5, 4))
    stats = stats_of(q, np.zeros((1, 1, 200, 4)), top_k=4)
    assert np.all(stats.top_keys == np.arange(4))
    assert np.all(stats.argmax_key == 0)
    np.testing.assert_allclose(stats.entropy, np.log(200))


def test_query_that_sees_nothing(stats_of, rng):
    q, k = arrays(rng, len_q=9, len_k=4)
    stats = stats_of(q, k, mask=Causal(), top_k=2)
    for name in ("entropy", "max_weight", "self_weight", "top_weights"):
        assert not getattr(stats, name)[:, :, :5].any(), name
    assert np.all(stats.argmax_key[:, :, :5] == -1)
    assert np.all(stats.top_keys[:, :, :5] == -1)
    assert np.all(stats.lse[:, :, :5] == -np.inf)
    sunk = stats_of(q, k, mask=Causal(), sinks=np.full(4, 0.5))
    np.testing.assert_allclose(sunk.lse[:, :, :5], 0.5)
    assert not sunk.entropy[:, :, :5].any()


def test_garbage_in_masked_keys_does_not_leak(stats_of, rng):
    q, k = arrays(rng)
    mask = Padding([100, 77])
    clean = stats_of(q, k, mask=mask, top_k=3)
    for garbage in (np.nan, np.inf, -np.inf):
        k[0, :, 100:] = garbage
        k[1, :, 77:] = garbage
        for a, b in zip(clean, stats_of(q, k, mask=mask, top_k=3), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("size", "tolerance"), [(0.01, 1e-6), (1.0, 1e-5), (30.0, 2e-4)])
def test_float32_is_as_accurate_as_its_logits(stats_of, rng, size, tolerance):
    q, k = arrays(rng, dtype=np.float32)
    q *= np.float32(size)
    stats = stats_of(q, k, mask=Causal(), top_k=2)
    exact = attention_stats(
        q.astype(np.float64), k.astype(np.float64), mask=Causal(), top_k=2, backend="numpy"
    )
    for name in ("entropy", "max_weight", "self_weight", "top_weights", "lse", "received"):
        assert getattr(stats, name).dtype == np.float32
        np.testing.assert_allclose(
            getattr(stats, name), getattr(exact, name), rtol=tolerance, atol=tolerance, err_msg=name
        )
    np.testing.assert_array_equal(stats.argmax_key, exact.argmax_key)


def test_huge_logits_give_entropy_zero_not_nan(stats_of):
    q = np.full((1, 1, 3, 1), 3e4)
    k = np.arange(50.0)[None, None, :, None]
    stats = stats_of(q, k, top_k=1, scale=1.0)
    assert not stats.entropy.any()
    assert np.all(stats.max_weight == 1)
    assert np.all(stats.argmax_key == 49)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_dtypes_give_float32_of_what_they_hold(stats_of, rng, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    q, k = (x.astype(dtype) for x in arrays(rng))
    options = {"mask": Dense(rng.random((4, 70, 131)) < 0.4) & Causal(), "scale": 1.7, "top_k": 4}
    stats = stats_of(np.asfortranarray(q), k, **options)
    exact = attention_stats(q.astype(np.float64), k.astype(np.float64), backend="numpy", **options)
    for name in ("entropy", "max_weight", "self_weight", "top_weights", "received"):
        assert getattr(stats, name).dtype == np.float32
        np.testing.assert_allclose(
            getattr(stats, name), getattr(exact, name), rtol=0, atol=1e-5, err_msg=name
        )
    np.testing.assert_array_equal(stats.top_keys, exact.top_keys)


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 5, 4), (2, 0, 3, 5, 4), (2, 2, 0, 5, 4), (2, 2, 3, 0, 4), (2, 2, 3, 5, 0)]
)
def test_empty_axes(stats_of, shape):
    batch, heads, len_q, len_k, dim = shape
    stats = stats_of(np.ones((batch, heads, len_q, dim)), np.ones((batch, heads, len_k, dim)), top_k=2)
    assert stats.entropy.shape == (batch, heads, len_q)
    assert stats.received.shape == (batch, heads, len_k)
    if len_k == 0:
        assert np.all(stats.lse == -np.inf)
        assert np.all(stats.top_keys == -1)


def test_one_head_without_an_axis(stats_of, rng):
    q, k = rng.normal(size=(5, 4)), rng.normal(size=(7, 4))
    stats = stats_of(q, k, top_k=2)
    four = stats_of(q[None, None], k[None, None], top_k=2)
    assert stats.entropy.shape == (5,)
    assert stats.received.shape == (7,)
    assert stats.top_keys.shape == (5, 2)
    np.testing.assert_array_equal(stats.entropy, four.entropy[0, 0])


def test_received_adds_up_to_the_queries_that_see_something(stats_of, rng):
    q, k = arrays(rng, len_q=131)
    stats = stats_of(q, k, mask=Padding([131, 50]))
    np.testing.assert_allclose(stats.received.sum(-1), 131)


@pytest.mark.parametrize(("top_k", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_top_k_is_refused(top_k, error):
    with pytest.raises(error, match="top_k"):
        attention_stats(np.ones((1, 2, 3)), np.ones((1, 2, 3)), top_k=top_k)


def test_memory_stays_linear_at_32768_keys():
    """The matrix would take 4 GiB."""
    import tracemalloc

    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 1, 32768, 16)).astype(np.float32)
    attention_stats(q[:, :, :99], q[:, :, :99], top_k=4)  # compiles, which takes memory of its own
    tracemalloc.start()
    stats = attention_stats(q, q, mask=Window(500), top_k=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    np.testing.assert_allclose(stats.received.sum(), 32768, rtol=1e-5)


def test_same_bits_for_any_number_of_threads(rng):
    import npattn

    q, k = arrays(rng, len_q=700, len_k=900, dim=32, dtype=np.float32)
    before = npattn.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            npattn.set_num_threads(threads)
            results.append(attention_stats(q, k, mask=Causal(), top_k=3))
    finally:
        npattn.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)

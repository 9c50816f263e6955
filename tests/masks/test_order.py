"""Sorted queries and keys: the same attention, in tiles that stand together."""

import numpy as np
import pytest
from random_masks import composition

import npattn
from npattn.masks import (
    Causal,
    Dilated,
    Documents,
    Extent,
    Full,
    GlobalTokens,
    Padding,
    Strided,
    Window,
    local_strided,
)
from npattn.plans import order
from npattn.plans.build import build_tile_plan
from npattn.plans.order import order_of

MASKS = {
    "dilated": Dilated(3, 4),
    "dilated, past": Dilated(3, 4) & Causal(),
    "dilated, shifted": Dilated(2, 3, offset=5) & Window(4, None),
    "dilated, in documents": Dilated(2, 5) & Documents([40, 0, 30]),
    "strided": Strided(7),
    "local and strided, past": local_strided(12, 7) & Causal(),
    "local and strided, padded": local_strided(12, 7) & Padding([70, 30]),
    "global": (Window(3, 0) | GlobalTokens([0, 9, 10, 50])) & Causal(),
    "not strided": ~Strided(5) & Causal(),
    "strided but for a window": Strided(5) & ~Window(3, None),
}
EXTENT = Extent(2, 4, 70, 70)


@pytest.fixture
def always(monkeypatch):
    """Order whatever can be ordered, however small."""
    monkeypatch.setattr(order, "LEAST", 1)
    monkeypatch.setattr(order, "SAVED", -1000)
    order._remembered.cache_clear()
    yield
    order._remembered.cache_clear()


def assert_is_an_order_of(found, mask, extent):
    batch, heads, len_q, len_k = extent
    dense = mask.to_dense(len_q, len_k, batch, heads)
    sorted_dense = found.mask.to_dense(len_q, len_k, batch, heads)
    np.testing.assert_array_equal(sorted_dense, dense[:, :, found.rows][..., found.cols])
    np.testing.assert_array_equal(found.rows[found.row_of], np.arange(len_q))
    np.testing.assert_array_equal(found.cols[found.col_of], np.arange(len_k))
    np.testing.assert_array_equal(np.sort(found.rows), np.arange(len_q))
    np.testing.assert_array_equal(np.sort(found.cols), np.arange(len_k))


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_of_an_order_is_the_mask_sorted(always, name):
    for extent in (EXTENT, Extent(2, 1, 70, 70)):
        found = order_of(MASKS[name], extent)
        assert found is not None
        assert_is_an_order_of(found, MASKS[name], extent)


def test_random_masks_are_ordered_right_or_not_at_all(always):
    found = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        extent = Extent(*(int(rng.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 45), (1, 70))))
        mask, _ = composition(extent, rng)
        sorted_ = order_of(mask, extent)
        if sorted_ is not None:
            found += 1
            assert_is_an_order_of(sorted_, mask, extent)
    assert found > 20


@pytest.mark.parametrize(
    "mask",
    [
        None,
        Full(),
        Causal(),
        Dilated(3, 1),
        Dilated(3, 4) | Window(2, 2),  # pairs of different remainders
        Dilated(3, 4) | Dilated(3, 5),
        Strided(4) & Dilated(3, 4),
        Dilated(3, 4, offset=[0, 1]),  # another order for each batch element
        Dilated(3, 50),  # hardly two keys of one remainder
        Strided(7) | ~Window(3, 3),  # not one interval beside the marked ones
        ~Dilated(3, 4),
    ],
    ids=str,
)
def test_what_would_not_stand_together_keeps_its_order(always, mask):
    assert order_of(mask, EXTENT) is None


def test_short_sequences_and_few_tokens_keep_their_order():
    assert order_of(Dilated(3, 4), Extent(1, 1, 511, 4096)) is None
    assert order_of(Dilated(3, 4), Extent(1, 1, 512, 512)) is not None
    spread = [64 * n for n in range(9)]
    assert order_of(Window(9, 9) | GlobalTokens(spread[:8]), Extent(1, 1, 2048, 2048)) is None
    assert order_of(Window(9, 9) | GlobalTokens(spread), Extent(1, 1, 2048, 2048)) is not None


def test_an_order_is_remembered_and_so_are_its_plans():
    extent = Extent(1, 2, 600, 600)
    found = order_of(Dilated(5, 3), extent)
    assert order_of(Dilated(5, 3), extent) is found


@pytest.mark.parametrize(("mask", "most"), [(Dilated(32, 8), 0.25), (local_strided(128, 64), 0.16)], ids=str)
def test_fewer_tiles_are_visited(mask, most):
    """L = 2,048: 8 remainders; 32 tokens that all see, one in each tile, beside a window of 4 tiles."""
    extent = Extent(1, 1, 2048, 2048)

    def tiles(mask):
        plan = build_tile_plan(mask, extent, 48, 64)
        return int((plan.row_stop - plan.row_first).sum())

    assert tiles(order_of(mask, extent).mask) < most * 43 * 32
    assert tiles(order_of(mask, extent).mask) < 0.5 * tiles(mask)


FEATURES = {
    "plain": {},
    "bias": {"bias": (2, 4, 70, 70)},
    "bias of keys": {"bias": (1, 4, 1, 70)},
    "bias of queries": {"bias": (70, 1)},
    "all": {"bias": (4, 70, 70), "softcap": 2.0, "sinks": 4, "scale": 0.7},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", ["dilated, past", "local and strided, padded"])
def test_sorted_attention_equals_the_oracle(attend, always, rng, name, feature):
    q, k, v = (rng.standard_normal((2, heads, 70, 16)) for heads in (4, 2, 2))
    options = {"mask": MASKS[name], **FEATURES[feature]}
    for key in ("bias", "sinks"):
        if key in options:
            options[key] = rng.standard_normal(options[key])
    dout, dlse = rng.standard_normal((2, 4, 70, 16)), rng.standard_normal((2, 4, 70))
    (out, lse), pullback = attend.attention_vjp(q, k, v, **options, return_lse=True)
    (exact, exact_lse), exact_pullback = npattn.attention_vjp(
        q, k, v, **options, return_lse=True, backend="oracle"
    )
    np.testing.assert_allclose(out, exact, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-10)
    for ours, right in zip(pullback(dout, dlse), exact_pullback(dout, dlse), strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            np.testing.assert_allclose(ours, right, rtol=1e-9, atol=1e-11)


def test_sixteen_bit_gradients_keep_their_rest(always, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, dout = (rng.standard_normal((1, 2, 70, 16)).astype(ml_dtypes.bfloat16) for _ in range(4))
    bias = np.zeros((1, 1, 1, 1), np.float32)
    _, pullback = npattn.attention_vjp(q, k, v, bias=bias, mask=MASKS["dilated"], backend="numpy")
    assert abs(float(pullback(dout).bias.ravel()[0])) < 1e-3


def test_dropout_keeps_the_weights_it_would_keep_in_place(attend, always, rng):
    q, k, v = (rng.standard_normal((1, 2, 70, 8)) for _ in range(3))
    options = {"mask": MASKS["dilated"], "dropout_p": 0.4, "seed": 7}
    out = attend.attention(q, k, v, **options)
    np.testing.assert_allclose(out, npattn.attention(q, k, v, **options, backend="oracle"), atol=1e-12)


def test_masked_nan_does_not_leak_through_an_order(attend, always, rng):
    q, k, v = (rng.standard_normal((1, 2, 70, 8)) for _ in range(3))
    mask = MASKS["dilated"] & Padding([33])
    clean = attend.attention(q, k, v, mask=mask)
    k[:, :, 33:], v[:, :, 33:] = np.nan, np.inf
    np.testing.assert_array_equal(attend.attention(q, k, v, mask=mask), clean)

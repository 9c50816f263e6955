"""attention_weights, and PyTorch's signature over attention."""

import numpy as np
import pytest

import npattn
from npattn import attention, attention_weights, masks, scaled_dot_product_attention


@pytest.mark.parametrize("rows", [None, [0, 5, 5, 2], np.array([6]), [-1, 0], range(7), []])
def test_weights_times_values_are_attention(rng, rows):
    q, k, v = (
        rng.standard_normal((2, 6, 7, 5)),
        rng.standard_normal((2, 3, 9, 5)),
        rng.standard_normal((2, 3, 9, 4)),
    )
    options = {
        "mask": masks.Causal() & masks.Padding(np.array([9, 4])),
        "bias": rng.standard_normal((6, 7, 9)),
        "scale": 0.3,
        "softcap": 1.5,
        "sinks": rng.standard_normal(6),
    }
    weights = attention_weights(q, k, **options, rows=rows)
    index = np.arange(7) if rows is None else np.asarray(rows, int)
    assert weights.shape == (2, 6, len(index), 9)
    assert weights.dtype == np.float64
    expected = attention(q, k, v, **options)[:, :, index]
    np.testing.assert_allclose(weights @ v.repeat(2, axis=1), expected, atol=1e-13)


def test_a_row_sums_to_1_to_less_with_a_sink_to_0_without_keys(rng):
    q, k = rng.standard_normal((1, 2, 4, 3)), rng.standard_normal((1, 2, 6, 3))
    mask = np.ones((4, 6), bool)
    mask[2] = False
    weights = attention_weights(q, k, mask=mask)
    np.testing.assert_allclose(weights.sum(-1), [[[1, 1, 0, 1]] * 2], atol=1e-15)
    assert (attention_weights(q, k, sinks=np.zeros(2)).sum(-1) < 1).all()


@pytest.mark.parametrize("rows", [[7], [-8], [0, 99], [1.5], [True, False], "ab", 3, [[1, 2]], [None]])
def test_rows_that_are_no_indices_are_an_index_error(rng, rows):
    q = rng.standard_normal((7, 5))
    with pytest.raises(IndexError, match="row"):
        attention_weights(q, q, rows=rows)


def test_a_bias_and_a_mask_of_one_row_serve_all_chosen_rows(rng):
    q, k = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 6, 4))
    bias, mask = rng.standard_normal((1, 6)), rng.random((1, 6)) < 0.7
    whole = attention_weights(q, k, bias=bias, mask=mask)
    np.testing.assert_array_equal(
        attention_weights(q, k, bias=bias, mask=mask, rows=[4, 1]), whole[:, [4, 1]]
    )


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (3, 2, 5, 4), (2, 3, 2, 5, 4)])
def test_weights_have_the_leading_shape_of_the_call(rng, shape):
    q = rng.standard_normal(shape).astype(np.float16)
    weights = attention_weights(q, q)
    assert weights.shape == (*shape[:-1], 5)
    assert weights.dtype == np.float16


def test_chosen_rows_of_a_long_sequence_need_no_matrix(rng):
    q = rng.standard_normal((1, 1, 200_000, 4)).astype(np.float32)
    weights = attention_weights(q, q, mask=masks.Window(50), rows=[199_999, 7])
    assert weights.shape == (1, 1, 2, 200_000)
    assert (weights > 0).sum(-1).tolist() == [[[51, 8]]]


def test_masked_rows_may_hold_nan(rng):
    q, k = rng.standard_normal((2, 1, 5, 4))
    k[0, 4] = np.nan
    weights = attention_weights(q, k, mask=masks.Prefix(4))
    assert np.isfinite(weights).all()
    assert not weights[..., 4].any()


# scaled_dot_product_attention


def formula(q, k, v, visible, scale=None, bias=0.0):
    logits = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    e = np.where(visible, np.exp(logits), 0)
    return e / e.sum(-1, keepdims=True) @ v


def test_sdpa_is_causal_from_the_top_left(rng):
    q, k, v = (
        rng.standard_normal((2, 3, 4, 5)),
        rng.standard_normal((2, 3, 7, 5)),
        rng.standard_normal((2, 3, 7, 6)),
    )
    np.testing.assert_allclose(
        scaled_dot_product_attention(q, k, v, is_causal=True),
        formula(q, k, v, np.tri(4, 7, dtype=bool)),
        atol=1e-14,
    )


def test_sdpa_takes_bool_and_float_masks_and_scale(rng):
    q, k, v = rng.standard_normal((3, 2, 3, 6, 5))
    mask = rng.random((2, 1, 6, 6)) < 0.8
    mask[..., 0] = True
    out = scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    np.testing.assert_allclose(out, formula(q, k, v, mask, 0.3), atol=1e-14)
    bias = rng.standard_normal((6, 6))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    np.testing.assert_allclose(out, formula(q, k, v, True, bias=bias), atol=1e-14)
    out = scaled_dot_product_attention(q, k, v, np.where(mask, 0.0, -np.inf))
    np.testing.assert_allclose(out, formula(q, k, v, mask), atol=1e-14)


def test_sdpa_gives_zeros_where_every_key_is_masked(rng):
    q, k, v = rng.standard_normal((3, 1, 1, 4, 5))
    mask = np.ones((4, 4), bool)
    mask[1] = False
    assert not scaled_dot_product_attention(q, k, v, mask)[0, 0, 1].any()


def test_sdpa_wants_enable_gqa_for_groups(rng):
    q, k = rng.standard_normal((1, 6, 4, 5)), rng.standard_normal((1, 2, 7, 5))
    with pytest.raises(ValueError, match=r"\(1, 6, 4, 5\).*\(1, 2, 7, 5\).*enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    expected = attention(q, k, k)
    np.testing.assert_array_equal(scaled_dot_product_attention(q, k, k, enable_gqa=True), expected)
    np.testing.assert_array_equal(
        scaled_dot_product_attention(q, k[:, :1], k[:, :1]), attention(q, k[:, :1], k[:, :1])
    )


def test_sdpa_broadcasts_one_head_against_several(rng):
    q, k, v = (
        rng.standard_normal((2, 3, 4, 5)),
        rng.standard_normal((2, 3, 7, 5)),
        rng.standard_normal((2, 3, 7, 6)),
    )
    for one in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        arrays = [x[:, :1] if n in one else x for n, x in enumerate((q, k, v))]
        out = scaled_dot_product_attention(*arrays)
        expected = formula(*arrays, True)
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, atol=1e-14)


def test_sdpa_refuses_what_pytorch_refuses(rng):
    q, k, v = rng.standard_normal((3, 1, 1, 4, 5))
    with pytest.raises(ValueError, match="not both"):
        scaled_dot_product_attention(q, k, v, np.ones((4, 4), bool), is_causal=True)
    with pytest.raises(TypeError, match="attn_mask != 0"):
        scaled_dot_product_attention(q, k, v, np.ones((4, 4), int))
    with pytest.raises(ValueError, match="seed"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_sdpa_drops_by_seed(rng):
    q, k, v = rng.standard_normal((3, 1, 2, 4, 5))
    np.testing.assert_array_equal(
        scaled_dot_product_attention(q, k, v, None, 0.5, seed=3),
        npattn.attention(q, k, v, dropout_p=0.5, seed=3),
    )

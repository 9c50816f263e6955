"""merge_attention: parts of the keys join to the whole, forward and backward."""

import itertools

import numpy as np
import pytest

import npattn
from npattn import attention, attention_vjp, merge_attention, merge_attention_vjp
from npattn.masks import Causal, Dense
from npattn.testing import check_vjp


def random_parts(rng, parts=3, shape=(2, 3, 5, 4)):
    return list(rng.normal(size=(parts, *shape))), list(rng.normal(size=(parts, *shape[:-1])) * 3)


def test_parts_join_to_unsplit_attention(rng):
    q, k, v = (rng.normal(size=(2, heads, n, d)) for heads, n, d in ((4, 17, 8), (2, 29, 8), (2, 29, 6)))
    whole = attention(q, k, v, return_lse=True)
    cuts = [0, 4, 4, 20, 29]  # one part is empty
    parts = [attention(q, k[:, :, a:z], v[:, :, a:z], return_lse=True) for a, z in itertools.pairwise(cuts)]
    out, lse = merge_attention(*zip(*parts, strict=True))
    np.testing.assert_allclose(out, whole[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


def test_sinks_count_once(rng):
    q, k, v = rng.normal(size=(3, 3, 9, 4))
    sinks = rng.normal(size=3)
    whole = attention(q, k, v, sinks=sinks, return_lse=True)
    first = attention(q, k[:, :5], v[:, :5], sinks=sinks, return_lse=True)
    second = attention(q, k[:, 5:], v[:, 5:], return_lse=True)
    out, lse = merge_attention(*zip(first, second, strict=True))
    np.testing.assert_allclose(out, whole[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


def test_split_and_whole_give_the_same_gradients(rng):
    q, k, v = rng.normal(size=(3, 2, 11, 4))
    mask = Causal().to_dense(11, 11)[0]
    (out, lse), whole_pullback = attention_vjp(q, k, v, mask=Dense(mask), return_lse=True)
    dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    whole = whole_pullback(dout, dlse)

    parts, pullbacks = [], []
    for columns in (slice(0, 6), slice(6, 11)):
        result, pullback = attention_vjp(
            q, k[:, columns], v[:, columns], mask=mask[..., columns], return_lse=True
        )
        parts.append(result)
        pullbacks.append(pullback)
    _, merge_pullback = merge_attention_vjp(*zip(*parts, strict=True))
    grads = [
        pullback(*cotangents)
        for pullback, *cotangents in zip(pullbacks, *merge_pullback(dout, dlse), strict=True)
    ]
    np.testing.assert_allclose(sum(g.query for g in grads), whole.query, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([g.key for g in grads], 1), whole.key, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        np.concatenate([g.value for g in grads], 1), whole.value, rtol=1e-10, atol=1e-12
    )


def test_merging_is_associative_and_order_does_not_matter(rng):
    outs, lses = random_parts(rng)
    flat = merge_attention(outs, lses)
    ab = merge_attention(outs[:2], lses[:2])
    nested = merge_attention([ab[0], outs[2]], [ab[1], lses[2]])
    turned = merge_attention(outs[::-1], lses[::-1])
    for other in (nested, turned):
        np.testing.assert_allclose(other[0], flat[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(other[1], flat[1], rtol=1e-12)


def test_zero_and_minus_infinity_is_neutral_and_garbage_in_an_empty_part_stays_there(rng):
    outs, lses = random_parts(rng, 1)
    nothing = np.full_like(lses[0], -np.inf)
    for filling in (0.0, np.nan, np.inf):
        out, lse = merge_attention([outs[0], np.full_like(outs[0], filling)], [lses[0], nothing])
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_array_equal(lse, lses[0])
    out, lse = merge_attention([np.full_like(outs[0], np.nan)] * 2, [nothing, nothing])
    assert not out.any()
    assert np.all(lse == -np.inf)


def test_lse_far_apart_or_huge_stays_finite(rng):
    outs, _ = random_parts(rng, 2)
    shape = outs[0].shape[:-1]
    out, lse = merge_attention(outs, [np.full(shape, 1e30), np.full(shape, -1e30)])
    np.testing.assert_array_equal(out, outs[0])
    assert np.all(lse == 1e30)


def test_gradients_by_differences(rng):
    outs, lses = random_parts(rng)
    lses[1][0] = -np.inf
    lses[1][1, 0] = -np.inf

    def f_vjp(*args):
        result, pullback = merge_attention_vjp(args[:3], args[3:])

        def both(dout, dlse):
            douts, dlses = pullback(dout, dlse)
            return (*douts, *dlses)

        return result, both

    finite = [np.where(np.isinf(x), -1.0, x) for x in lses]
    check_vjp(f_vjp, [*outs, *finite])
    _, pullback = merge_attention_vjp(outs, lses)
    douts, dlses = pullback(rng.normal(size=outs[0].shape))
    assert not douts[1][0].any()
    assert not dlses[1][0].any()
    assert len(douts) == len(dlses) == 3


def test_half_precision_comes_back_as_it_went_in(rng):
    outs = [x.astype(np.float16) for x in rng.normal(size=(2, 3, 4, 8))]
    lses = [x.astype(np.float32) for x in rng.normal(size=(2, 3, 4))]
    (out, lse), pullback = merge_attention_vjp(outs, lses)
    douts, dlses = pullback(out)
    assert out.dtype == douts[0].dtype == np.float16
    assert lse.dtype == dlses[0].dtype == np.float32


@pytest.mark.parametrize(
    ("outs", "lses", "error", "text"),
    [
        ([], [], ValueError, "at least one part"),
        ([np.zeros((2, 3))], [], ValueError, "1 outs and 0 lses"),
        ([np.zeros((2, 3)), np.zeros((3, 3))], [np.zeros(2), np.zeros(3)], ValueError, r"\(2, 3\).*\(3, 3\)"),
        ([np.zeros((2, 3))], [np.zeros((2, 3))], ValueError, r"\(2,\), got \(2, 3\)"),
        ([np.zeros((2, 3), int)], [np.zeros(2)], TypeError, "float"),
        ([np.zeros((2, 3))], [np.zeros(2, int)], TypeError, "lses"),
    ],
)
def test_bad_parts_are_refused(outs, lses, error, text):
    with pytest.raises(error, match=text):
        merge_attention(outs, lses)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_another_byte_order_changes_nothing(rng, dtype):
    outs, lses = (list(x.astype(dtype)) for x in (rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 3, 4))))
    (out, lse), pullback = merge_attention_vjp(outs, lses)
    swapped = [[x.astype(x.dtype.newbyteorder(">")) for x in xs] for xs in (outs, lses, [out, lse])]
    (other_out, other_lse), other_pullback = merge_attention_vjp(*swapped[:2])
    assert other_out.dtype == out.dtype
    assert other_lse.dtype == lse.dtype
    np.testing.assert_array_equal(other_out, out)
    np.testing.assert_array_equal(other_lse, lse)
    for xs, ys in zip(other_pullback(*swapped[2]), pullback(out, lse), strict=True):
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_array_equal(x, y)


def test_wrong_cotangents_are_refused():
    _, pullback = merge_attention_vjp([np.zeros((2, 3))], [np.zeros(2)])
    with pytest.raises(ValueError, match="dout"):
        pullback(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="dlse"):
        pullback(np.zeros((2, 3)), np.zeros(3))


def test_same_objects_in_both_places():
    assert npattn.merge_attention is npattn.functional.merge_attention

"""Summaries of heads: against loops over queries, and against distributions whose numbers are known."""

import math

import numpy as np
import pytest

import npattn
from npattn.analysis import distance_profile, head_agreement, head_summary


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.fixture
def weights():
    rng = np.random.default_rng(3)
    return softmax(rng.normal(size=(2, 3, 5, 7)) * np.array([0.1, 1.0, 5.0])[:, None, None])


def test_summary_equals_a_loop_over_queries(weights):
    summary = head_summary(weights)
    batch, heads, len_q, len_k = weights.shape
    for h in range(heads):
        rows = [weights[b, h, i] for b in range(batch) for i in range(len_q)]
        entropies = [-sum(p * math.log(p) for p in row) for row in rows]
        assert summary.entropy[h] == pytest.approx(np.mean(entropies), rel=1e-12)
        assert summary.spread[h] == pytest.approx(np.mean(np.exp(entropies)), rel=1e-12)
        assert summary.max_weight[h] == pytest.approx(np.mean([row.max() for row in rows]), rel=1e-12)
        own = [weights[b, h, i, i + len_k - len_q] for b in range(batch) for i in range(len_q)]
        assert summary.self_weight[h] == pytest.approx(np.mean(own), rel=1e-12)


def test_sharpest_logits_are_the_most_focused_head(weights):
    summary = head_summary(weights)
    assert (summary.most_focused, summary.least_focused) == (2, 0)
    assert isinstance(summary.most_focused, int)


def test_uniform_and_one_hot_heads_have_known_numbers():
    uniform, one_hot = np.full((6, 8), 1 / 8), np.eye(8)[2:]
    summary = head_summary(np.stack([uniform, one_hot]))
    np.testing.assert_allclose(summary.entropy, [math.log(8), 0.0], atol=1e-15)
    np.testing.assert_allclose(summary.spread, [8.0, 1.0], rtol=1e-14)
    np.testing.assert_allclose(summary.max_weight, [1 / 8, 1.0])
    np.testing.assert_allclose(summary.self_weight, [1 / 8, 1.0])


def test_queries_that_see_nothing_are_left_out():
    weights = np.zeros((2, 4, 4))
    weights[0, 1] = 0.25
    summary = head_summary(weights)
    np.testing.assert_allclose(summary.entropy, [math.log(4), 0.0])
    np.testing.assert_allclose(summary.spread, [4.0, 0.0])
    assert np.isfinite(np.concatenate(summary[:4])).all()


def test_more_queries_than_keys_have_no_diagonal_at_the_start():
    weights = np.full((5, 3), 1 / 3)  # queries 0 and 1 stand before the first key
    assert head_summary(weights).self_weight[0] == pytest.approx(3 / 5 / 3)


def test_a_matrix_is_one_head_and_lists_are_read():
    summary = head_summary([[0.5, 0.5], [0.0, 1.0]])
    assert summary.entropy.shape == (1,)
    assert summary.entropy[0] == pytest.approx(math.log(2) / 2)


def test_half_precision_weights_are_summed_in_double():
    weights = np.full((1, 8, 4096), 1 / 4096, np.float16)
    assert head_summary(weights).spread[0] == pytest.approx(4096, rel=1e-6)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 2), int)])
def test_wrong_weights_are_named_in_the_error(wrong):
    with pytest.raises(ValueError, match=r"float array \(..., heads, len_q, len_k\)"):
        head_summary(wrong)


def test_no_heads_is_an_error():
    with pytest.raises(ValueError, match="at least one head"):
        head_summary(np.zeros((0, 3, 3)))


def test_statistics_give_the_same_summary_as_the_weights():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, 4, 33, 8)) * 2
    mask = npattn.masks.Causal() & npattn.masks.Padding([33, 20])
    of_weights = head_summary(npattn.attention_weights(q, k, mask=mask))
    of_stats = head_summary(npattn.attention_stats(q, k, mask=mask))
    for a, b in zip(of_weights, of_stats, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    one_head = head_summary(npattn.attention_stats(q[0, 0], k[0, 0]))
    assert one_head.entropy.shape == (1,)


def test_agreement_is_symmetric_with_ones_on_the_diagonal(weights):
    agreement = head_agreement(weights)
    assert agreement.shape == (3, 3)
    np.testing.assert_array_equal(agreement, agreement.T)
    np.testing.assert_array_equal(np.diag(agreement), 1.0)
    assert ((agreement >= 0) & (agreement <= 1)).all()


def test_agreement_equals_scipys_jensen_shannon(weights):
    distance = pytest.importorskip("scipy.spatial.distance")
    agreement = head_agreement(weights)
    expected = [
        1 - distance.jensenshannon(weights[b, 0, i], weights[b, 2, i], base=2) ** 2
        for b in range(2)
        for i in range(5)
    ]
    assert agreement[0, 2] == pytest.approx(np.mean(expected), rel=1e-10)


def test_agreement_of_rows_without_keys_is_zero():
    np.testing.assert_array_equal(head_agreement(np.zeros((2, 3, 3))), np.eye(2))


def test_distance_profile_equals_a_loop(weights):
    profile = distance_profile(weights)
    batch, heads, len_q, len_k = weights.shape
    expected = np.zeros((heads, len_q + len_k - 1))
    lowest = profile.distance[0]
    for b, h, i, j in np.ndindex(weights.shape):
        expected[h, j - (i + len_k - len_q) - lowest] += weights[b, h, i, j] / (batch * len_q)
    np.testing.assert_allclose(profile.weight, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(profile.weight.sum(axis=-1), 1.0)
    np.testing.assert_allclose(profile.mean, (expected * abs(profile.distance)).sum(axis=-1))
    assert (profile.distance[0], profile.distance[-1]) == (1 - len_k, len_q - 1)


def test_distance_of_a_shifted_diagonal_is_the_shift():
    weights = np.roll(np.eye(10), -3, axis=1)[3:]  # row r (query r + 3) looks at key r
    profile = distance_profile(weights, rows=range(3, 10))
    assert profile.mean[0] == 3.0
    assert profile.weight[0, profile.distance == -3] == 1.0


def test_chosen_rows_give_the_profile_of_those_rows(weights):
    rows = np.array([4, -5, 2])
    sample = distance_profile(weights[..., rows, :], rows=rows, len_q=5)
    padded = np.zeros_like(weights)
    padded[..., rows, :] = weights[..., rows, :]
    np.testing.assert_allclose(sample.weight * 3, distance_profile(padded).weight * 5)
    with pytest.raises(ValueError, match="each of the 5 rows"):
        distance_profile(weights, rows=[0, 1])


def test_distance_of_heads_that_see_nothing_is_zero():
    profile = distance_profile(np.zeros((2, 3, 3)))
    np.testing.assert_array_equal(profile.mean, 0.0)

"""Sampling and stopping, over a model that is a table of logits."""

import numpy as np
import pytest

from npattn.cache import LayerCaches
from npattn.nn.generate import generate, penalized, probabilities, sample, stream

VOCAB = 8


class Table:
    """The next token's logits are a row of a table: a model without any attention."""

    max_length = None

    def __init__(self, table):
        self.table = np.asarray(table, float)

    def states(self, ids, *, cache=None, lengths=None):
        rows = np.zeros((len(ids), 1, ids.shape[1], 1), np.float32)
        for layer in cache:
            layer.append(rows, rows, lengths)
        return self.table[ids]

    def logits(self, states):
        return states

    def new_cache(self, batch, capacity):
        return LayerCaches.kv(1, batch, 1, capacity, 1)


def counting(step=1):
    """Token t is followed by t + step."""
    return Table(np.eye(VOCAB)[(np.arange(VOCAB) + step) % VOCAB] * 50)


def test_greedy_follows_the_largest_logit():
    assert generate(counting(), [[2], [6]], 4, temperature=0).tolist() == [[2, 3, 4, 5, 6], [6, 7, 0, 1, 2]]


def test_a_row_ends_with_its_stop_token_and_is_filled_with_it():
    ids = generate(counting(), [[2], [4]], 6, temperature=0, stop=5)
    assert ids.tolist() == [[2, 3, 4, 5], [4, 5, 5, 5]]
    ids = generate(counting(), [[2], [5]], 6, temperature=0, stop=[4, 7])
    assert ids.tolist() == [[2, 3, 4], [5, 6, 7]]
    ids = generate(counting(), [[5]], 3, temperature=0, stop=5)  # a stop token in the prompt stops nothing
    assert ids.tolist() == [[5, 6, 7, 0]]


def test_stream_yields_one_array_of_the_batch_a_step():
    steps = list(stream(counting(), np.array([[2], [6]]), 3, temperature=0))
    assert [step.tolist() for step in steps] == [[3, 7], [4, 0], [5, 1]]
    assert steps[0].dtype == np.int64


def test_lengths_pick_each_rows_last_real_token():
    ids = generate(counting(), [[2, 7, 7], [1, 2, 3]], 2, temperature=0, lengths=[1, 3])
    assert ids.tolist() == [[2, 7, 7, 3, 4], [1, 2, 3, 4, 5]]


def test_left_padding_gives_the_same_tokens_behind_the_same_columns():
    options = {"temperature": 0, "lengths": [1, 3]}
    ids = generate(counting(), [[7, 7, 2], [1, 2, 3]], 2, padding="left", **options)
    assert ids.tolist() == [[7, 7, 2, 3, 4], [1, 2, 3, 4, 5]]
    steps = stream(counting(), [[7, 7, 2], [1, 2, 3]], 2, padding="left", **options)
    assert [step.tolist() for step in steps] == [[3, 4], [4, 5]]
    assert generate(counting(), np.zeros((0, 0), int), 4, padding="left").shape == (0, 0)
    assert generate(counting(), [[1, 2]], 1, padding="left", temperature=0).tolist() == [[1, 2, 3]]


def test_nothing_to_generate_gives_the_prompt():
    assert generate(counting(), [[2, 3]], 0).tolist() == [[2, 3]]
    assert generate(counting(), np.zeros((0, 3), int), 4).shape == (0, 3)


def frequencies(**options):
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    rng = np.random.default_rng(0)
    draws = [sample(logits, rng, **options) for _ in range(4000)]
    return np.bincount(draws, minlength=5) / 4000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / 0.285),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.71}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.3}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(options, expected):
    np.testing.assert_allclose(
        probabilities(np.log([0.4, 0.3, 0.15, 0.1, 0.05]), **options), expected, atol=1e-9
    )
    np.testing.assert_allclose(frequencies(**options), expected, atol=0.03)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 40.0])
def test_top_p_keeps_what_a_sort_of_the_whole_vocabulary_keeps(spread, top_p):
    rng = np.random.default_rng(3)
    for top_k in (None, 30):
        logits = np.round(rng.standard_normal(1000) * spread, 2)  # with ties
        probs = probabilities(logits, top_k=top_k)
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        expected = np.where(np.isin(np.arange(1000), order[before < top_p]), probs, 0)
        found = probabilities(logits, top_k=top_k, top_p=top_p)
        np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-12)


def test_ties_at_the_edge_of_top_k_stay():
    assert (probabilities(np.array([1.0, 1.0, 1.0, 0.0]), top_k=2) > 0).tolist() == [True, True, True, False]


def test_extreme_logits_are_drawn_from_without_overflow():
    logits = np.array([1e4, -1e4, -np.inf, 1e4], np.float32)
    np.testing.assert_allclose(probabilities(logits, temperature=1e-3), [0.5, 0, 0, 0.5])
    rng = np.random.default_rng(0)
    assert {sample(logits, rng) for _ in range(50)} == {0, 3}
    with pytest.raises(ValueError, match="NaN"):
        probabilities(np.array([np.nan, 1.0]))
    with pytest.raises(ValueError, match="all -inf"):
        probabilities(np.array([-np.inf, -np.inf]))


def test_the_penalty_makes_seen_tokens_less_likely_on_both_sides_of_zero():
    logits = np.array([2.0, -2.0, 3.0])
    assert penalized(logits, {0, 1}, 2.0).tolist() == [1.0, -4.0, 3.0]
    assert logits.tolist() == [2.0, -2.0, 3.0]


def test_the_penalty_counts_no_padding():
    flat = Table(np.tile([5.0, 5, 0, 0, 0, 0, 0, 0], (VOCAB, 1)))
    ids = generate(flat, [[1, 0, 0]], 1, temperature=0, repetition_penalty=2.0, lengths=[1])
    assert ids[0, -1] == 0


def test_seeds_decide_the_draws():
    flat = Table(np.zeros((VOCAB, VOCAB)))
    one, same, other = (generate(flat, [[0], [0]], 20, seed=seed) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
    assert (one[0] != one[1]).any()
    assert (generate(flat, [[0]], 20, seed=1)[0] == one[0]).all()
    assert generate(flat, [[0]], 5).shape == (1, 6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"lengths": [0]}, "at least one token"),
        ({"lengths": [4]}, "from 0 to 2"),
        ({"lengths": [1, 1]}, "lengths"),
        ({"seed": "a"}, "seed"),
        ({"padding": "both"}, 'padding must be "right" or "left"'),
    ],
)
def test_options_out_of_range_are_refused_before_anything_runs(options, reason):
    with pytest.raises(ValueError, match=reason):
        stream(counting(), [[1, 2]], 3, **options)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(counting(), [[1]], -1)
    with pytest.raises(ValueError, match="batch, length"):
        generate(counting(), [1], 1)
    with pytest.raises(TypeError, match="integers"):
        generate(counting(), [[1.0]], 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": "a"}, "temperature must be one number"),
        ({"temperature": np.ones(2)}, r"temperature.*\(2,\)"),
        ({"top_k": 1.5}, "top_k.*int"),
        ({"top_p": "0.9"}, "top_p"),
        ({"min_p": "x"}, "min_p"),
        ({"repetition_penalty": None}, "repetition_penalty"),
        ({"stop": 1.5}, "stop must be a token or several.*1.5"),
        ({"stop": "."}, "stop must be a token or several"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an int"),
    ],
)
def test_options_of_another_kind_are_type_errors_that_name_them(options, reason):
    with pytest.raises(TypeError, match=reason):
        stream(counting(), [[1, 2]], **({"max_new_tokens": 3} | options))

"""Rollout: against the recursion written down, and on layers whose answer is known."""

import numpy as np
import pytest

from npattn.analysis import rollout


def random_layers(layers, *shape):
    rng = np.random.default_rng(11)
    return [rng.dirichlet(np.ones(shape[-1]), size=shape[:-1]) for _ in range(layers)]


def test_rollout_equals_the_recursion_of_the_paper():
    layers = random_layers(3, 2, 4, 6, 6)
    got = rollout(layers)
    for b in range(2):
        joint = np.eye(6)
        for layer in layers:
            joint = (0.5 * layer[b].mean(axis=0) + 0.5 * np.eye(6)) @ joint
        np.testing.assert_allclose(got[b], joint, rtol=1e-12)


def test_rows_add_up_to_one_also_for_max_and_min_fusion():
    layers = random_layers(4, 3, 5, 5)
    for heads in ("mean", "max", "min", [1.0, 0.0, 3.0]):
        np.testing.assert_allclose(rollout(layers, heads=heads).sum(axis=-1), 1.0, rtol=1e-12)


def test_chosen_rows_equal_those_rows_of_the_whole():
    layers = random_layers(3, 2, 4, 7, 7)
    np.testing.assert_allclose(rollout(layers, rows=[6, 0, 6]), rollout(layers)[..., [6, 0, 6], :])


def test_identity_attention_rolls_out_to_identity():
    np.testing.assert_array_equal(rollout([np.eye(4)] * 5), np.eye(4))


def test_without_residual_rollout_is_the_product_of_the_layers():
    first, second = random_layers(2, 6, 6)
    np.testing.assert_allclose(rollout([first, second], residual=0.0), second @ first)


def test_causal_layers_never_attribute_to_the_future():
    layers = [np.tril(layer) for layer in random_layers(3, 2, 6, 6)]
    assert (rollout(layers)[np.triu_indices(6, 1)] == 0).all()


def test_weighted_heads_pick_out_one_head():
    (layer,) = random_layers(1, 3, 5, 5)
    np.testing.assert_allclose(rollout([layer], heads=[0, 2.0, 0]), rollout([layer[1]]))


def test_query_that_sees_nothing_keeps_itself():
    np.testing.assert_array_equal(rollout([np.zeros((1, 3, 3))], residual=0.0), np.eye(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one layer"),
        (([np.eye(3), np.eye(4)],), "layer 1 has"),
        (([np.ones((3, 4))],), "self-attention over one sequence"),
        (([np.eye(3)], 1.0), "residual must be in"),
    ],
)
def test_errors_say_what_came(arguments, message):
    with pytest.raises(ValueError, match=message):
        rollout(arguments[0], **({"residual": arguments[1]} if len(arguments) > 1 else {}))


def test_unknown_fusion_is_an_error():
    with pytest.raises(ValueError, match="mean"):
        rollout([np.ones((1, 2, 2))], heads="median")
    with pytest.raises(ValueError, match="one per head"):
        rollout([np.ones((1, 2, 2))], heads=[1.0, 2.0])

"""The checkers are checked: a planted fault of 0.05 % must be found, whatever argument it is in."""

import numpy as np
import pytest

import npattn
from npattn.testing import Case, assert_within_budget, case, cases, check_vjp

NAMES = ("query", "key", "value", "bias", "sinks")


def attention_with(change):
    """attention_vjp whose gradients pass through ``change``."""
    options = {"mask": npattn.masks.Causal(), "softcap": 2.0, "return_lse": True, "backend": "oracle"}

    def f_vjp(query, key, value, bias, sinks):
        result, pullback = npattn.attention_vjp(query, key, value, bias=bias, sinks=sinks, **options)
        return result, lambda dout, dlse: change(pullback(dout, dlse), dout)

    return f_vjp


def arguments():
    rng = np.random.default_rng(1)
    shapes = [(1, 4, 11, 5), (1, 2, 13, 5), (1, 2, 13, 3), (4, 11, 13), (4,)]
    return [rng.standard_normal(shape) for shape in shapes]


def test_right_gradients_pass():
    for seed in range(20):
        check_vjp(attention_with(lambda grads, dout: grads), arguments(), names=NAMES, seed=seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_of_five_in_ten_thousand_is_found(name, seed):
    def change(grads, dout):
        return grads._replace(**{name: getattr(grads, name) * 1.0005})

    with pytest.raises(AssertionError, match=f"{name}: <cotangent, difference>"):
        check_vjp(attention_with(change), arguments(), names=NAMES, seed=seed)


def test_a_fault_in_one_of_four_heads_is_found():
    def change(grads, dout):
        bias = grads.bias.copy()
        bias[2] *= 1.001
        return grads._replace(bias=bias)

    with pytest.raises(AssertionError, match="bias"):
        check_vjp(attention_with(change), arguments(), names=NAMES)


def test_zero_gradients_are_found():
    """They would pass for the cotangent of a sum: the weights of a row always sum to 1."""
    with pytest.raises(AssertionError, match="query"):
        check_vjp(
            attention_with(lambda grads, dout: grads._replace(query=0 * grads.query)),
            arguments(),
            names=NAMES,
        )


def test_an_impure_pullback_is_found():
    calls = []

    def change(grads, dout):
        calls.append(1)
        return grads._replace(value=grads.value * (1 + 1e-9 * len(calls)))

    with pytest.raises(AssertionError, match="value: a second call"):
        check_vjp(attention_with(change), arguments(), names=NAMES)


def test_a_pullback_that_is_not_linear_is_found():
    with pytest.raises(AssertionError, match="not linear"):
        check_vjp(
            attention_with(lambda grads, dout: grads._replace(key=grads.key * np.abs(dout).max())),
            arguments(),
            names=NAMES,
        )


def test_a_pullback_that_writes_is_found():
    def change(grads, dout):
        dout *= 1.0 + 1e-12
        return grads

    with pytest.raises(AssertionError, match="cotangent 0 was written to"):
        check_vjp(attention_with(change), arguments(), names=NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grads: grads._replace(query=None), "gradient is None"),
        (lambda grads: grads._replace(query=grads.query[0]), "shape"),
        (lambda grads: grads._replace(query=grads.query.astype(np.float32)), "float32"),
        (lambda grads: grads[:4], "5 arguments, but 4 gradients"),
    ],
)
def test_gradients_of_another_form_are_found(change, message):
    with pytest.raises(AssertionError, match=message):
        check_vjp(attention_with(lambda grads, dout: change(grads)), arguments(), names=NAMES)


def test_a_gradient_for_none_is_found():
    def f_vjp(x, y):
        return x * 2, lambda dx: (dx * 2, dx)

    with pytest.raises(AssertionError, match="argument 1 is None"):
        check_vjp(f_vjp, [np.ones(3), None])


def test_float32_cannot_be_checked():
    with pytest.raises(AssertionError, match="float64"):
        check_vjp(lambda x: (x, lambda dx: dx), [np.ones(3, np.float32)])


def test_gradients_that_are_exactly_zero_pass():
    check_vjp(lambda x: (np.sign(x), lambda dy: 0 * dy), [np.array([1.0, -2.0])])


# the comparison by budget


def test_twice_the_plain_error_passes_and_three_times_does_not():
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(1000)
    noise = rng.standard_normal(1000)
    plain = (exact + 1e-5 * noise).astype(np.float32)
    assert_within_budget((exact + 1.9e-5 * noise).astype(np.float32), exact, plain)
    with pytest.raises(AssertionError, match="maximum error"):
        assert_within_budget((exact + 3e-5 * noise).astype(np.float32), exact, plain)


def test_many_small_errors_are_found_as_one_large_is():
    exact = np.ones(10_000)
    plain = exact.astype(np.float32)
    plain[0] += 1e-3
    with pytest.raises(AssertionError, match="root mean square"):
        assert_within_budget(exact.astype(np.float32) + np.float32(1e-3), exact, plain)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_single_wrong_nan_or_inf_is_found(wrong):
    exact = np.ones(9)
    actual = exact.copy()
    actual[3] = wrong
    with np.errstate(invalid="ignore"), pytest.raises(AssertionError):
        assert_within_budget(actual, exact, exact)
    exact[3] = -np.inf
    if wrong != -np.inf:
        with pytest.raises(AssertionError, match="inf or NaN elsewhere"):
            assert_within_budget(actual, exact, exact)


def test_another_shape_or_dtype_is_found():
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(np.ones((2, 1)), np.ones(2), np.ones(2))
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_budget(np.ones(2), np.ones(2), np.ones(2, np.float32))


# the table


def test_cases_are_the_same_every_time():
    for entry in cases("shapes", "masks", "features"):
        first, second = entry.arguments(), entry.arguments()
        assert first.keys() == second.keys()
        for name, x in first.items():
            np.testing.assert_array_equal(x, second[name])


def test_cases_differ_by_seed_and_round_the_same_numbers():
    plain = case("plain")
    assert not np.array_equal(plain.arguments(seed=1)["query"], plain.arguments(seed=2)["query"])
    half, double = plain.arguments(np.float16)["key"], plain.arguments(np.float64)["key"]
    np.testing.assert_array_equal(half, double.astype(np.float16))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="plain"):
        case("no such case")
    with pytest.raises(ValueError, match="shapes"):
        cases("no such group")


def test_flops_count_visible_pairs():
    full = Case("full", "shapes", 1, 2, 64, 64, 8)
    causal = Case("causal", "shapes", 1, 2, 64, 64, 8, mask=npattn.masks.Causal())
    assert full.flops == 4 * 2 * 64 * 64 * 8
    assert causal.flops == 4 * 2 * (64 * 65 / 2) * 8

"""Every case of the table by every implementation against the oracle in float64."""

import numpy as np
import pytest

import npattn
from npattn.testing import assert_within_budget, cases

CORRECTNESS = cases("shapes", "masks", "features")
NAMES = ("out", "lse", "dquery", "dkey", "dvalue", "dbias", "dsinks")
ARRAYS = ("query", "key", "value", "bias", "sinks")


def both_passes(attention_vjp, arguments, dtype, cotangents=None):
    """(out, lse, the five gradients) and the cotangents they were made with."""
    (out, lse), pullback = attention_vjp(**arguments, return_lse=True)
    if cotangents is None:
        rng = np.random.default_rng(1)
        cotangents = (
            rng.standard_normal(out.shape).astype(dtype),
            rng.standard_normal(lse.shape).astype(lse.dtype),
        )
    return (out, lse, *pullback(*cotangents)), cotangents


def oracle(**options):
    return npattn.attention_vjp(**options, backend="oracle")


def cancelling(case, arguments, cotangents):
    """A rounding of dp − delta, which is 0 where one key has all the weight, times a key or query."""
    dp = np.abs(cotangents[0]).max() * np.abs(arguments["value"]).max() * arguments["value"].shape[-1] ** 0.5
    rows = max(np.abs(arguments["query"]).max(), np.abs(arguments["key"]).max())
    return float(np.finfo(np.float32).eps * dp * rows / case.head_dim**0.5)


def in_float64(arguments):
    return {name: x.astype(np.float64) if name in ARRAYS else x for name, x in arguments.items()}


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_float64_agrees_with_the_oracle(attend, case):
    arguments = case.arguments(np.float64)
    actual, cotangents = both_passes(attend.attention_vjp, arguments, np.float64)
    exact, _ = both_passes(oracle, arguments, np.float64, cotangents)
    for name, x, y in zip(NAMES, actual, exact, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == np.float64
            finite = np.isfinite(y)
            np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=name)
            error = np.abs(x[finite] - y[finite]).max(initial=0)
            assert error <= 64 * np.finfo(np.float64).eps * max(1, np.abs(y[finite]).max(initial=0)), name


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_float32_is_as_accurate_as_a_plain_computation(attend, case):
    arguments = case.arguments(np.float32)
    actual, cotangents = both_passes(attend.attention_vjp, arguments, np.float32)
    plain, _ = both_passes(oracle, arguments, np.float32, cotangents)
    exact_cotangents = tuple(c.astype(np.float64) for c in cotangents)
    exact, _ = both_passes(oracle, in_float64(arguments), np.float64, exact_cotangents)
    for name, *triple in zip(NAMES, actual, exact, plain, strict=True):
        if triple[1] is not None:
            floor = cancelling(case, arguments, cotangents) if name in ("dquery", "dkey") else 0.0
            assert_within_budget(*triple, name=name, floor=floor)


HALF_CASES = [
    entry for entry in CORRECTNESS if entry.name in ("plain", "gqa", "causal", "all at once, causal")
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", HALF_CASES, ids=lambda case: case.name)
def test_half_precision_is_as_accurate_as_rounding_allows(attend, case, dtype):
    """Beside a plain computation the budget has room for dout · out, whose out is rounded to 16 bits."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    arguments = case.arguments(dtype)
    actual, cotangents = both_passes(attend.attention_vjp, arguments, dtype)
    plain, _ = both_passes(oracle, arguments, dtype, cotangents)
    exact_cotangents = tuple(c.astype(np.float64) for c in cotangents)
    exact, _ = both_passes(oracle, in_float64(arguments), np.float64, exact_cotangents)
    for name, *triple in zip(NAMES, actual, exact, plain, strict=True):
        if triple[1] is not None and triple[1].size > 1:
            assert triple[0].dtype == (
                dtype if name in ("out", "dquery", "dkey", "dvalue", "dbias", "dsinks") else np.float32
            )
            assert_within_budget(*triple, factor=4.0, name=name)

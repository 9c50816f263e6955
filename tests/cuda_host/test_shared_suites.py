"""The suites that every implementation of attention passes, by the CUDA kernels on the CPU model.

The tests are those of tests/functional; here the ``attend`` fixture is the one of this folder. A quick choice
runs by default (each specialisation is a compilation of about a second); ``pytest -m slow`` runs all of it.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

import test_attention_cases as by_case
from test_attention_dropout import *  # noqa: F403
from test_attention_masked import *  # noqa: F403
from test_attention_numerics import *  # noqa: F403

from npattn.testing import assert_within_budget

QUICK = {
    "float64": ("plain", "gqa, causal", "all at once", "documents", "bool, all axes"),
    "float32": (
        "one beyond a tile",
        "one query",
        "window",
        "all at once, causal",
        "bias, queries of each head",
    ),
    "float16": ("exact tiles", "mqa", "causal, some rows empty", "all at once"),
    "bfloat16": ("one short of a tile", "all at once, causal"),
}
#: float32 is multiplied as three tf32 products, 22 of its 24 bits: four times a plain rounding.
#: 16-bit results are rounded in other places than the plain computation's, as on the CPU.
FACTOR = {"float32": 5.0, "float16": 4.0, "bfloat16": 4.0}


def choices(*dtypes, quick=QUICK):
    """Cases in dtypes; ``quick`` names, by dtype, those that run by default."""
    return [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}, {dtype}",
            marks=[] if case.name in quick.get(dtype, ()) else pytest.mark.slow,
        )
        for dtype in dtypes
        for case in by_case.CORRECTNESS
    ]


@pytest.mark.parametrize(("case", "dtype"), choices("float64"))
def test_float64_agrees_with_the_oracle(attend, case, dtype):
    by_case.test_float64_agrees_with_the_oracle(attend, case)


@pytest.mark.parametrize(("case", "dtype"), choices("float32", "float16", "bfloat16"))
def test_results_are_as_accurate_as_the_products_allow(attend, case, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arguments = case.arguments(dtype)
    actual, cotangents = by_case.both_passes(attend.attention_vjp, arguments, dtype)
    plain, _ = by_case.both_passes(by_case.oracle, arguments, dtype, cotangents)
    exact_cotangents = tuple(c.astype(np.float64) for c in cotangents)
    exact, _ = by_case.both_passes(
        by_case.oracle, by_case.in_float64(arguments), np.float64, exact_cotangents
    )
    scale = case.options.get("scale", case.head_dim**-0.5)
    for name, *triple in zip(by_case.NAMES, actual, exact, plain, strict=True):
        if triple[1] is None:
            continue
        floor = 0.0
        if name in ("dquery", "dkey", "dbias", "dsinks"):  # dp - delta cancels; delta is of the rounded out
            floor = rounding_of_delta(arguments, cotangents, dtype) * (abs(scale) if name[1] in "qk" else 1.0)
        assert_within_budget(*triple, name=name, factor=FACTOR[dtype.name], floor=floor)


def rounding_of_delta(arguments, cotangents, dtype):
    """A rounding of dout · out, as it may stand in a gradient whose true value is 0."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    dp = np.abs(cotangents[0].astype(float)).max() * np.abs(arguments["value"].astype(float)).max()
    rows = max(np.abs(arguments[name].astype(float)).max() for name in ("query", "key"))
    return eps * dp * rows * arguments["value"].shape[-1] ** 0.5

"""A plan is its mask: both walking directions, any sizes, and never a matrix for interval masks."""

import time
import tracemalloc

import numpy as np
import pytest

from npattn.masks import Causal, Dense, Documents, Extent, Full, Window
from npattn.plans.build import build_tile_plan, tile_plan
from npattn.plans.tiles import check_tile_plan, plan_to_dense


@pytest.mark.parametrize(
    "mask", [None, Full(), Causal(), Causal(0), Window(5, 3), Documents([20, 0, 31, 50])]
)
def test_plan_equals_mask(mask):
    extent = Extent(2, 3, 101, 101)
    plan = tile_plan(mask, extent, 16, 32)
    check_tile_plan(plan)
    expected = (Full() if mask is None else mask).to_dense(101, 101, 2, 3)
    np.testing.assert_array_equal(plan_to_dense(plan, 2, 3), expected)


def test_interval_plan_of_a_million_queries_is_small_and_quick():
    tracemalloc.start()
    start = time.perf_counter()
    plan = build_tile_plan(Window(256), Extent(1, 1, 1_000_000, 1_000_000), 48, 64)
    took = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.row_first) < 3 * (1_000_000 // 48 + 1)
    assert peak < 300e6
    assert took < 10  # seconds; measured 0.1


def test_random_bits_are_kept_exactly():
    rng = np.random.default_rng(3)
    array = rng.random((2, 1, 70, 131)) < 0.4
    plan = build_tile_plan(Dense(array), Extent(2, 4, 70, 131), 16, 32)
    check_tile_plan(plan)
    np.testing.assert_array_equal(plan_to_dense(plan, 2, 4), np.broadcast_to(array, (2, 4, 70, 131)))

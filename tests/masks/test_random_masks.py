"""Every mask and random compositions: to_dense is the definition, the plan is the mask."""

import numpy as np
import pytest
from random_masks import KINDS, by_definition, composition, one_mask

from npattn.masks import Extent
from npattn.plans.build import build_tile_plan
from npattn.plans.tiles import check_tile_plan, plan_to_dense

EXTENTS = [Extent(2, 3, 37, 53), Extent(1, 2, 70, 33), Extent(2, 1, 1, 67), Extent(3, 2, 19, 1)]
TILES = [(16, 32), (5, 64), (48, 32)]


def assert_is(mask, dense, extent, tile):
    batch, heads, len_q, len_k = extent
    np.testing.assert_array_equal(mask.to_dense(len_q, len_k, batch, heads), dense)
    plan = build_tile_plan(mask, extent, *tile)
    check_tile_plan(plan)
    np.testing.assert_array_equal(plan_to_dense(plan, batch, heads), dense)
    assert mask.density(len_q, len_k, batch, heads) == pytest.approx(
        dense.mean() if dense.size else 0, abs=1e-12
    )
    intervals = mask.intervals(extent)
    if intervals is not None and dense.size:
        lo, hi = (np.broadcast_to(end, extent[:3])[..., None] for end in intervals)
        np.testing.assert_array_equal((np.arange(len_k) >= lo) & (np.arange(len_k) < hi), dense)
        assert np.all((lo < hi) | (hi == 0)), "a row that sees nothing is [0, 0)"


@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_its_definition_and_plan_is_the_mask(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for n, extent in enumerate(EXTENTS):
        mask, visible = one_mask(kind, extent, rng)
        assert_is(mask, by_definition(visible, extent), extent, TILES[n % 3])


@pytest.mark.parametrize("seed", range(300))
def test_composition_is_its_definition_and_plan_is_the_mask(seed):
    rng = np.random.default_rng(1000 + seed)
    extent = Extent(*(int(rng.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 45), (1, 70))))
    mask, dense = composition(extent, rng)
    assert_is(mask, dense, extent, TILES[seed % 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "extent", [Extent(0, 2, 5, 7), Extent(2, 0, 5, 7), Extent(2, 2, 0, 7), Extent(2, 2, 5, 0)]
)
def test_empty_axes_give_empty_plans(kind, extent):
    mask, _ = one_mask(kind, extent, np.random.default_rng(0))
    plan = build_tile_plan(mask, extent, 16, 32)
    check_tile_plan(plan)
    assert mask.to_dense(extent.len_q, extent.len_k, extent.batch, extent.heads).shape == extent
    assert mask.density(extent.len_q, extent.len_k, extent.batch, extent.heads) == 0
    if extent.len_q == 0 or extent.len_k == 0:
        assert len(plan.row_first) == len(plan.col_first) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_mask_read_in_slices_equals_the_mask_read_whole(kind):
    extent = Extent(2, 2, 41, 59)
    mask, _ = one_mask(kind, extent, np.random.default_rng(7))
    dense = mask.to_dense(41, 59, 2, 2)
    b, h, i, j = (index.astype(np.int64) for index in np.ogrid[1:2, :2, 13:30, 20:59])
    part = np.broadcast_to(mask.allowed(extent, b, h, i, j), (1, 2, 17, 39))
    np.testing.assert_array_equal(part, dense[1:2, :2, 13:30, 20:59])

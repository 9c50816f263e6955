"""Plans of many small tiles, against to_dense: what few tiles would not show.

Equal signatures must mean equal tiles, spans must end where they should, whole tiles must be FULL.
"""

import numpy as np
import pytest
from random_masks import KINDS, composition, one_mask

from npattn.masks import Causal, Dense, Dilated, Documents, Extent, GlobalTokens, Prefix, Sparse, Window
from npattn.plans.build import build_tile_plan
from npattn.plans.tiles import FULL, check_tile_plan, plan_to_dense

TILES = [(4, 32), (16, 32), (7, 64)]


def assert_plan_is_the_mask(mask, extent, tile):
    batch, heads, len_q, len_k = extent
    dense = mask.to_dense(len_q, len_k, batch, heads)
    plan = build_tile_plan(mask, extent, *tile)
    check_tile_plan(plan)
    np.testing.assert_array_equal(plan_to_dense(plan, batch, heads), dense, err_msg=repr(mask))

    # neighbouring tiles of one kind are one span
    row = np.repeat(np.arange(plan.row_ptr[:, :-1].size), np.diff(plan.row_ptr, axis=1).reshape(-1))
    joined = (row[1:] == row[:-1]) & (plan.row_first[1:] == plan.row_stop[:-1])
    joined &= (plan.row_kind[1:] == plan.row_kind[:-1]) & (plan.row_bits[1:] == plan.row_bits[:-1])
    assert not joined.any()

    # every tile that is whole is FULL, every tile that is empty is absent
    rows, cols = (-(-length // side) for length, side in zip((len_q, len_k), tile, strict=True))
    for b in range(batch):
        for h in range(heads):
            n = plan.list_of[b % plan.list_of.shape[0], h % plan.list_of.shape[1]]
            kinds = np.full((rows, cols), -1)
            for r in range(rows):
                for s in range(plan.row_ptr[n, r], plan.row_ptr[n, r + 1]):
                    kinds[r, plan.row_first[s] : plan.row_stop[s]] = plan.row_kind[s]
            padded = np.full((rows * tile[0], cols * tile[1]), -1)
            padded[:len_q, :len_k] = dense[b, h]
            tiles = padded.reshape(rows, tile[0], cols, tile[1])
            np.testing.assert_array_equal(kinds == FULL, (tiles != 0).all(axis=(1, 3)), err_msg=repr(mask))
            np.testing.assert_array_equal(kinds == -1, (tiles != 1).all(axis=(1, 3)), err_msg=repr(mask))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_every_mask(kind, seed):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    extent = Extent(2, 2, *(int(length) for length in rng.integers(100, 260, 2)))
    mask, _ = one_mask(kind, extent, rng)
    assert_plan_is_the_mask(mask, extent, TILES[seed % 3])


@pytest.mark.parametrize("seed", range(150))
def test_compositions(seed):
    rng = np.random.default_rng(5000 + seed)
    extent = Extent(2, 1, *(int(length) for length in rng.integers(60, 200, 2)))
    mask, _ = composition(extent, rng, 2, define=False)
    assert_plan_is_the_mask(mask, extent, TILES[seed % 3])


@pytest.mark.parametrize("dilation", [1, 2, 3, 8, 16, 33])
@pytest.mark.parametrize("radius", [1, 4, 9])
def test_dilated_windows_that_differ_between_batch_elements(radius, dilation):
    extent = Extent(3, 1, 150, 210)
    assert_plan_is_the_mask(Dilated(radius, dilation, offset=[0, 1, 37]), extent, (4, 32))
    assert_plan_is_the_mask(
        Dilated(radius, dilation, offset=[5, 60, -9]) | GlobalTokens([140]), extent, (16, 32)
    )


@pytest.mark.parametrize("gap", range(4))
def test_two_intervals_join_only_when_they_touch(gap):
    """[0, 10) and [10 + gap, 20 + gap) of every row."""
    extent = Extent(1, 1, 9, 40)
    mask = Prefix(10) | (Prefix(20 + gap) & ~Prefix(10 + gap))
    assert (mask.intervals(extent) is None) == (gap > 0)
    assert_plan_is_the_mask(mask, extent, (4, 32))


@pytest.mark.parametrize("between", [31, 32, 33, 63, 64, 65, 96])
def test_keys_that_no_query_of_the_row_sees_leave_tiles_out(between):
    """A document with keys but no query lies between two others; its tiles must be in no span."""
    for first in (31, 32, 33):
        extent = Extent(1, 1, 8, first + between + 40)
        mask = Documents([4, 0, 4], [first, between, 40])
        assert_plan_is_the_mask(mask, extent, (8, 32))
    swapped = Dense(np.repeat([[False] * 70 + [True] * 40, [True] * 30 + [False] * 80], 4, axis=0))
    assert_plan_is_the_mask(swapped, Extent(1, 1, 8, 110), (8, 32))


@pytest.mark.parametrize("tokens", [[0], [3, 40], [40, 45, 100], list(range(32, 64)), list(range(64))])
def test_global_tokens_in_rows_columns_and_both(tokens):
    extent = Extent(1, 1, 130, 150)
    for mask in (GlobalTokens(tokens), GlobalTokens(tokens) | Window(9, 9), GlobalTokens(tokens) & Causal()):
        for tile in TILES:
            assert_plan_is_the_mask(mask, extent, tile)


def test_arrays_whose_rows_are_intervals_are_recognised():
    array = np.tri(20, 30, 3, dtype=bool)
    array[5] = False
    array[6] = True
    extent = Extent(1, 1, 20, 30)
    for mask in (Dense(array), Dense(array[6:7]), Dense(array[:, 3:4])):
        assert mask.intervals(extent) is not None
        assert_plan_is_the_mask(mask, extent, (4, 32))
    array[7, 3] = False
    assert Dense(array).intervals(extent) is None
    from types import SimpleNamespace

    rows = SimpleNamespace(indptr=[0, 2, 2, 3], indices=[1, 2, 0], shape=(3, 4))
    assert Sparse(rows).intervals(Extent(1, 1, 3, 4)) is not None

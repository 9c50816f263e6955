"""What is particular to the tiled NumPy implementation: tiles of any size give the same result."""

import numpy as np
import pytest

import npattn
from npattn import masks
from npattn.kernels.tile import numpy_tiled
from npattn.testing import case

NAMES = [
    "plain",
    "causal, long",
    "holes",
    "bool, long",
    "documents",
    "all at once, causal",
    "gqa, mask of each head",
]


def run(name):
    (out, lse), pullback = npattn.attention_vjp(**case(name).arguments(), return_lse=True, backend="numpy")
    rng = np.random.default_rng(0)
    return out, lse, *pullback(rng.standard_normal(out.shape), rng.standard_normal(lse.shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", [(1, 32), (7, 64), (64, 32), (48, 64), (1000, 1024)], ids=str)
def test_the_size_of_tiles_does_not_show(monkeypatch, name, tile):
    expected = run(name)
    monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: tile)
    for x, y in zip(run(name), expected, strict=True):
        if x is not None:
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_tiles_stay_small_however_large_the_call():
    """A tile over all heads has some 2**20 weights for usual numbers of heads."""
    for batch, heads in [(1, 1), (1, 8), (8, 12), (64, 16)]:
        x = np.empty((batch, heads, 4096, 8), np.float32)
        problem = npattn.functional._canonical.canonical(x, x, x, None, None, None, None, None).problem
        rows, cols = numpy_tiled.tile_shape(problem)
        assert batch * heads * rows * cols <= 2**24


def test_only_the_tiles_of_the_plan_are_visited(monkeypatch):
    """A window costs O(length): tiles outside it are never computed."""
    visited = []
    logits = numpy_tiled._Call.logits

    def counting(self, q_tile, tile):
        visited.append(tile)
        return logits(self, q_tile, tile)

    monkeypatch.setattr(numpy_tiled._Call, "logits", counting)
    monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: (32, 32))
    x = np.zeros((1, 1, 1024, 4))
    out, pullback = npattn.attention_vjp(x, x, x, mask=masks.Window(31), backend="numpy")
    assert len(visited) == 63  # each of 32 rows of tiles sees two, the first one
    pullback(out)
    assert len(visited) == 126

"""Attention under all masks and 300 compositions, forward and backward: every backend is the oracle."""

import numpy as np
import pytest
from random_masks import KINDS, composition, one_mask

from npattn import attention_vjp
from npattn.kernels.select import TILE, load
from npattn.kernels.tile import numpy_tiled
from npattn.masks import Extent

NUMBA, WHY_NOT = load(TILE["numba"])


def backends(monkeypatch):
    """Numba, and NumPy with tiles small enough to need several."""
    monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: (16, 32))
    return ["numpy"] if NUMBA is None else ["numpy", "numba"]


def assert_is_the_oracle(mask, extent, rng, names):
    batch, heads, len_q, len_k = extent
    heads_kv = heads if rng.integers(2) else 1
    q = rng.normal(size=(batch, heads, len_q, 8))
    k, v = rng.normal(size=(2, batch, heads_kv, len_k, 8))
    dout, dlse = rng.normal(size=q.shape), rng.normal(size=q.shape[:-1])
    (out, lse), pullback = attention_vjp(q, k, v, mask=mask, return_lse=True, backend="oracle")
    grads = pullback(dout, dlse)
    for name in names:
        (other, other_lse), other_pullback = attention_vjp(q, k, v, mask=mask, return_lse=True, backend=name)
        np.testing.assert_allclose(other, out, rtol=1e-9, atol=1e-11, err_msg=f"{name} {mask}")
        np.testing.assert_allclose(other_lse, lse, rtol=1e-9, atol=1e-11, err_msg=f"{name} {mask}")
        for a, b in zip(other_pullback(dout, dlse)[:3], grads[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10, err_msg=f"{name} {mask}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_mask(kind, monkeypatch):
    rng = np.random.default_rng(KINDS.index(kind))
    names = backends(monkeypatch)
    for extent in (
        Extent(2, 4, 101, 77),
        Extent(1, 2, 150, 203),
    ):  # several tiles each way, the last ones cut
        mask, _ = one_mask(kind, extent, rng)
        assert_is_the_oracle(mask, extent, rng, names)


@pytest.mark.parametrize("seed", range(300))
def test_compositions(seed, monkeypatch):
    rng = np.random.default_rng(1000 + seed)
    extent = Extent(*(int(rng.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 120), (1, 140))))
    mask, _ = composition(extent, rng, define=False)
    assert_is_the_oracle(mask, extent, rng, backends(monkeypatch))

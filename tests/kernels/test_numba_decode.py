"""The decode kernel: few queries, keys read where they lie, in any storage and from any page."""

import os

import numpy as np
import pytest

from npattn import attention, attention_vjp
from npattn.kernels.select import TILE, load
from npattn.masks import Causal, Documents, Padding, Window
from npattn.plans.build import tile_plan

numba_cpu, _ = load(TILE["numba"])
pytestmark = pytest.mark.skipif(
    numba_cpu is None or bool(os.environ.get("NUMBA_DISABLE_JIT")), reason="Numba's kernels do not run here"
)


def storages():
    yield pytest.param(np.float16, id="float16")
    try:
        import ml_dtypes
    except ImportError:
        return
    yield pytest.param(ml_dtypes.bfloat16, id="bfloat16")


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", ["auto", "numpy", "oracle"])
@pytest.mark.parametrize("len_q", [1, 4, 60])
@pytest.mark.parametrize("storage", list(storages()))
def test_keys_stored_in_16_bits_give_what_their_widened_copies_give(storage, len_q, backend):
    rng = np.random.default_rng(0)
    q = rows(rng, 2, 6, len_q, 20)
    k, v = rows(rng, 2, 2, 150, 20).astype(storage), rows(rng, 2, 2, 150, 7).astype(storage)
    options = {"mask": Causal(), "sinks": rows(rng, 6), "return_lse": True}
    out, lse = attention(q, k, v, **options, backend=backend)
    wide, wide_lse = attention(q, k.astype(np.float32), v.astype(np.float32), **options, backend="oracle")
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, wide, atol=2e-6)
    np.testing.assert_allclose(lse, wide_lse, atol=3e-6)
    grads = attention_vjp(q, k, v, mask=Causal(), backend=backend)[1](wide)
    assert grads.key.dtype == storage
    assert grads.query.dtype == np.float32
    for p in (1.0, 0.5):
        dropped = attention(q, k, v, dropout_p=p, seed=3, backend=backend)
        same = attention(q, k.astype(np.float32), v.astype(np.float32), dropout_p=p, seed=3, backend="oracle")
        np.testing.assert_allclose(dropped, same, atol=2e-6)


@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 100])
def test_groups_of_any_size_agree_with_the_oracle(group, dim):
    """Around the number of rows up to which keys are read as they lie, and dims that are no whole vectors."""
    rng = np.random.default_rng(1)
    q, k, v = rows(rng, 2, 3 * group, 1, dim), rows(rng, 2, 3, 77, dim), rows(rng, 2, 3, 77, dim + 3)
    for mask in (None, Padding([0, 70]), Window(20, 0), Documents([1], [77])):
        whole = attention(q, k, v, mask=mask, backend="oracle", return_lse=True)
        for found, expected in zip(
            attention(q, k, v, mask=mask, backend="numba", return_lse=True), whole, strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=3e-6)


def test_long_keys_are_cut_into_splits_and_joined_exactly():
    rng = np.random.default_rng(2)
    q, k, v = rows(rng, 1, 2, 1, 16), rows(rng, 1, 1, 5000, 16), rows(rng, 1, 1, 5000, 19)
    k[:, :, 4000] = np.nan  # behind the mask
    v[:, :, 4000:] = np.inf
    mask = Padding([3990])
    expected = attention(q, k, v, mask=mask, backend="oracle", return_lse=True)
    for found, right in zip(
        attention(q, k, v, mask=mask, backend="numba", return_lse=True), expected, strict=True
    ):
        np.testing.assert_allclose(found, right, atol=3e-6)


def test_sums_that_overflow_before_they_are_normalised_come_out_finite():
    k = np.zeros((1, 1, 300, 16), np.float32)
    v = np.full((1, 1, 300, 16), 3e38, np.float32)
    v[..., 1::2] *= -1
    out = attention(np.zeros((1, 2, 1, 16), np.float32), k, v, backend="numba")
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, :1], out.shape), rtol=1e-5)


def test_views_of_any_strides_are_read_in_place():
    rng = np.random.default_rng(3)
    store = rows(rng, 2, 90, 3, 2, 24)  # batch, length, head, key or value, dim
    k, v = store[:, ::-1, :, 0].swapaxes(1, 2), store[:, :, :, 1, 4:].swapaxes(1, 2)
    q = rows(rng, 2, 1, 6, 24).swapaxes(1, 2)
    np.testing.assert_allclose(
        attention(q, k, v, backend="numba"), attention(q, k, v, backend="oracle"), atol=3e-6
    )


def test_calls_that_pages_cannot_serve_say_why():
    rng = np.random.default_rng(4)
    q, pages = rows(rng, 1, 4, 1, 8), rows(rng, 5, 2, 16, 8)
    table = np.array([[4, 0]], np.int32)
    problem, plan = call(1, 4, 1, 20)
    out = numba_cpu.paged_forward(problem, plan, q, pages, pages, table).out
    keys = np.concatenate([pages[4], pages[0, :, :4]], axis=1)[None]
    np.testing.assert_allclose(out, attention(q, keys, keys, backend="oracle"), atol=3e-6)
    with pytest.raises(ValueError, match="int32 and cover len_k=20 keys; got int64"):
        numba_cpu.paged_forward(problem, plan, q, pages, pages, table.astype(np.int64))
    with pytest.raises(ValueError, match="1 pages of 16"):
        numba_cpu.paged_forward(problem, plan, q, pages, pages, table[:, :1])
    many, plan = call(1, 4, 30, 20)
    with pytest.raises(ValueError, match=r"48 queries times heads.*len_q=30"):
        numba_cpu.paged_forward(many, plan, rows(rng, 1, 4, 30, 8), pages, pages, table)


def call(batch, heads_q, len_q, len_k):
    """A Problem of two key heads and head_dim 8, and its plan without a mask."""
    from npattn.kernels.contract import Problem
    from npattn.masks import Extent

    sizes = (batch, heads_q, 2, len_q, len_k, 8, 8)
    problem = Problem(np.dtype(np.float32), *sizes, 8**-0.5, 0.0, False, False, 0.0, 0)
    plan = tile_plan(None, Extent(batch, heads_q, len_q, len_k), *numba_cpu.tile_shape(problem))
    return problem, plan

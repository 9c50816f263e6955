"""Attention over keys and values in pages, where an implementation reads page tables."""

from typing import Any

import numpy as np

from npattn._arrays import array_module, is_cupy
from npattn._typing import Array
from npattn.functional._canonical import canonical, may_store
from npattn.functional.attention import _Call, _results
from npattn.kernels.select import TILE, select
from npattn.masks.base import Mask
from npattn.plans.build import tile_plan


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    len_k: int,
    *,
    mask: Mask | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """``attention``, its keys and values being rows of pages; None where no implementation reads pages.

    Parameters
    ----------
    query : (batch, heads_q, len_q, head_dim) array
    key_pages, value_pages : (num_pages, heads_kv, page_size, head_dim or head_dim_v) array
        Any strides but in the last axis.
    page_table : (batch, pages_per_sequence) int32 array
        Key j of a sequence is row ``j % page_size`` of page ``page_table[b, j // page_size]``.
    len_k : int
        Keys of the longest sequence; ``mask`` ends the others.
    mask, bias, scale, softcap, sinks, return_lse, backend
        As in ``attention``.

    Returns
    -------
    out, or (out, lse), or None
        None: many queries, a device or a dtype without such a kernel. Attend to slices of the pool instead
        and join these with ``merge_attention``.

    Notes
    -----
    Nothing is gathered: each page is read where it lies, by one launch for all sequences.
    """
    batch, heads_kv = query.shape[0], key_pages.shape[1]
    xp = array_module(query, key_pages, value_pages)

    def stand_in(pages: Array) -> Array:
        """An array of the shape the keys would have, for the checks; nobody reads it."""
        dim, item = pages.shape[3], pages.dtype.itemsize
        shape = (batch, heads_kv, len_k, dim)
        if xp is np:
            return np.ndarray(shape, pages.dtype, bytes(dim * item), 0, (0, 0, 0, item))
        return xp.broadcast_to(xp.empty((1, 1, 1, dim), pages.dtype), shape)  # type: ignore[no-any-return]

    keys, values = stand_in(key_pages), stand_in(value_pages)
    inputs = canonical(query, keys, values, mask, bias, scale, softcap, sinks, keeps_storage=True)
    problem = inputs.problem
    implementation = select(TILE, problem, is_cupy(query), backend)
    reads_pages = getattr(implementation, "reads_pages", None)
    if reads_pages is None or inputs.layout.is_empty or not may_store(key_pages.dtype, problem.dtype):
        return None
    plan = tile_plan(inputs.mask, inputs.layout.extent, *implementation.tile_shape(problem))
    if not reads_pages(problem, plan, key_pages.dtype):
        return None
    page_table = xp.asarray(page_table)
    result = implementation.paged_forward(
        problem, plan, inputs.q, key_pages, value_pages, page_table, inputs.bias, inputs.sinks
    )
    return _results(_Call(inputs, implementation, plan, False), result, return_lse)


__all__ = ["paged_attention"]

"""Heads side by side in the last axis, as in projections, and on an axis of their own, as in attention."""

from npattn._typing import Array
from npattn.kernels.pointwise import implementation


def split_heads(x: Array, heads: int) -> Array:
    """(..., length, heads · dim) -> (..., heads, length, dim), a view."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-3, -2)


def merge_heads(x: Array) -> Array:
    """(..., heads, length, dim) -> (..., length, heads · dim); a copy, unless ``split_heads`` made x."""
    heads, length, dim = x.shape[-3:]
    apart = x.swapaxes(-3, -2)
    if x.ndim != 4 or apart.flags.c_contiguous:
        return apart.reshape(*x.shape[:-3], length, heads * dim)
    merged: Array = implementation(x).merge_heads(x)
    return merged


__all__ = ["merge_heads", "split_heads"]

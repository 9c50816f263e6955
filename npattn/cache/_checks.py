"""What every cache checks before it changes anything."""

from typing import Any

import numpy as np

from npattn import _check
from npattn._arrays import is_attention_dtype, is_cupy
from npattn._typing import Array
from npattn.functional import merge_attention


class CacheFullError(ValueError):
    """More was appended than the cache holds. The cache is as it was before the call."""


def size(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int of at least ``least``."""
    return _check.integer(name, value, least)


def storage_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype attention computes in."""
    found: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if not is_attention_dtype(found):
        raise TypeError(f"a cache holds float64, float32, float16 or bfloat16, not {found}")
    return found


def new_rows(key: Any, value: Any, key_shape: tuple[Any, ...], value_shape: tuple[Any, ...]) -> int:
    """How many tokens ``key`` and ``value`` bring; None in a wanted shape stands for that number."""
    for name, array, wanted in (("key", key, key_shape), ("value", value, value_shape)):
        if not isinstance(array, np.ndarray) and not is_cupy(array):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        _check.float_dtype(name, np.dtype(array.dtype))
        if len(array.shape) != len(wanted) or any(
            have != want for have, want in zip(array.shape, wanted, strict=True) if want is not None
        ):
            text = ", ".join("new" if want is None else str(want) for want in wanted)
            raise ValueError(f"{name} must have the shape ({text}), got {tuple(array.shape)}")
    new = key.shape[-2]
    if value.shape[-2] != new:
        raise ValueError(f"key brings {new} tokens but value {value.shape[-2]}; they must be equal")
    return int(new)


def counts(name: str, values: Any, batch: int, most: int) -> Array:
    """``values`` as a new int64 array (batch,) with entries from 0 to ``most``; None means ``most``."""
    if values is None:
        return np.full(batch, most, np.int64)
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.shape != (batch,):
        raise ValueError(f"{name} must have the shape (batch,) = ({batch},), got {array.shape}")
    if batch and not 0 <= int(array.min()) <= int(array.max()) <= most:
        raise ValueError(f"{name} must be from 0 to {most}, got {array.tolist()}")
    return array.astype(np.int64)


def query_shape(query: Array, lead: int, axes: int, heads_kv: int, head_dim: int) -> int:
    """The number of query rows of ``query`` (batch or sequences, heads_q, len_q, head_dim)."""
    if not hasattr(query, "shape") or len(query.shape) != axes:
        shape = getattr(query, "shape", type(query).__name__)
        raise ValueError(f"query must have {axes} axes (batch, heads_q, len_q, head_dim), got {shape}")
    if query.shape[0] != lead:
        raise ValueError(f"query has {query.shape[0]} sequences (axis 0), the cache {lead}")
    if heads_kv == 0 or query.shape[1] % heads_kv:
        raise ValueError(f"heads_q = {query.shape[1]} must be a multiple of heads_kv = {heads_kv}")
    if query.shape[-1] != head_dim:
        raise ValueError(f"query has head_dim {query.shape[-1]}, the cached keys {head_dim}")
    return int(query.shape[-2])


def own_options(options: dict[str, Any], *, merged: bool) -> None:
    """Refuse what a cache decides itself; ``merged``: attention is joined from parts."""
    if "mask" in options:
        raise TypeError("a cache makes its own mask (causal, per sequence); mask= is not an option here")
    if merged and options.get("dropout_p"):
        raise ValueError("dropout is for training; this cache computes attention in parts and has none")


def joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(out, lse) over disjoint sets of keys, from the (out, lse) over each."""
    if len(parts) == 1:
        return parts[0]
    out, lse = merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    return out, lse

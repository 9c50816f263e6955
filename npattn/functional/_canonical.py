"""From what a caller may pass to what a kernel is given, and back.

A caller may pass any number of leading dimensions, 2-D arrays shared by all heads, mixed dtypes and any
strides; a kernel gets 4-D arrays of one dtype with a contiguous last axis. Nothing is copied unless a dtype
changes, the last axis is strided, or several leading dimensions broadcast partially.
"""

import math
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from npattn import _check
from npattn._arrays import (
    accumulation_dtype,
    array_module,
    contiguous_last_axis,
    is_attention_dtype,
    to_numpy,
)
from npattn._typing import Array
from npattn.kernels.contract import Problem
from npattn.masks.base import Extent, Mask
from npattn.masks.explicit import Dense


class Layout(NamedTuple):
    """The sizes of one call, agreed between query, key and value, and what follows from them."""

    lead: tuple[int, ...]  # leading dimensions of the result; batch is their product
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    rows_shape: tuple[int, ...]  # of lse: (*lead, heads_q, len_q), or (len_q,) when every array is 2-D
    out_shape: tuple[int, ...]  # (*rows_shape, head_dim_v)
    extent: Extent  # what masks and plans need to know
    is_empty: bool  # whether some axis is


class Inputs(NamedTuple):
    """One call as the kernels see it."""

    layout: Layout
    problem: Problem
    mask: Mask | None
    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None


@lru_cache(maxsize=1024)
def layout_of(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> Layout:
    """Agree on the sizes, or say which shapes differ along which axis.

    Parameters
    ----------
    query, key, value : tuple of int
        Shapes: (..., heads, length, dim), or (length, dim) for one head shared by all.

    Raises
    ------
    ValueError
        Fewer than two axes, lengths, head dimensions, numbers of heads or leading dimensions that differ.
    """
    shapes = {"query": query, "key": key, "value": value}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(f"{name} must be (..., heads, length, head_dim), got shape {shape}")
    if query[-1] != key[-1]:
        rule = "query and key must have the same head_dim"
        raise _check.shapes_differ(rule, "-1, head_dim", query=query, key=key)
    if key[-2] != value[-2]:
        rule = "key and value must have the same length len_k"
        raise _check.shapes_differ(rule, "-2, len_k", key=key, value=value)

    if len(key) > 2 and len(value) > 2 and key[-3] != value[-3]:
        rule = "key and value must have the same number of heads"
        raise _check.shapes_differ(rule, "-3, heads_kv", key=key, value=value)
    heads_kv = key[-3] if len(key) > 2 else value[-3] if len(value) > 2 else 1
    heads_q = query[-3] if len(query) > 2 else heads_kv
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"heads_q must be a multiple of heads_kv (axis -3, heads): heads_q={heads_q}, "
            f"heads_kv={heads_kv}; query has shape {query}, key has shape {key}, value has shape {value}"
        )
    try:
        lead = np.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    except ValueError:
        rule = "the leading dimensions must broadcast"
        raise _check.shapes_differ(rule, "0 to -4, batch", **shapes) from None
    batch, len_q, len_k = prod(lead), query[-2], key[-2]
    has_heads = max(len(query), len(key), len(value)) > 2
    rows_shape = (*lead, heads_q, len_q) if has_heads else (len_q,)
    return Layout(
        lead,
        batch,
        heads_q,
        heads_kv,
        len_q,
        len_k,
        head_dim=query[-1],
        head_dim_v=value[-1],
        rows_shape=rows_shape,
        out_shape=(*rows_shape, value[-1]),
        extent=Extent(batch, heads_q, len_q, len_k),
        is_empty=0 in (batch, heads_q, heads_kv, len_q, len_k, query[-1], value[-1]),
    )


@lru_cache(maxsize=1024)
def facts_of(
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dtype: np.dtype[Any],
    scale: float | None,
    softcap: float | None,
    has_bias: bool,
    has_sinks: bool,
    dropout_p: float,
) -> tuple[Layout, Problem]:
    """Everything about a call that its numbers do not change; the seed is 0."""
    layout = layout_of(*shapes)
    limits = np.finfo(accumulation_dtype(dtype))
    tiny, top = float(limits.tiny), float(limits.max)
    cap = _check.softcap_value(softcap)
    if cap:  # in accumulation precision neither 0 nor inf
        cap = min(max(cap, tiny), top)
    problem = Problem(
        dtype=dtype,
        batch=layout.batch,
        heads_q=layout.heads_q,
        heads_kv=layout.heads_kv,
        len_q=layout.len_q,
        len_k=layout.len_k,
        head_dim=layout.head_dim,
        head_dim_v=layout.head_dim_v,
        scale=min(max(_check.scale_value(scale, layout.head_dim), -top), top),
        softcap=cap,
        has_bias=has_bias,
        has_sinks=has_sinks,
        dropout_p=dropout_p,
        seed=0,
    )
    return layout, problem


def canonical(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    scale: float | None,
    softcap: float | None,
    sinks: Any,
    dropout: tuple[float, int] = (0.0, 0),
    keeps_storage: bool = False,
) -> Inputs:
    """Check the arguments of one call and bring them into the kernels' form.

    With ``keeps_storage`` keys and values stored in 16 bits stay so in a float32 call: forward kernels widen
    them where they read them.

    Raises
    ------
    TypeError, ValueError
        As ``npattn.attention`` says.
    """
    query, key, value = as_array(query), as_array(key), as_array(value)
    xp = array_module(query, key, value, bias, sinks)
    dtype = query.dtype
    if not (dtype == key.dtype == value.dtype and is_attention_dtype(dtype)):
        dtype = common_dtype(query=query, key=key, value=value)
    layout, problem = facts_of(
        (query.shape, key.shape, value.shape),
        dtype,
        None if scale is None else _check.number("scale", scale),
        None if softcap is None else _check.number("softcap", softcap),
        bias is not None,
        sinks is not None,
        dropout[0],
    )
    if dropout[0]:
        problem = problem._replace(seed=dropout[1])
    if mask is not None:
        mask = as_mask(mask, layout)
    if bias is not None:
        bias = _bias(bias, layout, accumulation_dtype(dtype))
    if sinks is not None:
        sinks = as_array(sinks)
        _check.float_dtype("sinks", sinks.dtype)
        if sinks.shape != (layout.heads_q,):
            raise ValueError(f"sinks must have shape (heads_q,) = ({layout.heads_q},), got {sinks.shape}")
        sinks = xp.ascontiguousarray(narrowed(sinks, accumulation_dtype(dtype)))
    query = stacked(query, layout, layout.heads_q, dtype)
    storage = dtype
    if keeps_storage and key.dtype == value.dtype and may_store(key.dtype, dtype):
        storage = key.dtype
    key = stacked(key, layout, layout.heads_kv, storage)
    value = stacked(value, layout, layout.heads_kv, storage)
    return Inputs(layout, problem, mask, query, key, value, bias, sinks)


def as_array(x: Any) -> Array:
    """``x`` itself when it is an array of a plain class, else ``numpy.asarray(x)``."""
    if type(x) is np.ndarray or array_module(x) is not np:
        return x  # type: ignore[no-any-return]
    return np.asarray(x)


def common_dtype(**arrays: Array) -> np.dtype[Any]:
    """The dtype NumPy promotes these arrays to, when attention computes in it and in each of them."""
    for name, array in arrays.items():
        _check.float_dtype(name, array.dtype)
    dtype = _check.promote(", ".join(arrays), *(array.dtype for array in arrays.values()))
    return _check.float_dtype("the promoted input", dtype)


def may_store(storage: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether forward kernels of a call in ``dtype`` read keys and values of dtype ``storage``."""
    return storage == dtype or (dtype == np.float32 and storage.itemsize == 2 and storage.isnative)


def stacked(x: Array, layout: Layout, heads: int, dtype: np.dtype[Any]) -> Array:
    """``x`` as (batch, heads, length, dim) of ``dtype``, its last axis contiguous."""
    if x.dtype != dtype or is_misaligned(x):
        x = x.astype(dtype)
    if x.ndim != 4 or x.shape[0] != layout.batch or x.shape[1] != heads:
        xp = array_module(x)
        x = xp.broadcast_to(x, (*layout.lead, heads, *x.shape[-2:]))
        x = x.reshape(layout.batch, heads, *x.shape[-2:])
    return contiguous_last_axis(x)


def is_misaligned(x: Array) -> bool:
    """Whether items start at addresses that a machine may refuse; never so on a GPU."""
    return type(x) is np.ndarray and not x.flags.aligned


def narrowed(x: Array, dtype: np.dtype[Any]) -> Array:
    """``x`` in ``dtype``; finite values beyond its range become its largest: finite stays finite."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize <= dtype.itemsize:
        return x.astype(dtype)
    xp = array_module(x)
    limit = float(np.finfo(dtype).max)
    result: Array = xp.where(xp.isinf(x), x, xp.clip(x, -limit, limit)).astype(dtype)
    return result


def halvings(x: Array, dtype: np.dtype[Any]) -> int:
    """How often to halve ``x``, a gradient of another dtype, until its finite values fit ``dtype``.

    A pullback is linear: it may work on less and have its results doubled as often (``doubled``).
    """
    if x.size == 0 or x.dtype.itemsize < dtype.itemsize or x.dtype.newbyteorder("=") == dtype:
        return 0
    limit = 65504.0 if dtype == np.float16 else 2.0**127  # of float32 and bfloat16, to the power of two
    top = float(abs(x).max())
    return math.frexp(top / limit)[1] if limit < top < math.inf else 0


def doubled(grads: Any, times: int) -> Any:
    """A NamedTuple of gradients, some of them None, times 2**times."""
    if times == 0:
        return grads
    with np.errstate(over="ignore"):  # inf where the true gradient is beyond the dtype
        return grads._make(
            grad if grad is None else (grad.astype(np.float64) * 2.0**times).astype(grad.dtype)
            for grad in grads
        )


def as_mask(mask: Any, layout: Layout) -> Mask:
    """A Mask as it is; a bool array as ``Dense``."""
    if isinstance(mask, Mask):
        return mask
    array = _check.mask_dtype(as_array(mask))
    array = pairwise(array, layout, "mask")
    return Dense(to_numpy(array))


def pairwise(x: Array, layout: Layout, name: str) -> Array:
    """``x``, which broadcasts to (..., heads_q, len_q, len_k), in 4-D.

    The result has shape (batch or 1, heads_q or 1, len_q or 1, len_k or 1).

    Raises
    ------
    ValueError
        It does not broadcast to that shape.
    """
    full = (*layout.lead, layout.heads_q, layout.len_q, layout.len_k)
    shape = (1,) * (len(full) - x.ndim) + x.shape
    extra = len(shape) - len(full)
    own = shape[extra:]
    if any(size != 1 for size in shape[:extra]) or any(
        size not in (1, there) for size, there in zip(own, full, strict=True)
    ):
        axes = ["batch"] * len(layout.lead) + ["heads_q", "len_q", "len_k"]
        wrong = [
            f"{axis - len(full)}, {axes[axis]}"
            for axis, (size, there) in enumerate(zip(own, full, strict=True))
            if size not in (1, there)
        ]
        rule = f"{name} must broadcast to (batch, heads_q, len_q, len_k)"
        raise _check.shapes_differ(rule, "; ".join(wrong) or "0", **{name: x.shape, "the call": full})
    x = x.reshape(own)
    lead = own[:-3]
    if lead == layout.lead:
        return x.reshape(layout.batch, *own[-3:])
    if all(size == 1 for size in lead):
        return x.reshape(1, *own[-3:])
    x = array_module(x).broadcast_to(x, (*layout.lead, *own[-3:]))
    return x.reshape(layout.batch, *own[-3:])


def _bias(bias: Any, layout: Layout, acc: np.dtype[Any]) -> Array:
    """The bias in 4-D; in its own dtype unless that is wider than the accumulation dtype."""
    if isinstance(bias, Mask):
        raise TypeError(f"bias must be a float array, got the mask {bias!r}: pass it as mask=")
    bias = as_array(bias)
    dtype = _check.float_dtype("bias", bias.dtype)
    bias = pairwise(bias, layout, "bias")
    if dtype == np.float64 != acc:
        bias = narrowed(bias, acc)
    elif bias.dtype != dtype or is_misaligned(bias):
        bias = bias.astype(dtype)
    return contiguous_last_axis(bias)


def like_argument(grad: Array, argument: Any, lead: tuple[int, ...]) -> Array:
    """A kernel's 4-D gradient in ``argument``'s own shape and dtype, summed where the argument broadcast."""
    argument = as_array(argument)
    if grad.shape == argument.shape:
        return grad if grad.dtype == argument.dtype else grad.astype(argument.dtype)
    if grad.ndim == 4:
        grad = grad.reshape(*(lead if grad.shape[0] != 1 else ()), *grad.shape[1:])
    shape = argument.shape
    shape = (1,) * (grad.ndim - len(shape)) + shape
    shape = shape[len(shape) - grad.ndim :]
    axes = tuple(axis for axis in range(grad.ndim) if shape[axis] == 1 != grad.shape[axis])
    if axes:
        grad = grad.sum(axes, keepdims=True, dtype=accumulation_dtype(grad.dtype))
    return grad.reshape(argument.shape).astype(argument.dtype, copy=False)


def visible_pairs(mask: Mask | None, extent: Extent, index: Array | None = None) -> Array:
    """The mask as bools, (batch or 1, heads or 1, len_q or len(index), len_k); ``index`` names query rows."""
    batch, heads, len_q, len_k = extent
    if mask is None:
        return np.ones((1, 1, len_q if index is None else len(index), len_k), bool)
    if index is None:
        return mask.to_dense(len_q, len_k, batch, heads)
    mask.check(extent)
    b, h, _, j = np.ogrid[:batch, :heads, :1, :len_k]
    return np.broadcast_to(mask.allowed(extent, b, h, index[:, None], j), (batch, heads, len(index), len_k))

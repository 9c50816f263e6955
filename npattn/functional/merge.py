"""Joining attention over disjoint sets of keys: what makes split keys, caches and rings of devices exact.

A softmax over the union of two key sets needs of each set only its result and the logarithm of its
denominator::

    lse = log Σ exp(lse_i)
    out = Σ exp(lse_i − lse) · out_i
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from npattn import _check
from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.functional._canonical import as_array, common_dtype

MergePullback: TypeAlias = Callable[..., tuple[list[Array], list[Array]]]


def merge_attention(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Attention over the union of disjoint key sets, from the results over each of them.

    Parameters
    ----------
    outs : sequence of (..., heads, len_q, head_dim_v) arrays
        ``attention`` over each part of the keys; at least one, all of one shape.
    lses : sequence of (..., heads, len_q) arrays
        The ``lse`` of each part (``return_lse=True``).

    Returns
    -------
    out : (..., heads, len_q, head_dim_v) array
        In the promoted dtype of outs. 0 where every part's lse is −inf.
    lse : (..., heads, len_q) array
        In accumulation dtype. Merging is associative, up to rounding; (0, −inf) is the neutral element.

    Raises
    ------
    ValueError
        No part, not as many lses as outs, or shapes that differ.
    TypeError
        Dtypes attention does not compute in.

    See Also
    --------
    merge_attention_vjp : the same with a pullback.

    Notes
    -----
    A part whose lse is −inf adds nothing, whatever its ``out`` holds. A sink belongs to one part only, or it
    would be counted more than once. Time and memory O(parts · size of out).

    References
    ----------
    .. [1] T. Dao et al., "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention, merge_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 2, 7, 4))
    >>> parts = [attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 7))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> whole, whole_lse = attention(q, k, v, return_lse=True)
    >>> bool(np.allclose(out, whole)), bool(np.allclose(lse, whole_lse))
    (True, True)
    """
    outs, lses, dtype = _parts(outs, lses)
    out, lse, _ = _merge(outs, lses)
    return out.astype(dtype, copy=False), lse


def merge_attention_vjp(
    outs: Sequence[Array] | Array, lses: Sequence[Array] | Array
) -> tuple[tuple[Array, Array], MergePullback]:
    """``merge_attention`` and its pullback.

    Parameters
    ----------
    outs, lses
        As in ``merge_attention``.

    Returns
    -------
    result : (array, array)
        What ``merge_attention`` returns.
    pullback : callable
        ``pullback(dout, dlse=None) -> (douts, dlses)``: lists in the order of the parts, each gradient with
        its argument's shape and dtype. Passed on to the pullbacks of the parts they give the gradients of
        attention over all keys.

    Raises
    ------
    ValueError, TypeError
        As ``merge_attention``; ``pullback``: when dout or dlse has another shape than out or lse.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import merge_attention_vjp
    >>> outs, lses = [np.array([[1.0]]), np.array([[3.0]])], [np.array([0.0]), np.array([0.0])]
    >>> (out, lse), pullback = merge_attention_vjp(outs, lses)
    >>> douts, dlses = pullback(np.array([[1.0]]))
    >>> float(out[0, 0]), [float(x[0, 0]) for x in douts], [float(x[0]) for x in dlses]
    (2.0, [0.5, 0.5], [-0.5, 0.5])
    """
    parts, part_lses, dtype = _parts(outs, lses)
    out, lse, weights = _merge(parts, part_lses)

    def pullback(dout: Array, dlse: Array | None = None) -> tuple[list[Array], list[Array]]:
        dout = _cotangent("dout", dout, out.shape)
        if dlse is not None:
            dlse = _cotangent("dlse", dlse, lse.shape).astype(lse.dtype, copy=False)
        xp = array_module(out)
        dout = dout.astype(lse.dtype, copy=False)
        douts, dlses = [], []
        for part, part_lse, weight in zip(parts, part_lses, weights, strict=True):
            seen = weight > 0
            # out = Σ weight_i · out_i
            douts.append(xp.where(seen[..., None], weight[..., None] * dout, 0).astype(part.dtype))
            # weight_i = exp(lse_i − lse), lse = log Σ exp(lse_i)
            difference = xp.where(seen[..., None], part, 0).astype(lse.dtype, copy=False) - out
            change = (dout * difference).sum(-1)
            if dlse is not None:
                change = change + dlse
            dlses.append(xp.where(seen, weight * change, 0).astype(part_lse.dtype))
        return douts, dlses

    return (out.astype(dtype, copy=False), lse), pullback


def _merge(outs: list[Array], lses: list[Array]) -> tuple[Array, Array, list[Array]]:
    """Out and lse in accumulation dtype, and the weight exp(lse_i − lse) of each part, 0 for an empty one."""
    xp = array_module(*outs, *lses)
    acc = np.result_type(*(accumulation_dtype(x.dtype) for x in (*outs, *lses)))
    lses = [x.astype(acc, copy=False) for x in lses]
    top = lses[0]
    for other in lses[1:]:
        top = xp.maximum(top, other)
    top = xp.where(top == -np.inf, 0, top)
    shares = [xp.exp(x - top) for x in lses]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    nonzero = xp.where(total == 0, 1, total)
    weights = [share / nonzero for share in shares]
    out = None
    with np.errstate(invalid="ignore"):  # what an empty part holds may be inf or NaN
        for weight, part in zip(weights, outs, strict=True):
            share = xp.where((weight > 0)[..., None], weight[..., None] * part.astype(acc, copy=False), 0)
            out = share if out is None else out + share
    with np.errstate(divide="ignore"):  # log 0 = −inf: no part has a key for the row
        lse = top + xp.log(total)
    assert out is not None
    return out, lse, weights


def _parts(outs: Any, lses: Any) -> tuple[list[Array], list[Array], np.dtype[Any]]:
    """Checked lists, and the dtype of the result."""
    outs, lses = [as_array(x) for x in outs], [as_array(x) for x in lses]
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs at least one part and an lse for each: got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    array_module(*outs, *lses)
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check.float_dtype(f"lses[{n}]", lse.dtype)
        if out.ndim < 1 or out.shape != outs[0].shape:
            rule = "the outs of all parts must have one shape"
            raise ValueError(f"{rule}: outs[0] has shape {outs[0].shape}, outs[{n}] has shape {out.shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lses[{n}] must have the shape of outs[{n}] without its last axis, {out.shape[:-1]}, "
                f"got {lse.shape}"
            )
    dtype = common_dtype(**{f"outs[{n}]": out for n, out in enumerate(outs)})
    return outs, lses, dtype


def _cotangent(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    x = as_array(x)
    _check.float_dtype(name, x.dtype)
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape of {name[1:]}, {shape}, got {x.shape}")
    checked: Array = x
    return checked


__all__ = ["merge_attention", "merge_attention_vjp"]

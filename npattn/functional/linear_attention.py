"""Linear attention: the softmax replaced by a product of features, so that the cost grows with the length.

With features φ of query and key::

    out_i = φ(q_i) · (Σ_j φ(k_j) v_jᵀ) / (φ(q_i) · Σ_j φ(k_j) + eps)

where j runs over all keys, or with ``causal`` over j <= i. One ones-column behind the values makes numerator
and denominator a single product, and everything here, forward and backward, is one operation::

    below(a, b, c) = (a @ b.T, kept where j <= i) @ c

computed by chunks: inside a chunk as written, between chunks through the running sum of b_jᵀ c_j.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from npattn import _check
from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.functional._canonical import Inputs, as_array, canonical, like_argument

#: A name, or (function, vjp) with ``vjp(x) -> (y, pullback)``.
FeatureMap: TypeAlias = "str | tuple[Callable[[Array], Array], Callable[[Array], tuple[Array, Any]]]"

_CHUNK = 128  # queries whose products with each other are formed as they stand


class LinearAttentionGrads(NamedTuple):
    """Gradients of ``linear_attention``, in the order of its arguments."""

    query: Array
    key: Array
    value: Array


class LinearAttentionState(NamedTuple):
    """What causal linear attention remembers of all keys so far, whatever their number."""

    kv: Array  # (batch, heads_kv, features, head_dim_v): Σ φ(k) vᵀ
    z: Array  # (batch, heads_kv, features): Σ φ(k)


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    feature_map: FeatureMap = "elu1",
    causal: bool = False,
    eps: float = 1e-6,
) -> Array:
    """``φ(q) (Σ φ(k) vᵀ) / (φ(q) · Σ φ(k) + eps)``, in time O(length).

    Parameters
    ----------
    query : (..., heads_q, len_q, head_dim) array
        Shapes and dtypes as for ``attention``, groups of query heads sharing a key head included.
    key : (..., heads_kv, len_k, head_dim) array
        Keys.
    value : (..., heads_kv, len_k, head_dim_v) array
        Values.
    feature_map : {"elu1", "relu", "identity"} or (function, vjp)
        φ, applied to query and key: elu(x) + 1, max(x, 0), x, or your own: ``function(x) -> y`` and
        ``vjp(x) -> (y, pullback)`` on (batch, heads, length, head_dim) arrays in accumulation dtype; y may
        have another number of features.
    causal : bool
        Query i sees keys j <= i; needs len_q = len_k.
    eps : float
        Added to the denominator; 0.0 gives the formula itself.

    Returns
    -------
    out : (..., heads_q, len_q, head_dim_v) array
        In the promoted dtype. 0 where the denominator is 0.

    Raises
    ------
    ValueError
        An unknown feature map, causal with len_q ≠ len_k, a negative or non-finite eps, shapes that do not
        fit.
    TypeError
        As ``attention``; a feature map that is neither a name nor a pair of functions.

    See Also
    --------
    linear_attention_vjp : the same with a pullback.
    linear_attention_step : causal, continued step by step from a state of fixed size.

    Notes
    -----
    Time O(length · features · (head_dim_v + chunk)), memory O(length · (features + head_dim_v)). Sums are
    kept in float64 for float64, else in float32. The query meets the *summed* keys in the denominator, so
    the weights φ(q_i)·φ(k_j) / Σ of each query sum to 1 (up to eps).

    References
    ----------
    .. [1] A. Katharopoulos et al., "Transformers are RNNs", 2020, equations 4 to 12.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import linear_attention
    >>> q, k = np.array([[[1.0], [1.0]]]), np.array([[[1.0], [3.0]]])
    >>> v = np.array([[[0.0], [8.0]]])
    >>> linear_attention(q, k, v, feature_map="identity", eps=0.0).ravel().tolist()
    [6.0, 6.0]
    >>> linear_attention(q, k, v, feature_map="identity", causal=True, eps=0.0).ravel().tolist()
    [0.0, 6.0]
    """
    inputs, phi = _prepare(query, key, value, feature_map, causal, eps)
    phi_q, phi_k, values = _features(inputs, phi[0])
    numerator, denominator = _split(_below(phi_q, phi_k, values, causal))
    return _shaped(inputs, _divide(numerator, denominator, eps))


def linear_attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    feature_map: FeatureMap = "elu1",
    causal: bool = False,
    eps: float = 1e-6,
) -> tuple[Array, Callable[[Array], LinearAttentionGrads]]:
    """``linear_attention`` and its pullback.

    Parameters
    ----------
    query, key, value, feature_map, causal, eps
        As in ``linear_attention``.

    Returns
    -------
    out : array
        What ``linear_attention`` returns.
    pullback : callable
        ``pullback(dout) -> LinearAttentionGrads(query, key, value)``, each with its argument's shape and
        dtype.

    Raises
    ------
    ValueError, TypeError
        As ``linear_attention``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import linear_attention_vjp
    >>> q, k = np.array([[[1.0], [1.0]]]), np.array([[[1.0], [3.0]]])
    >>> v = np.array([[[0.0], [8.0]]])
    >>> out, pullback = linear_attention_vjp(q, k, v, feature_map="identity", eps=0.0)
    >>> pullback(np.array([[[1.0], [0.0]]])).value.ravel().tolist()
    [0.25, 0.75]
    """
    inputs, phi = _prepare(query, key, value, feature_map, causal, eps)
    acc = accumulation_dtype(inputs.problem.dtype)
    y_q, pullback_q = phi[1](inputs.q.astype(acc, copy=False))
    y_k, pullback_k = phi[1](inputs.k.astype(acc, copy=False))
    phi_q, phi_k, values = _grouped(inputs, y_q, y_k)
    numerator, denominator = _split(_below(phi_q, phi_k, values, causal))
    divided = _divide(numerator, denominator, eps)
    out = _shaped(inputs, divided)

    def pullback(dout: Array) -> LinearAttentionGrads:
        dout = as_array(dout)
        _check.float_dtype("dout", dout.dtype)
        if dout.shape != out.shape:
            raise ValueError(f"dout must have the shape of out, {out.shape}, got {dout.shape}")
        xp = array_module(out)
        dout = dout.reshape(divided.shape).astype(acc, copy=False)
        # out = numerator / (denominator + eps)
        total = denominator + eps
        inverse = xp.where(total == 0, 0, 1 / xp.where(total == 0, 1, total))
        dboth = xp.concatenate([dout * inverse, -(dout * divided).sum(-1, keepdims=True) * inverse], axis=-1)
        # both = below(phi_q, phi_k, values)
        dphi_q = _below(dboth, values, phi_k, causal)
        dphi_k = _sum_group(_above(values, dboth, phi_q, causal))
        dvalues = _sum_group(_above(phi_k, phi_q, dboth, causal))
        dq = pullback_q(dphi_q.reshape(y_q.shape))
        dk = pullback_k(dphi_k.reshape(y_k.shape))
        lead = inputs.layout.lead
        return LinearAttentionGrads(
            like_argument(dq, query, lead),
            like_argument(dk, key, lead),
            like_argument(dvalues[..., :-1], value, lead),
        )

    return out, pullback


def linear_attention_step(
    query: Array,
    key: Array,
    value: Array,
    state: LinearAttentionState | None = None,
    *,
    feature_map: FeatureMap = "elu1",
    eps: float = 1e-6,
) -> tuple[Array, LinearAttentionState]:
    """Causal linear attention of the next tokens, given what came before as a state of fixed size.

    Parameters
    ----------
    query, key, value : arrays
        The next tokens, one or many, shaped as for ``linear_attention`` with len_q = len_k.
    state : LinearAttentionState or None
        What the previous call returned; None at the beginning. It is not written to.
    feature_map, eps
        As in ``linear_attention``, the same in all steps.

    Returns
    -------
    out : (..., heads_q, len_q, head_dim_v) array
        The rows that ``linear_attention(causal=True)`` over all tokens so far would give.
    state : LinearAttentionState
        To be passed to the next call.

    Raises
    ------
    ValueError
        As ``linear_attention``; a state of another shape.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import linear_attention, linear_attention_step
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 2, 9, 4))
    >>> state, outs = None, []
    >>> for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
    ...     out, state = linear_attention_step(q[:, part], k[:, part], v[:, part], state)
    ...     outs.append(out)
    >>> bool(np.allclose(np.concatenate(outs, axis=1), linear_attention(q, k, v, causal=True)))
    True
    """
    inputs, phi = _prepare(query, key, value, feature_map, True, eps)
    phi_q, phi_k, values = _features(inputs, phi[0])
    both = _below(phi_q, phi_k, values, True)
    added = _sum_group(_t(phi_k) @ values)  # (batch, heads_kv, features, head_dim_v + 1)
    if state is not None:
        expected = added[..., :-1].shape
        if state.kv.shape != expected or state.z.shape != expected[:-1]:
            raise ValueError(
                f"the state must be one of the same heads and sizes: its kv has shape {state.kv.shape}, "
                f"this call needs {expected}"
            )
        before = array_module(added).concatenate([state.kv, state.z[..., None]], axis=-1)
        both = both + phi_q @ before[:, :, None]
        added = added + before
    numerator, denominator = _split(both)
    out = _shaped(inputs, _divide(numerator, denominator, eps))
    return out, LinearAttentionState(added[..., :-1], added[..., -1])


# The operation


def _below(a: Array, b: Array, c: Array, causal: bool) -> Array:
    """``(a @ b.T, kept where j <= i if causal) @ c`` over the last two axes."""
    if not causal:
        result: Array = a @ (_t(b) @ c)
        return result
    xp = array_module(a)
    length = a.shape[-2]
    if length <= _CHUNK:
        return _below_as_written(a, b, c)
    count = -(-length // _CHUNK)
    a, b, c = (_chunks(x, count) for x in (a, b, c))
    # Inside a chunk as written; what lies in earlier chunks through the sums of b.T @ c.
    # Not cumsum(sums) − sums: huge or NaN keys of a chunk would reach its earlier queries.
    sums = _t(b) @ c
    before = xp.zeros_like(sums)
    before[..., 1:, :, :] = xp.cumsum(sums[..., :-1, :, :], axis=-3)
    out: Array = _below_as_written(a, b, c) + a @ before
    return out.reshape(*out.shape[:-3], count * _CHUNK, out.shape[-1])[..., :length, :]


def _below_as_written(a: Array, b: Array, c: Array) -> Array:
    """``tril(a @ b.T) @ c``; a row of c that is not finite reaches no row before it, not even as 0 · NaN."""
    xp = array_module(a)
    kept = xp.tril(a @ _t(b))
    finite = xp.isfinite(c)
    if finite.all():
        result: Array = kept @ c
        return result
    result = kept @ xp.where(finite, c, 0) + xp.cumsum(xp.where(finite, 0, c), axis=-2)
    return result


def _above(a: Array, b: Array, c: Array, causal: bool) -> Array:
    """``(a @ b.T, kept where j >= i if causal) @ c``: the transpose of `_below`, read backwards."""
    if not causal:
        return _below(a, b, c, False)
    a, b, c = (x[..., ::-1, :] for x in (a, b, c))
    return _below(a, b, c, True)[..., ::-1, :]


def _chunks(x: Array, count: int) -> Array:
    """(..., length, dim) -> (..., count, _CHUNK, dim), zeros behind the end."""
    xp = array_module(x)
    padded = xp.zeros((*x.shape[:-2], count * _CHUNK, x.shape[-1]), x.dtype)
    padded[..., : x.shape[-2], :] = x
    chunks: Array = padded.reshape(*x.shape[:-2], count, _CHUNK, x.shape[-1])
    return chunks


def _divide(numerator: Array, denominator: Array, eps: float) -> Array:
    xp = array_module(numerator)
    total = denominator + eps
    quotient: Array = xp.where(total == 0, 0, numerator / xp.where(total == 0, 1, total))
    return quotient


def _split(both: Array) -> tuple[Array, Array]:
    return both[..., :-1], both[..., -1:]


# From the arguments and back


def _prepare(
    query: Array, key: Array, value: Array, feature_map: Any, causal: bool, eps: float
) -> tuple[Inputs, tuple[Callable[..., Any], Callable[..., Any]]]:
    phi = _map(feature_map)
    eps = _check.number("eps", eps)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    inputs = canonical(query, key, value, None, None, 1.0, None, None)
    if causal and inputs.layout.len_q != inputs.layout.len_k:
        raise ValueError(
            f"causal linear attention needs len_q = len_k, got {inputs.layout.len_q} and "
            f"{inputs.layout.len_k}; continue an earlier sequence with linear_attention_step"
        )
    return inputs, phi


def _features(inputs: Inputs, phi: Callable[..., Any]) -> tuple[Array, Array, Array]:
    acc = accumulation_dtype(inputs.problem.dtype)
    return _grouped(inputs, *(phi(x.astype(acc, copy=False)) for x in (inputs.q, inputs.k)))


def _grouped(inputs: Inputs, phi_q: Array, phi_k: Array) -> tuple[Array, Array, Array]:
    """Features and values with a ones-column, (batch, heads_kv, group or 1, length, dim)."""
    layout, xp = inputs.layout, array_module(phi_q)
    for name, x, length in (("query", phi_q, layout.len_q), ("key", phi_k, layout.len_k)):
        if x.ndim != 4 or x.shape[2] != length:
            raise ValueError(
                f"feature_map must return (batch, heads, length, features), got shape {x.shape} for {name}"
            )
    if phi_q.shape[-1] != phi_k.shape[-1]:
        raise ValueError(
            f"feature_map gave {phi_q.shape[-1]} features for query and {phi_k.shape[-1]} for key"
        )
    group = layout.heads_q // layout.heads_kv if layout.heads_kv else 1
    phi_q = phi_q.reshape(layout.batch, layout.heads_kv, group, layout.len_q, phi_q.shape[-1])
    values = xp.ones((layout.batch, layout.heads_kv, 1, layout.len_k, layout.head_dim_v + 1), phi_k.dtype)
    values[..., :-1] = inputs.v[:, :, None]
    return phi_q, phi_k[:, :, None], values


def _shaped(inputs: Inputs, out: Array) -> Array:
    layout = inputs.layout
    shaped: Array = out.reshape(*layout.rows_shape, layout.head_dim_v).astype(
        inputs.problem.dtype, copy=False
    )
    return shaped


def _sum_group(x: Array) -> Array:
    """Sum over the query heads that share a key head."""
    summed: Array = x[:, :, 0] if x.shape[2] == 1 else x.sum(2)
    return summed


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


# Feature maps


def _elu1(x: Array) -> Array:
    """Elu(x) + 1."""
    xp = array_module(x)
    result: Array = xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))
    return result


def _elu1_vjp(x: Array) -> tuple[Array, Any]:
    xp = array_module(x)
    slope = xp.where(x > 0, 1, xp.exp(xp.minimum(x, 0))).astype(x.dtype)
    return _elu1(x), lambda dy: slope * dy


def _relu(x: Array) -> Array:
    result: Array = array_module(x).maximum(x, 0)
    return result


def _relu_vjp(x: Array) -> tuple[Array, Any]:
    positive = x > 0
    return _relu(x), lambda dy: positive * dy


def _identity(x: Array) -> Array:
    return x


def _identity_vjp(x: Array) -> tuple[Array, Any]:
    return x, lambda dy: dy


_MAPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "elu1": (_elu1, _elu1_vjp),
    "relu": (_relu, _relu_vjp),
    "identity": (_identity, _identity_vjp),
}


def _map(feature_map: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if isinstance(feature_map, str):
        if feature_map not in _MAPS:
            raise ValueError(f"unknown feature_map {feature_map!r}; there are {', '.join(map(repr, _MAPS))}")
        return _MAPS[feature_map]
    if isinstance(feature_map, (tuple, list)) and len(feature_map) == 2 and all(map(callable, feature_map)):
        return feature_map[0], feature_map[1]
    raise TypeError(
        f"feature_map must be one of {', '.join(map(repr, _MAPS))} or a pair (function, vjp), "
        f"got {type(feature_map).__name__}"
    )


__all__ = [
    "LinearAttentionGrads",
    "LinearAttentionState",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
]

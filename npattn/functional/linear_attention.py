"""Linear attention: the softmax replaced by a product of features, so that the cost grows with the length.

With features φ of query and key::

    out_i = φ(q_i) · (Σ_j φ(k_j) v_jᵀ) / (φ(q_i) · Σ_j φ(k_j) + eps)

where j runs over all keys, or with ``causal`` over j <= i. How it is computed, forward and backward, is said
in ``npattn.kernels.linear_attention.contract``.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from npattn import _check
from npattn._arrays import accumulation_dtype, contiguous_last_axis
from npattn._typing import Array
from npattn.functional._canonical import Inputs, as_array, canonical, like_argument
from npattn.kernels.linear_attention import State, implementation

#: A name, or (function, vjp) with ``vjp(x) -> (y, pullback)``.
FeatureMap: TypeAlias = "str | tuple[Callable[[Array], Array], Callable[[Array], tuple[Array, Any]]]"

_NAMES = ("elu1", "relu", "identity")


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
    kept in float64 for float64, else in float32; on the CPU by explicit vectors where Numba is installed,
    with results that do not depend on the number of threads. The query meets the *summed* keys in the
    denominator, so the weights φ(q_i)·φ(k_j) / Σ of each query sum to 1 (up to eps).

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
    inputs, own, eps = _prepare(query, key, value, feature_map, causal, eps)
    q, k, v = _accumulated(inputs)
    name = "identity"
    if own is None:
        name = str(feature_map)
    else:
        q, k = _checked(inputs, own[0](q), own[0](k))
    return _shaped(inputs, implementation(q, k, v).forward(q, k, v, name, causal, eps).out)


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
    inputs, own, eps = _prepare(query, key, value, feature_map, causal, eps)
    q, k, v = _accumulated(inputs)
    name = "identity"
    if own is None:
        name = str(feature_map)
    else:
        y_q, pullback_q = own[1](q)
        y_k, pullback_k = own[1](k)
        q, k = _checked(inputs, y_q, y_k)
    kernel = implementation(q, k, v)
    forward = kernel.forward(q, k, v, name, causal, eps)
    out = _shaped(inputs, forward.out)

    def pullback(dout: Array) -> LinearAttentionGrads:
        dout = as_array(dout)
        _check.float_dtype("dout", dout.dtype)
        if dout.shape != out.shape:
            raise ValueError(f"dout must have the shape of out, {out.shape}, got {dout.shape}")
        dout = contiguous_last_axis(dout.reshape(forward.out.shape).astype(v.dtype, copy=False))
        dq, dk, dv = kernel.backward(q, k, v, *forward[:2], dout, name, causal)
        if own is not None:
            dq, dk = pullback_q(dq), pullback_k(dk)
        lead = inputs.layout.lead
        return LinearAttentionGrads(
            like_argument(dq, query, lead), like_argument(dk, key, lead), like_argument(dv, value, lead)
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
    inputs, own, eps = _prepare(query, key, value, feature_map, True, eps)
    q, k, v = _accumulated(inputs)
    name = "identity"
    if own is None:
        name = str(feature_map)
    else:
        q, k = _checked(inputs, own[0](q), own[0](k))
    if state is not None:
        expected = (*k.shape[:2], k.shape[3], v.shape[3])
        if state.kv.shape != expected or state.z.shape != expected[:-1]:
            raise ValueError(
                f"the state must be one of the same heads and sizes: its kv has shape {state.kv.shape}, "
                f"this call needs {expected}"
            )
    before = None if state is None else State(*state)
    forward = implementation(q, k, v).forward(q, k, v, name, True, eps, before, True)
    return _shaped(inputs, forward.out), LinearAttentionState(*forward.state)


# From the arguments and back


def _prepare(
    query: Array, key: Array, value: Array, feature_map: Any, causal: bool, eps: float
) -> tuple[Inputs, Any, float]:
    """(checked inputs, the caller's own pair or None, eps)."""
    own = _own_map(feature_map)
    eps = _check.number("eps", eps)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    inputs = canonical(query, key, value, None, None, 1.0, None, None)
    if causal and inputs.layout.len_q != inputs.layout.len_k:
        raise ValueError(
            f"causal linear attention needs len_q = len_k, got {inputs.layout.len_q} and "
            f"{inputs.layout.len_k}; continue an earlier sequence with linear_attention_step"
        )
    return inputs, own, eps


def _accumulated(inputs: Inputs) -> tuple[Array, Array, Array]:
    """Query, key and value in accumulation dtype."""
    acc = accumulation_dtype(inputs.problem.dtype)
    q, k, v = (x.astype(acc, copy=False) for x in (inputs.q, inputs.k, inputs.v))
    return q, k, v


def _checked(inputs: Inputs, phi_q: Array, phi_k: Array) -> tuple[Array, Array]:
    """What the caller's own feature map returned, in the kernels' form."""
    layout = inputs.layout
    for name, x, heads, length in (
        ("query", phi_q, layout.heads_q, layout.len_q),
        ("key", phi_k, layout.heads_kv, layout.len_k),
    ):
        if x.ndim != 4 or x.shape[:3] != (layout.batch, heads, length):
            raise ValueError(
                f"feature_map must return (batch, heads, length, features), got shape {x.shape} for {name}"
            )
    if phi_q.shape[-1] != phi_k.shape[-1]:
        raise ValueError(
            f"feature_map gave {phi_q.shape[-1]} features for query and {phi_k.shape[-1]} for key"
        )
    return contiguous_last_axis(phi_q), contiguous_last_axis(phi_k)


def _shaped(inputs: Inputs, out: Array) -> Array:
    layout = inputs.layout
    shaped: Array = out.reshape(*layout.rows_shape, layout.head_dim_v).astype(
        inputs.problem.dtype, copy=False
    )
    return shaped


def _own_map(feature_map: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The caller's own pair of functions; None where ``feature_map`` is a name."""
    if isinstance(feature_map, str):
        if feature_map not in _NAMES:
            raise ValueError(f"unknown feature_map {feature_map!r}; there are {', '.join(map(repr, _NAMES))}")
        return None
    if isinstance(feature_map, (tuple, list)) and len(feature_map) == 2 and all(map(callable, feature_map)):
        return feature_map[0], feature_map[1]
    raise TypeError(
        f"feature_map must be one of {', '.join(map(repr, _NAMES))} or a pair (function, vjp), "
        f"got {type(feature_map).__name__}"
    )


__all__ = [
    "LinearAttentionGrads",
    "LinearAttentionState",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
]

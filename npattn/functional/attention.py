"""Exact attention and its pullback.

``attention`` checks and canonicalises its arguments (``_canonical``), asks ``plans`` for the tiles to visit
and ``kernels.select`` for the module to visit them, and shapes the result. The formula is in
``kernels.contract``.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from npattn import _check
from npattn._arrays import accumulation_dtype, array_module, is_cupy
from npattn._typing import Array
from npattn.functional._canonical import (
    Inputs,
    as_array,
    canonical,
    doubled,
    halvings,
    layout_of,
    like_argument,
    pairwise,
    stacked,
    visible_pairs,
)
from npattn.functional._reordered import Reordered
from npattn.kernels.contract import AttentionGrads, Forward
from npattn.kernels.select import TILE, load, select
from npattn.masks.base import Mask
from npattn.masks.interval import Causal
from npattn.plans.build import tile_plan
from npattn.plans.order import order_of

AttentionPullback: TypeAlias = Callable[..., AttentionGrads]


class _Call(NamedTuple):
    """One call, ready to run."""

    inputs: Inputs
    implementation: Any  # a module with the contract's ``forward`` and ``backward``
    plan: Any  # what its ``tile_shape`` asked for
    drops_all: (
        bool  # dropout_p = 1: the values count as zeros, so out is 0 and the kernels run without dropout
    )

    def forward(self, keeps_rest: bool = False) -> Forward:
        """Run the kernel."""
        _, problem, _, q, k, v, bias, sinks = self.inputs
        if keeps_rest:
            problem = problem._replace(keeps_rest=True)
        result: Forward = self.implementation.forward(problem, self.plan, q, k, v, bias, sinks)
        return result


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Array: ...


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Array, Array]: ...


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: bool,
    backend: str = ...,
) -> Any: ...


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Scaled dot-product attention, ``softmax(scale · q·kᵀ) · v``, exact.

    For query i of query head h, over the keys j it may see, with key head ``h // (heads_q // heads_kv)``::

        logits[j] = scale · q[i]·k[j]
        logits[j] = softcap · tanh(logits[j] / softcap)      # with softcap
        logits[j] = logits[j] + bias[h, i, j]                # with bias
        w[j]      = exp(logits[j]) / (exp(sinks[h]) + Σ exp(logits))
        out[i]    = Σ dropout(w)[j] · v[j]

    Parameters
    ----------
    query : (..., heads_q, len_q, head_dim) array
        float64, float32, float16, or bfloat16 where ml_dtypes is installed. NumPy or CuPy.
    key : (..., heads_kv, len_k, head_dim) array
        heads_q must be a multiple of heads_kv. Leading dimensions broadcast as NumPy's do. A 2-D array is one
        head shared by all.
    value : (..., heads_kv, len_k, head_dim_v) array
        The dtype of the result is what NumPy promotes the three to. Keys and values in 16 bits under float32
        queries are widened where they are read, not copied.
    mask : Mask or bool array, optional
        Which query may see which key; True = may attend. An array broadcasts, right-aligned, to
        (batch, heads_q, len_q, len_k). None: all see all. Several leading dimensions count as one batch of
        their product for a Mask.
    bias : float array, optional
        Added to the logits after softcap, broadcast like ``mask``. −inf means masked; a finite value, however
        low, does not.
    scale : float, optional
        Default 1/√head_dim.
    softcap : float, optional
        Bound of the logits, before bias. None or 0: off.
    sinks : (heads_q,) float array, optional
        A logit per query head that takes its part of the softmax but has no value.
    dropout_p : float, default 0.0
        Probability of dropping a weight; the kept ones are divided by 1 − p.
    seed : int, optional
        Needed for dropout. Which weights stay depends on (seed, batch, head, query, key) alone, see
        ``npattn.functional.dropout.keep_mask``.
    return_lse : bool, default False
        Also return the logarithm of the softmax denominator.
    backend : str, default "auto"
        "auto" takes the fastest that supports the call; "numba", "numpy", "cupy" or "oracle" that one or an
        error with the reason.

    Returns
    -------
    out : (..., heads_q, len_q, head_dim_v) array
        0 for a query that sees no key.
    lse : (..., heads_q, len_q) array
        Only with ``return_lse``. In accumulation dtype (float64 for float64, else float32), before dropout;
        −inf for a query that sees no key and has no sink.

    Raises
    ------
    ValueError
        Shapes that do not fit (the message names both and the axis), heads_q no multiple of heads_kv, a
        negative or non-finite softcap, a non-finite scale, dropout_p outside [0, 1] or without seed, an
        unknown backend or one that cannot compute this call.
    TypeError
        Other dtypes, an integer or float mask, an integer or bool bias, arrays of different devices.

    See Also
    --------
    attention_vjp : the same with a pullback.
    attention_weights : the weights themselves.

    Notes
    -----
    Time is O(visible tiles · head_dim), memory beyond the arguments and the result O(len_q · head_dim): the
    weights are never stored. What a masked key or value row holds, NaN included, has no influence. The numba
    and cupy backends give the same bits for any number of threads.

    Causal alignment is that of the mask: ``Causal()`` puts the last query at the last key,
    ``Causal(offset=0)`` the first at the first.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention is all you need", 2017, equation 1.
    .. [2] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    .. [3] T. Dao, "FlashAttention-2", 2023, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention
    >>> from npattn.masks import Causal
    >>> q = np.zeros((1, 3, 2))
    >>> v = np.array([[[3.0], [6.0], [9.0]]])
    >>> attention(q, q, v)[0].ravel().tolist()          # equal logits: the mean
    [6.0, 6.0, 6.0]
    >>> attention(q, q, v, mask=Causal())[0].ravel().tolist()
    [3.0, 4.5, 6.0]
    >>> out, lse = attention(q, q, v, mask=np.array([[False], [True], [True]]), return_lse=True)
    >>> out[0].ravel().tolist(), lse[0].round(4).tolist()
    ([0.0, 6.0, 6.0], [-inf, 1.0986, 1.0986])
    """
    call = _prepare(query, key, value, mask, bias, scale, softcap, sinks, dropout_p, seed, backend, True)
    result = call.forward()
    return _results(call, result, return_lse)


def attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Any, AttentionPullback]:
    """``attention`` and its pullback.

    Parameters
    ----------
    query, key, value, mask, bias, scale, softcap, sinks, dropout_p, seed, return_lse, backend
        As in ``attention``.

    Returns
    -------
    result : array or (array, array)
        What ``attention`` returns.
    pullback : callable
        ``pullback(dout, dlse=None) -> AttentionGrads(query, key, value, bias, sinks)``: the gradients of
        ``sum(dout * out) + sum(dlse * lse)``, each with its argument's shape and dtype, None where the
        argument was None. ``dlse`` is accepted whether or not the call returned lse. Pure: call it as
        often as you like.

    Raises
    ------
    ValueError, TypeError
        As ``attention``; ``pullback``: when dout or dlse has another shape than out or lse.

    Notes
    -----
    Between the two passes query, key, value, out and two numbers per query are kept, by reference (of a
    16-bit out also what rounding took from it): the weights are recomputed, so memory stays
    O(len_q · head_dim). Do not write into those arrays before the
    last pullback. Rows that see nothing and masked pairs give and receive exactly 0.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", 2023, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_vjp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 2, 5, 4))
    >>> out, pullback = attention_vjp(q, k, v)
    >>> dout = rng.normal(size=out.shape)
    >>> grads = pullback(dout)
    >>> grads.query.shape, grads.bias is None
    ((2, 5, 4), True)
    >>> step = 1e-6 * rng.normal(size=v.shape)
    >>> change = attention_vjp(q, k, v + step)[0] - out
    >>> bool(abs((change * dout).sum() - (step * grads.value).sum()) < 1e-12)
    True
    """
    call = _prepare(query, key, value, mask, bias, scale, softcap, sinks, dropout_p, seed, backend)
    result = call.forward(keeps_rest=call.inputs.problem.dtype.itemsize == 2)

    def pullback(dout: Array, dlse: Array | None = None) -> AttentionGrads:
        grads = _backward(call, result, dout, dlse)
        lead = call.inputs.layout.lead
        return AttentionGrads(
            like_argument(grads.query, query, lead),
            like_argument(grads.key, key, lead),
            like_argument(grads.value, value, lead),
            None if grads.bias is None else like_argument(grads.bias, bias, lead),
            None if grads.sinks is None else like_argument(grads.sinks, sinks, ()),
        )

    return _results(call, result, return_lse), pullback


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
) -> Array:
    """``attention`` with the signature and meaning of ``torch.nn.functional.scaled_dot_product_attention``.

    Parameters
    ----------
    query, key, value : (..., heads, length, dim) array
        One head broadcasts against several; fewer heads of key and value than of query, but more than one,
        need ``enable_gqa``.
    attn_mask : bool or float array, optional
        True = may attend; a float array is added to the logits.
    dropout_p : float, default 0.0
        Probability of dropping a weight; needs ``seed``.
    is_causal : bool, default False
        Query i sees key j iff j <= i, counted from the top left also when the lengths differ.
    scale : float, optional
        Default 1/√head_dim.
    enable_gqa : bool, default False
        Groups of query heads share a key head.
    seed : int, optional
        Of the dropout.

    Returns
    -------
    out : (..., heads, len_q, head_dim_v) array

    Raises
    ------
    ValueError
        Both attn_mask and is_causal; different numbers of heads without enable_gqa; what ``attention``
        raises.
    TypeError
        An integer mask; what ``attention`` raises.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import scaled_dot_product_attention
    >>> v = np.array([[[3.0], [6.0], [9.0]]])
    >>> q, k = np.zeros((1, 2, 2)), np.zeros((1, 3, 2))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).ravel().tolist()
    [3.0, 4.5]
    """
    query, key, value = as_array(query), as_array(key), as_array(value)
    if is_causal and attn_mask is not None:
        raise ValueError(
            "give attn_mask or is_causal=True, not both; combine masks with npattn.masks and `&`"
        )
    if not enable_gqa:
        query, key, value = _broadcast_heads(query, key, value)
    mask: Any = Causal(offset=0) if is_causal else None
    bias = None
    if isinstance(attn_mask, Mask):
        raise TypeError(
            f"attn_mask must be a bool or float array, got the mask {attn_mask!r}: "
            "npattn.attention takes it as mask="
        )
    if attn_mask is not None:
        attn_mask = as_array(attn_mask)
        pairwise(attn_mask, layout_of(query.shape, key.shape, value.shape), "attn_mask")
        if attn_mask.dtype.kind in "fV":
            bias = attn_mask
        else:
            mask = _check.mask_dtype(attn_mask, "attn_mask")
    return attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, seed=seed)


def _broadcast_heads(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Repeat arrays of one head, by a stride of 0, for the heads of the others, as PyTorch does."""
    arrays = (query, key, value)
    heads = {x.shape[-3] for x in arrays if x.ndim > 2} - {1}
    if len(heads) > 1:
        raise ValueError(
            "query, key and value have different numbers of heads (axis -3, heads): query has shape "
            f"{query.shape}, key has shape {key.shape}, value has shape {value.shape}; groups of query heads "
            "that share a key head need enable_gqa=True"
        )
    if not heads or (query.ndim > 2 and query.shape[-3] != 1 and key.shape[-3:-2] == value.shape[-3:-2]):
        return arrays  # one key head for all is what ``attention`` computes anyway
    (several,) = heads
    xp = array_module(*arrays)
    query, key, value = (
        xp.broadcast_to(x, (*x.shape[:-3], several, *x.shape[-2:])) if x.ndim > 2 else x for x in arrays
    )
    return query, key, value


def _prepare(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | Array | None,
    bias: Array | None,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
    dropout_p: float,
    seed: int | None,
    backend: str,
    keeps_storage: bool = False,
) -> _Call:
    """Check everything, choose the implementation, build the plan it wants."""
    dropout = _check.dropout_values(dropout_p, seed)
    drops_all = dropout[0] == 1.0
    if drops_all:
        dropout = (0.0, 0)
    inputs = canonical(query, key, value, mask, bias, scale, softcap, sinks, dropout, keeps_storage)
    problem = inputs.problem
    if drops_all:
        inputs = inputs._replace(v=array_module(inputs.v).zeros(inputs.v.shape, inputs.v.dtype))
    implementation = select(TILE, problem, is_cupy(inputs.q), backend)
    if inputs.layout.is_empty:  # an empty axis: nothing to tile
        implementation, _ = load(TILE["oracle"])
    tile = implementation.tile_shape(problem)
    extent, mask = inputs.layout.extent, inputs.mask
    if tile is None:
        plan = array_module(inputs.q).asarray(visible_pairs(mask, extent))
    else:
        order = None if problem.dropout_p else order_of(mask, extent)  # dropout counts by place
        if order is not None:
            implementation, mask = Reordered(implementation, order), order.mask
        plan = tile_plan(mask, extent, *tile)
    return _Call(inputs, implementation, plan, drops_all)


def _results(call: _Call, result: Forward, return_lse: bool) -> Any:
    """Out, or (out, lse), in the caller's shape."""
    layout = call.inputs.layout
    out = result.out.reshape(layout.out_shape)
    if not return_lse:
        return out
    with np.errstate(divide="ignore"):  # log 0 = -inf: the row sees nothing
        lse = result.m + array_module(result.l).log(result.l)
    return out, lse.reshape(layout.rows_shape)


def _backward(call: _Call, result: Forward, dout: Array, dlse: Array | None) -> AttentionGrads:
    """The kernel's gradients, 4-D."""
    layout, problem, _, q, k, v, bias, sinks = call.inputs
    rows = layout.rows_shape
    dout = _cotangent("dout", dout, layout.out_shape)
    acc = accumulation_dtype(problem.dtype)
    times = halvings(dout, problem.dtype)
    if dlse is not None:
        dlse = _cotangent("dlse", dlse, rows)
        times = max(times, halvings(dlse, acc))
    if times:
        dout, dlse = dout * 0.5**times, None if dlse is None else dlse * 0.5**times
    four = dout.reshape(layout.batch, layout.heads_q, layout.len_q, layout.head_dim_v)
    dout = stacked(four, layout, layout.heads_q, problem.dtype)
    if dlse is not None:
        dlse = dlse.reshape(layout.batch, layout.heads_q, layout.len_q)
        dlse = array_module(dlse).ascontiguousarray(dlse.astype(acc))
    grads: AttentionGrads = call.implementation.backward(
        problem, call.plan, dout, dlse, q, k, v, result.out, result.m, result.l, bias, sinks, result.rest
    )
    if call.drops_all:
        grads = grads._replace(value=array_module(v).zeros(v.shape, v.dtype))
    whole: AttentionGrads = doubled(grads, times)
    return whole


def _cotangent(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    x = as_array(x)
    _check.float_dtype(name, x.dtype)
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape of {name[1:]}, {shape}, got {x.shape}")
    return x

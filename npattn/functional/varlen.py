"""Attention over packed sequences of different lengths: no padding, no wasted work."""

from typing import Any

from npattn._typing import Array
from npattn.functional._canonical import as_array
from npattn.functional.attention import AttentionPullback, attention, attention_vjp
from npattn.masks.interval import Documents


def varlen_attention(
    query: Array,
    key: Array,
    value: Array,
    query_lengths: Any,
    key_lengths: Any,
    *,
    causal: bool = False,
    window: Any = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Attention of every segment's queries over that segment's keys, the segments lying one after another.

    Parameters
    ----------
    query : (heads_q, total_q, head_dim) array
        The queries of all segments.
    key : (heads_kv, total_k, head_dim) array
        The keys of all segments.
    value : (heads_kv, total_k, head_dim_v) array
        The values of all segments.
    query_lengths, key_lengths : sequence of int
        Length of each segment; as many of one as of the other, sums total_q and total_k. Zeros are fine:
        queries without keys get 0.
    causal : bool
        Inside a segment: only keys up to the query's own position, its last query at its last key.
    window : int, (left, right), or None
        Inside a segment: as in `npattn.masks.Documents`.
    bias, scale, softcap, sinks, dropout_p, seed, return_lse, backend
        As in ``attention``; bias and dropout see positions in the packed arrays.

    Returns
    -------
    out : (heads_q, total_q, head_dim_v) array
        As ``attention`` with ``mask=Documents(query_lengths, key_lengths, causal, window)``.
    lse : (heads_q, total_q) array
        Only with ``return_lse``.

    Raises
    ------
    ValueError
        Lengths that are negative, of different number, or do not sum to the totals; and as ``attention``.
    TypeError
        Lengths that are no ints; and as ``attention``.

    See Also
    --------
    varlen_attention_vjp : the same with a pullback.

    Notes
    -----
    Time is proportional to the tiles that hold a visible pair, Σ query_lengths · key_lengths up to the
    roundness of tiles; memory O(total). From flash-attention's ``cu_seqlens``: ``np.diff(cu_seqlens)``; its
    arrays are (total, heads, head_dim): pass ``x.swapaxes(0, 1)``, which is not copied.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import varlen_attention
    >>> v = np.array([[[1.0], [3.0], [10.0]]])
    >>> q = np.zeros((1, 3, 2))
    >>> varlen_attention(q, q, v, [2, 1], [2, 1]).ravel().tolist()
    [2.0, 2.0, 10.0]
    """
    mask = _mask(query, key, query_lengths, key_lengths, causal, window)
    return attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=return_lse,
        backend=backend,
    )


def varlen_attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    query_lengths: Any,
    key_lengths: Any,
    *,
    causal: bool = False,
    window: Any = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Any, AttentionPullback]:
    """``varlen_attention`` and its pullback.

    Parameters
    ----------
    query, key, value, query_lengths, key_lengths, causal, window
        As in ``varlen_attention``.
    bias, scale, softcap, sinks, dropout_p, seed, return_lse, backend
        As in ``attention``.

    Returns
    -------
    result : array or (array, array)
        What ``varlen_attention`` returns.
    pullback : callable
        ``pullback(dout, dlse=None) -> AttentionGrads(query, key, value, bias, sinks)``, as of
        ``attention_vjp``.

    Raises
    ------
    ValueError, TypeError
        As ``varlen_attention``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import varlen_attention_vjp
    >>> v = np.array([[[1.0], [3.0], [10.0]]])
    >>> q = np.zeros((1, 3, 2))
    >>> out, pullback = varlen_attention_vjp(q, q, v, [2, 1], [2, 1])
    >>> pullback(np.array([[[1.0], [0.0], [2.0]]])).value.ravel().tolist()
    [0.5, 0.5, 2.0]
    """
    mask = _mask(query, key, query_lengths, key_lengths, causal, window)
    return attention_vjp(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=return_lse,
        backend=backend,
    )


def _mask(query: Any, key: Any, query_lengths: Any, key_lengths: Any, causal: bool, window: Any) -> Documents:
    mask = Documents(query_lengths, key_lengths, causal=causal, window=window)
    for name, lengths, x in (
        ("query", mask.query_lengths, as_array(query)),
        ("key", mask.key_lengths if mask.key_lengths is not None else mask.query_lengths, as_array(key)),
    ):
        if x.ndim < 2:
            raise ValueError(f"{name} must be (heads, total, head_dim), got shape {x.shape}")
        if sum(lengths) != x.shape[-2]:
            raise ValueError(
                f"{name}_lengths must sum to the packed length of {name} (axis -2): they sum to "
                f"{sum(lengths)}, {name} has shape {x.shape}"
            )
    return mask


__all__ = ["varlen_attention", "varlen_attention_vjp"]

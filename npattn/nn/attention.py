"""MultiHeadAttention and its causal form."""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array, Grads, Pullback
from npattn.functional._heads import merge_heads, split_heads
from npattn.functional.attention import attention, attention_vjp
from npattn.functional.weights import attention_weights
from npattn.masks import Causal, Dense, Mask, Window
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join, prefixed
from npattn.nn.linear import Linear, together, together_vjp
from npattn.nn.norm import RMSNorm
from npattn.nn.position import ALiBi, Rotary


@dataclass(init=False, eq=False, repr=False)
class MultiHeadAttention(Layer):
    """Attention of several heads between learned projections.

    ``out(attention(query(x), key(context), value(context)))``, context being x itself when not given.

    Parameters
    ----------
    embed_dim, num_heads : int
    num_kv_heads : int, optional
        Fewer key and value heads than query heads: query head h reads head h // (num_heads // num_kv_heads).
        1 is multi-query attention. None: num_heads.
    head_dim : int, optional
        None: embed_dim / num_heads.
    bias : bool, default False
        Of the query, key and value projections.
    out_bias : bool, default True
    causal : bool, default False
        Keys after the query are masked; the last query stands at the last key.
    window : int or (left, right), optional
        An int w is the w keys before (and, if not causal, the w after) the query's own, a pair both sides
        explicitly: the convention of ``npattn.masks.Documents``.
    mask : Mask, optional
        Of every call, beside causal and window.
    rotary : Rotary, optional
        Turns queries and keys by their positions.
    alibi : bool, default False
        Adds ``ALiBi(num_heads)``'s bias.
    qk_norm : bool, default False
        RMS norm over the features of each query head and key head, before rotary.
    dropout_p : float, default 0.0
        Of the attention weights, when a seed is passed.
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    query, key, value, out : Linear
        weight shapes (num_heads · head_dim, embed_dim), (num_kv_heads · head_dim, embed_dim) twice, and
        (embed_dim, num_heads · head_dim).
    query_norm, key_norm : RMSNorm(head_dim), or None

    Raises
    ------
    ValueError
        When embed_dim is not a multiple of num_heads (and head_dim is None), or num_heads not one of
        num_kv_heads.

    Notes
    -----
    Projections keep their (batch, length, heads, head_dim) layout; the kernels read the transposed view in
    place. The weights are never formed, except by ``weights``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.MultiHeadAttention(8, 2, num_kv_heads=1, causal=True, rng=np.random.default_rng(0))
    >>> layer(np.zeros((3, 5, 8), np.float32)).shape
    (3, 5, 8)
    >>> layer.weights(np.zeros((3, 5, 8), np.float32))[0, 1, 2]
    array([0.33333334, 0.33333334, 0.33333334, 0.        , 0.        ],
          dtype=float32)
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    window: int | tuple[int | None, int | None] | None
    mask: Mask | None
    rotary: Rotary | None
    alibi: ALiBi | None
    dropout_p: float

    takes_seed = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = True,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        alibi: bool = False,
        qk_norm: bool = False,
        dropout_p: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        if rotary is not None and rotary.head_dim != head_dim:
            raise ValueError(f"rotary was made for head_dim {rotary.head_dim}, but head_dim is {head_dim}")
        self.query = Linear(embed_dim, num_heads * head_dim, bias=bias, rng=rng, dtype=dtype)
        self.key = Linear(embed_dim, num_kv_heads * head_dim, bias=bias, rng=rng, dtype=dtype)
        self.value = Linear(embed_dim, num_kv_heads * head_dim, bias=bias, rng=rng, dtype=dtype)
        self.out = Linear(num_heads * head_dim, embed_dim, bias=out_bias, rng=rng, dtype=dtype)
        self.query_norm = RMSNorm(head_dim, dtype=dtype) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, dtype=dtype) if qk_norm else None
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.causal = causal
        self.window = checked_window(window)
        window_masks(self.window, causal)  # a wrong one is refused here, not at the first call
        self.mask = mask
        self.rotary = rotary
        self.alibi = ALiBi(num_heads, dtype=dtype) if alibi else None
        self.dropout_p = check_dropout(dropout_p)

    def __call__(
        self,
        x: Array,
        context: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        cache: Any = None,
        lengths: Any = None,
        seed: int | None = None,
        added: Array | None = None,
    ) -> Array:
        """Attend.

        Parameters
        ----------
        x : ndarray, shape (..., len_q, embed_dim)
        context : ndarray, shape (..., len_k, embed_dim), optional
            What keys and values are made of; None: x.
        mask : Mask or bool array, optional
            Broadcast right-aligned to (batch, num_heads, len_q, len_k), beside the layer's own.
        positions : int ndarray, shape (len_q,) or (batch, len_q), optional
            Of x, for rotary and ALiBi. A context stands at 0 … len_k − 1.
        cache : layer cache of ``npattn.cache``, optional
            The keys and values of x are appended, then all kept ones attended to. Needs causal=True.
        lengths : int ndarray, shape (batch,), optional
            With a cache: how many of each sequence's rows are real (the first ones).
        seed : int, optional
            Switches the dropout of the weights on.
        added : ndarray, shape (..., len_q, embed_dim), optional
            A residual connection: added to the output.

        Returns
        -------
        y : ndarray, shape (..., len_q, embed_dim)
        """
        if cache is not None:
            attended = self._with_cache(x, context, mask, positions, cache, lengths, seed)
            return self.out(merge_heads(attended), added=added)
        q, k, v = self._project(x, context, positions)
        attended = attention(q, k, v, **self._options(q, k, context, mask, positions, seed))
        return self.out(merge_heads(attended), added=added)

    def vjp(
        self,
        x: Array,
        context: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        seed: int | None = None,
        added: Array | None = None,
    ) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, grads), or ((dx, dcontext), grads) when context was given."""
        (q, k, v), back_project = self._project_vjp(x, context, positions)
        attended, back_attention = attention_vjp(
            q, k, v, **self._options(q, k, context, mask, positions, seed)
        )
        y, back_out = self.out.vjp(merge_heads(attended), added=added)

        def pullback(dy: Array) -> tuple[Any, Grads]:
            dattended, out = back_out(dy)
            dx, projections, norms = back_project(back_attention(split_heads(dattended, self.num_heads))[:3])
            return dx, {**projections, **prefixed("out", out), **norms}

        return y, pullback

    def weights(
        self,
        x: Array,
        context: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        rows: Any = None,
    ) -> Array:
        """The attention weights, (..., num_heads, len_q, len_k), or of the query rows ``rows`` only."""
        q, k, _ = self._project(x, context, positions)
        options = self._options(q, k, context, mask, positions, None)
        return attention_weights(q, k, rows=rows, **options)

    def attention_stats(
        self,
        x: Array,
        context: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        top_k: int = 0,
    ) -> Any:
        """``npattn.attention_stats`` of the layer's queries and keys: statistics without the weights."""
        from npattn.functional.statistics import attention_stats

        q, k, _ = self._project(x, context, positions)
        options = self._options(q, k, context, mask, positions, None)
        return attention_stats(q, k, top_k=top_k, **options)

    def _project(self, x: Array, context: Array | None, positions: Any) -> tuple[Array, Array, Array]:
        """Query, key and value, each (..., heads, length, head_dim)."""
        check_rows(x, context)
        if context is None:
            q, k, v = together((self.query, self.key, self.value), x)
        else:
            q, (k, v) = self.query(x), together((self.key, self.value), context)
        key_positions = positions if context is None else None
        return (
            self._turned(split_heads(q, self.num_heads), self.query_norm, positions),
            self._turned(split_heads(k, self.num_kv_heads), self.key_norm, key_positions),
            split_heads(v, self.num_kv_heads),
        )

    def _project_vjp(
        self, x: Array, context: Array | None, positions: Any
    ) -> tuple[tuple[Array, Array, Array], Pullback]:
        """``_project`` and its pullback (dq, dk, dv) -> (dx or (dx, dcontext), their grads, the norms')."""
        check_rows(x, context)
        if context is None:
            (q, k, v), back_all = together_vjp((self.query, self.key, self.value), x)
        else:
            q, back_query = self.query.vjp(x)
            (k, v), back_both = together_vjp((self.key, self.value), context)
        key_positions = positions if context is None else None
        q, back_q = self._turned_vjp(split_heads(q, self.num_heads), self.query_norm, positions)
        k, back_k = self._turned_vjp(split_heads(k, self.num_kv_heads), self.key_norm, key_positions)

        def pullback(dheads: tuple[Array, Array, Array]) -> tuple[Any, Grads, Grads]:
            dq, query_norm = back_q(dheads[0])
            dk, key_norm = back_k(dheads[1])
            dq, dk, dv = (merge_heads(dh) for dh in (dq, dk, dheads[2]))
            if context is None:
                dx, (query, key, value) = back_all((dq, dk, dv))
            else:
                dx_query, query = back_query(dq)
                dcontext, (key, value) = back_both((dk, dv))
                dx = dx_query, dcontext
            projections = join(("query", query), ("key", key), ("value", value))
            return dx, projections, join(("query_norm", query_norm), ("key_norm", key_norm))

        return (q, k, split_heads(v, self.num_kv_heads)), pullback

    def _turned(self, h: Array, norm: RMSNorm | None, positions: Any) -> Array:
        """Queries or keys normalised and rotated, (..., heads, length, head_dim)."""
        h = h if norm is None else norm(h)
        return h if self.rotary is None else self.rotary(h, positions)

    def _turned_vjp(self, h: Array, norm: RMSNorm | None, positions: Any) -> tuple[Array, Pullback]:
        """``_turned`` and its pullback dh -> (dh, grads of the norm)."""
        back_norm: Pullback | None = None
        back_rotary: Pullback | None = None
        if norm is not None:
            h, back_norm = norm.vjp(h)
        if self.rotary is not None:
            h, back_rotary = self.rotary.vjp(h, positions)

        def pullback(dh: Array) -> tuple[Array, Grads]:
            if back_rotary is not None:
                dh, _ = back_rotary(dh)
            return (dh, {}) if back_norm is None else back_norm(dh)

        return h, pullback

    def _options(
        self,
        q: Array,
        k: Array,
        context: Array | None,
        mask: Mask | Array | None,
        positions: Any,
        seed: int | None,
    ) -> dict[str, Any]:
        """The keywords of ``attention`` for this call."""
        options: dict[str, Any] = {"mask": combined(*window_masks(self.window, self.causal), self.mask, mask)}
        if self.alibi is not None:
            xp = array_module(q, k)
            if positions is None:
                options["bias"] = xp.asarray(self.alibi(q.shape[-2], k.shape[-2]))
            else:
                keys = xp.asarray(positions) if context is None else xp.arange(k.shape[-2])
                options["bias"] = self.alibi.between(xp.asarray(positions), keys)
        if seed is not None and self.dropout_p > 0.0:
            options.update(dropout_p=self.dropout_p, seed=seed)
        return options

    def _with_cache(
        self,
        x: Array,
        context: Array | None,
        mask: Mask | Array | None,
        positions: Any,
        cache: Any,
        lengths: Any,
        seed: int | None,
    ) -> Array:
        if context is not None or mask is not None or self.mask is not None or not self.causal:
            raise ValueError(
                "a cache holds the keys of a causal layer's own earlier tokens: it goes with causal=True, "
                "and neither with context nor with a mask"
            )
        if positions is None:
            positions = cache.lengths[:, None] + np.arange(x.shape[-2])  # read before the append moves them
        q, k, v = self._project(x, None, positions)
        cache.append(k, v, lengths)
        options: dict[str, Any] = {}
        if self.window is not None:
            options["window"] = self.window if isinstance(self.window, int) else self.window[0]
        if self.alibi is not None:
            xp = array_module(q)
            options["bias"] = self.alibi.between(xp.asarray(positions), xp.asarray(cache.bias_positions))
        if seed is not None and self.dropout_p > 0.0:
            options.update(dropout_p=self.dropout_p, seed=seed)
        return cache.attention(q, query_lengths=lengths, **options)  # type: ignore[no-any-return]


@dataclass(init=False, eq=False, repr=False)
class CausalMultiHeadAttention(MultiHeadAttention):
    """``MultiHeadAttention`` with causal=True; the other parameters are the same.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.CausalMultiHeadAttention(8, 2, rng=np.random.default_rng(0)).causal
    True
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, causal=True, **options)


def check_rows(x: Array, context: Array | None) -> None:
    """Refuse arrays that have no axis of rows."""
    for name, array in (("x", x), ("context", context)):
        if array is not None and array.ndim < 2:
            raise ValueError(
                f"{name} must have shape (..., length, embed_dim), got {array.shape}: a single token is "
                f"{name}[None, :]"
            )


def checked_window(window: Any) -> Any:
    """None, an int, or the pair (left, right)."""
    if window is None or isinstance(window, bool):  # Window refuses a bool
        return window
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(f"window must be an int or the pair (left, right), got {len(window)} values")
        return tuple(window)
    try:
        return operator.index(window)
    except TypeError:
        kind = type(window).__name__
        raise TypeError(f"window must be an int or the pair (left, right), got {kind} ({window!r})") from None


def window_masks(window: Any, causal: bool) -> tuple[Mask | None, Mask | None]:
    """What ``window`` and ``causal`` together allow, as masks."""
    if window is None:
        return (Causal() if causal else None), None
    left, right = (window, 0 if causal else window) if isinstance(window, int) else window
    return Window(left, right), (Causal() if causal and right != 0 else None)


def combined(*masks: Mask | Array | None) -> Mask | Array | None:
    """All of the masks at once; a single one as it is."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    result = given[0]
    for mask in given[1:]:
        result = _as_mask(result) & _as_mask(mask)
    return result


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """head_dim, after making sure that the heads divide what they must."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, both at least 1: num_heads {num_heads}, "
            f"num_kv_heads {num_kv_heads}"
        )
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, or head_dim be given: embed_dim {embed_dim}, "
            f"num_heads {num_heads}"
        )
    return embed_dim // num_heads


def check_dropout(dropout_p: float) -> float:
    """``dropout_p`` itself, in [0, 1]."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return float(dropout_p)


def _as_mask(mask: Mask | Array) -> Mask:
    return mask if isinstance(mask, Mask) else Dense(mask)


__all__ = [
    "CausalMultiHeadAttention",
    "MultiHeadAttention",
    "check_dropout",
    "check_heads",
    "check_rows",
    "checked_window",
    "combined",
    "window_masks",
]

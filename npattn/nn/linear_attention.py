"""LinearMultiHeadAttention: feature maps in the softmax's place."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._typing import Array, Grads, Pullback
from npattn.functional._heads import merge_heads, split_heads
from npattn.nn.attention import check_heads, check_rows
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join
from npattn.nn.linear import Linear, together, together_vjp


@dataclass(init=False, eq=False, repr=False)
class LinearMultiHeadAttention(Layer):
    """Multi-head attention through feature maps instead of a softmax: time and memory linear in the length.

    Parameters
    ----------
    embed_dim, num_heads : int
    head_dim : int, optional
        None: embed_dim / num_heads.
    feature_map : str or (function, vjp), default "elu1"
        See ``npattn.linear_attention``.
    causal : bool, default False
    eps : float, default 1e-6
        Added to the denominator.
    bias : bool, default False
        Of the query, key and value projections.
    out_bias : bool, default True
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    query, key, value, out : Linear
        Named and shaped as in MultiHeadAttention.

    References
    ----------
    Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, equations 5 and 9.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.LinearMultiHeadAttention(8, 2, rng=np.random.default_rng(0))
    >>> layer(np.zeros((3, 5, 8), np.float32)).shape
    (3, 5, 8)
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    num_heads: int
    head_dim: int
    feature_map: Any
    causal: bool
    eps: float

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        feature_map: Any = "elu1",
        causal: bool = False,
        eps: float = 1e-6,
        bias: bool = False,
        out_bias: bool = True,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        head_dim = check_heads(embed_dim, num_heads, num_heads, head_dim)
        width = num_heads * head_dim
        self.query = Linear(embed_dim, width, bias=bias, rng=rng, dtype=dtype)
        self.key = Linear(embed_dim, width, bias=bias, rng=rng, dtype=dtype)
        self.value = Linear(embed_dim, width, bias=bias, rng=rng, dtype=dtype)
        self.out = Linear(width, embed_dim, bias=out_bias, rng=rng, dtype=dtype)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.feature_map = feature_map
        self.causal = causal
        self.eps = eps

    def __call__(self, x: Array, context: Array | None = None) -> Array:
        """(..., len_q, embed_dim) of x (..., len_q, embed_dim) and context (..., len_k, embed_dim) or x."""
        from npattn.functional.linear_attention import linear_attention

        check_rows(x, context)
        source = x if context is None else context
        q, (k, v) = self.query(x), together((self.key, self.value), source)
        q, k, v = (split_heads(h, self.num_heads) for h in (q, k, v))
        return self.out(merge_heads(linear_attention(q, k, v, **self._options())))

    def vjp(self, x: Array, context: Array | None = None) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, grads), or ((dx, dcontext), grads) when context was given."""
        from npattn.functional.linear_attention import linear_attention_vjp

        check_rows(x, context)
        source = x if context is None else context
        q, back_query = self.query.vjp(x)
        (k, v), back_both = together_vjp((self.key, self.value), source)
        q, k, v = (split_heads(h, self.num_heads) for h in (q, k, v))
        attended, back_attention = linear_attention_vjp(q, k, v, **self._options())
        y, back_out = self.out.vjp(merge_heads(attended))

        def pullback(dy: Array) -> tuple[Any, Grads]:
            dattended, out = back_out(dy)
            dq, dk, dv = back_attention(split_heads(dattended, self.num_heads))[:3]
            dx, query = back_query(merge_heads(dq))
            dcontext, (key, value) = back_both((merge_heads(dk), merge_heads(dv)))
            grads = join(("query", query), ("key", key), ("value", value), ("out", out))
            if context is None:
                dx += dcontext
                return dx, grads
            return (dx, dcontext), grads

        return y, pullback

    def _options(self) -> dict[str, Any]:
        return {"feature_map": self.feature_map, "causal": self.causal, "eps": self.eps}


__all__ = ["LinearMultiHeadAttention"]

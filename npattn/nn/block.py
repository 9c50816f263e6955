"""TransformerBlock: attention, then a feed-forward network, each beside a residual connection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._dropout import fold_seed
from npattn._typing import Array, Grads, Pullback
from npattn.functional.dropout import dropout, dropout_vjp
from npattn.masks import Mask
from npattn.nn.attention import MultiHeadAttention
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join
from npattn.nn.mlp import MLP, GatedMLP
from npattn.nn.norm import LayerNorm, RMSNorm
from npattn.nn.position import Rotary


@dataclass(init=False, eq=False, repr=False)
class TransformerBlock(Layer):
    """One block of a transformer.

    ``norm_first=True`` (GPT-2, Llama)::

        x = x + dropout(attention(attention_norm(x)))
        y = x + dropout(mlp(mlp_norm(x)))

    ``norm_first=False`` (the original, BERT)::

        x = attention_norm(x + dropout(attention(x)))
        y = mlp_norm(x + dropout(mlp(x)))

    Parameters
    ----------
    embed_dim, num_heads, ff_dim : int
    norm_first : bool, default True
    norm : {"layer", "rms"}
    mlp : {"gelu", "gelu_tanh", "silu", "swiglu"}
    bias : bool, default True
        Of every projection and every layer norm.
    eps : float, optional
        Of both norms; None: the norm's own default.
    num_kv_heads, head_dim, causal, window, mask, rotary, alibi, qk_norm
        As for ``MultiHeadAttention``.
    dropout_p : float, default 0.0
        Of the attention weights and of both branches, when a seed is passed.
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    attention_norm, attention, mlp_norm, mlp : Layers

    Notes
    -----
    The pullback keeps, beside x, what its four layers keep: no attention weights.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> block = nn.TransformerBlock(8, 2, 16, causal=True, rng=np.random.default_rng(0))
    >>> block(np.zeros((3, 5, 8), np.float32)).shape
    (3, 5, 8)
    """

    attention_norm: LayerNorm | RMSNorm
    attention: MultiHeadAttention
    mlp_norm: LayerNorm | RMSNorm
    mlp: MLP | GatedMLP
    norm_first: bool
    dropout_p: float

    takes_seed = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ff_dim: int,
        *,
        norm_first: bool = True,
        norm: str = "layer",
        mlp: str = "gelu",
        bias: bool = True,
        eps: float | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
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
        self.attention_norm = make_norm(norm, embed_dim, bias=bias, eps=eps, dtype=dtype)
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            out_bias=bias,
            causal=causal,
            window=window,
            mask=mask,
            rotary=rotary,
            alibi=alibi,
            qk_norm=qk_norm,
            dropout_p=dropout_p,
            rng=rng,
            dtype=dtype,
        )
        self.mlp_norm = make_norm(norm, embed_dim, bias=bias, eps=eps, dtype=dtype)
        self.mlp = (
            GatedMLP(embed_dim, ff_dim, bias=bias, rng=rng, dtype=dtype)
            if mlp == "swiglu"
            else MLP(embed_dim, ff_dim, activation=mlp, bias=bias, rng=rng, dtype=dtype)
        )
        self.norm_first = norm_first
        self.dropout_p = self.attention.dropout_p

    def __call__(
        self,
        x: Array,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        cache: Any = None,
        lengths: Any = None,
        seed: int | None = None,
    ) -> Array:
        """(..., length, embed_dim) of x (..., length, embed_dim); keywords as for MultiHeadAttention."""
        seeds = self._seeds(seed)

        def attend(h: Array, **options: Any) -> Array:
            options |= {"mask": mask, "positions": positions, "cache": cache, "lengths": lengths}
            return self.attention(h, **options, seed=seeds[0])

        x = self._branch(self.attention_norm, attend, x, seeds[1])
        return self._branch(self.mlp_norm, self.mlp, x, seeds[2])

    def vjp(
        self,
        x: Array,
        *,
        mask: Mask | Array | None = None,
        positions: Any = None,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, grads)."""
        seeds = self._seeds(seed)

        def attend(h: Array, **options: Any) -> tuple[Array, Pullback]:
            return self.attention.vjp(h, mask=mask, positions=positions, seed=seeds[0], **options)

        h, back_attention = self._branch_vjp(self.attention_norm, attend, x, seeds[1])
        y, back_mlp = self._branch_vjp(self.mlp_norm, self.mlp.vjp, h, seeds[2])

        def pullback(dy: Array) -> tuple[Array, Grads]:
            dh, mlp_norm, mlp = back_mlp(dy)
            dx, attention_norm, attention = back_attention(dh)
            return dx, join(
                ("attention_norm", attention_norm),
                ("attention", attention),
                ("mlp_norm", mlp_norm),
                ("mlp", mlp),
            )

        return y, pullback

    def weights(self, x: Array, *, mask: Mask | Array | None = None, positions: Any = None) -> Array:
        """The attention weights of this block for its input x, (..., num_heads, length, length)."""
        return self.attention.weights(self._attended(x), mask=mask, positions=positions)

    def attention_stats(
        self, x: Array, *, mask: Mask | Array | None = None, positions: Any = None, top_k: int = 0
    ) -> Any:
        """``npattn.attention_stats`` of this block for its input x."""
        return self.attention.attention_stats(self._attended(x), mask=mask, positions=positions, top_k=top_k)

    def _attended(self, x: Array) -> Array:
        """What the attention layer sees of the block's input."""
        return self.attention_norm(x) if self.norm_first else x

    def _seeds(self, seed: int | None) -> tuple[int | None, ...]:
        """Seeds of the weights, the attention branch and the MLP branch; None where nothing is dropped."""
        if seed is None or self.dropout_p == 0.0:
            return None, None, None
        return tuple(fold_seed(seed, place) for place in range(3))

    def _branch(self, norm: Layer, f: Callable[..., Array], x: Array, seed: int | None) -> Array:
        h = norm(x) if self.norm_first else x
        if seed is None:
            h = f(h, added=x)
        else:
            h = dropout(f(h), self.dropout_p, seed)
            h += x
        return h if self.norm_first else norm(h)

    def _branch_vjp(
        self, norm: Layer, f_vjp: Callable[..., tuple[Array, Pullback]], x: Array, seed: int | None
    ) -> tuple[Array, Pullback]:
        """``_branch`` and its pullback dy -> (dx, grads of norm, grads of f)."""
        back_dropout: Pullback | None = None
        h = x
        if self.norm_first:
            h, back_norm = norm.vjp(x)
        if seed is None:
            y, back_f = f_vjp(h, added=x)
        else:
            y, back_f = f_vjp(h)
            y, back_dropout = dropout_vjp(y, self.dropout_p, seed)
            y += x
        if not self.norm_first:
            y, back_norm = norm.vjp(y)

        def pullback(dy: Array) -> tuple[Array, Grads, Grads]:
            # y = x + dropout(f(norm(x)))  or  y = norm(x + dropout(f(x)))
            dh, norm_grads = (dy, {}) if self.norm_first else back_norm(dy)
            dx, f_grads = back_f(dh if back_dropout is None else back_dropout(dh))
            if self.norm_first:
                dx, norm_grads = back_norm(dx)
            dx += dh
            return dx, norm_grads, f_grads

        return y, pullback


def make_norm(
    norm: str, dim: int, *, bias: bool = True, eps: float | None = None, dtype: Any = np.float32
) -> LayerNorm | RMSNorm:
    """The norm of a name."""
    options: dict[str, Any] = {"dtype": dtype} if eps is None else {"dtype": dtype, "eps": eps}
    if norm == "layer":
        return LayerNorm(dim, bias=bias, **options)
    if norm == "rms":
        return RMSNorm(dim, **options)
    raise ValueError(f'norm must be "layer" or "rms", got {norm!r}')


__all__ = ["TransformerBlock", "make_norm"]

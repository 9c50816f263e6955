"""TransformerEncoder and TransformerDecoder, which has a head behind the last norm."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.masks import Mask
from npattn.nn.init import generator, normal
from npattn.nn.layer import prefixed
from npattn.nn.linear import Linear
from npattn.nn.position import Rotary
from npattn.nn.stack import STD, TransformerStack


@dataclass(init=False, eq=False, repr=False)
class TransformerEncoder(TransformerStack):
    """Every token attends to every token: ids -> (batch, length, embed_dim).

    Token embeddings times √embed_dim, plus positions, through the blocks, and a final norm when norm_first.

    Parameters
    ----------
    vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_length : int
    num_kv_heads, head_dim, window, mask, qk_norm
        Of every block, as for ``MultiHeadAttention``.
    position : {"sinusoidal", "learned", "rotary", "alibi"}
    rotary : Rotary, optional
        With position="rotary"; None: ``Rotary(head_dim)``.
    norm : {"layer", "rms"}
    mlp : {"gelu", "gelu_tanh", "silu", "swiglu"}
    norm_first, bias : bool, default True
    eps : float, optional
    dropout_p : float, default 0.0
        After the embedding, in the attention weights and in both branches of a block, when a seed is passed.
    rng : numpy Generator
    dtype : default float32

    Raises
    ------
    TypeError, ValueError
        On call: ids that are not integers, or not in [0, vocab_size); more than max_length of them where
        positions are learned or sinusoidal.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> encoder = nn.TransformerEncoder(100, 16, 2, 3, 32, 64, rng=np.random.default_rng(0))
    >>> encoder(np.array([[1, 2, 3], [4, 5, 6]])).shape
    (2, 3, 16)
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        ff_dim: int,
        max_length: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: str = "sinusoidal",
        rotary: Rotary | None = None,
        norm: str = "layer",
        mlp: str = "gelu",
        norm_first: bool = True,
        bias: bool = True,
        eps: float | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        mask: Mask | None = None,
        qk_norm: bool = False,
        dropout_p: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__(
            *(vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_length),
            position=position,
            embedding_scale=math.sqrt(embed_dim),
            norm=norm,
            norm_first=norm_first,
            bias=bias,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            eps=eps,
            rotary=rotary,
            rng=rng,
            dtype=dtype,
            mlp=mlp,
            window=window,
            mask=mask,
            qk_norm=qk_norm,
            dropout_p=dropout_p,
        )

    def __call__(self, ids: Any, mask: Mask | Array | None = None, seed: int | None = None) -> Array:
        """Encode.

        Parameters
        ----------
        ids : int ndarray, shape (batch, length)
        mask : Mask or bool array, optional
            Broadcast right-aligned to (batch, num_heads, length, length); for sequences of different length
            ``masks.Padding(lengths)``.
        seed : int, optional
            Switches dropout on.

        Returns
        -------
        y : ndarray, shape (batch, length, embed_dim)
        """
        return self.states(ids, mask=mask, seed=seed)

    def vjp(
        self,
        ids: Any,
        mask: Mask | Array | None = None,
        seed: int | None = None,
        *,
        checkpoint: bool = False,
    ) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (None, grads); ``checkpoint`` as for ``states_vjp``."""
        return self.states_vjp(ids, mask=mask, seed=seed, checkpoint=checkpoint)


@dataclass(init=False, eq=False, repr=False)
class TransformerDecoder(TransformerStack):
    """A causal language model: ids -> logits of the token after each of them.

    Parameters
    ----------
    vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_length : int
    num_kv_heads, head_dim, window, qk_norm
        Of every block, as for ``MultiHeadAttention``.
    position : {"learned", "rotary", "alibi", "sinusoidal"}
        "sinusoidal" multiplies the token embeddings by √embed_dim.
    rotary : Rotary, optional
        With position="rotary"; None: ``Rotary(head_dim)``.
    norm : {"layer", "rms"}
    mlp : {"gelu", "gelu_tanh", "silu", "swiglu"}
    norm_first, bias : bool, default True
    tied : bool, default True
        The head is the transposed embedding; its gradient is the sum of both uses.
    eps : float, optional
    dropout_p : float, default 0.0
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    head : Linear(embed_dim, vocab_size) without bias, or None when tied

    Raises
    ------
    TypeError, ValueError
        On call, as for ``TransformerEncoder``.

    Notes
    -----
    Initial weights are GPT-2's: normal with deviation 0.02, the two projections that end in the residual
    stream divided by √(2 · num_layers), biases 0.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> from npattn.functional import cross_entropy_vjp
    >>> model = nn.TransformerDecoder(65, 32, 2, 2, 64, 16, rng=np.random.default_rng(0))
    >>> ids = np.array([[1, 2, 3, 4]])
    >>> logits, pullback = model.vjp(ids[:, :-1])
    >>> loss, back_loss = cross_entropy_vjp(logits, ids[:, 1:])
    >>> _, grads = pullback(back_loss())
    >>> list(grads) == list(model.named_parameters())
    True
    """

    head: Linear | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        ff_dim: int,
        max_length: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: str = "learned",
        rotary: Rotary | None = None,
        norm: str = "layer",
        mlp: str = "gelu",
        norm_first: bool = True,
        bias: bool = True,
        tied: bool = True,
        eps: float | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        dropout_p: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        super().__init__(
            *(vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_length),
            position=position,
            embedding_scale=math.sqrt(embed_dim) if position == "sinusoidal" else 1.0,
            norm=norm,
            norm_first=norm_first,
            bias=bias,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            eps=eps,
            rotary=rotary,
            rng=rng,
            dtype=dtype,
            mlp=mlp,
            window=window,
            qk_norm=qk_norm,
            dropout_p=dropout_p,
            causal=True,
        )
        self.head = None
        if not tied:
            self.head = Linear(embed_dim, vocab_size, bias=False, rng=rng, dtype=dtype)
            self.head.weight = normal(rng, self.head.weight.shape, STD, dtype)

    def __call__(self, ids: Any, *, cache: Any = None, lengths: Any = None, seed: int | None = None) -> Array:
        """Logits of the next token at each position.

        Parameters
        ----------
        ids : int ndarray, shape (batch, length)
        cache : of ``new_cache``, optional
            ids continue what the cache holds; it grows by them. On any error it is as it was.
        lengths : int ndarray, shape (batch,), optional
            With a cache: how many ids of each row are real (the first ones). The others' logits mean nothing.
        seed : int, optional
            Switches dropout on.

        Returns
        -------
        logits : ndarray, shape (batch, length, vocab_size)
        """
        return self.logits(self.states(ids, cache=cache, lengths=lengths, seed=seed))

    def vjp(self, ids: Any, *, seed: int | None = None, checkpoint: bool = False) -> tuple[Array, Pullback]:
        """Logits and pullback dlogits -> (None, grads); ``checkpoint`` as for ``states_vjp``."""
        x, back_states = self.states_vjp(ids, seed=seed, checkpoint=checkpoint)
        if self.head is not None:
            logits, back_head = self.head.vjp(x)

            def pullback(dlogits: Array) -> tuple[None, Grads]:
                dx, head = back_head(dlogits)
                return None, {**back_states(dx)[1], **prefixed("head", head)}

            return logits, pullback

        logits, back_tied = F.linear_vjp(x, self.embedding.weight)

        def tied_pullback(dlogits: Array) -> tuple[None, Grads]:
            dx, dweight, _ = back_tied(dlogits)
            grads: Grads = back_states(dx)[1]
            grads["embedding.weight"] += dweight
            return None, grads

        return logits, tied_pullback

    def logits(self, states: Array) -> Array:
        """The head alone: (..., vocab_size) of states (..., embed_dim)."""
        if self.head is not None:
            return self.head(states)
        return F.linear(states, self.embedding.weight)

    def new_cache(self, batch: int, capacity: int, *, dtype: Any = None) -> Any:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens, one ``KVCache`` a layer.

        ``dtype`` is how keys and values are stored: None as the parameters, float16 or bfloat16 in half the
        memory of float32.
        """
        from npattn.cache import LayerCaches

        attention = self.blocks[0].attention
        return LayerCaches.kv(
            *(len(self.blocks), batch, attention.num_kv_heads, capacity, attention.head_dim),
            dtype=self.embedding.weight.dtype if dtype is None else dtype,
        )

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> Array:
        """Ids with new tokens appended; see ``npattn.nn.generate.generate`` for the keywords."""
        from npattn.nn.generate import generate

        return generate(self, ids, max_new_tokens, **options)

    def stream(self, ids: Any, max_new_tokens: int, **options: Any) -> Iterator[Array]:
        """The new tokens one (batch,) array at a time; see ``npattn.nn.generate.stream`` for the keywords."""
        from npattn.nn.generate import stream

        return stream(self, ids, max_new_tokens, **options)


__all__ = ["TransformerDecoder", "TransformerEncoder"]

"""TransformerEncoder, TransformerDecoder: embedding, positions, blocks, norm; the decoder has a head."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._dropout import fold_seed
from npattn._typing import Array, Grads, Pullback
from npattn.functional.dropout import dropout_vjp
from npattn.masks import Mask
from npattn.nn.attention import check_heads
from npattn.nn.block import TransformerBlock, make_norm
from npattn.nn.embedding import Embedding
from npattn.nn.init import Blank, generator, normal
from npattn.nn.layer import Layer, join, prefixed
from npattn.nn.linear import Linear
from npattn.nn.norm import LayerNorm, RMSNorm
from npattn.nn.position import LearnedPosition, Rotary, SinusoidalPosition

POSITIONS = ("learned", "rotary", "alibi", "sinusoidal")

#: Deviation of the initial embeddings and matrices (GPT-2).
STD = 0.02


@dataclass(init=False, eq=False, repr=False)
class TransformerStack(Layer):
    """What encoder and decoder share: ids -> embedding -> positions -> blocks -> norm.

    Attributes
    ----------
    embedding : Embedding
        Its vectors are multiplied by ``embedding_scale``.
    position : LearnedPosition or SinusoidalPosition, or None where the attention layers know positions
    blocks : tuple of TransformerBlock
    norm : the norm after the last block; None when norm_first=False
    max_length : how many positions there are; None: no limit
    """

    embedding: Embedding
    position: LearnedPosition | SinusoidalPosition | None
    blocks: tuple[TransformerBlock, ...]
    norm: LayerNorm | RMSNorm | None
    embedding_scale: float
    max_length: int | None
    dropout_p: float

    takes_seed = True

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        ff_dim: int,
        max_length: int,
        *,
        position: str,
        embedding_scale: float,
        norm: str,
        norm_first: bool,
        bias: bool,
        head_dim: int | None,
        num_kv_heads: int | None,
        eps: float | None,
        rotary: Rotary | None,
        rng: np.random.Generator,
        dtype: Any,
        **block_options: Any,
    ) -> None:
        if position not in POSITIONS:
            raise ValueError(f"position must be one of {', '.join(POSITIONS)}, got {position!r}")
        rng = generator(rng)
        head_dim = check_heads(embed_dim, num_heads, num_kv_heads or num_heads, head_dim)
        if position == "rotary" and rotary is None:
            rotary = Rotary(head_dim)
        self.embedding = Embedding(vocab_size, embed_dim, rng=rng, dtype=dtype, std=STD)
        self.position = None
        if position == "learned":
            self.position = LearnedPosition(max_length, embed_dim, rng=rng, dtype=dtype, std=STD)
        elif position == "sinusoidal":
            self.position = SinusoidalPosition(embed_dim, max_length)
        self.blocks = tuple(
            TransformerBlock(
                embed_dim,
                num_heads,
                ff_dim,
                norm=norm,
                norm_first=norm_first,
                bias=bias,
                eps=eps,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rotary=rotary if position == "rotary" else None,
                alibi=position == "alibi",
                rng=rng,
                dtype=dtype,
                **block_options,
            )
            for _ in range(num_layers)
        )
        self.norm = make_norm(norm, embed_dim, bias=bias, eps=eps, dtype=dtype) if norm_first else None
        self.embedding_scale = embedding_scale
        self.max_length = max_length if position in ("learned", "sinusoidal") else None
        self.dropout_p = self.blocks[0].dropout_p if self.blocks else 0.0
        for block in self.blocks:
            _initialise(block, rng, num_layers)

    def states(
        self,
        ids: Any,
        *,
        mask: Mask | Array | None = None,
        cache: Any = None,
        lengths: Any = None,
        seed: Any = None,
    ) -> Array:
        """The last block's output after the final norm, (batch, length, embed_dim). Holds one block."""
        ids = _check_ids(ids)
        if cache is None:
            x, _ = self._embed_vjp(ids, None, seed)
            for index, block in enumerate(self.blocks):
                x = block(x, mask=mask, seed=_place(seed, index))
        else:
            positions = _cached_positions(ids, cache, lengths)
            cache.check_room(ids.shape[-1], lengths)
            x, _ = self._embed_vjp(ids, positions, seed)
            with cache.guard():
                for index, (block, kept) in enumerate(zip(self.blocks, cache.layers, strict=True)):
                    options = {"positions": positions, "cache": kept, "lengths": lengths}
                    x = block(x, mask=mask, seed=_place(seed, index), **options)
        return x if self.norm is None else self.norm(x)

    def states_vjp(
        self, ids: Any, *, mask: Mask | Array | None = None, seed: int | None = None, checkpoint: bool = False
    ) -> tuple[Array, Pullback]:
        """``states`` and its pullback dy -> (None, grads).

        With ``checkpoint`` only each block's input is kept; the pullback runs the block again to get at its
        residuals: a third more work for a fraction of the memory, and the same bits.
        """
        ids = _check_ids(ids)
        x, back_embed = self._embed_vjp(ids, None, seed)
        backs: list[Pullback] = []
        for index, block in enumerate(self.blocks):
            options: dict[str, Any] = {"mask": mask, "seed": _place(seed, index)}
            if checkpoint:
                backs.append(_recomputed(block, x, options))
                x = block(x, **options)
            else:
                x, back = block.vjp(x, **options)
                backs.append(back)
        back_norm: Pullback | None = None
        if self.norm is not None:
            x, back_norm = self.norm.vjp(x)

        def pullback(dy: Array) -> tuple[None, Grads]:
            norm: Grads = {}
            if back_norm is not None:
                dy, norm = back_norm(dy)
            blocks: list[Grads] = []
            for back in reversed(backs):
                dy, grads = back(dy)
                blocks.append(grads)
            named = ((f"blocks.{index}", grads) for index, grads in enumerate(reversed(blocks)))
            return None, {**back_embed(dy), **join(*named), **prefixed("norm", norm)}

        return x, pullback

    def weights(self, ids: Any, mask: Mask | Array | None = None) -> list[Array]:
        """Every layer's attention weights, each (batch, num_heads, length, length).

        Computed for this call alone: no other call forms or keeps them. Memory is quadratic in the length;
        ``attention_stats`` needs none of it.
        """
        return [block.weights(x, mask=mask) for block, x in self._inputs(ids, mask)]

    def attention_stats(self, ids: Any, top_k: int = 0, mask: Mask | Array | None = None) -> list[Any]:
        """Every layer's ``npattn.attention_stats``, without ever holding the weights."""
        return [block.attention_stats(x, mask=mask, top_k=top_k) for block, x in self._inputs(ids, mask)]

    def _inputs(self, ids: Any, mask: Mask | Array | None) -> Iterator[tuple[TransformerBlock, Array]]:
        """Each block with the input it gets."""
        x, _ = self._embed_vjp(_check_ids(ids), None, None)
        for block in self.blocks:
            yield block, x
            x = block(x, mask=mask)

    def _embed_vjp(self, ids: Array, positions: Any, seed: int | None) -> tuple[Array, Pullback]:
        """``dropout(position(scale · embedding(ids)))`` and its pullback dx -> grads."""
        x, back_embedding = self.embedding.vjp(ids)
        scale = self.embedding_scale
        if scale != 1.0:
            x *= x.dtype.type(scale)
        back_position: Pullback | None = None
        if self.position is not None:
            x, back_position = self.position.vjp(x, positions)
        back_dropout: Pullback | None = None
        if seed is not None and self.dropout_p > 0.0:
            x, back_dropout = dropout_vjp(x, self.dropout_p, fold_seed(seed, len(self.blocks)))

        def pullback(dx: Array) -> Grads:
            position: Grads = {}
            if back_dropout is not None:
                dx = back_dropout(dx)
            if back_position is not None:
                dx, position = back_position(dx)
            embedding = back_embedding(dx)[1]
            if scale != 1.0:
                embedding["weight"] *= dx.dtype.type(scale)
            return {**prefixed("embedding", embedding), **prefixed("position", position)}

        return x, pullback


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

    def new_cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens, one ``KVCache`` a layer."""
        from npattn.cache import LayerCaches

        attention = self.blocks[0].attention
        return LayerCaches.kv(
            *(len(self.blocks), batch, attention.num_kv_heads, capacity, attention.head_dim),
            dtype=self.embedding.weight.dtype,
        )

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> Array:
        """Ids with new tokens appended; see ``npattn.nn.generate.generate`` for the keywords."""
        from npattn.nn.generate import generate

        return generate(self, ids, max_new_tokens, **options)

    def stream(self, ids: Any, max_new_tokens: int, **options: Any) -> Iterator[Array]:
        """The new tokens one (batch,) array at a time; see ``npattn.nn.generate.stream`` for the keywords."""
        from npattn.nn.generate import stream

        return stream(self, ids, max_new_tokens, **options)


def _initialise(block: TransformerBlock, rng: np.random.Generator, num_layers: int) -> None:
    """GPT-2's initial values: see TransformerDecoder's notes."""
    if isinstance(rng, Blank):
        return
    residual = 1.0 / math.sqrt(2.0 * num_layers)
    for name, array in block.named_parameters().items():
        if array.ndim == 2:
            ends_in_residual = name in ("attention.out.weight", "mlp.down.weight")
            array[...] = normal(rng, array.shape, STD * (residual if ends_in_residual else 1.0), array.dtype)
        elif name.endswith("bias"):
            array[...] = 0.0


def _recomputed(block: TransformerBlock, x: Array, options: dict[str, Any]) -> Pullback:
    """The block's pullback at x, keeping nothing but x."""
    return lambda dy: block.vjp(x, **options)[1](dy)


def _place(seed: int | None, index: int) -> int | None:
    return None if seed is None else fold_seed(seed, index)


def _cached_positions(ids: Array, cache: Any, lengths: Any) -> Array:
    """Where the ids stand behind what the cache holds, (batch, length); padding rows repeat the last one."""
    batch, kept = (1 if ids.ndim == 1 else len(ids)), len(cache.lengths)
    if batch != kept:
        raise ValueError(f"ids of shape {tuple(ids.shape)} do not fit a cache of {kept} sequences (axis 0)")
    steps = np.arange(ids.shape[-1])
    if lengths is not None:
        steps = np.minimum(steps, np.maximum(np.asarray(lengths)[:, None] - 1, 0))
    positions: Array = np.asarray(cache.lengths)[:, None] + steps
    return positions


def _check_ids(ids: Any) -> Array:
    """``ids`` as an integer array with a length axis."""
    ids = ids if hasattr(ids, "dtype") else np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integer token numbers, got dtype {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids must be (batch, length), or (length,) for one sequence; got {ids.shape}")
    return ids  # type: ignore[no-any-return]


__all__ = ["TransformerDecoder", "TransformerEncoder", "TransformerStack"]

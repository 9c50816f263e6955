"""TransformerStack: what encoder and decoder share, from ids to the states behind the last norm."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._dropout import fold_seed
from npattn._typing import Array, Grads, Pullback
from npattn.functional.dropout import dropout_vjp
from npattn.masks import Mask
from npattn.nn.attention import check_heads
from npattn.nn.block import TransformerBlock, make_norm
from npattn.nn.embedding import Embedding
from npattn.nn.init import Blank, generator, normal
from npattn.nn.layer import Layer, join, prefixed
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
    if not hasattr(cache, "guard"):
        raise TypeError(
            f"cache must hold the caches of all layers, as new_cache(batch, capacity) makes it, got "
            f"{type(cache).__name__}; npattn.cache.LayerCaches joins caches made one by one"
        )
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


__all__ = ["STD", "TransformerStack"]

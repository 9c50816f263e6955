"""Bert: the encoder of Devlin et al., BERT, 2019, and sentence embeddings by it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._arrays import array_module, to_numpy
from npattn._typing import Array
from npattn.masks import Documents, Mask
from npattn.models._folder import Config, Names, as_it_is, both, fill, read_tensors
from npattn.nn import Embedding, Layer, LayerNorm, LearnedPosition, TransformerBlock
from npattn.nn.init import BLANK

#: Tokens that go through the blocks together in ``embed``: enough for large matmuls, few for the cache.
PACK_TOKENS = 4096


@dataclass(init=False, eq=False, repr=False)
class Bert(Layer):
    """BERT: every token attends to every token; layer norm after each branch, exact GELU.

    Parameters
    ----------
    vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_length : int
    num_segments : int, default 2
    activation : {"gelu", "gelu_tanh", "silu"}
    eps : float, default 1e-12
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    embedding, segment : Embedding
    position : LearnedPosition
    embedding_norm : LayerNorm
    blocks : tuple of TransformerBlock

    Examples
    --------
    >>> bert = Bert(100, 16, 2, 3, 32, 64, rng=np.random.default_rng(0))
    >>> bert(np.array([[1, 2, 3], [4, 5, 6]])).shape
    (2, 3, 16)
    >>> bert.embed(np.array([[1, 2, 3], [4, 5, 0]]), lengths=[3, 2]).shape
    (2, 16)
    """

    embedding: Embedding
    position: LearnedPosition
    segment: Embedding
    embedding_norm: LayerNorm
    blocks: tuple[TransformerBlock, ...]

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        ff_dim: int,
        max_length: int,
        *,
        num_segments: int = 2,
        activation: str = "gelu",
        eps: float = 1e-12,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        self.embedding = Embedding(vocab_size, embed_dim, rng=rng, dtype=dtype, std=0.02)
        self.position = LearnedPosition(max_length, embed_dim, rng=rng, dtype=dtype)
        self.segment = Embedding(num_segments, embed_dim, rng=rng, dtype=dtype, std=0.02)
        self.embedding_norm = LayerNorm(embed_dim, eps=eps, dtype=dtype)
        self.blocks = tuple(
            TransformerBlock(
                embed_dim,
                num_heads,
                ff_dim,
                norm_first=False,
                mlp=activation,
                eps=eps,
                rng=rng,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> "Bert":
        """Read a Hugging Face folder.

        Parameters
        ----------
        folder : str or Path
            With config.json and the weights in ``*.safetensors``, in any float dtype. A leading ``bert.`` of
            their names is optional; tensors without a use (``pooler.*``, ``position_ids``) are passed over.
        dtype : dtype
            What the parameters are converted to.

        Returns
        -------
        model : Bert

        Raises
        ------
        ValueError
            Another architecture, fields or tensors that are missing (all of them named) or do not fit.
        FileNotFoundError
            No config.json, or no ``*.safetensors``.
        """
        needed = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_hidden_layers",
        )
        config = Config(folder, "bert", (*needed, "max_position_embeddings"))
        config.refuse(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        model = cls(
            config["vocab_size"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_hidden_layers"],
            config["intermediate_size"],
            config["max_position_embeddings"],
            num_segments=config.get("type_vocab_size", 2),
            activation=config.activation("hidden_act", "gelu"),
            eps=config.get("layer_norm_eps", 1e-12),
            rng=BLANK,
            dtype=dtype,
        )
        # the oldest files call a norm's scale and shift gamma and beta
        tensors = {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            ): array
            for name, array in read_tensors(folder, "bert.").items()
        }
        fill(model, tensors, _names(config["num_hidden_layers"]), folder)
        return model

    def __call__(self, ids: Any, *, segments: Any = None, mask: Mask | Array | None = None) -> Array:
        """Encode.

        Parameters
        ----------
        ids : (batch, length) ints
        segments : (batch, length) ints, optional
            Which of the two texts each token is of; None: the first.
        mask : Mask or bool array, optional
            ``masks.Padding(lengths)`` for sequences of different lengths; a bool array of ids' shape says
            which tokens are real; any other broadcasts right-aligned to (batch, num_heads, length, length).

        Returns
        -------
        states : (batch, length, embed_dim)
            Those of padding mean nothing.

        Raises
        ------
        ValueError
            More tokens than positions, ids or segments out of range, a mask of ids' shape when that is square
            and so could mean either.
        """
        ids = np.asarray(ids) if not hasattr(ids, "dtype") else ids
        x = self._embed(ids, None, segments)
        mask = _keys(mask, ids.shape)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x

    def embed(self, ids: Any, lengths: Any, pooling: str = "mean", normalize: bool = True) -> Array:
        """One vector for each text.

        Parameters
        ----------
        ids : (batch, length) ints
            The first ``lengths[b]`` of row b are real.
        lengths : (batch,) ints, at least 1
        pooling : {"mean", "cls"}
            The mean over a text's tokens, or the first token's state.
        normalize : bool, default True
            Scale to length 1, so that a scalar product is the cosine similarity.

        Returns
        -------
        vectors : (batch, embed_dim)

        Notes
        -----
        Padding costs nothing: the real tokens of all texts, sorted by length, go through the blocks as packed
        sequences of up to ``PACK_TOKENS`` tokens, and attention sees a `Documents` mask.
        """
        if pooling not in ("mean", "cls"):
            raise ValueError(f'pooling must be "mean" or "cls", got {pooling!r}')
        ids, lengths = to_numpy(ids), to_numpy(lengths)
        if ids.ndim != 2 or lengths.shape != ids.shape[:1] or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"ids must be (batch, length), lengths (batch,) ints: {ids.shape}, {lengths.shape}"
            )
        if ((lengths < 1) | (lengths > ids.shape[1])).any():
            raise ValueError(f"lengths must be from 1 to {ids.shape[1]}, got {lengths.tolist()}")
        weight = self.embedding.weight
        xp = array_module(weight)
        vectors: Array = xp.empty((len(ids), weight.shape[1]), weight.dtype)
        order = np.argsort(lengths, kind="stable")
        for texts in _packs(order, lengths):
            counts = lengths[texts]
            starts = np.cumsum(counts) - counts
            position = np.arange(counts.sum()) - np.repeat(starts, counts)
            packed, position = ids[np.repeat(texts, counts), position][None], xp.asarray(position)[None]
            x = self._embed(xp.asarray(packed), position, None)
            mask = Documents(counts)
            for block in self.blocks:
                x = block(x, mask=mask)
            if pooling == "cls":
                vectors[xp.asarray(texts)] = x[0, xp.asarray(starts)]
            else:
                for text, start, count in zip(texts.tolist(), starts.tolist(), counts.tolist(), strict=True):
                    vectors[text] = x[0, start : start + count].mean(axis=0)
        if normalize:
            vectors /= xp.maximum(xp.sqrt((vectors**2).sum(axis=1, keepdims=True)), 1e-12)
        return vectors

    def weights(self, ids: Any, mask: Mask | Array | None = None) -> list[Array]:
        """Every layer's attention weights, each (batch, num_heads, length, length)."""
        return [block.weights(x, mask=mask) for block, x, mask in self._inputs(ids, mask)]

    def attention_stats(self, ids: Any, top_k: int = 0, mask: Mask | Array | None = None) -> list[Any]:
        """Every layer's ``npattn.attention_stats``, without ever holding the weights."""
        return [
            block.attention_stats(x, mask=mask, top_k=top_k) for block, x, mask in self._inputs(ids, mask)
        ]

    def _inputs(self, ids: Any, mask: Mask | Array | None) -> Iterator[tuple[TransformerBlock, Array, Any]]:
        ids = np.asarray(ids) if not hasattr(ids, "dtype") else ids
        x, mask = self._embed(ids, None, None), _keys(mask, ids.shape)
        for block in self.blocks:
            yield block, x, mask
            x = block(x, mask=mask)

    def _embed(self, ids: Array, positions: Any, segments: Any) -> Array:
        if ids.ndim != 2:
            raise ValueError(f"ids must be (batch, length), got shape {ids.shape}; one text is ids[None]")
        x = self.position(self.embedding(ids), positions)
        if segments is None:
            x += self.segment.weight[0]
        else:
            segments = array_module(ids).asarray(segments)
            if segments.shape != ids.shape:
                raise ValueError(f"segments {segments.shape} must have the shape of ids {ids.shape}")
            x += self.segment(segments)
        return self.embedding_norm(x)


def _keys(mask: Mask | Array | None, shape: tuple[int, ...]) -> Mask | Array | None:
    """A bool array of ids' shape as one over keys, (batch, 1, 1, length)."""
    if mask is None or isinstance(mask, Mask) or getattr(mask, "shape", None) != shape:
        return mask
    if shape[0] == shape[1] > 1:
        raise ValueError(
            f"a mask of shape {shape} could be (batch, length) or (len_q, len_k); write "
            "mask[:, None, None, :] for real tokens, mask[None, None] for pairs, or masks.Padding(lengths)"
        )
    return mask[:, None, None, :]


def _packs(order: Array, lengths: Array) -> Iterator[Array]:
    """``order`` cut into pieces of at most ``PACK_TOKENS`` tokens, or one text."""
    start, tokens = 0, 0
    for index, text in enumerate(order):
        if tokens and tokens + lengths[text] > PACK_TOKENS:
            yield order[start:index]
            start, tokens = index, 0
        tokens += lengths[text]
    if start < len(order):
        yield order[start:]


def _names(num_layers: int) -> Names:
    names: Names = {
        f"{own}.weight": (f"embeddings.{file_name}_embeddings.weight", as_it_is)
        for own, file_name in (("embedding", "word"), ("position", "position"), ("segment", "token_type"))
    }
    names |= both("embedding_norm", "embeddings.LayerNorm")
    for n in range(num_layers):
        block, layer = f"blocks.{n}", f"encoder.layer.{n}"
        names |= both(f"{block}.attention_norm", f"{layer}.attention.output.LayerNorm")
        for which in ("query", "key", "value"):
            names |= both(f"{block}.attention.{which}", f"{layer}.attention.self.{which}")
        names |= both(f"{block}.attention.out", f"{layer}.attention.output.dense")
        names |= both(f"{block}.mlp_norm", f"{layer}.output.LayerNorm")
        names |= both(f"{block}.mlp.up", f"{layer}.intermediate.dense")
        names |= both(f"{block}.mlp.down", f"{layer}.output.dense")
    return names

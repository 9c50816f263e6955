"""LayerCaches: one cache per layer of a model, which move forward together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from npattn._typing import Array
from npattn.cache.kv import KVCache


class LayerCache(Protocol):
    """What a layer asks of a cache: `KVCache`, `RollingKVCache` and ``PagedKVCache.batch`` have it."""

    @property
    def lengths(self) -> Array:
        """(batch,) int64: the tokens seen, which are also the absolute positions of the next ones."""

    @property
    def bias_positions(self) -> Array:
        """(batch, seen) int64: the absolute position of each column of a bias, -1 where there is none."""

    def check_room(self, new: int, lengths: Any = None) -> None:
        """Raise CacheFullError when ``append`` would."""

    def append(self, key: Array, value: Array, lengths: Any = None) -> None:
        """Store the next rows; the first ``lengths[b]`` of them are real."""

    def attention(
        self, query: Array, *, query_lengths: Any = None, window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of the newest tokens."""

    def undo(self) -> None:
        """Take back the last append."""


class LayerCaches:
    """The caches of all layers of a model: ``lengths`` is one for all of them.

    Parameters
    ----------
    layers : sequence of layer caches
        All with the same batch and lengths.

    Examples
    --------
    >>> caches = LayerCaches.kv(2, batch=1, heads_kv=4, capacity=16, head_dim=8)
    >>> len(caches), caches.lengths.tolist(), caches.capacity
    (2, [0], 16)
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        if not layers:
            raise ValueError("LayerCaches needs the cache of at least one layer")
        for index, layer in enumerate(layers):
            if not np.array_equal(layer.lengths, layers[0].lengths):
                raise ValueError(
                    f"the cache of layer {index} has lengths {layer.lengths.tolist()}, "
                    f"that of layer 0 {layers[0].lengths.tolist()}; a model's caches move together"
                )
        self.layers = tuple(layers)

    @classmethod
    def kv(
        cls,
        num_layers: int,
        batch: int,
        heads_kv: int,
        capacity: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
    ) -> "LayerCaches":
        """A `KVCache` for each of ``num_layers`` layers."""
        return cls(
            [KVCache(batch, heads_kv, capacity, head_dim, head_dim_v, dtype) for _ in range(num_layers)]
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

    @property
    def lengths(self) -> Array:
        """Tokens seen by each sequence, (batch,) int64."""
        return self.layers[0].lengths

    @property
    def capacity(self) -> int | None:
        """The smallest capacity of the layers; None when none has one."""
        found = [getattr(layer, "capacity", None) for layer in self.layers]
        return min((capacity for capacity in found if capacity is not None), default=None)

    def check_room(self, new: int, lengths: Any = None) -> None:
        """Raise CacheFullError when some layer has no room for ``new`` more tokens; nothing is changed."""
        for layer in self.layers:
            layer.check_room(new, lengths)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """One step of the model: on any error or interruption inside, every layer is as it was before.

        Holds for a block that appends at most once to each layer.
        """
        before = self.lengths
        try:
            yield
        except BaseException:
            for layer in self.layers:
                if not np.array_equal(layer.lengths, before):
                    layer.undo()
            raise

    def reset(self) -> None:
        """Forget everything in every layer."""
        for layer in self.layers:
            layer.reset()  # type: ignore[attr-defined]

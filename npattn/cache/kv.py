"""KVCache: every token's key and value, in one growing array per side."""

from typing import Any, Final

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.cache._checks import (
    CacheFullError,
    counts,
    new_rows,
    own_options,
    query_shape,
    size,
    storage_dtype,
)
from npattn.functional import attention
from npattn.masks import Causal, Mask, Padding, Window

FIRST_ROWS: Final = 64  # allocated at the start; doubled from there


class KVCache:
    """Keys and values of up to ``capacity`` tokens for each sequence of a batch.

    Parameters
    ----------
    batch, heads_kv, capacity, head_dim : int
        ``capacity`` is the most tokens one sequence may hold.
    head_dim_v : int, optional
        Size of a value row; ``head_dim`` by default.
    dtype : dtype
        How rows are stored: float16 or bfloat16 halve the memory and cost their rounding.

    Attributes
    ----------
    lengths : (batch,) int64
        Tokens seen by each sequence.
    positions : (batch, longest) int64
        Absolute position of each kept row, -1 where a shorter sequence has none.

    Notes
    -----
    Memory follows the longest sequence: rows are allocated by doubling up to ``capacity``, so an append costs
    O(new) amortised. The arrays given to ``attention`` are views; rows beyond a sequence's length are never
    looked at. Not for use from two threads at once; give each its own cache.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> key, value = rng.standard_normal((2, 1, 4, 10, 8))
    >>> cache = KVCache(1, 4, 32, 8, dtype=np.float64)
    >>> for t in range(10):
    ...     cache.append(key[:, :, t : t + 1], value[:, :, t : t + 1])
    >>> query = rng.standard_normal((1, 8, 3, 8))          # two query heads read one key head
    >>> out = cache.attention(query)                       # the last three tokens, causal
    >>> bool(np.allclose(out, attention(query, key, value, mask=Causal())))
    True
    """

    def __init__(
        self,
        batch: int,
        heads_kv: int,
        capacity: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.batch = size("batch", batch, 0)
        self.heads_kv = size("heads_kv", heads_kv)
        self.capacity = size("capacity", capacity, 0)
        self.head_dim = size("head_dim", head_dim)
        self.head_dim_v = self.head_dim if head_dim_v is None else size("head_dim_v", head_dim_v)
        self.dtype = storage_dtype(dtype)
        rows = min(self.capacity, FIRST_ROWS)
        self._key: Array = np.empty((self.batch, self.heads_kv, rows, self.head_dim), self.dtype)
        self._value: Array = np.empty((self.batch, self.heads_kv, rows, self.head_dim_v), self.dtype)
        self._lengths = np.zeros(self.batch, np.int64)
        self._before = self._lengths

    @property
    def lengths(self) -> Array:
        """Tokens seen by each sequence, (batch,) int64; a copy."""
        return self._lengths.copy()

    @property
    def positions(self) -> Array:
        """Absolute position of each row of ``arrays()``, (batch, longest) int64; -1 where there is none."""
        index = np.arange(self._longest())
        return np.where(index < self._lengths[:, None], index, -1)

    @property
    def bias_positions(self) -> Array:
        """Absolute position of each column of a bias: ``positions``."""
        return self.positions

    def arrays(self) -> tuple[Array, Array]:
        """The kept (key, value), read-only views (batch, heads_kv, longest, ...); see ``positions``."""
        views = self._key[:, :, : self._longest()], self._value[:, :, : self._longest()]
        for view in views:
            if isinstance(view, np.ndarray):
                view.flags.writeable = False
        return views

    def check_room(self, new: int, lengths: Any = None) -> None:
        """Raise CacheFullError when ``append`` of ``new`` tokens would."""
        added = new if lengths is None else counts("lengths", lengths, self.batch, new)
        self._check_longest(_largest(self._lengths + added))

    def _check_longest(self, longest: int) -> None:
        if longest > self.capacity:
            raise CacheFullError(
                f"a sequence would reach {longest} tokens; the cache's capacity is {self.capacity}"
            )

    def append(self, key: Array, value: Array, lengths: Any = None) -> None:
        """Store the rows of the next tokens.

        Parameters
        ----------
        key, value : (batch, heads_kv, new, head_dim), (batch, heads_kv, new, head_dim_v)
            Converted to the cache's dtype.
        lengths : (batch,) ints, optional
            How many of the new rows of each sequence are real, counted from the first; the rest is padding
            and is not stored. None: all.

        Raises
        ------
        CacheFullError
            When a sequence would exceed the capacity; nothing is changed.
        ValueError, TypeError
            For other shapes or dtypes; nothing is changed.
        """
        lead = (self.batch, self.heads_kv, None)
        new = new_rows(key, value, (*lead, self.head_dim), (*lead, self.head_dim_v))
        added = new if lengths is None else counts("lengths", lengths, self.batch, new)
        after = self._lengths + added
        longest = _largest(after)
        self._check_longest(longest)
        self._reserve(longest, array_module(key, value))
        # rows beyond the lengths are invisible, so an interruption up to the last line changes nothing
        if lengths is None and self._is_even():
            rows = slice(longest - new, longest)
            self._key[:, :, rows] = key
            self._value[:, :, rows] = value
        else:
            for b, (start, stop) in enumerate(zip(self._lengths.tolist(), after.tolist(), strict=True)):
                self._key[b, :, start:stop] = key[b, :, : stop - start]
                self._value[b, :, start:stop] = value[b, :, : stop - start]
        self._lengths, self._before = after, self._lengths

    def attention(
        self, query: Array, *, query_lengths: Any = None, window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of the newest tokens over everything kept.

        Parameters
        ----------
        query : (batch, heads_q, len_q, head_dim)
            Rows of the last tokens of each sequence, which are already appended.
        query_lengths : (batch,) ints, optional
            How many of the rows are real, counted from the first: row i of sequence b stands at position
            ``lengths[b] - query_lengths[b] + i``; the rest is padding and gives zeros. None: all len_q.
        window : int, optional
            See at most this many keys to the left of oneself, as ``masks.Window(window)``.
        **options
            Those of `npattn.attention` but mask; the last axis of a bias is the absolute position.

        Returns
        -------
        out : (batch, heads_q, len_q, head_dim_v), or (out, lse) with ``return_lse=True``.
        """
        own_options(options, merged=False)
        len_q = query_shape(query, self.batch, 4, self.heads_kv, self.head_dim)
        longest = self._longest()
        key, value = self._key[:, :, :longest], self._value[:, :, :longest]
        if len_q == 1 and query_lengths is None and window is None and self._is_even():
            return attention(query, key, value, **options)  # the newest token sees everything
        rows = counts("query_lengths", query_lengths, self.batch, len_q)
        mask = causal_mask(self._lengths, rows, len_q, window)
        return attention(query, key, value, mask=mask, **options)

    def truncate(self, lengths: Any) -> None:
        """Forget all but the first ``lengths`` tokens of each sequence."""
        kept = counts("lengths", lengths, self.batch, self._longest())
        if (kept > self._lengths).any():
            raise ValueError(f"lengths {kept.tolist()} exceed what is kept, {self._lengths.tolist()}")
        self._lengths = self._before = kept

    def undo(self) -> None:
        """Take back the last append (one step)."""
        self._lengths = self._before

    def reset(self) -> None:
        """Forget everything; the memory is kept for reuse."""
        self._lengths = self._before = np.zeros(self.batch, np.int64)

    def _is_even(self) -> bool:
        """Whether all sequences, at least one, have one length."""
        return self.batch == 1 or (self.batch > 0 and bool((self._lengths == self._lengths[0]).all()))

    def _longest(self) -> int:
        return _largest(self._lengths)

    def _reserve(self, rows: int, xp: Any) -> None:
        """Room for ``rows`` tokens, on the device of the arrays that come."""
        allocated = self._key.shape[2]
        if rows <= allocated and (array_module(self._key) is xp or not rows):
            return
        kept = self._longest()
        array_module(*((self._key,) if kept else ()), xp.empty(0))  # refuses to mix devices
        wanted = allocated if rows <= allocated else min(self.capacity, max(2 * allocated, rows))
        grown = []
        for old in (self._key, self._value):
            array = xp.empty((*old.shape[:2], wanted, old.shape[3]), self.dtype)
            if kept:
                array[:, :, :kept] = old[:, :, :kept]
            grown.append(array)
        self._key, self._value = grown


def _largest(lengths: Array) -> int:
    """The largest of ``lengths``, 0 of none."""
    return int(lengths[0]) if len(lengths) == 1 else int(lengths.max(initial=0))


def causal_mask(lengths: Array, rows: Array, len_q: int, window: int | None) -> Mask | None:
    """What the last ``rows`` tokens of sequences of ``lengths`` tokens may see; None: everything."""
    if not len(lengths):
        return None
    same = bool((lengths == lengths[0]).all() and (rows == rows[0]).all())
    if len_q == 1 and same and rows[0] == 1 and window is None:
        return None
    offset = int(lengths[0] - rows[0]) if same else lengths - rows
    mask: Mask = Causal(offset) if window is None else Window(size("window", window, 0), 0, offset)
    # A padding row would stand beyond the last token, where a causal mask would show it what is not there
    return mask if bool((rows == len_q).all()) else mask & Padding(lengths, rows)

"""RollingKVCache: the first few tokens and the last many, in memory that never grows.

Position p < sinks lives in slot p for ever; a later one in slot ``sinks + (p - sinks) % ring``. For one new
token at a time the ring has ``window`` slots, so that a query sees exactly what is stored, in whatever order
it lies. While ``new`` tokens arrive at once the ring has ``window + new - 1`` slots, because the first of
them still sees keys which the last no longer does.
"""

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.cache._checks import counts, joined, new_rows, own_options, query_shape, size, storage_dtype
from npattn.functional import attention
from npattn.masks import Causal, Dense, Mask, Padding, Window


class _State(NamedTuple):
    key: Array  # (batch, heads_kv, sinks + ring, head_dim)
    value: Array
    ring: int  # slots behind the sinks
    lengths: Array  # (batch,): tokens seen
    first: Array  # (batch,): oldest position in the ring, at least sinks


class RollingKVCache:
    """Keys and values of the first ``sinks`` and the last ``window`` tokens of each sequence.

    Parameters
    ----------
    window : int
        How many of the newest tokens are kept. A query sees itself and the ``window - 1`` before it.
    sinks : int
        How many of the very first tokens are kept for ever ("attention sinks").
    batch, heads_kv, head_dim, head_dim_v, dtype
        As for `KVCache`.

    Attributes
    ----------
    lengths : (batch,) int64
        Tokens seen, evicted ones included: the absolute position of the next token.
    positions : (batch, kept) int64
        Absolute positions of the kept rows, ascending; -1 where a shorter sequence has none.

    Notes
    -----
    Positions are absolute, also after eviction: rotate keys by them before ``append``. Equal to attention
    under ``Causal() & (Window(window - 1) | Prefix(sinks))`` over all tokens ever seen, for the queries of
    the last append; a query further back sees what is still kept. Decoding one token reads the slots as they
    lie, without a copy.

    References
    ----------
    G. Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023. There positions are
    counted inside the cache; here they stay absolute.

    Examples
    --------
    >>> cache = RollingKVCache(3, sinks=1, batch=1, heads_kv=1, head_dim=2)
    >>> for t in range(9):
    ...     cache.append(np.full((1, 1, 1, 2), t, np.float32), np.full((1, 1, 1, 2), t, np.float32))
    >>> cache.lengths.tolist(), cache.positions.tolist()
    ([9], [[0, 6, 7, 8]])
    """

    def __init__(
        self,
        window: int,
        sinks: int = 0,
        *,
        batch: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.window = size("window", window)
        self.sinks = size("sinks", sinks, 0)
        self.batch = size("batch", batch, 0)
        self.heads_kv = size("heads_kv", heads_kv)
        self.head_dim = size("head_dim", head_dim)
        self.head_dim_v = self.head_dim if head_dim_v is None else size("head_dim_v", head_dim_v)
        self.dtype = storage_dtype(dtype)
        self._now = self._empty()
        self._before = self._now  # what undo returns to,
        self._evicted: tuple[Array, Array, Array] | None = (
            None  # and the slots written since: slots, key, value
        )

    @property
    def lengths(self) -> Array:
        """Tokens seen by each sequence, (batch,) int64; a copy."""
        found: Array = self._now.lengths.copy()
        return found

    @property
    def positions(self) -> Array:
        """Absolute position of each row of ``arrays()``, (batch, kept) int64; -1 where there is none."""
        return self._kept_from(np.maximum(self._now.first, self._now.lengths - self.window))

    @property
    def bias_positions(self) -> Array:
        """Absolute position of each column of a bias, (batch, seen) int64; -1 where there is none.

        ``positions``, and the rows before them that only the first queries of a long append still see.
        """
        return self._kept_from(self._now.first)

    def _kept_from(self, first: Array) -> Array:
        """The positions of the sinks and of the tail from ``first`` (batch,) on, real ones in front."""
        tail = self._tail_positions(first)
        head = np.broadcast_to(np.arange(self.sinks), (self.batch, self.sinks))
        both = np.concatenate([np.where(head < self._now.lengths[:, None], head, -1), tail], axis=1)
        # real ones to the front, in order: a short sequence may have gaps between its sinks and its tail
        order = np.argsort(both < 0, axis=1, kind="stable")
        both = np.take_along_axis(both, order, axis=1)
        most = int((both >= 0).sum(axis=1).max(initial=0))
        return both[:, :most]

    def arrays(self) -> tuple[Array, Array]:
        """The kept (key, value) in the order of ``positions``; copies."""
        return self._gather(self.positions)

    def check_room(self, new: int, lengths: Any = None) -> None:
        """Any number of tokens fits: the oldest give way."""

    def append(self, key: Array, value: Array, lengths: Any = None) -> None:
        """Store the rows of the next tokens; the oldest give way.

        Parameters and errors are those of `KVCache.append`, but nothing is ever too much.
        """
        lead = (self.batch, self.heads_kv, None)
        new = new_rows(key, value, (*lead, self.head_dim), (*lead, self.head_dim_v))
        added = counts("lengths", lengths, self.batch, new)
        ring = self.window + max(new, 1) - 1  # at least new: no slot is written twice
        now = self._now
        xp = array_module(key, value, *((now.key,) if now.lengths.any() else ()))
        if ring == now.ring and array_module(now.key) is xp:
            target, evicted = now, self._slots_used_next(added)
        else:
            target, evicted = self._laid_out_anew(ring, xp), None
        try:
            for b, (start, count) in enumerate(zip(now.lengths.tolist(), added.tolist(), strict=True)):
                slots = self._slots(np.arange(start, start + count), ring)
                target.key[b, :, slots] = key[b, :, :count].swapaxes(0, 1)
                target.value[b, :, slots] = value[b, :, :count].swapaxes(0, 1)
        except BaseException:
            self._restore(now, evicted)
            raise
        lengths = now.lengths + added
        self._before, self._evicted = now, evicted
        self._now = target._replace(lengths=lengths, first=np.maximum(target.first, lengths - ring))

    def attention(
        self, query: Array, *, query_lengths: Any = None, window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of the newest tokens over their window and the sinks.

        Parameters
        ----------
        query : (batch, heads_q, len_q, head_dim)
            Rows of the last tokens of each sequence, which are already appended.
        query_lengths : (batch,) ints, optional
            As for `KVCache.attention`.
        window : int, optional
            None, or the layer's own ``masks.Window(window)``, which the cache must be able to serve:
            ``window < cache.window``; the sinks are then seen beside it.
        **options
            Those of `npattn.attention` but mask and dropout; the last axis of a bias follows
            ``bias_positions`` or, for one query row, ``positions``.

        Returns
        -------
        out : (batch, heads_q, len_q, head_dim_v), or (out, lse) with ``return_lse=True``.
        """
        own_options(options, merged=True)
        len_q = query_shape(query, self.batch, 4, self.heads_kv, self.head_dim)
        if not self.batch:
            return attention(query, self._now.key, self._now.value, **options)
        rows = counts("query_lengths", query_lengths, self.batch, len_q)
        reach = self.window - 1 if window is None else size("window", window, 0)
        if reach >= self.window:
            raise ValueError(f"the layer's window {window} reaches beyond the {self.window} kept tokens")
        if options.get("bias") is not None:
            return self._attend_with_bias(query, rows, reach, options)
        filled = np.minimum(self._now.lengths, self.sinks + self._now.ring)
        if len_q == 1 and (rows == 1).all() and reach + 1 == self._now.ring:
            # every filled slot is visible, in whatever order: softmax does not care
            most = int(filled.max(initial=0))
            key, value = self._now.key[:, :, :most], self._now.value[:, :, :most]
            everything = bool((filled == most).all())
            return attention(query, key, value, mask=None if everything else Padding(filled), **options)
        return self._attend_in_order(query, rows, reach, options)

    def undo(self) -> None:
        """Take back the last append (one step), evicted rows included."""
        self._restore(self._before, self._evicted)
        self._evicted = None

    def reset(self) -> None:
        """Forget everything."""
        self._now = self._empty()
        self._before = self._now
        self._evicted = None

    def _attend_with_bias(self, query: Array, rows: Array, reach: int, options: dict[str, Any]) -> Any:
        """What the bias has columns for, gathered, under the definition of the mask."""
        columns, len_q = options["bias"].shape[-1], query.shape[2]
        positions = self.positions
        if len_q > 1 or columns not in (1, positions.shape[1]):
            positions = self.bias_positions
        if columns not in (1, positions.shape[1]):
            raise ValueError(
                f"the last axis of bias has {columns} columns; it must follow bias_positions, which has "
                f"{positions.shape[1]}"
            )
        at = self._now.lengths[:, None] - rows[:, None] + np.arange(len_q)  # (batch, len_q)
        at = np.where(np.arange(len_q) < rows[:, None], at, -1)[:, :, None]  # a padding row sees nothing
        keys = positions[:, None]
        visible = (keys >= 0) & (keys <= at) & ((keys >= at - reach) | (keys < self.sinks))
        return attention(query, *self._gather(positions), mask=Dense(visible[:, None]), **options)

    def _attend_in_order(self, query: Array, rows: Array, reach: int, options: dict[str, Any]) -> Any:
        """The sinks and the tail as two disjoint sets of keys, each under an interval mask, then joined."""
        options = dict(options)
        with_lse = options.pop("return_lse", False)
        len_q = query.shape[2]
        tail = self._tail_positions(self._now.first)
        start = self._now.lengths - rows  # position of query row 0
        padded = not bool((rows == len_q).all())

        def part(positions: Array, mask: Mask, options: dict[str, Any]) -> Any:
            if padded:
                mask = mask & Padding((positions >= 0).sum(axis=1), rows)
            return attention(query, *self._gather(positions), mask=mask, return_lse=True, **options)

        parts = [part(tail, Window(reach, 0, start - self._now.first), options)]
        if self.sinks:
            index = np.broadcast_to(np.arange(self.sinks), (self.batch, self.sinks))
            head = np.where(index < self._now.lengths[:, None], index, -1)
            options.pop("sinks", None)  # the learned sink logits count once
            parts.append(part(head, Causal(start), options))
        out, lse = joined(parts)
        return (out, lse) if with_lse else out

    def _tail_positions(self, first: Array) -> Array:
        """The positions from ``first`` (batch,) to the newest of each sequence, from column 0 on, then -1."""
        width = int((self._now.lengths - first).max(initial=0))
        index = first[:, None] + np.arange(max(width, 0))
        return np.where(index < self._now.lengths[:, None], index, -1)

    def _slots(self, positions: Array, ring: int) -> Array:
        return np.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % ring)

    def _gather(self, positions: Array) -> tuple[Array, Array]:
        """Copies of the rows at ``positions`` (batch, n); those at -1 hold anything."""
        slots = np.where(positions < 0, 0, self._slots(positions, self._now.ring))
        xp = array_module(self._now.key)
        index = xp.asarray(slots[:, None, :, None])
        return xp.take_along_axis(self._now.key, index, axis=2), xp.take_along_axis(
            self._now.value, index, axis=2
        )

    def _empty(self) -> _State:
        rows = (self.batch, self.heads_kv, self.sinks + self.window)
        return _State(
            np.empty((*rows, self.head_dim), self.dtype),
            np.empty((*rows, self.head_dim_v), self.dtype),
            self.window,
            np.zeros(self.batch, np.int64),
            np.full(self.batch, self.sinks, np.int64),
        )

    def _laid_out_anew(self, ring: int, xp: Any) -> _State:
        """What is kept, in arrays for another ring."""
        rows = (self.batch, self.heads_kv, self.sinks + ring)
        key = xp.empty((*rows, self.head_dim), self.dtype)
        value = xp.empty((*rows, self.head_dim_v), self.dtype)
        positions = self.positions
        if positions.shape[1]:
            old_key, old_value = self._gather(positions)
            for b in range(self.batch):
                real = positions[b] >= 0
                slots = self._slots(positions[b][real], ring)
                key[b, :, slots] = old_key[b][:, real].swapaxes(0, 1)
                value[b, :, slots] = old_value[b][:, real].swapaxes(0, 1)
        now = self._now
        return _State(key, value, ring, now.lengths, np.maximum(now.first, now.lengths - self.window))

    def _slots_used_next(self, added: Array) -> tuple[Array, Array, Array]:
        """The slots an append is about to use, with what is in them."""
        now, new = self._now, int(added.max(initial=0))
        slots = self._slots(now.lengths[:, None] + np.arange(new), now.ring)  # (batch, new)
        xp = array_module(now.key)
        index = xp.asarray(slots[:, None, :, None])
        return slots, xp.take_along_axis(now.key, index, axis=2), xp.take_along_axis(now.value, index, axis=2)

    def _restore(self, state: _State, evicted: tuple[Array, Array, Array] | None) -> None:
        if evicted is not None:
            slots, old_key, old_value = evicted
            for b in range(self.batch):
                state.key[b, :, slots[b]] = old_key[b].swapaxes(0, 1)
                state.value[b, :, slots[b]] = old_value[b].swapaxes(0, 1)
        self._now = state

"""PagedKVCache: many sequences in one pool of pages; a shared prefix is stored once.

The pool is one array (heads_kv, num_pages * page_size, head_dim): row ``page * page_size + r`` is row r of a
page. A sequence is a list of pages and a length. The kernel for few queries reads the lists, one launch for
all sequences. Elsewhere (many queries, without Numba) pages of a list that are neighbours in the pool
too form a *run*, which is a plain slice of the pool: attention walks the runs and joins the results with
`merge_attention`, exactly. No page is ever copied to be read. The allocator gives each sequence the page
behind its last one when it is free, and starts new runs in the middle of the widest gap, so that sequences
which grow side by side stay in long runs.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.cache._checks import (
    CacheFullError,
    counts,
    joined,
    new_rows,
    own_options,
    query_shape,
    size,
    storage_dtype,
)
from npattn.cache.kv import causal_mask
from npattn.functional import attention
from npattn.functional.paged import paged_attention
from npattn.masks import Causal, Mask, Window


class _Sequence(NamedTuple):
    pages: tuple[int, ...]
    length: int
    table: Array  # the pages as int32, for kernels


NO_PAGES: Final = _Sequence((), 0, np.zeros(0, np.int32))


class _Step(NamedTuple):
    """An append, worked out but not yet made."""

    sequence: int
    after: _Sequence
    copied: tuple[int, int] | None  # (shared page, private copy) when the last page has other readers


class PagedKVCache:
    """A pool of ``num_pages`` pages of ``page_size`` tokens each.

    Parameters
    ----------
    num_pages, page_size : int
    heads_kv, head_dim : int
    head_dim_v : int, optional
        ``head_dim`` by default.
    dtype : dtype
        How rows are stored.

    Attributes
    ----------
    pages_free : int
        Pages that no sequence uses.

    Notes
    -----
    ``fork`` copies nothing: a page is copied when one of its readers first writes into it. Bookkeeping is
    locked, so sequences may be appended to and read from several threads; one sequence belongs to one thread
    at a time.

    References
    ----------
    W. Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.

    Examples
    --------
    >>> cache = PagedKVCache(8, 4, heads_kv=2, head_dim=3)
    >>> first = cache.allocate()
    >>> cache.append(first, np.ones((2, 6, 3), np.float32), np.ones((2, 6, 3), np.float32))
    >>> second = cache.fork(first)
    >>> cache.pages_free, cache.length(second)
    (6, 6)
    >>> cache.append(second, np.zeros((2, 1, 3), np.float32), np.zeros((2, 1, 3), np.float32))
    >>> cache.pages_free                                       # the half-filled page now exists twice
    5
    >>> cache.free(first)
    >>> cache.pages_free, cache.arrays(second)[0][0, :, 0].tolist()
    (6, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.num_pages = size("num_pages", num_pages, 0)
        self.page_size = size("page_size", page_size)
        self.heads_kv = size("heads_kv", heads_kv)
        self.head_dim = size("head_dim", head_dim)
        self.head_dim_v = self.head_dim if head_dim_v is None else size("head_dim_v", head_dim_v)
        self.dtype = storage_dtype(dtype)
        rows = self.num_pages * self.page_size
        self._key: Array = np.empty((self.heads_kv, rows, self.head_dim), self.dtype)
        self._value: Array = np.empty((self.heads_kv, rows, self.head_dim_v), self.dtype)
        self._readers = np.zeros(self.num_pages, np.int64)  # sequences that list each page
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._lock = threading.RLock()

    @property
    def pages_free(self) -> int:
        """Pages that no sequence uses."""
        return int((self._readers == 0).sum())

    def allocate(self) -> int:
        """A new, empty sequence; it takes no page yet. Numbers are never used again."""
        with self._lock:
            return self._add(NO_PAGES)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, sharing every page until one of the two writes into it."""
        with self._lock:
            source = self._find(sequence)
            self._readers[list(source.pages)] += 1
            return self._add(source)

    def free(self, sequence: int) -> None:
        """Give back the pages that only ``sequence`` reads; its number is unknown from now on."""
        with self._lock:
            pages = self._find(sequence).pages
            del self._sequences[sequence]
            self._readers[list(pages)] -= 1

    def length(self, sequence: int) -> int:
        """Tokens in ``sequence``."""
        return self._find(sequence).length

    def arrays(self, sequence: int) -> tuple[Array, Array]:
        """The (key, value) of one sequence, (heads_kv, length, ...): copies, for inspection."""
        xp = array_module(self._key)
        found = self._find(sequence)
        parts = [slice(row, row + count) for row, _, count in self._runs(found)] or [slice(0, 0)]
        return (
            xp.concatenate([self._key[:, part] for part in parts], axis=1),
            xp.concatenate([self._value[:, part] for part in parts], axis=1),
        )

    def append(self, sequence: int, key: Array, value: Array) -> None:
        """Store the rows of the next tokens of one sequence.

        Parameters
        ----------
        sequence : int
        key, value : (heads_kv, new, head_dim), (heads_kv, new, head_dim_v)

        Raises
        ------
        CacheFullError
            When the free pages do not suffice; nothing is changed.
        KeyError
            For a freed or unknown sequence.
        ValueError, TypeError
            For other shapes or dtypes; nothing is changed.
        """
        lead = (self.heads_kv, None)
        new = new_rows(key, value, (*lead, self.head_dim), (*lead, self.head_dim_v))
        self._append_all([sequence], key[None], value[None], np.array([new]))

    def attention(self, query: Array, sequences: Iterable[int], **options: Any) -> Any:
        """Causal attention of the newest tokens of several sequences.

        Parameters
        ----------
        query : (len(sequences), heads_q, len_q, head_dim)
            Rows of the last len_q tokens of each sequence, which are already appended.
        sequences : ints
            In the order of query's first axis; one may be named several times.
        **options
            Those of `npattn.attention` but mask and dropout; the last axis of a bias is the absolute position
            and at least as long as the longest sequence.

        Returns
        -------
        out : (len(sequences), heads_q, len_q, head_dim_v), or (out, lse) with ``return_lse=True``.

        Raises
        ------
        KeyError
            For a freed or unknown sequence.
        """
        return self.batch(sequences).attention(query, **options)

    def batch(self, sequences: Iterable[int]) -> "PagedBatch":
        """``sequences`` seen as one layer cache: what a model's layer appends to and attends over."""
        return PagedBatch(self, sequences)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens; pages without a token are given back."""
        with self._lock:
            found = self._find(sequence)
            kept = size("length", length, 0)
            if kept > found.length:
                raise ValueError(f"sequence {sequence} has {found.length} tokens; {kept} cannot be kept")
            pages = -(-kept // self.page_size)
            self._readers[list(found.pages[pages:])] -= 1
            self._sequences[sequence] = _Sequence(found.pages[:pages], kept, found.table[:pages])

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, which a copy has one of its own of."""
        with self._lock:
            state = self.__dict__.copy()
            state["_readers"], state["_sequences"] = self._readers.copy(), dict(self._sequences)
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _find(self, sequence: int) -> _Sequence:
        found = self._sequences.get(sequence)
        if found is None:
            raise KeyError(f"sequence {sequence!r} is not in the cache: freed, or never allocated")
        return found

    def _add(self, sequence: _Sequence) -> int:
        number, self._next = self._next, self._next + 1
        self._sequences[number] = sequence
        return number

    def _runs(self, sequence: _Sequence, start: int = 0) -> list[tuple[int, int, int]]:
        """(row in the pool, position of its first token, tokens) of each run of neighbouring pages.

        From token ``start`` on.
        """
        runs: list[tuple[int, int, int]] = []
        at = start
        while at < sequence.length:
            number, within = divmod(at, self.page_size)
            place = sequence.pages[number] * self.page_size + within
            tokens = min(sequence.length - at, self.page_size - within)
            row, position, count = runs[-1] if runs else (-1, 0, 0)
            if runs and row + count == place:
                runs[-1] = (row, position, count + tokens)
            else:
                runs.append((place, at, tokens))
            at += tokens
        return runs

    def _as_pages(self, pool: Array) -> Array:
        """The pool as (num_pages, heads_kv, page_size, dim), a view."""
        shape = (self.heads_kv, self.num_pages, self.page_size, pool.shape[-1])
        return pool.reshape(shape).swapaxes(0, 1)

    def _append_all(self, sequences: Sequence[int], key: Array, value: Array, added: Array) -> None:
        """Append to several sequences, to all or to none."""
        xp = array_module(key, value, *((self._key,) if self._readers.any() else ()))
        with self._lock:
            readers, steps = self._plan(sequences, added)
            if array_module(self._key) is not xp:
                self._key = xp.empty(self._key.shape, self.dtype)
                self._value = xp.empty(self._value.shape, self.dtype)
            # Everything written below lies beyond the lengths of today or in pages that are still free
            for index, step in enumerate(steps):
                if step.copied is not None:
                    old, new = (
                        slice(page * self.page_size, (page + 1) * self.page_size) for page in step.copied
                    )
                    self._key[:, new], self._value[:, new] = self._key[:, old], self._value[:, old]
                start, taken = step.after.length - int(added[index]), 0
                for row, _, count in self._runs(step.after, start):
                    rows, wanted = slice(row, row + count), slice(taken, taken + count)
                    self._key[:, rows] = key[index, :, wanted]
                    self._value[:, rows] = value[index, :, wanted]
                    taken = wanted.stop
            self._readers = readers
            self._sequences.update({step.sequence: step.after for step in steps})

    def _plan(self, sequences: Sequence[int], added: Array) -> tuple[Array, list[_Step]]:
        """The readers of every page after an append, and its steps; CacheFullError when there is no room."""
        readers = self._readers.copy()
        steps = []
        for sequence, new in zip(sequences, added.tolist(), strict=True):
            found = self._find(sequence)
            length = found.length + new
            if new <= -found.length % self.page_size and readers[list(found.pages[-1:])].max(initial=0) <= 1:
                steps.append(_Step(sequence, found._replace(length=length), None))  # the last page has room
                continue
            pages, copied = list(found.pages), None
            if new and found.length % self.page_size and readers[pages[-1]] > 1:
                copied = (pages[-1], self._take(readers, pages[-2] if len(pages) > 1 else None))
                readers[copied[0]] -= 1
                pages[-1] = copied[1]
            for _ in range(-(-length // self.page_size) - len(pages)):
                pages.append(self._take(readers, pages[-1] if pages else None))
            after = _Sequence(tuple(pages), length, np.array(pages, np.int32))
            steps.append(_Step(sequence, after, copied))
        return readers, steps

    def _take(self, readers: Array, last: int | None) -> int:
        """A free page, marked as read once in ``readers``."""
        if last is not None and last + 1 < self.num_pages and readers[last + 1] == 0:
            page = last + 1
        else:
            free = np.flatnonzero(readers == 0)
            if not len(free):
                raise CacheFullError(
                    f"no free page is left of {self.num_pages} pages of {self.page_size} tokens; "
                    f"the capacity is {self.num_pages * self.page_size} tokens in all. "
                    "Free a sequence first."
                )
            # the widest gap; its middle unless it starts the pool, since someone grows into its start
            cuts = np.flatnonzero(np.diff(free) > 1) + 1
            gaps = np.split(free, cuts)
            gap = max(gaps, key=len)
            page = int(gap[0] if gap[0] == 0 else gap[len(gap) // 2])
        readers[page] += 1
        return page


class PagedBatch:
    """Some sequences of a `PagedKVCache` as one layer cache; made by ``PagedKVCache.batch``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.cache import PagedKVCache
    >>> pool = PagedKVCache(8, 4, heads_kv=1, head_dim=2)
    >>> batch = pool.batch([pool.allocate(), pool.allocate()])
    >>> batch.append(np.ones((2, 1, 3, 2)), np.ones((2, 1, 3, 2)), lengths=[3, 1])
    >>> batch.lengths
    array([3, 1])
    """

    def __init__(self, pool: PagedKVCache, sequences: Iterable[int]) -> None:
        self.pool = pool
        self.sequences = tuple(sequences)
        self._before = self.lengths

    @property
    def lengths(self) -> Array:
        """Tokens in each sequence, (batch,) int64."""
        return np.array([self.pool.length(sequence) for sequence in self.sequences], np.int64)

    @property
    def positions(self) -> Array:
        """Absolute positions of the kept rows, (batch, longest) int64; -1 where there is none."""
        index = np.arange(int(self.lengths.max(initial=0)))
        return np.where(index < self.lengths[:, None], index, -1)

    @property
    def bias_positions(self) -> Array:
        """Absolute position of each column of a bias: ``positions``."""
        return self.positions

    @property
    def capacity(self) -> int:
        """Tokens of the whole pool, which all its sequences share."""
        return self.pool.num_pages * self.pool.page_size

    def check_room(self, new: int, lengths: Any = None) -> None:
        """Raise CacheFullError when ``append`` would."""
        self.pool._plan(self.sequences, counts("lengths", lengths, len(self.sequences), new))

    def append(self, key: Array, value: Array, lengths: Any = None) -> None:
        """Store the next rows of every sequence, or of none; as `KVCache.append`."""
        if len(set(self.sequences)) != len(self.sequences):
            raise ValueError(f"a sequence is named twice in {self.sequences}; fork it instead")
        lead = (len(self.sequences), self.pool.heads_kv, None)
        new = new_rows(key, value, (*lead, self.pool.head_dim), (*lead, self.pool.head_dim_v))
        before = self.lengths
        added = counts("lengths", lengths, len(self.sequences), new)
        self.pool._append_all(self.sequences, key, value, added)
        self._before = before

    def attention(
        self, query: Array, *, query_lengths: Any = None, window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of the newest tokens; as `KVCache.attention`, without dropout."""
        own_options(options, merged=True)
        pool = self.pool
        found = [pool._find(sequence) for sequence in self.sequences]
        len_q = query_shape(query, len(found), 4, pool.heads_kv, pool.head_dim)
        rows = counts("query_lengths", query_lengths, len(found), len_q)
        xp = array_module(query)
        with_lse = options.pop("return_lse", False)
        bias = options.pop("bias", None)
        if not found:
            return attention(query, pool._key[None, :, :0], pool._value[None, :, :0], return_lse=with_lse)
        whole = self._attend_by_table(query, found, rows, window, bias, with_lse, options)
        if whole is not None:
            return whole
        parts = []
        for index, sequence in enumerate(found):
            one = None if bias is None else _element(bias, index, int(rows[index]))
            out, lse = self._attend(query[index, :, : rows[index]], sequence, window, one, options)
            if rows[index] < len_q:  # padding rows
                missing = ((0, 0), (0, len_q - int(rows[index])))
                out, lse = xp.pad(out, (*missing, (0, 0))), xp.pad(lse, missing, constant_values=-np.inf)
            parts.append((out, lse))
        outs, lses = zip(*parts, strict=True)
        return (xp.stack(outs), xp.stack(lses)) if with_lse else xp.stack(outs)

    def undo(self) -> None:
        """Take back the last append (one step)."""
        for sequence, length in zip(self.sequences, self._before.tolist(), strict=True):
            self.pool.truncate(sequence, length)

    def reset(self) -> None:
        """Forget every token of these sequences."""
        for sequence in self.sequences:
            self.pool.truncate(sequence, 0)
        self._before = self.lengths

    def _attend_by_table(
        self,
        query: Array,
        found: list[_Sequence],
        rows: Array,
        window: int | None,
        bias: Array | None,
        with_lse: bool,
        options: dict[str, Any],
    ) -> Any:
        """All sequences at once, by a kernel that reads their lists of pages; None where there is none."""
        pool = self.pool
        lengths = np.array([sequence.length for sequence in found], np.int64)
        longest = int(lengths.max())
        mask = causal_mask(lengths, rows, query.shape[2], window)
        if len(found) == 1:
            table = found[0].table[None]
        else:
            table = np.zeros((len(found), max(len(sequence.table) for sequence in found)), np.int32)
            for row, sequence in zip(table, found, strict=True):
                row[: len(sequence.table)] = sequence.table
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., :longest]
        pages = (pool._as_pages(pool._key), pool._as_pages(pool._value))
        return paged_attention(
            query, *pages, table, longest, mask=mask, bias=bias, return_lse=with_lse, **options
        )

    def _attend(
        self,
        query: Array,
        sequence: _Sequence,
        window: int | None,
        bias: Array | None,
        options: dict[str, Any],
    ) -> tuple[Array, Array]:
        """(out, lse) of one sequence: its runs, each under its own mask, joined."""
        pool = self.pool
        start = sequence.length - query.shape[1]  # position of query row 0
        options = dict(options)
        parts = []
        for row, position, count in pool._runs(sequence) or [(0, 0, 0)]:
            mask: Mask | None = None
            if window is not None:
                mask = Window(size("window", window, 0), 0, start - position)
            elif position + count - 1 > start:
                mask = Causal(start - position)
            key, value = pool._key[:, row : row + count], pool._value[:, row : row + count]
            part = bias
            if bias is not None and bias.shape[-1] != 1:
                part = bias[..., position : position + count]
            parts.append(attention(query, key, value, mask=mask, bias=part, return_lse=True, **options))
            options.pop("sinks", None)  # the learned sink logits count once
        return joined(parts)


def _element(bias: Array, index: int, rows: int) -> Array:
    """The bias of the first ``rows`` query rows of one batch element; below four axes all share one."""
    if len(bias.shape) == 4:
        bias = bias[0 if bias.shape[0] == 1 else index]
    return bias[..., :rows, :] if len(bias.shape) > 1 and bias.shape[-2] != 1 else bias

"""How many threads, and the only place that splits work over them.

A kernel is serial over one work item; ``run`` hands items to a few threads, costliest first. The calling
thread always takes part, so a call finishes even when every helper is busy with somebody else's. Helpers
start on first use, wait between calls, end with the process, and are made anew in a forked child, which
inherits none of them. Results never depend on the number of threads, because an item's result depends on the
item.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import numpy as np

_KEPT_SCRATCH = 32 << 20  # bytes a thread may keep between calls; more is given back at once


class _Pool:
    """Helper threads and the queue they wait on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.helpers = 0

    def ask(self, job: Any, count: int) -> None:
        """Offer ``job`` to ``count`` helpers, starting those that are missing."""
        if self.helpers < count:
            with self.lock:
                while self.helpers < count:
                    self.helpers += 1
                    name = f"npattn-{self.helpers}"
                    threading.Thread(target=_serve, args=(self.queue,), name=name, daemon=True).start()
        for _ in range(count):
            self.queue.put(job)


class _Job:
    """One call of ``run``: the items left, who is at work, and the first exception."""

    def __init__(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        self.function = function
        self.items = deque(items)
        self.lock = threading.Lock()
        self.active = 0
        self.closed = False
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take items until none is left."""
        try:
            while True:
                self.function(self.items.popleft())
        except IndexError as error:
            if self.items:  # raised by the function, not by the empty deque
                self._fail(error)
        except BaseException as error:  # handed to the caller
            self._fail(error)
        finally:
            trim_scratch()

    def help(self) -> None:
        """The same, for a helper: not begun after the caller has left, waited for once begun."""
        with self.lock:
            if self.closed:
                return
            self.active += 1
        self.work()
        with self.lock:
            self.active -= 1
            if self._is_over():
                self.finished.set()

    def _is_over(self) -> bool:
        """The caller waits, and nobody is left at work."""
        return self.closed and self.active == 0

    def close(self) -> None:
        """Wait for the helpers at work and raise what went wrong."""
        with self.lock:
            self.closed = True
            waiting = self.active > 0
        if waiting:
            self.finished.wait()
        if self.error is not None:
            raise self.error

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            if self.error is None:
                self.error = error
        self.items.clear()


def _serve(queue: "SimpleQueue[Any]") -> None:
    while True:
        queue.get().help()


_pool = _Pool()
_threads: int | None = None
_local = threading.local()
_asked = np.zeros(1, np.int64)

#: Address of a word that changes whenever ``run`` needs helpers: who waits for other work then returns.
asked_at: int = _asked.__array_interface__["data"][0]


def get_num_threads() -> int:
    """How many threads a call may use.

    Returns
    -------
    int
        What ``set_num_threads`` said; else the environment variable NPATTN_NUM_THREADS; else the number of
        processors this process may use.

    Raises
    ------
    ValueError
        When NPATTN_NUM_THREADS is not a positive integer.

    Examples
    --------
    >>> import npattn
    >>> npattn.get_num_threads() >= 1
    True
    """
    global _threads
    if _threads is None:
        _threads = _default()
    return _threads


def set_num_threads(n: int) -> None:
    """Use ``n`` threads from now on, in this process.

    Parameters
    ----------
    n : int
        At least 1. Results are the same, bit for bit, for any number.

    Raises
    ------
    TypeError
        When n is not an integer.
    ValueError
        When n < 1.

    Examples
    --------
    >>> import npattn
    >>> before = npattn.get_num_threads()
    >>> npattn.set_num_threads(2)
    >>> npattn.get_num_threads()
    2
    >>> npattn.set_num_threads(before)
    """
    global _threads
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"the number of threads must be an integer, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"the number of threads must be at least 1, got {n}")
    _threads = int(n)


def _default() -> int:
    text = os.environ.get("NPATTN_NUM_THREADS", "")
    if text:
        try:
            number = int(text)
        except ValueError:
            number = 0
        if number < 1:
            raise ValueError(f"NPATTN_NUM_THREADS must be a positive integer, got {text!r}")
        return number
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def run(function: Callable[[Any], None], items: list[Any]) -> None:
    """Call ``function`` once for every item, on up to ``get_num_threads()`` threads.

    Items are taken in order, so put the costliest first. The function must not care which thread runs it. The
    first exception is raised here, after the items at work have ended; those not begun are dropped.
    """
    helpers = min(get_num_threads(), len(items)) - 1
    if helpers <= 0:
        for item in items:
            function(item)
        trim_scratch()
        return
    job = _Job(function, items)
    _asked[0] += 1
    _pool.ask(job, helpers)
    job.work()
    job.close()


def ask(job: Any, count: int) -> None:
    """Let ``count`` helpers call ``job.help()``, each as soon as it is free."""
    _pool.ask(job, count)


def scratch(size: int) -> int:
    """Address of ``size`` bytes for this thread alone, aligned to 64, of unspecified content.

    Valid until the thread's next call of ``scratch``; a small piece is kept from call to call.
    """
    kept = getattr(_local, "scratch", None)
    if kept is None or kept[1] < size:
        array = np.empty(size + 64, np.uint8)
        start = array.__array_interface__["data"][0]
        kept = (array, size, (start + 63) & ~63)
        _local.scratch = kept
    address: int = kept[2]
    return address


def trim_scratch() -> None:
    """Give this thread's scratch back if it is large."""
    kept = getattr(_local, "scratch", None)
    if kept is not None and kept[1] > _KEPT_SCRATCH:
        _local.scratch = None


def _after_fork() -> None:
    global _pool
    _pool = _Pool()
    _local.__dict__.pop("scratch", None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


__all__ = ["ask", "asked_at", "get_num_threads", "run", "scratch", "set_num_threads", "trim_scratch"]

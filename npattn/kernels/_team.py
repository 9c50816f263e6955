# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Threads that take the next kernel's work without Python: for calls that follow each other closely.

``_threads.run`` hands Python calls to a pool whose helpers sleep in between; waking one (the system's
wake-up, then the interpreter lock) takes 50 us on a Zen 4, as long as a layer norm of a small model, and a
training step is a hundred such calls. Here a helper of that pool that has just worked looks for more work for
about a tenth of a millisecond, and takes it by an atomic operation, without the interpreter.

A kernel is a compiled ``kernel(where, start, stop, scratch, one)``: it works on units [start, stop);
``where`` is the address of its arguments, ``scratch`` that of memory of the thread's own, ``one`` a float32
or float64 that says which of the two is meant. Units are cut into items, which the caller claims from the
front and the helpers from the back: in calls that follow each other a thread meets the rows it has just
written.

The state is a block of words that all threads see. ``TICKET`` holds the number of the job and how many items
are claimed from either end, so that claiming an item, a compare-and-swap of the whole word, fails when the
job it was read for is over. While the other words change, the ticket says that no item is left. The caller
returns when ``DONE`` has counted all items: no helper is inside the job then. The caller can do all the work
itself: a helper that comes late, or never, costs time and nothing else.
"""

import ctypes
import os
import threading
from functools import cache
from typing import Any, Final

import numpy as np
from numba.types import intp

from npattn import _threads
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.atomic import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_kernel,
    give_way,
    pause,
)

# Byte offsets into the state. Words that different threads write are on cache lines of their own.
TICKET, DONE, SERVING, HIRED, REST = (128 * i for i in range(5))
KERNEL, WHERE, UNITS, ITEMS, SCRATCH, DOUBLE, HELPERS = (REST + 8 * i for i in range(7))
BYTES: Final = 5 * 128

#: What the ticket counts by: items from the front, items from the back, jobs; and the most of each.
FRONT, BACK, JOB = 1, 1 << 16, 1 << 32
MOST_ITEMS: Final = 1 << 15
MOST_JOBS: Final = 1 << 30

#: How often a helper looks at the ticket before it sleeps: some 0.1 ms.
PATIENCE: Final = 30000
#: How often the caller looks for the last item's end before each time it lets other threads run.
SPIN: Final = 2000

#: What ``serve`` returns.
TIRED, MORE_SCRATCH = 0, 1

ONE = np.float32(1)


@part(intp)
def _left(state, ticket):
    """How many items of the ticket's job nobody has claimed."""
    return atomic_load(state + ITEMS) - ticket % BACK - ticket % JOB // BACK


@part()
def _work(state, job, claim, scratch):
    """Claim items of one job, one after the other, and run them until it has none left."""
    ticket = atomic_load(state + TICKET)
    while ticket // JOB == job and _left(state, ticket) > 0:
        if atomic_replace(state + TICKET, ticket, ticket + claim):  # the words below now stay until we count
            units, items = atomic_load(state + UNITS), atomic_load(state + ITEMS)
            number = ticket % BACK if claim == FRONT else items - 1 - ticket % JOB // BACK
            kernel, where = atomic_load(state + KERNEL), atomic_load(state + WHERE)
            start, stop = units * number // items, units * (number + 1) // items
            if atomic_load(state + DOUBLE):
                call_kernel(kernel, where, start, stop, scratch, 1.0)
            else:
                call_kernel(kernel, where, start, stop, scratch, ONE)
            atomic_add(state + DONE, 1)
        ticket = atomic_load(state + TICKET)


@part(intp)
def _serve(state, asked, scratch, size):
    atomic_add(state + SERVING, 1)
    before = atomic_load(asked)
    seen, looks, result = -1, 0, TIRED
    while looks < PATIENCE:
        ticket = atomic_load(state + TICKET)
        job = ticket // JOB
        if job != seen and _left(state, ticket) > 0:
            if atomic_load(state + SCRATCH) > size:
                looks, result = PATIENCE, MORE_SCRATCH
            else:  # should these words be another job's already, nothing is left of this one
                looks, seen = 0, job
                if atomic_add(state + HIRED, 1) < atomic_load(state + HELPERS):
                    _work(state, job, BACK, scratch)
        elif atomic_load(asked) != before:
            looks = PATIENCE
        else:
            pause()
            looks += 1
    atomic_add(state + SERVING, -1)
    return result


@jit(returns=intp)
def serve(state, asked, scratch, size):
    """Work on the jobs that come, until none has come for a while or ``asked`` changes."""
    return _serve(state, asked, scratch, size)


@part()
def _lead(state, kernel, where, units, items, scratch_bytes, double, helpers, scratch):
    job = (atomic_load(state + TICKET) // JOB + 1) % MOST_JOBS
    atomic_store(state + TICKET, job * JOB + BACK - 1)
    atomic_store(state + KERNEL, kernel)
    atomic_store(state + WHERE, where)
    atomic_store(state + UNITS, units)
    atomic_store(state + ITEMS, items)
    atomic_store(state + SCRATCH, scratch_bytes)
    atomic_store(state + DOUBLE, double)
    atomic_store(state + HELPERS, helpers)
    atomic_store(state + DONE, 0)
    atomic_store(state + HIRED, 0)
    atomic_store(state + TICKET, job * JOB)
    _work(state, job, FRONT, scratch)
    looks = 0
    while atomic_load(state + DONE) < items:
        pause()
        looks += 1
        if looks % SPIN == 0:
            give_way()  # the helper we wait for may have lost its processor


@jit
def lead(state, kernel, where, units, items, scratch_bytes, double, helpers, scratch):
    """Post a job, work on it, return when all of it is done."""
    _lead(state, kernel, where, units, items, scratch_bytes, double, helpers, scratch)


class _Team:
    """The state, the lock of the one who leads, and how helpers come here from the pool."""

    def __init__(self) -> None:
        self.words = np.zeros(BYTES // 8 + 16, np.int64)
        self.state = (address(self.words) + 127) & ~127
        self.first = (self.state - address(self.words)) // 8
        self.leads = threading.Lock()
        self.counts = threading.Lock()
        self.coming = 0  # helpers asked for that have not begun to serve

    def run(
        self, kernel: int, where: int, units: int, items: int, scratch_bytes: int, double: bool, helpers: int
    ) -> None:
        """Share the items with up to ``helpers`` of the pool's threads. The caller holds ``leads``."""
        missing = helpers - self._word(SERVING) - self.coming
        if missing > 0:
            with self.counts:
                self.coming += missing
            _threads.ask(self, missing)
        scratch = _threads.scratch(scratch_bytes)
        lead(self.state, kernel, where, units, items, scratch_bytes, double, helpers, scratch)

    def help(self) -> None:
        """Serve. Called by a helper of the pool."""
        with self.counts:
            self.coming -= 1
        size = 1 << 16
        while serve(self.state, _threads.asked_at, _threads.scratch(size), size) == MORE_SCRATCH:
            size = max(size, self._word(SCRATCH))
        _threads.trim_scratch()

    def _word(self, offset: int) -> int:
        return int(self.words[self.first + offset // 8])


def run(kernel: Any, where: int, units: int, items: int, scratch_bytes: int = 0, one: Any = ONE) -> None:
    """Call ``kernel`` on units [0, units), cut into ``items`` ranges, on up to ``get_num_threads()`` threads.

    A range must not care which thread works on it, nor in which company. When another Python thread leads the
    team just now, all is done on this one.
    """
    items = min(items, MOST_ITEMS)
    helpers = min(_threads.get_num_threads(), items) - 1
    if helpers > 0 and _team.leads.acquire(blocking=False):
        try:
            double = one.dtype.itemsize == 8
            _team.run(entry(kernel, double), where, units, items, scratch_bytes, double, helpers)
        finally:
            _team.leads.release()
    else:
        kernel(where, 0, units, _threads.scratch(scratch_bytes), one)
    _threads.trim_scratch()


@cache
def entry(kernel: Any, double: bool) -> int:
    """Address of the machine code of ``kernel``."""
    version = kernel.version((0, 0, 0, 0, np.float64(1) if double else ONE))
    return ctypes.cast(version, ctypes.c_void_p).value or 0


_team = _Team()


def _after_fork() -> None:
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


__all__ = ["run"]

"""The team: every unit is worked on exactly once, also when many call, in a child, and after a nap."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

import npattn
from npattn import _threads

pytest.importorskip("numba")
from npattn.kernels import _jit

if _jit.INTERPRETED:
    pytest.skip("needs compiled kernels", allow_module_level=True)

from npattn.kernels import _team
from npattn.kernels._parts import part
from npattn.kernels._simd.vectors import load_int64, store_scalar


@part()
def _count(where, start, stop, scratch, amount):
    table, size = load_int64(where), load_int64(where + 8)
    for i in range(0, size, 8):  # the last word too: helpers must have as much scratch as the job wants
        store_scalar(scratch + i, i)
    for unit in range(start, stop):
        total = 0
        for i in range(0, size, 8):
            total += load_int64(scratch + i)
        store_scalar(table + 8 * unit, load_int64(table + 8 * unit) + total + 1)


@_jit.jit
def count_units(where, start, stop, scratch, one):
    """Add 1 and the sum of the scratch to each unit's word."""
    _count(where, start, stop, scratch, one)


def counted(units, items, scratch=64, one=_team.ONE):
    """How often each unit was worked on."""
    words = np.zeros(units, np.int64)
    where = np.array([_jit.address(words), scratch])
    _team.run(count_units, _jit.address(where), units, items, scratch, one)
    return words - sum(range(0, scratch, 8))


@pytest.fixture
def threads():
    before = npattn.get_num_threads()
    yield npattn.set_num_threads
    npattn.set_num_threads(before)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("one", [np.float32(1), np.float64(1)])
def test_every_unit_is_worked_on_once(threads, number, one):
    threads(number)
    for units, items in ((1, 1), (2, 2), (7, 3), (5, 5), (1000, 16), (64, 64)):
        for scratch in (64, 1 << 18, 64):
            assert (counted(units, items, scratch, one) == 1).all(), (units, items, scratch)


def test_jobs_in_quick_succession_do_not_mix(threads):
    threads(3)
    for n in range(3000):
        units = n % 9 + 1
        assert (counted(units, units) == 1).all()


def test_python_jobs_and_pauses_in_between(threads):
    threads(2)
    done = []
    for n in range(40):
        assert (counted(12, 6) == 1).all()
        _threads.run(done.append, [n, -n])
        if n % 8 == 0:
            time.sleep(0.002)  # longer than a helper looks for work
    assert sorted(done) == sorted([*range(40), *range(0, -40, -1)])


def test_callers_at_once(threads):
    threads(2)
    wrong = []

    def call():
        for n in range(300):
            if not (counted(n % 20 + 1, 4) == 1).all():
                wrong.append(n)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_one_thread_means_the_caller_alone(threads, monkeypatch):
    threads(1)
    monkeypatch.setattr(_team._Team, "run", None)
    assert (counted(30, 10) == 1).all()


def test_no_more_helpers_are_asked_for_than_there_is_work(threads, monkeypatch):
    threads(8)
    asked = []
    monkeypatch.setattr(_threads, "ask", lambda job, count: asked.append(count))
    monkeypatch.setattr(_team, "_team", _team._Team())
    assert (counted(3, 3) == 1).all()
    assert (counted(3, 3) == 1).all()
    assert asked == [2]  # they are on their way


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_team_of_its_own(threads):
    threads(2)
    assert (counted(8, 8) == 1).all()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(bool((counted(50, 10) == 1).all())))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get()
    assert (counted(8, 8) == 1).all()

"""Threads: how many, that work is shared, that errors arrive, that fork and concurrent calls work."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import npattn
from npattn import _threads


@pytest.fixture
def threads():
    before = npattn.get_num_threads()
    yield npattn.set_num_threads
    npattn.set_num_threads(before)


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_default_is_the_processors_this_process_may_use():
    code = "import os, npattn; print(npattn.get_num_threads() == len(os.sched_getaffinity(0)))"
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no processor affinity on this system")
    assert _python(code, NPATTN_NUM_THREADS="") == "True"


def test_the_environment_variable_sets_the_number():
    assert _python("import npattn; print(npattn.get_num_threads())", NPATTN_NUM_THREADS="3") == "3"


def test_a_wrong_environment_variable_is_named():
    code = (
        "import npattn\ntry: npattn.get_num_threads()\n"
        "except ValueError as error: print('NPATTN_NUM_THREADS' in str(error))"
    )
    assert _python(code, NPATTN_NUM_THREADS="many") == "True"
    assert _python(code, NPATTN_NUM_THREADS="0") == "True"


def test_import_and_serial_calls_start_no_thread():
    code = (
        "import threading, numpy as np, npattn\nx = np.ones((1, 1, 8, 8), np.float32)\n"
        "npattn.attention(x, x, x)\n"
        "print(threading.active_count())"
    )
    assert _python(code) == "1"


@pytest.mark.parametrize("wrong", [0, -1])
def test_fewer_than_one_is_refused(wrong):
    with pytest.raises(ValueError, match=f"at least 1, got {wrong}"):
        npattn.set_num_threads(wrong)


@pytest.mark.parametrize("wrong", [1.5, "2", True, None])
def test_what_is_no_integer_is_refused(wrong):
    with pytest.raises(TypeError, match="integer"):
        npattn.set_num_threads(wrong)


def test_numpy_integers_are_taken(threads):
    threads(np.int64(2))
    assert npattn.get_num_threads() == 2


def test_every_item_is_done_once_in_order_of_the_list(threads):
    threads(4)
    done = []
    _threads.run(done.append, list(range(100)))
    assert sorted(done) == list(range(100))
    threads(1)
    done.clear()
    _threads.run(done.append, list(range(5)))
    assert done == [0, 1, 2, 3, 4]


def test_several_threads_take_part(threads):
    threads(3)
    seen = set()
    barrier = threading.Barrier(3, timeout=30)

    def meet(item):
        seen.add(threading.get_ident())
        barrier.wait()  # passes only when three threads are here at once

    _threads.run(meet, [1, 2, 3])
    assert len(seen) == 3


@pytest.mark.parametrize("number", [1, 3])
def test_the_first_exception_reaches_the_caller(threads, number):
    threads(number)

    def fail(item):
        raise KeyError(item)

    with pytest.raises(KeyError):
        _threads.run(fail, list(range(10)))
    done = []
    _threads.run(done.append, [1, 2, 3])  # and the pool is still there
    assert sorted(done) == [1, 2, 3]


def test_an_index_error_of_the_function_is_not_the_end_of_the_list(threads):
    threads(2)

    def fail(item):
        time.sleep(0.01)
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        _threads.run(fail, [1, 2, 3, 4, 5, 6])


def test_calls_from_many_python_threads_do_not_meet(threads):
    threads(2)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, 200, 32)).astype(np.float32) for _ in range(3))
    expected = npattn.attention(q, k, v).tobytes()
    wrong = []

    def work():
        for _ in range(5):
            if npattn.attention(q, k, v).tobytes() != expected:
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_with_threads_of_its_own():
    """The child inherits the pool's bookkeeping but none of its threads: waiting for them would hang."""
    code = """
import os, numpy as np, npattn, warnings
warnings.simplefilter("ignore")
npattn.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((2, 4, 300, 32)).astype(np.float32)
before = npattn.attention(x, x, x)
child = os.fork()
if child == 0:
    same = npattn.attention(x, x, x).tobytes() == before.tobytes()
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), npattn.attention(x, x, x).tobytes() == before.tobytes())
"""
    assert _python(code) == "0 True"


def test_scratch_is_aligned_and_apart_for_each_thread():
    mine = _threads.scratch(1000)
    assert mine % 64 == 0
    theirs = []
    worker = threading.Thread(target=lambda: theirs.append(_threads.scratch(1000)))
    worker.start()
    worker.join()
    assert abs(theirs[0] - mine) >= 1000

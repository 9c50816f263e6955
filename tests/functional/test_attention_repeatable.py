"""Same input, same bits: on repetition, for any number of threads, from many threads at once, after fork."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import npattn
from npattn import masks

FEATURES = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "window, dropout": {"mask": masks.Window(30, 7), "dropout_p": 0.3, "seed": 5},
    "documents": {"mask": masks.Documents(np.array([90, 1, 60]), causal=True), "softcap": 3.0},
}


def inputs(dtype=np.float32):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, 151, 16)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, 151, 16)).astype(dtype)
    return (
        q,
        k,
        v,
        rng.standard_normal(q.shape).astype(dtype),
        rng.standard_normal((4, 151, 151)).astype(dtype),
    )


def bits(attend, arrays, **options):
    q, k, v, dout, bias = arrays
    (out, lse), pullback = attend.attention_vjp(
        q, k, v, bias=bias, sinks=bias[:, 0, 0], return_lse=True, **options
    )
    return [x.tobytes() for x in (out, lse, *pullback(dout, lse))]


@pytest.fixture
def threads():
    before = npattn.get_num_threads()
    yield npattn.set_num_threads
    npattn.set_num_threads(before)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_repetition_gives_the_same_bits(attend, name, dtype):
    arrays = inputs(dtype)
    first = bits(attend, arrays, **FEATURES[name])
    for _ in range(3):
        assert bits(attend, arrays, **FEATURES[name]) == first


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_number_of_threads_does_not_show(attend, threads, name, dtype):
    arrays = inputs(dtype)
    results = []
    for count in (1, 2, 4):
        threads(count)
        results.append(bits(attend, arrays, **FEATURES[name]))
    assert results[0] == results[1] == results[2]


def test_many_python_threads_may_call_at_once(attend, threads):
    threads(2)
    jobs = [(inputs(dtype), name) for dtype in (np.float32, np.float64) for name in FEATURES] * 3
    expected = [bits(attend, arrays, **FEATURES[name]) for arrays, name in jobs]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda job: bits(attend, job[0], **FEATURES[job[1]]), jobs))
    assert actual == expected


def test_one_pullback_may_be_called_from_many_threads(attend, threads):
    threads(2)
    q, k, v, dout, _ = inputs()
    _, pullback = attend.attention_vjp(q, k, v, mask=masks.Causal())
    expected = [x.tobytes() for x in pullback(dout)[:3]]
    with ThreadPoolExecutor(4) as pool:
        for grads in pool.map(pullback, [dout] * 12):
            assert [x.tobytes() for x in grads[:3]] == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is a POSIX call")
def test_a_forked_child_computes_the_same_bits(attend):
    program = f"""
        import os, warnings
        import numpy as np
        import npattn
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of fork beside threads; that is the test

        npattn.set_num_threads(2)
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 2, 4, 200, 16)).astype(np.float32)

        def run():
            mask = npattn.masks.Causal()
            out, pullback = npattn.attention_vjp(q, k, v, mask=mask, backend={attend.backend!r})
            return [x.tobytes() for x in (out, *pullback(v)[:3])]

        expected = run()
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(0 if run() == expected and run() == expected else 1)
            children.append(child)
        assert run() == expected
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    attend.attention(*np.ones((3, 1, 1, 2, 4), np.float32))  # skips, with its reason, where not supported
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120, env=env)

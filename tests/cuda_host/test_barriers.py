"""Each barrier and each wait is needed: without it some order of execution gives a wrong result.

And with all of them no order does. A mutation that survived would mean a barrier too many, or a weak model.
"""

import ctypes
import os
import re

import numpy as np
import pytest

from npattn.kernels._cuda import source_text
from npattn.kernels.contract import Problem
from npattn.kernels.tile import cuda_launch
from npattn.masks import Dense
from npattn.masks.base import Extent
from npattn.plans.build import tile_plan

from . import host

pytestmark = pytest.mark.skipif(host.why_not() is not None, reason=str(host.why_not()))

ORDERS = ("forward", "backward", "random:1", "random:2")
FILES = {
    "forward": "tile/forward.cu",
    "backward_rows": "tile/backward_rows.cu",
    "backward_cols": "tile/backward_cols.cu",
    "dbias": "tile/backward_bias.cu",
}
BARRIER = re.compile(r"__syncthreads\(\);|__syncthreads_or\((\w+)\)|dev::copy_async_wait_all\(\);")


def scenario(head_dim):
    """A call whose every step is partial, with NaN seen by few, twice in the same stage of the pipeline."""
    rng = np.random.default_rng(3)
    length = 250
    visible = rng.random((length, length)) < 0.7
    visible[64:128] = visible[:, 64:128] = False  # a row and a column of tiles with nothing to do
    for place, seen_by in ((40, 5), (178, 6)):
        visible[:, place] = visible[place, :] = False
        visible[seen_by, place] = visible[place, seen_by] = True
    shape = (2, 1, length, head_dim)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name in ("q", "k", "v", "dout")}
    for name in ("k", "v", "dout", "q"):
        arrays[name][0, 0, [40, 178]] = np.nan
    arrays["bias"] = rng.standard_normal((1, 1, length, length), dtype=np.float32)
    arrays["sinks"] = np.zeros(1, np.float32)
    problem = Problem(
        *(np.dtype(np.float32), 2, 1, 1, length, length, head_dim, head_dim, 0.3, 0.0, True, True, 0.0, 0)
    )
    plan = tile_plan(Dense(visible), Extent(2, 1, length, length), *cuda_launch.tile_shape(problem))
    rows = shape[:3]
    arrays |= {
        "out": np.empty(shape, np.float32),
        "m": np.empty(rows, np.float32),
        "l": np.empty(rows, np.float32),
    }
    launches = cuda_launch.forward_launches(problem, plan, arrays)
    host.run(launches)
    arrays["delta"], arrays["absmax"] = np.empty(rows, np.float32), np.zeros(1, np.float32)
    results = {"dq": shape, "dk": shape, "dv": shape, "dbias": (1, 1, length, length), "dsinks": (1,)}
    arrays |= {name: np.empty(size, np.float32) for name, size in results.items()}
    launches += cuda_launch.backward_launches(problem, plan, arrays)
    return arrays, launches, plan


def outcome(launches, arrays, library, entries):
    """The bytes of all results, or the model's message, of the named kernels by ``library``."""
    for name in ("out", "dq", "dk", "dv", "dbias", "dsinks"):
        if any(name in WRITES[entry] for entry in entries):
            arrays[name][...] = 7.0
    try:
        for launch in launches:
            if launch.entry in entries:
                host.run_library(library, launch)
    except host.LaunchError as error:
        return str(error)
    written = sorted({name for entry in entries for name in WRITES[entry]})
    return {name: arrays[name].copy() for name in written}


WRITES = {
    "attention_forward": ("out",),
    "attention_dsinks": ("dsinks",),
    "attention_backward_rows": ("dq",),
    "attention_backward_cols": ("dk", "dv"),
    "attention_dbias": ("dbias",),
}


def same(x, y):
    if isinstance(x, str) or isinstance(y, str):
        return x == y
    return all(np.array_equal(x[name], y[name], equal_nan=True) for name in x)


def in_every_order(launches, arrays, library, entries):
    results = []
    before = os.environ.get("NPATTN_CUDA_ORDER")
    try:
        for order in ORDERS:
            os.environ["NPATTN_CUDA_ORDER"] = order
            results.append(outcome(launches, arrays, library, entries))
    finally:
        if before is None:
            del os.environ["NPATTN_CUDA_ORDER"]
        else:
            os.environ["NPATTN_CUDA_ORDER"] = before
    return results


def barriers(family):
    """Where in a file's text its barriers are."""
    text = (host.HEADER.parents[2] / "npattn" / "kernels" / FILES[family]).read_text()
    return [match.start() for match in BARRIER.finditer(text)]


def check(family, index, head_dim):
    """Without barrier number ``index`` some order must differ; returns whether one did."""
    arrays, launches, _plan = scenario(head_dim)
    entry_kernels = {launch.entry: launch.kernel for launch in launches if launch.entry in WRITES}
    kernel = next(k for k in entry_kernels.values() if FILES[family] in k.files)
    entries = [entry for entry, k in entry_kernels.items() if k == kernel]
    right = in_every_order(
        launches, arrays, ctypes.CDLL(str(host.library_file(source_text(kernel)))), entries
    )
    assert not isinstance(right[0], str), right[0]
    for result in right[1:]:
        assert same(right[0], result), "the result depends on the order of execution"
    if index is None:
        return True
    text = source_text(kernel)
    begin = text.index(f'#line 1 "{FILES[family]}"')
    found = list(BARRIER.finditer(text, begin))[index]
    without = text[: found.start()] + (f"({found[1]})" if found[1] else ";") + text[found.end() :]
    wrong = in_every_order(launches, arrays, ctypes.CDLL(str(host.library_file(without))), entries)
    return any(not same(right[0], result) for result in wrong)


@pytest.mark.parametrize("head_dim", [16, pytest.param(136, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FILES)
def test_results_do_not_depend_on_the_order_of_execution(family, head_dim):
    assert check(family, None, head_dim)


@pytest.mark.parametrize(
    ("family", "index"),
    [
        pytest.param(family, index, marks=[] if family == "forward" else pytest.mark.slow)
        for family in FILES
        for index in range(len(barriers(family)))
    ],
)
def test_a_missing_barrier_shows(family, index):
    """head_dim 16 runs the pipeline of two stages, 136 that of one."""
    assert check(family, index, 16) or check(family, index, 136)


def test_a_racing_kernel_is_caught_by_the_model():
    """The checker is checked: one warp reads what another writes, without a barrier between."""
    text = """
struct Params { float* to; };
extern "C" __global__ void racy(const Params p) {
    DYNAMIC_SHARED(shared);
    ((float*)shared)[threadIdx.x] = (float)threadIdx.x;
    p.to[threadIdx.x] = ((float*)shared)[63 - threadIdx.x];
}
"""
    for barrier, is_right in (("", False), ("__syncthreads();", True)):
        library = ctypes.CDLL(str(host.library_file(text.replace("    p.to", f"    {barrier}\n    p.to"))))
        to = np.zeros(64, np.float32)
        params = np.array([to.ctypes.data], np.uint64)
        host.run_library(library, host.Launch(None, "racy", 1, 64, 256, params))
        assert np.array_equal(to, np.arange(64)[::-1]) == is_right


def test_a_barrier_not_reached_by_all_ends_with_a_message():
    text = """
struct Params { int unused; };
extern "C" __global__ void hangs(const Params p) { if (threadIdx.x < 7) __shfl_xor_sync(0xffffffffu, 1, 1); }
"""
    library = ctypes.CDLL(str(host.library_file(text)))
    with pytest.raises(host.LaunchError, match="deadlock"):
        host.run_library(library, host.Launch(None, "hangs", 1, 32, 0, np.zeros(1, np.int32)))


def test_a_write_outside_shared_memory_is_caught():
    text = """
struct Params { int unused; };
extern "C" __global__ void outside(const Params p) { DYNAMIC_SHARED(shared); shared[64 + threadIdx.x] = 1; }
"""
    library = ctypes.CDLL(str(host.library_file(text)))
    with pytest.raises(host.LaunchError, match="behind the requested shared memory"):
        host.run_library(library, host.Launch(None, "outside", 1, 32, 64, np.zeros(1, np.int32)))

"""Each barrier and each wait is needed: without it some order of execution gives a wrong result.

And with all of them no order does. A mutation that survived would mean a barrier too many, or a weak model.
"""

import ctypes
import re
from functools import cache, partial

import numpy as np
import pytest

from npattn.kernels._cuda import source_text
from npattn.kernels.contract import Problem
from npattn.kernels.tile import cuda_launch
from npattn.masks import Dense
from npattn.masks.base import Extent
from npattn.plans.build import tile_plan

from . import fake_cupy, host

pytestmark = pytest.mark.skipif(host.why_not() is not None, reason=str(host.why_not()))

ORDERS = ("forward", "backward", "random:1", "random:2")
STARVING = ("starve:0-128", "starve:128-256", "starve:256-384")  # the warpgroups of forward_wgmma.cu
FILES = {
    "forward": "tile/forward.cu",
    "backward_rows": "tile/backward_rows.cu",
    "backward_cols": "tile/backward_cols.cu",
    "dbias": "tile/backward_bias.cu",
    "backward_atomic": "tile/backward_dq.cuh",
    "forward_wgmma": "tile/forward_wgmma.cu",
    "forward_async": "tile/copy_async.cuh",
    "forward_tma": "tile/copy_tma.cuh",
}
# Not the named barriers of forward_wgmma.cu: they only say whose turn it is, results do not depend on them.
BARRIER = re.compile(
    r"__syncthreads\(\);|__syncthreads_or\((\w+)\)|dev::copy_async_wait_all\(\);"
    r"|dev::mbarrier_(?:wait|arrive|expect)\([^;]*\);|dev::fence_for_wgmma\(\);|dev::wgmma_(?:fence|commit|wait<\d>)\(\);"
)


def scenario(head_dim, atomics=False):
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
    # read by what runs here and written by none of it: what memory held would decide, and NaN hides a fault
    arrays["delta"], arrays["absmax"] = rng.standard_normal(rows, dtype=np.float32), np.zeros(1, np.float32)
    results = {"dq": shape, "dk": shape, "dv": shape, "dbias": (1, 1, length, length), "dsinks": (1,)}
    arrays |= {name: np.empty(size, np.float32) for name, size in results.items()}
    arrays["dq_sum"] = np.zeros(shape, np.float32)
    launches += cuda_launch.backward_launches(problem, plan, arrays, atomics)
    return arrays, launches, plan


def wgmma_scenario(head_dim, copier="1"):
    """As ``scenario``, for the forward pass of the sm_90a kernel; more steps than it has stages."""
    rng = np.random.default_rng(3)
    len_q, len_k = 100, 1000
    visible = rng.random((len_q, len_k)) < 0.7
    visible[:, 128:256] = False
    for place, seen_by in ((40, 5), (300, 77), (600, 6)):
        visible[:, place] = False
        visible[seen_by, place] = True
    q, k, v = (rng.standard_normal((1, 1, n, head_dim)).astype(np.float16) for n in (len_q, len_k, len_k))
    k[0, 0, [40, 600]] = v[0, 0, [40, 300, 600]] = np.nan
    problem = Problem(
        *(np.dtype(np.float16), 1, 1, 1, len_q, len_k, head_dim, head_dim, 0.3, 0.0, False, False, 0.0, 0)
    )
    plan = tile_plan(Dense(visible), Extent(1, 1, len_q, len_k), *cuda_launch.tile_shape(problem, True))
    rows = q.shape[:3]
    arrays = {"q": q, "k": k, "v": v, "out": np.empty_like(q)}
    arrays |= {"m": np.empty(rows, np.float32), "l": np.empty(rows, np.float32)}
    with fake_cupy.installed():
        return arrays, cuda_launch.forward_launches(problem, plan, arrays, copier), plan


def outcome(launches, arrays, library, entries):
    """The bytes of all results, or the model's message, of the named kernels by ``library``."""
    for name in ("out", "dq", "dk", "dv", "dbias", "dsinks"):
        if any(name in WRITES[entry] for entry in entries):
            arrays[name][...] = 7
    if "attention_dq_from_sum" in entries:
        arrays["dq_sum"][...] = 0
    try:
        for launch in launches:
            if launch.entry in entries:
                host.run_library(library, launch)
    except host.LaunchError as error:
        return str(error)
    written = sorted({name for entry in entries for name in WRITES[entry]})
    return {name: arrays[name].copy() for name in written}


DIMS = dict.fromkeys(("forward_wgmma", "forward_async", "forward_tma"), (128,)) | {"backward_atomic": (16,)}
WRITES = {
    "attention_forward": ("out",),
    "attention_dsinks": ("dsinks",),
    "attention_backward_rows": ("dq",),
    "attention_backward_cols": ("dk", "dv"),
    "attention_dbias": ("dbias",),
    "attention_dq_from_sum": ("dq",),
    "attention_forward_wgmma": ("out",),
}


def same(x, y):
    if isinstance(x, str) or isinstance(y, str):
        return x == y
    return all(np.array_equal(x[name], y[name], equal_nan=True) for name in x)


def in_every_order(launches, arrays, library, entries):
    """One outcome for each order of execution and, for wgmma, each time at which operands may be read."""
    is_wgmma = "attention_forward_wgmma" in entries
    for order in (*STARVING, "random:1") if is_wgmma else ORDERS:
        for reads in ("early", "late") if is_wgmma else ("early",):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NPATTN_CUDA_ORDER", order)
                patch.setenv("NPATTN_CUDA_WGMMA", reads)
                result = outcome(launches, arrays, library, entries)
            yield result


def barriers(family):
    """The barriers in a file's text."""
    text = (host.HEADER.parents[2] / "npattn" / "kernels" / FILES[family]).read_text()
    return [match[0] for match in BARRIER.finditer(text)]


def quick_dim(family):
    return {"forward_tma": 128, "forward_async": None}.get(family, 16)


def is_quick(family, index):
    return family == "forward" or (family == "forward_tma" and "mbarrier_wait" in barriers(family)[index])


@cache
def undisturbed(family, head_dim):
    """What is launched, and its right outcome, which no order of execution changes."""
    make = {
        "forward_wgmma": wgmma_scenario,
        "forward_async": wgmma_scenario,
        "forward_tma": partial(wgmma_scenario, copier="tma"),
        "backward_atomic": partial(scenario, atomics=True),
    }
    arrays, launches, plan = make.get(family, scenario)(head_dim)
    entry_kernels = {launch.entry: launch.kernel for launch in launches if launch.entry in WRITES}
    kernel = next(k for k in entry_kernels.values() if FILES[family] in k.files)
    entries = [entry for entry, k in entry_kernels.items() if k == kernel]
    library = ctypes.CDLL(str(host.library_file(source_text(kernel))))
    right, *others = in_every_order(launches, arrays, library, entries)
    assert not isinstance(right, str), right
    for result in others:
        assert same(right, result), "the result depends on the order of execution"
    return arrays, launches, plan, kernel, entries, right


def shows(family, index, head_dim):
    """Whether without barrier number ``index`` some order of execution gives something else."""
    arrays, launches, _plan, kernel, entries, right = undisturbed(family, head_dim)
    text = source_text(kernel)
    begin = text.index(f'#line 1 "{FILES[family]}"')
    found = list(BARRIER.finditer(text, begin))[index]
    without = text[: found.start()] + (f"({found[1]})" if found[1] else ";") + text[found.end() :]
    library = ctypes.CDLL(str(host.library_file(without)))
    return any(not same(right, wrong) for wrong in in_every_order(launches, arrays, library, entries))


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [
        pytest.param(family, dim, marks=[] if dim == quick_dim(family) else pytest.mark.slow)
        for family in FILES
        for dim in sorted({16, 128} if family in DIMS else {16, 136})
    ],
)
def test_results_do_not_depend_on_the_order_of_execution(family, head_dim):
    undisturbed(family, head_dim)


@pytest.mark.parametrize(
    ("family", "index"),
    [
        pytest.param(family, index, marks=[] if is_quick(family, index) else pytest.mark.slow)
        for family in FILES
        for index in range(len(barriers(family)))
    ],
)
def test_a_missing_barrier_shows(family, index):
    """head_dim 16 runs the pipeline of two stages, 136 that of one; forward_wgmma.cu has two at 128."""
    assert any(shows(family, index, dim) for dim in DIMS.get(family, (16, 136)))


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

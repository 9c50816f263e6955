"""No array of len_q × len_k anywhere for masks with intervals, and none in building structured plans."""

import subprocess
import sys
import textwrap
import time
import tracemalloc

import pytest

from npattn.masks import Dilated, Extent, GlobalTokens, Window, bigbird, local_strided, longformer
from npattn.plans.build import build_tile_plan

LENGTH = 65536


def test_attention_with_a_window_over_65536_keys_stays_far_below_the_matrix():
    """The bool matrix would take 4 GiB, the weights 16. In its own process, whose peak it then is."""
    program = textwrap.dedent(
        f"""
        import resource, sys
        import numpy as np
        from npattn import attention_vjp
        from npattn.masks import Window

        rng = np.random.default_rng(0)
        q, k, v = rng.normal(size=(3, 1, {LENGTH}, 32)).astype(np.float32)
        small = attention_vjp(q[:, :99], k[:, :99], v[:, :99], mask=Window(9))  # imports and compiles
        small[1](small[0])
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        before = peak()
        out, pullback = attention_vjp(q, k, v, mask=Window(127))
        grads = pullback(out)
        assert np.isfinite(grads.key).all()
        print(peak() - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 150  # MiB; arrays, results and plan are about 60


@pytest.mark.slow
def test_a_million_keys_under_a_window_stay_below_two_gib():
    """Inputs, results and gradients alone are 1.7 GiB; dQ has two layers, not one for each chunk of keys."""
    program = textwrap.dedent(
        """
        import resource
        import numpy as np
        from npattn import attention_vjp
        from npattn.masks import Window

        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, 1, 1_000_000, 64), dtype=np.float32) for _ in range(3))
        out, pullback = attention_vjp(q, k, v, mask=Window(255))
        grads = pullback(out)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0  # GiB


@pytest.mark.parametrize(
    "mask",
    [
        Window(256),
        longformer(256, [0, 1, 30000]),
        bigbird(64, 3, 2, 3, 0),
        Dilated(128, 4),
        local_strided(512, 128),
        ~(Window(64, 64) | GlobalTokens([5])),
    ],
    ids=["window", "longformer", "bigbird", "dilated", "local_strided", "complement"],
)
def test_structured_plans_for_65536_keys_take_one_entry_per_tile_at_most(mask):
    start = time.perf_counter()
    plan = build_tile_plan(mask, Extent(1, 1, LENGTH, LENGTH), 64, 64)
    took = time.perf_counter() - start
    assert took < 10  # seconds; measured 0.01 to 0.4
    assert len(plan.bits) < 100  # equal partial tiles are stored once
    tracemalloc.start()
    build_tile_plan(mask, Extent(1, 1, LENGTH, LENGTH), 64, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * (LENGTH // 64) ** 2  # bytes: one entry per tile, a few of them at a time

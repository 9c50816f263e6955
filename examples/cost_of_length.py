"""What length costs: operations and memory, counted and measured. With `--save FOLDER` the curves are drawn.

python examples/cost_of_length.py
"""

import time
import tracemalloc
from pathlib import Path

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn.analysis import attention_cost, linear_attention_cost
from npattn.masks import Causal, Window

HEADS, HEAD_DIM = 4, 64
WAYS = {
    "whole matrices": lambda n: attention_cost(n, heads=HEADS, algorithm="dense"),
    "npattn, full": lambda n: attention_cost(n, heads=HEADS),
    "npattn, causal": lambda n: attention_cost(n, heads=HEADS, mask=Causal()),
    "npattn, window 128": lambda n: attention_cost(n, heads=HEADS, mask=Window(127)),
    "linear attention": lambda n: linear_attention_cost(n, heads=HEADS),
}


def by_formula(q, k, v):
    """Softmax(q kᵀ / √D) v over whole matrices."""
    logits = q @ k.swapaxes(-1, -2) / HEAD_DIM**0.5
    logits = logits - logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True) @ v


CALLS = {
    "whole matrices": by_formula,
    "npattn, full": npattn.attention,
    "npattn, causal": lambda q, k, v: npattn.attention(q, k, v, mask=Causal()),
    "npattn, window 128": lambda q, k, v: npattn.attention(q, k, v, mask=Window(127)),
    "linear attention": npattn.linear_attention,
}


def main():
    """Run the example and print."""
    save = {"type": Path, "default": None, "help": "folder to write pictures to (needs matplotlib)"}
    length = {"type": int, "default": 2048, "help": "tokens of the longest measured call"}
    arguments, xp = parse(__doc__, save=save, length=length)
    lengths = (1024, 8192, 65536)
    print(f"counted, {HEADS} heads of {HEAD_DIM}, forward: GFLOP | MiB beyond the inputs")
    print(f"{'':20}" + "".join(f"{n:>24,}" for n in lengths))
    for name, cost_of in WAYS.items():
        costs = [cost_of(n) for n in lengths]
        print(
            f"{name:20}" + "".join(f"{c.flops / 1e9:>13,.2f} | {c.peak_bytes / 2**20:>8,.1f}" for c in costs)
        )

    print(f"\nmeasured at {arguments.length:,} tokens{'':12} {'ms':>8} {'GFLOP/s':>9} {'MiB':>8}")
    rng = np.random.default_rng(0)
    arrays = [
        xp.asarray(rng.standard_normal((HEADS, arguments.length, HEAD_DIM), dtype=np.float32))
        for _ in range(3)
    ]
    for name, call in CALLS.items():
        milliseconds, mebibytes = measure(call, arrays)
        rate = WAYS[name](arguments.length).flops / milliseconds / 1e6
        print(f"{name:38} {milliseconds:>8.2f} {rate:>9.1f} {mebibytes:>8.1f}")

    if arguments.save is not None:
        from npattn import plots

        arguments.save.mkdir(parents=True, exist_ok=True)
        plots.cost_curves(curves=WAYS)[0].figure.savefig(arguments.save / "cost.png")


def measure(call, arrays):
    """Milliseconds of a call, the best of three after one to warm up, and MiB allocated on the host."""
    to_numpy(call(*arrays))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        to_numpy(call(*arrays))
        best = min(best, time.perf_counter() - begin)
    tracemalloc.start()
    call(*arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return 1e3 * best, peak / 2**20


if __name__ == "__main__":
    main()

"""Causal attention, sliding windows, padding and packed documents: masks that are one interval per query.

python examples/causal_and_windows.py
"""

import time

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn.masks import Causal, Documents, Padding, Window


def main():
    """Run the example and print."""
    arguments, xp = parse(__doc__, length={"type": int, "default": 2048, "help": "tokens"})
    rng = np.random.default_rng(0)

    # The usual way: a large negative number where attention is forbidden. It is the same here only as long
    # as every query sees something.
    q, k, v = rng.standard_normal((3, 6, 8))
    logits = q @ k.T / np.sqrt(8)
    logits[np.triu_indices(6, 1)] = -1e9
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    by_hand = weights / weights.sum(axis=-1, keepdims=True) @ v
    assert np.allclose(npattn.attention(q, k, v, mask=Causal()), by_hand)
    assert np.allclose(npattn.attention(q, k, v, mask=np.tri(6, dtype=bool)), by_hand)  # an array works too

    print("Causal()                Window(2)               Window(1, 1)\n")
    pictures = [mask.picture(8, 8).splitlines() for mask in (Causal(), Window(2), Window(1, 1))]
    print("\n".join("                ".join(lines) for lines in zip(*pictures, strict=True)))

    # The future has no influence: change it, and nothing before it changes.
    changed = v.copy()
    changed[4:] = np.nan
    before = npattn.attention(q, k, changed, mask=Causal())[:4]
    assert np.array_equal(before, npattn.attention(q, k, v, mask=Causal())[:4])

    # A window makes the cost grow with the length, not with its square.
    print(f"\n{'tokens':>8} {'full':>9} {'causal':>9} {'window 128':>11}   milliseconds, 4 heads of 64")
    for length in (arguments.length // 4, arguments.length // 2, arguments.length):
        arrays = [xp.asarray(rng.standard_normal((4, length, 64), dtype=np.float32)) for _ in range(3)]
        times = [measure(*arrays, mask) for mask in (None, Causal(), Window(127))]
        print(f"{length:>8} {times[0]:>9.2f} {times[1]:>9.2f} {times[2]:>11.2f}")

    # Texts of different lengths, padded to a batch: padding is never seen, whatever it holds.
    lengths = [5, 3]
    batch = rng.standard_normal((2, 1, 5, 8))
    batch[1, :, 3:] = np.nan
    out = npattn.attention(batch, batch, batch, mask=Causal(0) & Padding(lengths, lengths))
    assert np.isfinite(out).all()
    assert not out[1, 0, 3:].any()  # a padded query sees nothing: its output is 0

    # Or packed behind each other, without padding at all.
    packed = np.concatenate([batch[0, :, :5], batch[1, :, :3]], axis=1)  # (heads, total, head_dim)
    together = npattn.varlen_attention(packed, packed, packed, lengths, lengths, causal=True)
    assert np.allclose(together[:, :5], out[0])
    assert np.allclose(together[:, 5:], out[1, :, :3])
    print("\npacked texts:\n" + Documents(lengths, causal=True).picture(8, 8))


def measure(query, key, value, mask):
    """Milliseconds of one call, the best of three after one to warm up."""
    to_numpy(npattn.attention(query, key, value, mask=mask))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        to_numpy(npattn.attention(query, key, value, mask=mask))
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


if __name__ == "__main__":
    main()

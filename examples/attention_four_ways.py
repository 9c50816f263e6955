"""Attention from the formula to flash attention: the same numbers four ways.

1. the formula, three lines over whole matrices;
2. one query at a time, as the words would say it;
3. key tile after key tile with a running maximum: what a flash kernel does, in NumPy;
4. npattn.attention, with each kernel this machine has.

Then the gradients: by hand over whole matrices, and by npattn's pullback, which never sees one.

    python examples/attention_four_ways.py
"""

import numpy as np
from _device import parse, to_numpy

import npattn


def by_formula(q, k, v):
    """Softmax(q kᵀ / √D) v over whole matrices."""
    logits = q @ k.T / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v


def by_query(q, k, v):
    """Each query by itself, each key by itself."""
    out = np.zeros((len(q), v.shape[-1]))
    for i in range(len(q)):
        logits = [q[i] @ k[j] / np.sqrt(q.shape[-1]) for j in range(len(k))]
        largest = max(logits)  # exp of a large number overflows; of a difference to the largest, never
        weights = [np.exp(s - largest) for s in logits]
        for weight, row in zip(weights, v, strict=True):
            out[i] += weight / sum(weights) * row
    return out


def by_tiles(q, k, v, tile_q=16, tile_k=16):
    """Key tile after key tile, with a running maximum and sum."""
    out = np.empty((len(q), v.shape[-1]))
    for r in range(0, len(q), tile_q):
        rows = q[r : r + tile_q]
        m = np.full(len(rows), -np.inf)  # the largest logit so far
        l = np.zeros(len(rows))  # the sum of exp(logit - m) so far
        acc = np.zeros((len(rows), v.shape[-1]))  # the sum of exp(logit - m) · value so far
        for c in range(0, len(k), tile_k):
            s = rows @ k[c : c + tile_k].T / np.sqrt(q.shape[-1])  # (tile_q, tile_k): all there ever is
            m_new = np.maximum(m, s.max(axis=-1))
            shrink = np.exp(m - m_new)  # what was summed under the old maximum, under the new one
            p = np.exp(s - m_new[:, None])
            l = l * shrink + p.sum(axis=-1)
            acc = acc * shrink[:, None] + p @ v[c : c + tile_k]
            m = m_new
        out[r : r + tile_q] = acc / l[:, None]
    return out


def gradients_by_formula(q, k, v, dout):
    """The backward pass over whole matrices: dq, dk, dv."""
    scale = 1 / np.sqrt(q.shape[-1])
    logits = q @ k.T * scale
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dv = p.T @ dout
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return scale * ds @ k, scale * ds.T @ q, dv


def main():
    """Run the example and print."""
    arguments, xp = parse(__doc__, length={"type": int, "default": 100, "help": "tokens"})
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, arguments.length, 32))

    expected = by_formula(q, k, v)
    results = {"one query at a time": by_query(q, k, v), "tile by tile": by_tiles(q, k, v)}
    on_device = [xp.asarray(array) for array in (q, k, v)]
    backends = ["cupy"] if arguments.device == "gpu" else ["oracle", "numpy", "numba"]
    for backend in backends:
        results[f"npattn, {backend}"] = to_numpy(npattn.attention(*on_device, backend=backend))
    print(f"{arguments.length} tokens of 32 features, float64; largest difference from the formula:")
    for name, out in results.items():
        print(f"  {name:22} {abs(out - expected).max():.1e}")
        assert np.allclose(out, expected, rtol=1e-10, atol=1e-12)

    _, pullback = npattn.attention_vjp(*on_device)
    grads = pullback(xp.asarray(dout))
    print("gradients, largest difference from those by the formula:")
    expected = gradients_by_formula(q, k, v, dout)
    for name, ours, theirs in zip(("query", "key", "value"), grads, expected, strict=False):
        print(f"  {name:22} {abs(to_numpy(ours) - theirs).max():.1e}")
        assert np.allclose(to_numpy(ours), theirs, rtol=1e-9, atol=1e-12)


if __name__ == "__main__":
    main()

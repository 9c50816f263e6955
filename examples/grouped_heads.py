"""Several heads, and fewer key heads than query heads: multi-head, grouped-query and multi-query attention.

Heads split the features: each attends in a small space of its own, and their results stand side by side. Keys
and values may be shared by a group of query heads; the cache that a decoder keeps shrinks by as much.

    python examples/grouped_heads.py
"""

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn import analysis, nn

EMBED_DIM, HEADS, LENGTH = 64, 8, 32


def by_hand(layer, x):
    """The layer's output from its parameters: split into heads, attend in each, join, project."""
    length = x.shape[0]
    head_dim = EMBED_DIM // HEADS

    def heads(projection, count):  # (length, count · head_dim) -> (count, length, head_dim)
        return (x @ projection.weight.T).reshape(length, count, head_dim).transpose(1, 0, 2)

    query = heads(layer.query, HEADS)
    key, value = heads(layer.key, layer.num_kv_heads), heads(layer.value, layer.num_kv_heads)
    group = HEADS // layer.num_kv_heads
    parts = []
    for h in range(HEADS):
        logits = query[h] @ key[h // group].T / np.sqrt(head_dim)  # query head h reads key head h // group
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        parts.append(weights / weights.sum(axis=-1, keepdims=True) @ value[h // group])
    return np.concatenate(parts, axis=-1) @ layer.out.weight.T + layer.out.bias


def main():
    """Run the example and print."""
    _, xp = parse(__doc__)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((LENGTH, EMBED_DIM))
    print(f"{'':20} {'parameters':>10} {'cache, bytes a token':>22} {'difference from by hand':>25}")
    for name, kv_heads in (("multi-head", HEADS), ("grouped-query", 2), ("multi-query", 1)):
        layer = nn.MultiHeadAttention(EMBED_DIM, HEADS, num_kv_heads=kv_heads, rng=rng, dtype=np.float64)
        out = layer(x[None])[0]
        difference = abs(out - by_hand(layer, x)).max()
        cache = 2 * kv_heads * layer.head_dim * 4  # key and value, float32
        size = sum(array.size for array in layer.named_parameters().values())
        print(f"{name:20} {size:>10,} {cache:>22,} {difference:>25.1e}")
        assert difference < 1e-12

    # The function takes the heads as they are: nothing is repeated in memory.
    query = xp.asarray(rng.standard_normal((2, HEADS, LENGTH, 16)))
    key, value = xp.asarray(rng.standard_normal((2, 2, 2, LENGTH, 16)))
    grouped = npattn.attention(query, key, value)
    repeated = npattn.attention(query, key.repeat(4, axis=1), value.repeat(4, axis=1))
    assert np.allclose(to_numpy(grouped), to_numpy(repeated))

    # What distinguishes the heads of a layer that has not been trained: hardly anything.
    layer = nn.MultiHeadAttention(EMBED_DIM, HEADS, rng=rng)
    weights = layer.weights(x[None].astype(np.float32))
    summary = analysis.head_summary(weights)
    print(f"\nweights {weights.shape}; a query spreads over {summary.spread.min():.1f} to")
    print(f"{summary.spread.max():.1f} of {LENGTH} keys, depending on the head")


if __name__ == "__main__":
    main()

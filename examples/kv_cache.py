"""Caches: keys and values kept while a text grows. Contiguous, rolling and paged.

python examples/kv_cache.py
"""

import time

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn import nn
from npattn.cache import CacheFullError, KVCache, PagedKVCache, RollingKVCache
from npattn.masks import Causal

HEADS, HEADS_KV, HEAD_DIM = 8, 2, 32


def main():
    """Run the example and print."""
    _, xp = parse(__doc__)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return xp.asarray(rng.standard_normal(shape, dtype=np.float32))

    # The whole text at once, to compare with.
    length = 48
    query, key = normal(1, HEADS, length, HEAD_DIM), normal(1, HEADS_KV, length, HEAD_DIM)
    value = normal(1, HEADS_KV, length, HEAD_DIM)
    whole = npattn.attention(query, key, value, mask=Causal())

    # 1. Contiguous: a prompt of 40, then token by token. The result is the same as at once.
    cache = KVCache(batch=1, heads_kv=HEADS_KV, capacity=length, head_dim=HEAD_DIM)
    parts = []
    for new in [slice(0, 40), *(slice(n, n + 1) for n in range(40, length))]:
        cache.append(key[:, :, new], value[:, :, new])
        parts.append(cache.attention(query[:, :, new]))
    difference = abs(to_numpy(xp.concatenate(parts, axis=2)) - to_numpy(whole)).max()
    print(f"contiguous: {len(parts)} steps, {cache.lengths[0]} tokens, difference {difference:.1e}")
    assert difference < 1e-5
    try:
        cache.append(key[:, :, :1], value[:, :, :1])
    except CacheFullError as error:
        print(f"            {error}")

    # 2. Rolling: the last 16 tokens and the first 2, however long the text becomes.
    rolling = RollingKVCache(16, sinks=2, batch=1, heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    for n in range(length):
        rolling.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
        out = rolling.attention(query[:, :, n : n + 1])
    kept = to_numpy(rolling.positions)[0]
    expected = npattn.attention(query[:, :, -1:], key[:, :, kept], value[:, :, kept])
    assert np.allclose(to_numpy(out), to_numpy(expected), atol=1e-5)
    print(f"rolling:    after {length} tokens keeps positions {sorted(kept.tolist())}")

    # 3. Paged: two answers to one prompt share its pages, and write into copies of their own.
    paged = PagedKVCache(num_pages=16, page_size=8, heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    first = paged.allocate()
    paged.append(first, key[0, :, :20], value[0, :, :20])
    free = paged.pages_free
    second = paged.fork(first)
    print(
        f"paged:      20 tokens take {16 - free} pages, the fork takes {free - paged.pages_free} more,",
        end=" ",
    )
    paged.append(second, key[0, :, 20:21], value[0, :, 20:21])
    print(f"{free - paged.pages_free} when it writes")
    out = paged.attention(query[:, :, 20:21], [second])
    assert np.allclose(to_numpy(out), to_numpy(whole[:, :, 20:21]), atol=1e-5)
    paged.free(second)
    assert paged.pages_free == free

    # A model does this by itself: `generate` keeps a cache; without it each token costs the whole text again.
    model = nn.TransformerDecoder(100, 64, 4, 2, 128, 256, rng=rng)
    prompt = np.arange(1, 65)[None]
    begin = time.perf_counter()
    with_cache = model.generate(prompt, 64, temperature=0.0)
    middle = time.perf_counter()
    without = prompt
    for _ in range(64):
        without = np.concatenate([without, model(without)[:, -1:].argmax(axis=-1)], axis=1)
    end = time.perf_counter()
    assert np.array_equal(with_cache, without)
    print(f"model:      64 tokens in {middle - begin:.2f} s with the cache, {end - middle:.2f} s without")


if __name__ == "__main__":
    main()

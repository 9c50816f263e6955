"""Ten thousand mixed calls from four threads: the same bits each time, and no growth of memory."""

import gc
import random
import threading

import numpy as np
import pytest

import npattn
from npattn import masks, nn
from npattn.cache import KVCache, PagedKVCache

psutil = pytest.importorskip("psutil")


def as_bytes(result):
    """Every number of a result, in order."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, tuple | list):
        return b"".join(as_bytes(part) for part in result)
    return b"" if result is None else np.asarray(result).tobytes()


def mixed_calls():
    """Functions without arguments, of many kinds and sizes; each gives the same every time."""
    rng = np.random.default_rng(0)

    def arrays(*shape, dtype=np.float32):
        return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]

    small, medium, double = (
        arrays(2, 4, 17, 16),
        arrays(1, 2, 150, 32),
        arrays(1, 2, 40, 24, dtype=np.float64),
    )
    half = arrays(1, 3, 70, 16, dtype=np.float16)
    key, value = (x[:, :2] for x in small[1:])
    dense = rng.random((17, 17)) < 0.5
    block = nn.TransformerBlock(32, 4, 64, causal=True, rng=rng)
    model = nn.TransformerDecoder(50, 32, 4, 1, 64, 64, rng=rng)
    x, ids = rng.standard_normal((2, 20, 32)).astype(np.float32), rng.integers(0, 50, (2, 9))
    adjacency = npattn.graph.Adjacency.from_edges(*rng.integers(0, 30, (2, 200)), 30)
    nodes = [rng.standard_normal((30, 2, 8)).astype(np.float32) for _ in range(3)]

    def gradients(args, **options):
        out, pullback = npattn.attention_vjp(*args, **options)
        return [out, *pullback(out)]

    def block_step():
        y, pullback = block.vjp(x)
        return [y, *pullback(y)]

    def cached():
        cache = KVCache(2, 2, 17, 16)
        parts = []
        for s in (slice(0, 9), slice(9, 10), slice(10, 17)):
            cache.append(key[:, :, s], value[:, :, s])
            parts.append(cache.attention(small[0][:, :, s]))
        return parts

    def paged():
        pool = PagedKVCache(8, 4, heads_kv=2, head_dim=16)
        one = pool.allocate()
        pool.append(one, key[0], value[0])
        two = pool.fork(one)
        return pool.attention(small[0][:1, :, -1:].repeat(2, axis=0), [one, two])

    def fresh_mask(n=[0]):  # noqa: B006 - counts through the sizes, so that plans come and go
        n[0] = (n[0] + 1) % 400
        npattn.attention(*medium, mask=masks.Window(n[0]))
        return []

    return [
        lambda: npattn.attention(*small),
        lambda: npattn.attention(*medium, mask=masks.Causal(), return_lse=True),
        lambda: npattn.attention(*half, mask=masks.Window(9, 3)),
        lambda: npattn.attention(small[0], key, value, mask=dense),
        lambda: npattn.attention(*double, mask=masks.Strided(3) | masks.Causal(), backend="numpy"),
        lambda: gradients(small, mask=masks.Causal(), dropout_p=0.2, seed=5),
        lambda: gradients(medium, mask=masks.Documents([50, 60, 40], causal=True)),
        lambda: gradients(double, softcap=5.0),
        lambda: npattn.attention_weights(*small[:2], mask=masks.Causal()),
        lambda: npattn.attention_stats(*medium[:2], top_k=2),
        lambda: npattn.linear_attention(*small, causal=True),
        lambda: npattn.graph_attention(*nodes, adjacency),
        lambda: npattn.varlen_attention(*(a[0] for a in medium), [100, 50], [100, 50], causal=True),
        block_step,
        lambda: model.generate(ids, 3, temperature=0.0),
        cached,
        paged,
        fresh_mask,
    ]


def soak(calls_per_thread, threads=4):
    """Run; return the differing calls, and how many bytes the process grew after the first third."""
    calls = mixed_calls()
    expected = [as_bytes(call()) for call in calls]
    wrong, memory, lock = [], [], threading.Lock()

    def work(seed):
        order = random.Random(seed)
        for step in range(calls_per_thread):
            number = order.randrange(len(calls))
            try:
                same = as_bytes(calls[number]()) == expected[number]
            except Exception as error:  # a thread's exception would be lost
                same = False
                wrong.append((number, repr(error)))
            if not same:
                wrong.append((number, step))
            if seed == 0 and step % max(calls_per_thread // 30, 1) == 0:
                with lock:
                    memory.append(psutil.Process().memory_info().rss)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    third = len(memory) // 3
    return wrong, max(memory[-third:]) - max(memory[: 2 * third])


def test_mixed_calls_from_four_threads_give_the_same_bits():
    wrong, growth = soak(100)
    assert wrong == []
    assert growth < 64 * 2**20


@pytest.mark.slow
def test_ten_thousand_mixed_calls_neither_differ_nor_grow():
    wrong, growth = soak(2500)
    assert wrong == []
    assert growth < 8 * 2**20

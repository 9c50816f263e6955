import copy
import os
import pickle
import threading

import numpy as np
import pytest

from npattn import attention
from npattn.cache import CacheFullError, LayerCaches, PagedKVCache
from npattn.kernels.select import TILE, load
from npattn.masks import Causal, Window

HEADS_Q, HEADS_KV, DIM, DIM_V = 4, 2, 3, 5


def rows(rng, length, heads=HEADS_KV):
    return rng.standard_normal((heads, length, DIM)), rng.standard_normal((heads, length, DIM_V))


def new_cache(num_pages=32, page_size=4):
    return PagedKVCache(
        num_pages, page_size, heads_kv=HEADS_KV, head_dim=DIM, head_dim_v=DIM_V, dtype=np.float64
    )


def poison(cache):
    """NaN in every row that no sequence holds."""
    held = np.zeros(cache.num_pages * cache.page_size, bool)
    for sequence in cache._sequences.values():
        for row, _, count in cache._runs(sequence):
            held[row : row + count] = True
    cache._key[:, ~held] = np.nan
    cache._value[:, ~held] = np.nan


def check(cache, truth, rng):
    """Every sequence: its arrays, its length, and the attention of its last rows, alone and together."""
    poison(cache)
    live = list(truth)
    for sequence, (k, v) in truth.items():
        assert cache.length(sequence) == k.shape[1]
        np.testing.assert_array_equal(cache.arrays(sequence)[0], k)
        np.testing.assert_array_equal(cache.arrays(sequence)[1], v)
    for len_q in (1, 3):
        q = rng.standard_normal((len(live), HEADS_Q, len_q, DIM))
        out, lse = cache.attention(q, live, return_lse=True)
        for index, sequence in enumerate(live):
            expected = attention(q[index], *truth[sequence], mask=Causal(), return_lse=True, backend="oracle")
            np.testing.assert_allclose(out[index], expected[0], atol=1e-12)
            np.testing.assert_allclose(lse[index], expected[1], atol=1e-12)


def used_pages(cache):
    return cache.num_pages - cache.pages_free


def test_random_histories_equal_the_contiguous_arrays():
    """Allocate, append, fork, truncate and free at random; a dict of plain arrays is the truth."""
    rng = np.random.default_rng(0)
    cache, truth = new_cache(), {}
    for step in range(150):
        action = rng.choice(["allocate", "append", "append", "append", "fork", "free", "truncate"])
        chosen = int(rng.choice(list(truth))) if truth else None
        if action == "allocate" or chosen is None:
            truth[cache.allocate()] = (np.zeros((HEADS_KV, 0, DIM)), np.zeros((HEADS_KV, 0, DIM_V)))
        elif action == "append":
            k, v = rows(rng, int(rng.integers(0, 9)))
            free = cache.pages_free
            try:
                cache.append(chosen, k, v)
            except CacheFullError:
                assert cache.pages_free == free
            else:
                truth[chosen] = tuple(
                    np.concatenate(pair, axis=1) for pair in zip(truth[chosen], (k, v), strict=True)
                )
        elif action == "fork":
            free = cache.pages_free
            truth[cache.fork(chosen)] = truth[chosen]
            assert cache.pages_free == free
        elif action == "free":
            cache.free(chosen)
            del truth[chosen]
        else:
            kept = int(rng.integers(0, truth[chosen][0].shape[1] + 1))
            cache.truncate(chosen, kept)
            truth[chosen] = tuple(array[:, :kept] for array in truth[chosen])
        if step % 10 == 0 and truth:
            check(cache, truth, rng)
    for sequence in list(truth):
        cache.free(sequence)
    assert cache.pages_free == cache.num_pages


def test_a_fork_takes_no_page_until_a_branch_writes():
    rng = np.random.default_rng(1)
    cache = new_cache()
    first = cache.allocate()
    k, v = rows(rng, 10)
    cache.append(first, k, v)
    assert used_pages(cache) == 3
    second, third = cache.fork(first), cache.fork(first)
    assert used_pages(cache) == 3
    k2, v2 = rows(rng, 1)
    cache.append(second, k2, v2)
    assert used_pages(cache) == 4  # its own copy of the half-filled page
    cache.append(first, k2[:, :0], v2[:, :0])
    assert used_pages(cache) == 4  # nothing was written
    cache.free(third)
    cache.append(first, 2 * k2, 2 * v2)
    assert used_pages(cache) == 4  # the last reader of a page writes in place
    truth = {
        first: (np.concatenate([k, 2 * k2], 1), np.concatenate([v, 2 * v2], 1)),
        second: (np.concatenate([k, k2], 1), np.concatenate([v, v2], 1)),
    }
    check(cache, truth, rng)


def test_a_fork_at_a_page_boundary_copies_nothing():
    rng = np.random.default_rng(2)
    cache = new_cache()
    first = cache.allocate()
    cache.append(first, *rows(rng, 8))
    second = cache.fork(first)
    cache.append(second, *rows(rng, 1))
    assert used_pages(cache) == 3


def test_a_refused_append_changes_nothing_not_even_in_part():
    rng = np.random.default_rng(3)
    cache = new_cache(num_pages=4)
    first = cache.allocate()
    k, v = rows(rng, 10)
    cache.append(first, k, v)
    second = cache.fork(first)
    third = cache.allocate()
    cache.append(third, *rows(rng, 4))
    with pytest.raises(CacheFullError, match=r"4 pages of 4 tokens.*16 tokens"):
        cache.append(second, *rows(rng, 1))  # a copy of the shared page would be needed
    with pytest.raises(CacheFullError):
        cache.append(third, *rows(rng, 9))
    assert cache.pages_free == 0
    assert [cache.length(sequence) for sequence in (first, second, third)] == [10, 10, 4]
    np.testing.assert_array_equal(cache.arrays(second)[0], k)
    batch = cache.batch([first, second])
    with pytest.raises(CacheFullError):
        batch.check_room(1)
    with pytest.raises(CacheFullError):  # the first has room once the second is copied, but not both
        batch.append(np.zeros((2, HEADS_KV, 1, DIM)), np.zeros((2, HEADS_KV, 1, DIM_V)))
    assert batch.lengths.tolist() == [10, 10]
    np.testing.assert_array_equal(cache.arrays(first)[0], k)
    cache.free(third)
    batch.append(np.zeros((2, HEADS_KV, 1, DIM)), np.ones((2, HEADS_KV, 1, DIM_V)))
    assert batch.lengths.tolist() == [11, 11]
    assert cache.pages_free == 0  # one copy served both


def test_freed_and_unknown_sequences_are_key_errors():
    cache = new_cache()
    sequence = cache.allocate()
    k, v = rows(np.random.default_rng(4), 3)
    cache.append(sequence, k, v)
    cache.free(sequence)
    for misuse in (
        lambda: cache.append(sequence, k, v),
        lambda: cache.fork(sequence),
        lambda: cache.free(sequence),
        lambda: cache.length(sequence),
        lambda: cache.arrays(sequence),
        lambda: cache.truncate(sequence, 0),
        lambda: cache.attention(np.zeros((1, HEADS_Q, 1, DIM)), [sequence]),
        lambda: cache.attention(np.zeros((1, HEADS_Q, 1, DIM)), [99]),
    ):
        with pytest.raises(KeyError, match="freed"):
            misuse()
    assert cache.allocate() != sequence
    assert cache.pages_free == cache.num_pages


def test_wrong_shapes_are_refused():
    cache = new_cache()
    sequence = cache.allocate()
    k, v = rows(np.random.default_rng(5), 3)
    with pytest.raises(ValueError, match="shape"):
        cache.append(sequence, k[:1], v[:1])
    with pytest.raises(ValueError, match="shape"):
        cache.append(sequence, v, k)
    with pytest.raises(ValueError, match="3 tokens but value 2"):
        cache.append(sequence, k, v[:, :2])
    with pytest.raises(ValueError, match="2 sequences"):
        cache.attention(np.zeros((2, HEADS_Q, 1, DIM)), [sequence])
    with pytest.raises(ValueError, match="multiple"):
        cache.attention(np.zeros((1, 3, 1, DIM)), [sequence])
    with pytest.raises(ValueError, match="twice"):
        cache.batch([sequence, sequence]).append(np.stack([k, k]), np.stack([v, v]))
    assert cache.length(sequence) == 0


def test_sequences_that_grow_side_by_side_stay_in_long_runs():
    cache = new_cache(num_pages=64)
    sequences = [cache.allocate() for _ in range(4)]
    k, v = rows(np.random.default_rng(6), 1)
    for _ in range(50):
        for sequence in sequences:
            cache.append(sequence, k, v)
    assert max(len(cache._runs(cache._find(sequence))) for sequence in sequences) <= 2


def test_options_count_once_over_several_runs():
    rng = np.random.default_rng(7)
    cache = new_cache(num_pages=16, page_size=2)
    others = [cache.allocate() for _ in range(16)]
    for other in others:
        cache.append(other, *rows(rng, 2))
    for other in others[::2]:
        cache.free(other)  # no two free pages are neighbours
    first = cache.allocate()
    k, v = rows(rng, 13)
    cache.append(first, k, v)
    assert len(cache._runs(cache._find(first))) > 3
    poison(cache)
    q = rng.standard_normal((1, HEADS_Q, 3, DIM))
    options = {"sinks": rng.standard_normal(HEADS_Q), "bias": rng.standard_normal((1, HEADS_Q, 3, 13))}
    out = cache.attention(q, [first], **options, softcap=2.0)
    expected = attention(q, k[None], v[None], mask=Causal(), **options, softcap=2.0, backend="oracle")
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_sequences_of_one_pool_may_be_used_from_several_threads():
    cache = new_cache(num_pages=400, page_size=2)
    faults = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(3):
                sequence = cache.allocate()
                k, v = rows(rng, 25)
                for t in range(0, 25, 5):
                    cache.append(sequence, k[:, t : t + 5], v[:, t : t + 5])
                    q = rng.standard_normal((1, HEADS_Q, 1, DIM))
                    expected = attention(q[0], k[:, : t + 5], v[:, : t + 5])
                    np.testing.assert_allclose(cache.attention(q, [sequence])[0], expected, atol=1e-12)
                cache.free(sequence)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert cache.pages_free == 400


def filled(page_size, dtype, lengths, rng, heads=(HEADS_Q, HEADS_KV)):
    """A pool of which a part is taken at random, and whose sequences grow in turns: pages lie scattered."""
    needed = sum(-(-n // page_size) for n in lengths)
    cache = PagedKVCache(
        2 * needed,
        page_size,
        heads_kv=heads[1],
        head_dim=DIM,
        head_dim_v=DIM_V,
        dtype=dtype,
    )
    others = [cache.allocate() for _ in range(2 * needed)]
    for other in others:
        cache.append(other, *rows(rng, page_size, heads[1]))
    for other in rng.permutation(others)[:needed]:
        cache.free(int(other))
    sequences = [cache.allocate() for _ in lengths]
    truth = [[x.astype(dtype) for x in rows(rng, n, heads[1])] for n in lengths]
    at = [0] * len(lengths)
    while at != list(lengths):
        for b, (k, v) in enumerate(truth):
            new = min(int(rng.integers(1, 2 * page_size + 1)), lengths[b] - at[b])
            cache.append(sequences[b], k[:, at[b] : at[b] + new], v[:, at[b] : at[b] + new])
            at[b] += new
    return cache, sequences, truth


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 100])
def test_every_page_size_and_storage_gives_attention_over_the_arrays(page_size, dtype):
    """Sequences of unequal length, one of them empty; the poisoned rest of the pool never shows."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(8)
    lengths = [230, 1, 0, 64, 147]
    cache, sequences, truth = filled(page_size, dtype, lengths, rng)
    poison(cache)
    wide = np.float64 if dtype == np.float64 else np.float32
    for len_q, window in ((1, None), (3, None), (1, 70), (20, None), (30, 9)):  # the last two go by runs
        q = rng.standard_normal((5, HEADS_Q, len_q, DIM)).astype(wide)
        real = np.minimum(lengths, rng.integers(0, len_q + 1, 5))
        out, lse = cache.batch(sequences).attention(q, query_lengths=real, window=window, return_lse=True)
        assert out.dtype == wide
        for b, (k, v) in enumerate(truth):
            n = int(real[b])
            mask = Causal() if window is None else Window(window, 0)
            k, v = k.astype(np.float64), v.astype(np.float64)
            expected = attention(
                q[b, :, :n].astype(np.float64), k, v, mask=mask, return_lse=True, backend="oracle"
            )
            close = {"atol": 1e-12 if wide == np.float64 else 2e-6}
            np.testing.assert_allclose(out[b, :, :n], expected[0], **close)
            np.testing.assert_allclose(lse[b, :, :n], expected[1], rtol=1e-6, **close)
            assert (out[b, :, n:] == 0).all()
            assert (lse[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize("backend", ["auto", "numpy", "oracle"])
def test_a_bias_of_unequal_sequences_follows_their_positions(backend):
    rng = np.random.default_rng(9)
    lengths = [40, 7, 21]
    cache, sequences, truth = filled(4, np.float64, lengths, rng)
    q = rng.standard_normal((3, HEADS_Q, 5, DIM))
    bias = rng.standard_normal((3, HEADS_Q, 5, 40))
    for own in (bias, bias[:, :, :1], bias[:1], bias[0], bias[0, 0], bias[..., :1]):
        out = cache.batch(sequences).attention(q, query_lengths=[5, 2, 4], bias=own, backend=backend)
        whole = np.broadcast_to(own, bias.shape)
        for b, (n, (k, v)) in enumerate(zip([5, 2, 4], truth, strict=True)):
            expected = attention(
                q[b, :, :n], k, v, mask=Causal(), bias=whole[b, :, :n, : lengths[b]], backend="oracle"
            )
            np.testing.assert_allclose(out[b, :, :n], expected, atol=1e-12)


def test_the_table_is_read_by_one_launch(monkeypatch):
    """Decoding over scattered pages makes no call of attention a run, nor a copy of the rows."""
    rng = np.random.default_rng(10)
    cache, sequences, truth = filled(4, np.float32, [90, 33], rng)
    assert len(cache._runs(cache._find(sequences[0]))) > 5
    q = rng.standard_normal((2, HEADS_Q, 1, DIM)).astype(np.float32)
    expected = [attention(q[b], *truth[b], backend="oracle") for b in range(2)]

    def refused(*arguments, **options):
        raise AssertionError("attention was called")

    if load(TILE["numba"])[0] is None or os.environ.get("NUMBA_DISABLE_JIT"):
        pytest.skip("Numba's kernels do not run here")
    monkeypatch.setattr("npattn.cache.paged.attention", refused)
    out = cache.attention(q, sequences)
    for b in range(2):
        np.testing.assert_allclose(out[b], expected[b], atol=2e-6)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_pool_is_a_pool_of_its_own(how):
    rng = np.random.default_rng(11)
    cache = new_cache()
    first = cache.allocate()
    k, v = rows(rng, 10)
    cache.append(first, k, v)
    batch = how(cache.batch([first, cache.fork(first)]))
    pool = batch.pool
    assert pool is not cache
    k2, v2 = rows(rng, 3)
    pool.append(first, k2, v2)
    pool.free(batch.sequences[1])
    assert cache.length(first) == 10
    assert cache.length(batch.sequences[1]) == 10
    check(pool, {first: (np.concatenate([k, k2], 1), np.concatenate([v, v2], 1))}, rng)
    check(cache, dict.fromkeys(batch.sequences, (k, v)), rng)
    assert pool.allocate() == cache.allocate()


def test_layer_caches_move_together_or_not_at_all():
    pools = [new_cache() for _ in range(3)]
    sequences = [pools[0].allocate(), pools[0].allocate()]
    for pool in pools[1:]:
        assert [pool.allocate(), pool.allocate()] == sequences
    caches = LayerCaches([pool.batch(sequences) for pool in pools])
    k, v = np.ones((2, HEADS_KV, 5, DIM)), np.ones((2, HEADS_KV, 5, DIM_V))
    with caches.guard():
        for layer in caches:
            layer.append(k, v, [5, 3])
    assert caches.lengths.tolist() == [5, 3]

    def interrupted():
        with caches.guard():
            caches[0].append(k, v)
            caches[1].append(k, v)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [layer.lengths.tolist() for layer in caches] == [[5, 3]] * 3
    assert [pool.pages_free for pool in pools] == [29] * 3
    assert caches.capacity == 128
    caches[0].append(k, v)
    with pytest.raises(ValueError, match="move together"):
        LayerCaches(caches.layers)

"""Caches, generation and models with their arrays on the GPU give what they give on the CPU."""

import numpy as np
import pytest

from npattn.cache import KVCache, PagedKVCache, RollingKVCache
from npattn.models import Bert
from npattn.nn import TransformerDecoder

from .fake_cupy import ndarray


def test_generation_on_the_gpu_gives_the_cpus_tokens(cupy):
    model = TransformerDecoder(
        40, 32, 2, 1, 48, 32, num_kv_heads=1, position="rotary", norm="rms", mlp="swiglu", rng=0
    )
    prompts, options = np.array([[3, 1, 4], [1, 5, 9]]), {"temperature": 0, "lengths": [3, 2]}
    expected = model.generate(prompts, 3, **options)
    model.move_to(cupy)
    np.testing.assert_array_equal(model.generate(prompts, 3, **options), expected)


def test_sentence_embeddings_on_the_gpu_are_the_cpus(cupy):
    bert = Bert(40, 32, 2, 1, 48, 16, rng=0)
    ids, lengths = np.arange(20).reshape(4, 5), np.array([5, 2, 1, 4])
    for pooling in ("mean", "cls"):
        expected = bert.embed(ids, lengths, pooling=pooling)
        bert.move_to(cupy)
        found = bert.embed(ids, lengths, pooling=pooling)
        assert isinstance(found, ndarray)
        np.testing.assert_allclose(found.get(), expected, atol=2e-5)
        bert.move_to(np)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
def test_caches_keep_gpu_arrays_on_the_gpu(cupy, kind, dtype):
    rng = np.random.default_rng(0)
    key, value, query = rng.standard_normal((3, 1, 2, 9, 16)).astype(np.float32)
    found = []
    for xp in (np, cupy):
        if kind == "kv":
            cache = KVCache(1, 2, 16, 16, dtype=dtype)
        elif kind == "rolling":
            cache = RollingKVCache(16, 2, batch=1, heads_kv=2, head_dim=16, dtype=dtype)
        else:
            pool = PagedKVCache(8, 4, heads_kv=2, head_dim=16, dtype=dtype)
            cache = pool.batch([pool.allocate()])
        for part in (slice(0, 7), slice(7, 8), slice(8, 9)):
            cache.append(xp.asarray(key[:, :, part]), xp.asarray(value[:, :, part]))
            out = cache.attention(xp.asarray(query[:, :, part]))
        found.append(out)
    assert isinstance(found[1], ndarray)
    np.testing.assert_allclose(found[1].get(), found[0], atol=2e-5)
    with pytest.raises(TypeError, match="same device"):
        cache.append(key[:, :, :1], value[:, :, :1])


def test_decoding_from_pages_is_one_launch_on_the_gpu_too(cupy, monkeypatch):
    """Sequences of unequal length in one pool, whose pages alternate; attention is not called a run."""
    rng = np.random.default_rng(1)
    lengths, pools = (70, 9), []
    rows = [rng.standard_normal((2, 2, n, 16)).astype(np.float32) for n in lengths]
    query = rng.standard_normal((2, 4, 1, 16)).astype(np.float32)
    for xp in (np, cupy):
        pool = PagedKVCache(40, 4, heads_kv=2, head_dim=16)
        sequences = [pool.allocate(), pool.allocate()]
        for start in range(0, 70, 3):
            for sequence, (key, value) in zip(sequences, rows, strict=True):
                part = slice(start, start + 3)
                pool.append(sequence, xp.asarray(key[:, part]), xp.asarray(value[:, part]))
        pools.append((pool, sequences))
    expected = pools[0][0].attention(query, pools[0][1])

    def refused(*arguments, **options):
        raise AssertionError("attention was called")

    monkeypatch.setattr("npattn.cache.paged.attention", refused)
    found = pools[1][0].attention(cupy.asarray(query), pools[1][1])
    assert isinstance(found, ndarray)
    np.testing.assert_allclose(found.get(), expected, atol=2e-5)

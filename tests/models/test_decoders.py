"""GPT2 and Llama against what Hugging Face's transformers computed on the same files (make_references.py)."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from npattn.cache import CacheFullError, KVCache, LayerCaches, PagedKVCache, RollingKVCache
from npattn.functional.linear import linears
from npattn.io import load_safetensors, save
from npattn.masks import Prefix, Window
from npattn.models import GPT2, Llama
from npattn.nn import TransformerDecoder

DATA = Path(__file__).parent / "data"
DECODERS = ["gpt2", "llama", "llama_tied_llama3", "llama_linear"]
CLASSES = {"gpt2": GPT2}


@pytest.fixture(params=DECODERS)
def decoder(request, load):
    return load(request.param)


def copied(name, folder, *, config=None, tensors=None):
    """A copy of a reference folder with some fields or tensors changed (None: left out)."""
    shutil.copytree(DATA / name, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields.update(config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    if tensors is not None:
        (folder / "model.safetensors").unlink()
        save(folder / "model.safetensors", tensors(dict(load_safetensors(DATA / name / "model.safetensors"))))
    return folder


def test_logits_are_those_of_transformers(decoder):
    model, expected = decoder
    np.testing.assert_allclose(model(expected["ids"]), expected["logits"], atol=1e-5)


def test_greedy_tokens_are_those_of_transformers(decoder):
    model, expected = decoder
    ids = model.generate(expected["ids"], 12, temperature=0)
    np.testing.assert_array_equal(ids, expected["greedy"])
    ids = model.generate(expected["ids"], 12, temperature=0, repetition_penalty=1.7)
    np.testing.assert_array_equal(ids, expected["penalised"])


def caches_of(model, kind, batch, dtype=np.float32):
    attention = model.blocks[0].attention
    sizes = {"heads_kv": attention.num_kv_heads, "head_dim": attention.head_dim, "dtype": dtype}
    if kind == "kv":
        return LayerCaches([KVCache(batch, capacity=40, **sizes) for _ in model.blocks])
    if kind == "rolling":
        return LayerCaches([RollingKVCache(40, 2, batch=batch, **sizes) for _ in model.blocks])
    pools = [PagedKVCache(20, 4, **sizes) for _ in model.blocks]
    sequences = [[pool.allocate() for _ in range(batch)] for pool in pools]
    return LayerCaches([pool.batch(own) for pool, own in zip(pools, sequences, strict=True)])


@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
@pytest.mark.parametrize("chunks", [[1] * 12, [12], [5, 1, 1, 4, 1]], ids=str)
def test_cached_logits_equal_uncached_ones_at_every_step(decoder, kind, chunks):
    model, expected = decoder
    ids, cache, start = expected["ids"], caches_of(model, kind, 2), 0
    whole = model(ids)
    for new in chunks:
        logits = model(ids[:, start : start + new], cache=cache)
        np.testing.assert_allclose(logits, whole[:, start : start + new], atol=1e-5)
        start += new
        assert cache.lengths.tolist() == [start, start]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
def test_ragged_prompts_come_out_as_alone(decoder, kind, padding):
    model, expected = decoder
    lengths = np.array([12, 5])
    padded = expected["ids"].copy()
    real = slice(7, 12) if padding == "left" else slice(0, 5)
    padded[1] = 49
    padded[1, real] = expected["ids"][1, :5]
    options = {"lengths": lengths, "padding": padding, "temperature": 0, "cache": caches_of(model, kind, 2)}
    together = model.generate(padded, 6, **options)
    for b, prompt in enumerate((padded[0], padded[1, real])):
        alone = model.generate(prompt[None], 6, temperature=0)
        np.testing.assert_array_equal(together[b, 12:], alone[0, len(prompt) :])
    np.testing.assert_array_equal(together[:, :12], padded)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "sinusoidal"])
def test_ragged_prompts_come_out_as_alone_for_every_kind_of_position(position, kind, padding):
    """Drawn tokens, three lengths, one empty column nowhere real, and a stop token that ends rows apart."""
    rng = np.random.default_rng(0)
    model = TransformerDecoder(11, 16, 4, 2, 24, 40, num_kv_heads=2, position=position, rng=rng)
    for array in model.named_parameters().values():
        array *= 8  # far from uniform
    lengths = [3, 7, 1]
    padded = rng.integers(0, 11, (3, 8))
    options = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "stop": 4}
    cache = caches_of(model, kind, 3)
    together = model.generate(
        padded, 12, lengths=lengths, padding=padding, seed=[5, 6, 7], cache=cache, **options
    )
    for b, length in enumerate(lengths):
        prompt = padded[b, 8 - length :] if padding == "left" else padded[b, :length]
        alone = model.generate(prompt[None], 12, seed=5 + b, **options)[0, length:]
        np.testing.assert_array_equal(together[b, 8 : 8 + len(alone)], alone)
        assert (together[b, 8 + len(alone) :] == 4).all()


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "sinusoidal"])
def test_a_model_on_rolling_caches_sees_a_window_and_its_sinks(position, sinks):
    """Chunks and single tokens, far beyond the window; positions stay absolute."""
    rng = np.random.default_rng(1)
    options = {"num_kv_heads": 2, "position": position, "dtype": np.float64}
    model = TransformerDecoder(11, 16, 4, 2, 24, 90, **options, rng=rng)
    for array in model.named_parameters().values():
        array *= 8
    ids, window = rng.integers(0, 11, (2, 90)), 9
    whole = model.logits(model.states(ids, mask=Window(window - 1, 0) | Prefix(sinks)))
    sizes = {"batch": 2, "heads_kv": 2, "head_dim": 4, "dtype": np.float64}
    layers = [RollingKVCache(window, sinks, **sizes) for _ in model.blocks]
    cache, start = LayerCaches(layers), 0
    for new in (20, 1, 1, 7, 1, 30, *[1] * 30):
        logits = model(ids[:, start : start + new], cache=cache)
        np.testing.assert_allclose(logits, whole[:, start : start + new], rtol=1e-10, atol=1e-10)
        start += new


def test_sampled_rows_do_not_depend_on_the_other_rows(decoder):
    model, expected = decoder
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    ids = expected["ids"]
    together = model.generate(ids, 8, seed=[7, 8], **options)
    for b, seed in enumerate([7, 8]):
        alone = model.generate(ids[b : b + 1], 8, seed=seed, **options)
        np.testing.assert_array_equal(together[b], alone[0])
    again = model.generate(ids, 8, seed=[7, 8], **options)
    np.testing.assert_array_equal(together, again)
    twice = model.generate(np.repeat(ids[:1], 2, axis=0), 8, seed=7, **options)
    assert (twice[0] != twice[1]).any()  # rows of one seed draw from generators of their own


def test_beyond_the_capacity_every_layer_is_unchanged(load):
    model, expected = load("llama")
    cache = model.new_cache(2, 12)
    model(expected["ids"][:, :10], cache=cache)
    kept = [layer.arrays()[0].copy() for layer in cache]
    with pytest.raises(CacheFullError, match="capacity is 12"):
        model(expected["ids"][:, :3], cache=cache)
    assert [layer.lengths.tolist() for layer in cache] == [[10, 10]] * 2
    for layer, before in zip(cache, kept, strict=True):
        np.testing.assert_array_equal(layer.arrays()[0], before)
    with pytest.raises(CacheFullError):
        model.generate(expected["ids"][:, :2], 2, cache=cache)
    logits = model(expected["ids"][:, 10:], cache=cache)
    np.testing.assert_allclose(logits, expected["logits"][:, 10:], atol=1e-5)


def test_a_failure_inside_a_step_leaves_every_layer_as_it_was(load, monkeypatch):
    model, expected = load("llama")
    for kind in ("kv", "rolling", "paged"):
        cache = caches_of(model, kind, 2)
        model(expected["ids"][:, :7], cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[1].attention.out, "weight", None)
            with pytest.raises(AttributeError):
                model(expected["ids"][:, 7:9], cache=cache)
        assert [layer.lengths.tolist() for layer in cache] == [[7, 7]] * 2
        logits = model(expected["ids"][:, 7:], cache=cache)
        np.testing.assert_allclose(logits, expected["logits"][:, 7:], atol=1e-5)


def test_a_stream_stopped_between_tokens_leaves_its_cache_usable(load):
    model, expected = load("gpt2")
    cache = model.new_cache(2, 32)
    steps = model.stream(expected["ids"], 12, temperature=0, cache=cache)
    first = [next(steps) for _ in range(4)]
    steps.close()
    assert cache.lengths.tolist() == [15, 15]  # the fourth token was shown but not fed back
    rest = model.generate(first[-1][:, None], 8, temperature=0, cache=cache)
    np.testing.assert_array_equal(
        np.concatenate([np.stack(first, axis=1), rest[:, 1:]], axis=1), expected["greedy"][:, 12:]
    )


def test_threads_may_generate_on_one_model_at_once(load):
    model, expected = load("llama")
    prompts = [expected["ids"][b : b + 1, :length] for b in range(2) for length in (4, 8, 12)]
    alone = [model.generate(prompt, 10, seed=3) for prompt in prompts]
    found = [None] * len(prompts)

    def work(index):
        found[index] = model.generate(prompts[index], 10, seed=3)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_threads_may_generate_from_one_pool_of_pages(load):
    """Each thread has sequences of its own in pools that all share; pages of all threads lie mixed."""
    model, expected = load("llama")
    attention = model.blocks[0].attention
    pools = [
        PagedKVCache(60, 4, heads_kv=attention.num_kv_heads, head_dim=attention.head_dim)
        for _ in model.blocks
    ]
    prompts = [expected["ids"][b : b + 1, :length] for b in range(2) for length in (4, 8, 12)]
    alone = [model.generate(prompt, 10, seed=3) for prompt in prompts]
    found = [None] * len(prompts)

    def work(index):
        for _ in range(3):
            sequences = [pool.allocate() for pool in pools]
            caches = [pool.batch([own]) for pool, own in zip(pools, sequences, strict=True)]
            found[index] = model.generate(prompts[index], 10, seed=3, cache=LayerCaches(caches))
            for pool, own in zip(pools, sequences, strict=True):
                pool.free(own)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [pool.pages_free for pool in pools] == [60, 60]


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
def test_ctrl_c_inside_any_step_leaves_whole_tokens_only(load, monkeypatch, kind, calls):
    """Interrupted in the prompt, the first and a later token, when one layer's cache has grown, or both."""
    model, expected = load("llama")
    lengths = [12, 7]
    whole = model.generate(expected["ids"], 8, temperature=0, lengths=lengths)[:, 12:]
    for at in (0, 1, 4):
        cache = caches_of(model, kind, 2)
        steps = model.stream(expected["ids"], 8, temperature=0, lengths=lengths, cache=cache)
        shown = [next(steps) for _ in range(at)]
        with monkeypatch.context() as patch:
            left = [calls]

            def interrupted(*arguments, left=left):
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                return linears(*arguments)

            patch.setattr("npattn.nn.linear.linears", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(steps)
        kept = np.array([0, 0]) if at == 0 else np.array(lengths) + at - 1
        assert [layer.lengths.tolist() for layer in cache] == [kept.tolist()] * 2
        if at == 0:
            rest = model.generate(expected["ids"], 8, temperature=0, lengths=lengths, cache=cache)[:, 12:]
            np.testing.assert_array_equal(rest, whole)
        else:
            rest = model.generate(shown[-1][:, None], 8 - at, temperature=0, cache=cache)
            np.testing.assert_array_equal(rest[:, 1:], whole[:, at:])


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["kv", "rolling", "paged"])
def test_caches_in_16_bits_cost_their_rounding_only(load, kind, storage):
    if storage == "bfloat16":
        storage = pytest.importorskip("ml_dtypes").bfloat16
    model, expected = load("llama")
    cache = caches_of(model, kind, 2, storage)
    assert all(layer.arrays()[0].dtype == storage for layer in cache if kind != "paged")
    exact, seen = model(expected["ids"]), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 12)):
        seen.append(model(expected["ids"][:, start:stop], cache=cache))
    logits = np.concatenate(seen, axis=1)
    assert logits.dtype == np.float32
    # a relative rounding of 2**-11 or 2**-8 in each key and value, on logits of size 1
    error = abs(logits - exact).max() / abs(exact).max()
    assert 0 < error < (2e-3 if storage == "float16" else 2e-2)
    if kind == "kv":
        own = model.new_cache(2, 12, dtype=storage)
        assert own[0].arrays()[0].dtype == storage
        model(expected["ids"][:, :5], cache=own)
        np.testing.assert_array_equal(model(expected["ids"][:, 5:6], cache=own), seen[1])


def test_more_positions_than_gpt2_has_are_refused_with_the_number(load):
    model, _ = load("gpt2")
    with pytest.raises(ValueError, match="32"):
        model(np.zeros((1, 33), int))
    with pytest.raises(ValueError, match=r"33 positions .* only 32"):
        model.generate(np.zeros((1, 30), int), 4)
    assert model.generate(np.zeros((1, 30), int), 3, temperature=0).shape == (1, 33)
    cache = model.new_cache(1, 50)
    model(np.zeros((1, 32), int), cache=cache)
    with pytest.raises(ValueError, match="32"):
        model(np.zeros((1, 1), int), cache=cache)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_reach_every_parameter_and_sum_both_uses_of_a_tied_one(load, name):
    model, expected = load(name, dtype=np.float64)
    ids, rng = expected["ids"][:, :6], np.random.default_rng(0)
    logits, pullback = model.vjp(ids)
    dlogits = rng.standard_normal(logits.shape)
    _, grads = pullback(dlogits)
    parameters = model.named_parameters()
    assert list(grads) == list(parameters)
    assert ("head.weight" in parameters) == (name == "llama")
    for key, array in parameters.items():
        step = rng.standard_normal(array.shape)
        original, h = array.copy(), 1e-5
        array[...] = original + h * step
        above = (model(ids) * dlogits).sum()
        array[...] = original - h * step
        below = (model(ids) * dlogits).sum()
        array[...] = original
        numeric = (above - below) / (2 * h)
        np.testing.assert_allclose((grads[key] * step).sum(), numeric, rtol=2e-6, atol=2e-5)


def test_weights_and_statistics_of_every_layer(load):
    model, expected = load("llama")
    weights = model.weights(expected["ids"])
    assert [array.shape for array in weights] == [(2, 4, 12, 12)] * 2
    np.testing.assert_allclose(weights[1].sum(-1), 1, atol=1e-5)
    assert (np.triu(weights[0][0, 0], 1) == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_precision_weights_are_read_exactly(tmp_path, load, name, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    folder = copied(
        name, tmp_path / "m", tensors=lambda all_: {key: array.astype(dtype) for key, array in all_.items()}
    )
    model, expected = load(name)
    narrow = CLASSES.get(name, Llama).from_pretrained(folder)
    for key, array in model.named_parameters().items():
        np.testing.assert_array_equal(narrow.named_parameters()[key], array.astype(dtype).astype(np.float32))
    assert narrow(expected["ids"]).dtype == np.float32


def test_prefixes_are_optional_and_shards_and_unused_tensors_are_accepted(tmp_path, load):
    folder = tmp_path / "m"
    shutil.copytree(DATA / "gpt2", folder)
    tensors = {
        name.removeprefix("transformer."): array
        for name, array in load_safetensors(folder / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    tensors["lm_head.weight"] = np.full((50, 16), np.nan, np.float32)  # tied: the embedding counts
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for shard, part in enumerate((names[:7], names[7:])):
        save(folder / f"model-{shard}.safetensors", {name: tensors[name] for name in part})
    model, expected = GPT2.from_pretrained(str(folder)), load("gpt2")[1]
    np.testing.assert_allclose(model(expected["ids"]), expected["logits"], atol=1e-5)


def test_all_missing_tensors_are_named_at_once(tmp_path):
    def without(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
        return tensors

    folder = copied("llama", tmp_path / "m", tensors=without)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight, lm_head\.weight"):
        Llama.from_pretrained(folder)


def test_misshapen_tensors_are_all_named_at_once(tmp_path):
    folder = copied("llama", tmp_path / "m", config={"intermediate_size": 20, "vocab_size": 49})
    with pytest.raises(ValueError, match=r"(?s)embed_tokens.*gate_proj.*down_proj"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("llama", {"hidden_size": ..., "vocab_size": ...}, "vocab_size, hidden_size"),
        ("llama", {"model_type": "mamba"}, "'mamba'"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "yarn"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("gpt2", {"activation_function": "relu"}, "relu"),
        ("gpt2", {"n_head": ...}, "n_head"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_other_architectures_and_missing_fields_are_named(tmp_path, name, config, reason):
    folder = copied(name, tmp_path / "m", config=config)
    with pytest.raises(ValueError, match=reason):
        CLASSES.get(name, Llama).from_pretrained(folder)


def test_older_configs_with_rope_theta_and_rope_scaling_are_read(tmp_path, load):
    scaling = {"type": "linear", "factor": 2.0}
    config = {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": scaling}
    folder = copied("llama_linear", tmp_path / "m", config=config)
    _, expected = load("llama_linear")
    np.testing.assert_allclose(Llama.from_pretrained(folder)(expected["ids"]), expected["logits"], atol=1e-5)


def test_missing_files_are_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        GPT2.from_pretrained(tmp_path)
    shutil.copy(DATA / "gpt2" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        GPT2.from_pretrained(tmp_path)


def test_every_forward_reads_the_live_arrays(load):
    model, expected = load("llama")
    before = model(expected["ids"])
    model.named_parameters()["blocks.0.mlp.up.weight"][...] *= 1.5
    assert abs(model(expected["ids"]) - before).max() > 1e-3

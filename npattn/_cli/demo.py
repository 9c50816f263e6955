"""``npattn demo``: the library at work on a real text, in a minute, with nothing to download."""

import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import npattn
from npattn._cli import corpus
from npattn._typing import Array
from npattn.masks import Causal, Mask, Window

HEADS = 8
HEAD_DIM = 64
WINDOW = 512
SHARPNESS = 12.0  # of the query: how much more a similar word weighs than an unrelated one


def demo(*, tokens: int = 8192, train_seconds: float = 20.0) -> None:
    """Run and print every part. Cost: under a minute on two cores, compilation included."""
    if tokens < 64:
        raise ValueError(f"--tokens must be at least 64 to have something to attend over, got {tokens}")
    begin = time.perf_counter()
    spelled, qkv = _embed(tokens)
    _attend("causal", Causal(), spelled, qkv)
    _attend(f"window of {WINDOW}", Window(WINDOW - 1), spelled, qkv)
    _show_words(spelled, qkv)
    if train_seconds > 0:
        _train(train_seconds)
    _karate_club()
    print(f"\nall of it in {time.perf_counter() - begin:.0f} s")


def _embed(tokens: int) -> tuple[list[str], tuple[Array, Array, Array]]:
    """Words of the language reference as (1, HEADS, tokens, HEAD_DIM) queries, keys and values."""
    _heading("text")
    text = corpus.language_reference()
    spelled = corpus.words(text)
    ids, vocabulary = corpus.number(spelled)
    vectors = corpus.word_vectors(ids, len(vocabulary), 2 * HEAD_DIM)
    tokens = min(tokens, len(ids))
    print(
        f"Python language reference: {len(text):,} characters, {len(ids):,} words, "
        f"{len(vocabulary):,} different; the first {tokens:,} attend to each other"
    )
    # every head looks at its own random directions of the word vectors
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((HEADS, 2 * HEAD_DIM, HEAD_DIM), dtype=np.float32)
    directions /= np.float32(np.sqrt(HEAD_DIM))
    key = np.matmul(vectors[ids[:tokens]], directions)[None]
    query = key * np.float32(SHARPNESS * np.sqrt(HEAD_DIM))
    return spelled[:tokens], (query, key, key.copy())


def _attend(title: str, mask: Mask, spelled: list[str], qkv: tuple[Array, Array, Array]) -> None:
    """Forward and backward: shapes, time, rate, memory beside n², and agreement with the definition."""
    _heading(f"attention, {title}")
    query, key, value = qkv
    length = query.shape[2]
    density = mask.density(length, length)
    flops = 4.0 * HEADS * density * length**2 * HEAD_DIM
    dout = np.empty_like(value)
    np.random.default_rng(1).standard_normal(out=dout, dtype=np.float32)
    print(f"query, key, value {query.shape} float32; {density:.1%} of the pairs are visible")

    _compile(mask, qkv)
    with _Progress("forward and backward"):
        peak, (forward, backward, out, grads) = _peak_memory(lambda: _forward_backward(mask, qkv, dout))
        for _ in range(2):
            again = _forward_backward(mask, qkv, dout)
            forward, backward = min(forward, again[0]), min(backward, again[1])
    matrix = HEADS * length**2 * 4
    print(f"forward  {forward * 1e3:8.1f} ms  {flops / forward / 1e9:6.0f} GFLOP/s")
    print(f"backward {backward * 1e3:8.1f} ms  {2.5 * flops / backward / 1e9:6.0f} GFLOP/s")
    results = sum(array.nbytes for array in (out, grads.query, grads.key, grads.value))
    print(
        f"memory   {(peak - results) / 2**20:8.1f} MiB beside inputs and results; "
        f"one matrix of weights would take {matrix / 2**20:,.0f} MiB"
    )
    rows = slice(length - 64, length)
    exact = npattn.attention(
        *(array.astype(np.float64) for array in (query[:, :, rows], key, value)), mask=mask, backend="oracle"
    )
    error = np.abs(out[:, :, rows] - exact).max() / np.abs(exact).max()
    print(f"checked  {error:8.1e} relative to the definition in float64, on the last 64 rows")


def _forward_backward(
    mask: Mask, qkv: tuple[Array, Array, Array], dout: Array
) -> tuple[float, float, Array, Any]:
    """Seconds forward, seconds backward, the output and the gradients."""
    start = time.perf_counter()
    out, pullback = npattn.attention_vjp(*qkv, mask=mask)
    middle = time.perf_counter()
    grads = pullback(dout)
    return middle - start, time.perf_counter() - middle, out, grads


def _compile(mask: Mask, qkv: tuple[Array, Array, Array]) -> None:
    """Let the kernels compile (or come from their cache) on a few rows, outside the timing."""
    start = time.perf_counter()
    with _Progress("compiling the kernels"):
        out, pullback = npattn.attention_vjp(*(array[:, :, :64] for array in qkv), mask=mask)
        pullback(out)
    seconds = time.perf_counter() - start
    if seconds > 0.2:
        print(f"compiled in {seconds:.1f} s (kept on disk for the next time)")


def _show_words(spelled: list[str], qkv: tuple[Array, Array, Array]) -> None:
    """Which earlier words a few chosen words attend to, all heads together."""
    _heading("what attends to what")
    query, key, _ = qkv
    for row in _chosen_rows(spelled):
        weights = npattn.attention_weights(query, key, mask=Causal(), rows=[row])[0, :, 0].mean(axis=0)
        mass: dict[str, float] = {}
        for position in np.argsort(-weights)[:200]:
            if position != row:
                word = spelled[position]
                mass[word] = mass.get(word, 0.0) + float(weights[position])
        best = sorted(mass.items(), key=lambda item: -item[1])[:5]
        context = " ".join(spelled[row - 4 : row + 1])
        print(f"... {context:<44} -> " + "  ".join(f"{word} {weight:.0%}" for word, weight in best))


def _chosen_rows(spelled: list[str]) -> list[int]:
    """The last occurrence of some telling words, or of the last long words when they are absent."""
    last = {word: position for position, word in enumerate(spelled) if position >= 4}
    rows = [last[word] for word in ("list", "exception", "function", "class", "integer") if word in last]
    if not rows:
        rows = [position for word, position in last.items() if len(word) > 5][-3:]
    return rows


def _train(seconds: float) -> None:
    """A character model learns the same text."""
    from npattn._cli.char_model import train_char_model

    _heading("a character model learns this text")
    show = sys.stdout.isatty()

    def report(step: int, loss: float, share: float) -> None:
        if show:
            bar = "#" * round(30 * share)
            print(f"[{bar:<30}] step {step}, loss {loss:.2f} ", end="\r", flush=True)

    run = train_char_model(corpus.language_reference(), seconds, report=report)
    print(f"{run.num_parameters:,} parameters, {len(run.losses)} steps of 768 characters in {seconds:.0f} s")
    print(
        f"loss {run.losses[0]:.2f} -> {np.mean(run.losses[-10:]):.2f}, on held-out text {run.val_loss:.2f} "
        "nats a character"
    )
    print("it writes:\n    " + run.sample.strip().replace("\n", "\n    "))


def _karate_club() -> None:
    """Graph attention on networkx's own graph."""
    from npattn._cli.karate import train_karate_club

    _heading("graph attention on Zachary's karate club")
    with _Progress("training a two-layer GAT"):
        start = time.perf_counter()
        accuracy, links = train_karate_club()
    print(f"two members' clubs known, {accuracy:.0%} of the other members predicted right".replace("%", " %"))
    print(f"trained in {time.perf_counter() - start:.1f} s; strongest links (from -> to):")
    print("  ".join(f"{u} -> {v} {weight:.2f}" for u, v, weight in links))


def _heading(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}")


def _peak_memory(work: Callable[[], Any]) -> tuple[int, Any]:
    """Largest number of bytes NumPy held at once above the start, and what ``work`` returned."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    result = work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before, result


class _Progress:
    """A line that says what is being waited for, on terminals only."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> None:
        if self.shown:
            print(f"{self.text} ...", end="\r", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print(" " * (len(self.text) + 4), end="\r", file=sys.stderr, flush=True)

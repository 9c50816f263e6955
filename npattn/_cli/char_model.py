"""A character model trained for as long as one likes: the last part of ``npattn demo``."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npattn._typing import Array
from npattn.functional import cross_entropy, cross_entropy_vjp, softmax
from npattn.nn import TransformerDecoder
from npattn.optim import AdamW, clip_by_global_norm, warmup_cosine

CONTEXT = 64
BATCH = 12
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100


class CharRun(NamedTuple):
    """What ``train_char_model`` returns."""

    losses: list[float]  # of each step, nats per character
    val_loss: float  # on the last tenth of the text, at the end
    sample: str  # written by the trained model
    num_parameters: int


def train_char_model(
    text: str,
    seconds: float,
    *,
    seed: int = 0,
    sample_length: int = 300,
    report: Callable[[int, float, float], None] | None = None,
) -> CharRun:
    """Train nanoGPT's CPU recipe on a text for some seconds, and let it write.

    4 layers of 4 heads, 128 wide, context 64, batches of 12, AdamW; the learning rate follows the time left,
    so how far it gets depends on the machine.

    Parameters
    ----------
    text : str
        The last tenth is held out.
    seconds : float
        Of training; compilation comes on top.
    seed : int
    sample_length : int
    report : callable(step, loss, share of the time), optional
        Called after every step.

    Returns
    -------
    CharRun
    """
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    ids = np.array([number[character] for character in text])
    held_out = len(ids) - max(len(ids) // 10, CONTEXT + 1)
    train, val = ids[:held_out], ids[held_out:]
    rng = np.random.default_rng(seed)
    model = TransformerDecoder(len(characters), 128, 4, 4, 512, CONTEXT, bias=False, rng=rng)
    optimiser = AdamW(model.named_parameters(), betas=(0.9, 0.99), weight_decay=0.1)

    losses: list[float] = []
    end = 0.0
    while not losses or time.perf_counter() < end:
        starts = rng.integers(0, len(train) - CONTEXT, BATCH)
        batch = train[starts[:, None] + np.arange(CONTEXT + 1)]
        logits, back_model = model.vjp(batch[:, :-1])
        loss, back_loss = cross_entropy_vjp(logits, batch[:, 1:])
        grads, _ = clip_by_global_norm(back_model(back_loss())[1], 1.0)
        end = end or time.perf_counter() + seconds  # the first step compiled; the clock starts here
        share = min(max(1.0 - (end - time.perf_counter()) / max(seconds, 1e-9), 0.0), 1.0)
        decayed = warmup_cosine(int(1000 * share), lr=LR, min_lr=MIN_LR, warmup=0, total=1000)
        optimiser.step(grads, lr=decayed * min(1.0, (len(losses) + 1) / WARMUP))
        losses.append(float(loss))
        if report is not None:
            report(len(losses), losses[-1], share)

    windows = val[: (len(val) - 1) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)[:128]
    targets = val[1 : 1 + windows.size].reshape(windows.shape)
    sample = "".join(characters[i] for i in continued(model, ids[:1], sample_length, rng))
    return CharRun(losses, float(cross_entropy(model(windows), targets)), sample, model.num_parameters())


def continued(model: TransformerDecoder, ids: Array, length: int, rng: np.random.Generator) -> Array:
    """``ids`` and ``length`` more at temperature 0.8, each drawn in view of the last CONTEXT ones."""
    for _ in range(length):
        logits = model(ids[None, -CONTEXT:])[0, -1].astype(np.float64)
        ids = np.append(ids, rng.choice(len(logits), p=softmax(logits / 0.8)))
    return ids


__all__ = ["CharRun", "train_char_model"]

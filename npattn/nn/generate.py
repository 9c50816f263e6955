"""Generation of tokens by any causal language model: plain functions over a small protocol.

``stream`` runs the prompts through the model once, filling a cache, then one token a step; ``generate``
collects what it yields; ``sample`` chooses a token from logits. `LanguageModel` says what a model must have.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from npattn import _check
from npattn._arrays import array_module, to_numpy
from npattn._typing import Array
from npattn.cache import LayerCaches


class LanguageModel(Protocol):
    """What ``generate`` and ``stream`` ask of a model."""

    def states(self, ids: Array, *, cache: Any = None, lengths: Any = None) -> Array:
        """(batch, length, embed_dim): what the head turns into logits; fills ``cache``."""

    def logits(self, states: Array) -> Array:
        """(..., vocab) of states (..., embed_dim)."""

    def new_cache(self, batch: int, capacity: int) -> LayerCaches:
        """An empty cache for ``batch`` sequences of at most ``capacity`` tokens."""


def generate(
    model: LanguageModel,
    ids: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Any = None,
    lengths: Any = None,
    padding: str = "right",
    seed: Any = None,
    cache: LayerCaches | None = None,
) -> Array:
    """Continue ``ids`` by up to ``max_new_tokens`` tokens.

    Parameters
    ----------
    model : LanguageModel
        A TransformerDecoder, GPT2, Llama, or anything with the protocol's three methods.
    ids : (batch, length) ints
        Prompts. With ``lengths`` only ``lengths[b]`` tokens of row b are real and the rest is padding of any
        value; each row comes out as it would alone.
    max_new_tokens : int
    temperature : float, default 1.0
        Divides the logits; 0 takes the likeliest token (the first of equals).
    top_k : int, optional
        Only the k likeliest tokens (and what ties with the last of them).
    top_p : float in (0, 1], optional
        Only the likeliest tokens that together reach this probability.
    min_p : float in [0, 1], optional
        Only tokens at least this share as likely as the likeliest.
    repetition_penalty : float, default 1.0
        Positive logits of tokens already in the row are divided by it, negative ones multiplied.
    stop : int or ints, optional
        A row ends with the first of these it produces; an ended row is filled with its stop token. When all
        rows have ended, so does generation.
    lengths : (batch,) ints, optional
        See ``ids``; None: all real.
    padding : {"right", "left"}
        Where the padding stands: the first or the last ``lengths[b]`` tokens of a row are real. The same
        tokens come either way, bit for bit; after left padding they follow their prompt directly.
    seed : int, or (batch,) ints, optional
        Row b draws from a generator of its own, made of (seed, b), or of ``seed[b]`` as row 0 of that seed
        would: a row's draws do not depend on the others. None: from the operating system, another each time.
    cache : LayerCaches, optional
        One that already holds the tokens before ``ids``: a conversation goes on without a second look at its
        past. None: a new one of just the right capacity.

    Returns
    -------
    ids : (batch, length + new) int64
        ``ids`` with the new tokens behind the last column; new <= max_new_tokens.

    Raises
    ------
    ValueError
        An option out of its range, empty prompts, more tokens than the model has positions or the cache room.

    See Also
    --------
    stream : the same tokens one at a time.

    Notes
    -----
    The options act in this order: repetition penalty, temperature, top_k, top_p, min_p; the rest is
    renormalised.
    """
    prompts = _prompts(ids)
    steps = stream(
        model,
        prompts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        lengths=lengths,
        padding=padding,
        seed=seed,
        cache=cache,
    )
    return np.concatenate([prompts, *(tokens[:, None] for tokens in steps)], axis=1)


def stream(
    model: LanguageModel,
    ids: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Any = None,
    lengths: Any = None,
    padding: str = "right",
    seed: Any = None,
    cache: LayerCaches | None = None,
) -> Iterator[Array]:
    """Yield one (batch,) array of tokens a step; parameters as `generate`.

    Arguments are checked at once, computation begins with the first token asked for. Stopping in between (by
    ``close``, an error or Ctrl-C) leaves a ``cache`` that was passed with whole tokens only. The last token
    yielded is not in the cache yet: begin the next call's ids with it.
    """
    prompts = _prompts(ids)
    batch, length = prompts.shape
    real = np.full(batch, length) if lengths is None else _lengths(lengths, batch, length)
    if padding not in ("right", "left"):
        raise ValueError(f'padding must be "right" or "left", got {padding!r}')
    if padding == "left":
        prompts = _real_tokens_first(prompts, real)
    max_new_tokens = _check.integer("max_new_tokens", max_new_tokens, 0)
    check_options(temperature, top_k, top_p, min_p, repetition_penalty)
    if batch and max_new_tokens and not real.all():
        raise ValueError(
            f"every prompt needs at least one token to continue from, got lengths {real.tolist()}"
        )
    stops = _stops(stop)
    generators = _generators(seed, batch) if temperature > 0 else [None] * batch
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # the last token is never fed back
    fed_back = max(max_new_tokens - 1, 0)
    needed = int(real.max(initial=0)) + fed_back
    past = 0 if cache is None else int(cache.lengths.max(initial=0))
    limit = getattr(model, "max_length", None)
    if limit is not None and past + needed > limit:
        raise ValueError(f"{past + needed} positions would be needed, but the model has only {limit}")
    if cache is None:
        cache = model.new_cache(batch, needed)
    ragged = None if bool((real == length).all()) else real
    cache.check_room(length + fed_back, real + fed_back)
    seen = [set(row[:count].tolist()) for row, count in zip(prompts, real, strict=True)]

    def tokens() -> Iterator[Array]:
        ended = np.zeros(batch, bool)
        chosen = np.zeros(batch, np.int64)
        # rows may end at different columns, so the states of each row's last real token are picked
        states = model.states(prompts, cache=cache, lengths=ragged)
        xp = array_module(states)
        states = states[xp.arange(batch), xp.asarray(real - 1)]
        for step in range(max_new_tokens):
            if step:
                states = model.states(chosen[:, None], cache=cache)[:, -1]
            logits = to_numpy(model.logits(states))
            for b in range(batch):
                if not ended[b]:
                    row = penalized(logits[b], seen[b], repetition_penalty)
                    chosen[b] = sample(row, generators[b], **options)
                    seen[b].add(int(chosen[b]))
            ended |= np.isin(chosen, stops)
            yield chosen.copy()
            if ended.all():
                return

    return tokens() if batch and max_new_tokens else iter(())


def sample(
    logits: Array,
    rng: np.random.Generator | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> int:
    """One token drawn from the softmax of ``logits`` (vocab,); options as in `generate`.

    ``rng`` gives one uniform number; it is not needed at temperature 0.

    Examples
    --------
    >>> logits = np.log(np.array([0.1, 0.6, 0.3]))
    >>> sample(logits, temperature=0)
    1
    >>> rng = np.random.default_rng(0)
    >>> draws = [sample(logits, rng) for _ in range(2000)]
    >>> [round(draws.count(token) / 2000, 1) for token in range(3)]
    [0.1, 0.6, 0.3]
    """
    if temperature == 0:
        return int(logits.argmax())
    if rng is None:
        raise ValueError("sampling needs rng=np.random.default_rng(<seed>); temperature=0 does not")
    probs = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    below = np.cumsum(probs)
    # scaled by the sum, so that rounding can never point behind the last token with a share
    token = int(np.searchsorted(below, rng.random() * below[-1], side="right"))
    return min(token, int(probs.nonzero()[0][-1]))


def probabilities(
    logits: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Array:
    """The distribution `sample` draws from, (vocab,) float64.

    Examples
    --------
    >>> logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    >>> probabilities(logits, top_k=2).round(3).tolist()
    [0.625, 0.375, 0.0, 0.0]
    >>> probabilities(logits, top_p=0.75).round(3).tolist()
    [0.625, 0.375, 0.0, 0.0]
    >>> probabilities(logits, min_p=0.2).round(3).tolist()
    [0.526, 0.316, 0.158, 0.0]
    """
    scaled = logits.astype(np.float64)
    if not np.isfinite(scaled.max()):
        raise ValueError("the logits hold NaN or inf, or are all -inf; nothing can be drawn from them")
    scaled = (scaled - scaled.max()) / temperature
    if top_k is not None and top_k < len(scaled):
        least = np.partition(scaled, -top_k)[-top_k]
        scaled = np.where(scaled < least, -np.inf, scaled)
    probs = np.exp(scaled)
    probs /= probs.sum()
    if top_p is not None and top_p < 1.0:
        # All tokens below this share together have less than 1 - top_p: what is likelier has top_p already.
        # Sorting the few others is a tenth of the work for a vocabulary of 50,000.
        few = np.flatnonzero(probs > 0.999 * (1.0 - top_p) / len(probs))
        order = few[np.argsort(-probs[few], kind="stable")]
        before = np.cumsum(probs[order]) - probs[order]  # of the likelier ones
        kept = order[before < top_p]
        shares, probs = probs[kept], np.zeros_like(probs)
        probs[kept] = shares
    if min_p is not None:
        probs[probs < min_p * probs.max()] = 0.0
    return np.asarray(probs / probs.sum())


def penalized(logits: Array, seen: set[int], penalty: float) -> Array:
    """``logits`` with those of ``seen`` tokens made less likely (Keskar et al., CTRL, 2019, section 4.1)."""
    if penalty == 1.0 or not seen:
        return logits
    logits = logits.copy()
    tokens = np.fromiter(seen, np.int64)
    values = logits[tokens]
    logits[tokens] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def check_options(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, repetition_penalty: float
) -> None:
    """Refuse options outside their ranges."""
    if not 0.0 <= _check.number("temperature", temperature) < np.inf:
        raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), got {temperature}")
    if top_k is not None:
        _check.integer("top_k, when not None,", top_k, 1)
    if top_p is not None and not 0.0 < _check.number("top_p", top_p) <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], or None to switch it off; got {top_p}")
    if min_p is not None and not 0.0 <= _check.number("min_p", min_p) <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], or None to switch it off; got {min_p}")
    if not 0.0 < _check.number("repetition_penalty", repetition_penalty) < np.inf:
        raise ValueError(f"repetition_penalty must be positive and finite, got {repetition_penalty}")


def _prompts(ids: Any) -> Array:
    prompts = to_numpy(ids)
    if prompts.ndim != 2:
        raise ValueError(f"ids must be (batch, length), got shape {prompts.shape}; one prompt is ids[None]")
    if prompts.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {prompts.dtype}")
    return prompts.astype(np.int64)


def _lengths(lengths: Any, batch: int, length: int) -> Array:
    real = np.asarray(lengths)
    if real.shape != (batch,) or real.dtype.kind not in "iu":
        raise ValueError(f"lengths must be ({batch},) ints, got {real.dtype} of shape {real.shape}")
    if ((real < 0) | (real > length)).any():
        raise ValueError(f"lengths must be from 0 to {length}, got {real.tolist()}")
    return real.astype(np.int64)


def _real_tokens_first(prompts: Array, real: Array) -> Array:
    """Left padding made right padding: the last ``real[b]`` tokens of each row moved to its start."""
    length = prompts.shape[1]
    index = (np.arange(length) + length - real[:, None]) % max(length, 1)
    moved: Array = np.take_along_axis(prompts, index, axis=1)
    return moved


def _stops(stop: Any) -> Array:
    """The tokens that end a row."""
    tokens = np.asarray([] if stop is None else stop)
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TypeError(f"stop must be a token or several, as ints, got {stop!r}")
    return np.unique(tokens.astype(np.int64))


def _generators(seed: Any, batch: int) -> list[np.random.Generator | None]:
    if seed is None:
        return [np.random.default_rng() for _ in range(batch)]
    seeds = np.asarray(seed)
    if seeds.dtype.kind not in "iu" or seeds.shape not in ((), (batch,)):
        raise ValueError(f"seed must be an int or ({batch},) ints, got {seed!r}")
    if seeds.ndim:
        return [np.random.default_rng([int(own) % 2**64, 0]) for own in seeds]
    return [np.random.default_rng([int(seeds) % 2**64, b]) for b in range(batch)]


__all__ = ["LanguageModel", "check_options", "generate", "penalized", "probabilities", "sample", "stream"]

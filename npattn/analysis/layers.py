"""The cost of a layer or a model at a length, read off its tree of layers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.analysis.formulas import Cost, attention_cost
from npattn.masks import Causal, Mask, Window


def cost(subject: Any, *args: Any, **options: Any) -> Cost:
    """What a layer or one call of attention costs.

    Parameters
    ----------
    subject : Layer or int
        A layer or model: ``layer_cost(subject, length, ...)``. A length of queries:
        ``attention_cost(subject, ...)``.
    *args, **options
        As there.

    Returns
    -------
    cost : Cost

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import analysis, nn
    >>> analysis.cost(1024, heads=8, head_dim=64) == analysis.attention_cost(1024, heads=8, head_dim=64)
    True
    >>> layer = nn.Linear(16, 32, rng=np.random.default_rng(0))
    >>> analysis.cost(layer, 10).flops == 2 * 10 * 16 * 32
    True
    """
    if isinstance(subject, int | np.integer):
        return attention_cost(int(subject), *args, **options)
    return layer_cost(subject, *args, **options)


def layer_cost(layer: Any, length: int, *, batch: int = 1, backward: bool = False) -> Cost:
    """Operations, traffic and memory of a layer or a model on ``batch`` sequences of ``length`` tokens.

    Parameters
    ----------
    layer : Layer
        Any layer or model of ``npattn.nn`` or ``npattn.models``, and what is built of them.
    length : int
        Tokens of a sequence; causal, window and mask of its attention layers are counted.
    batch : int, default 1
        Sequences.
    backward : bool, default False
        A training step: forward and backward. The peak then holds what the pullbacks keep and the gradients
        of all parameters.

    Returns
    -------
    cost : Cost
        ``flops`` counts matrix products alone, ``exps`` those of the softmax. ``peak_bytes`` is beyond
        inputs and parameters.

    Raises
    ------
    TypeError
        When ``layer`` has no ``named_parameters``.

    Notes
    -----
    Operations are exact for the pairs that masks leave visible. Traffic and peak are those of the large
    arrays, as the layers run one after another. Layers of a kind that is not known here count as the chain
    of what they are built of.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> from npattn.analysis import layer_cost
    >>> block = nn.TransformerBlock(64, 4, 256, causal=True, rng=np.random.default_rng(0))
    >>> forward, step = layer_cost(block, 128), layer_cost(block, 128, backward=True)
    >>> f"{forward.flops:,}", round(step.flops / forward.flops, 2)
    ('14,696,448', 3.07)
    """
    if not hasattr(layer, "named_parameters"):
        raise TypeError(f"layer_cost reads a layer of npattn.nn or a model, got {type(layer).__name__}")
    parameters = layer.named_parameters()
    item = next((array.dtype.itemsize for array in parameters.values()), 4)
    tally = _Tally(batch, length)
    peak, width = _visit(layer, tally, 0)
    size = sum(array.size for array in parameters.values())
    if not backward:
        flops = tally.products + tally.attention_forward
        return Cost(flops, tally.exps, tally.moved * item, peak * item)
    flops = 3 * tally.products + tally.attention_step  # dx and dweight are a product each
    moved = 3 * tally.moved + 2 * tally.kept + size
    held = tally.kept + tally.tokens * width + size + max(peak, 2 * tally.again)
    return Cost(flops, 2 * tally.exps, moved * item, held * item)


@dataclass
class _Tally:
    """Sums over the layers visited; sizes in elements."""

    batch: int
    length: int
    products: int = 0  # operations of matrix products with parameters
    attention_forward: int = 0  # operations between queries, keys and values
    attention_step: int = 0  # the same, forward and backward
    exps: int = 0
    moved: int = 0  # read and written, parameters included
    kept: int = 0  # what pullbacks hold
    again: int = 0  # the largest of what they compute again for a moment

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def _visit(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """Add ``layer``, fed with tokens of ``width`` features; what it holds at once, and its output's width."""
    for kind in type(layer).__mro__:
        if kind.__name__ in _KINDS:
            return _KINDS[kind.__name__](layer, tally, width)
    return _chain(layer, tally, width)


def _chain(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """Children one after another; each one's input lives until its output is there."""
    peak = 0
    for child in _children(layer):
        held, after = _visit(child, tally, width)
        peak = max(peak, tally.tokens * width + held)
        width = after
    if getattr(layer, "head", True) is None and hasattr(layer, "embedding"):  # the head is the embedding
        vocabulary, dim = layer.embedding.weight.shape
        _product(tally, dim, vocabulary)
        peak = max(peak, tally.tokens * (width + vocabulary))
        width = vocabulary
    return peak, width


def _linear(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    outputs, inputs = layer.weight.shape
    _product(tally, inputs, outputs)
    return tally.tokens * outputs, outputs


def _product(tally: _Tally, inputs: int, outputs: int) -> None:
    """Tokens x inputs times inputs x outputs; the pullback keeps the input."""
    tally.products += 2 * tally.tokens * inputs * outputs
    tally.moved += inputs * outputs + tally.tokens * (inputs + outputs)
    tally.kept += tally.tokens * inputs


def _elementwise(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    tally.moved += 2 * tally.tokens * width
    tally.kept += tally.tokens * width
    return tally.tokens * width, width


def _lookup(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    dim = layer.weight.shape[1]
    tally.moved += 2 * tally.tokens * dim
    return tally.tokens * dim, dim


def _position(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """Added to the tokens; nothing is kept."""
    tally.moved += 3 * tally.tokens * width
    return tally.tokens * width, width


def _mlp(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """up, activation, down. Without a gate one hidden array: activated in cache, kept as it was before."""
    hidden, _ = _linear(layer.up, tally, width)
    gate = 0
    if hasattr(layer, "gate"):
        gate, _ = _linear(layer.gate, tally, width)
        tally.kept -= tally.tokens * layer.gate.weight.shape[1]  # the same input as up's
    tally.kept += gate + (hidden if gate else 0)
    tally.again = max(tally.again, 0 if gate else hidden)
    tally.moved += 2 * hidden + gate
    out, width = _linear(layer.down, tally, width)
    return max((2 * hidden + gate) if gate else hidden, hidden + out), width


def _attention(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """Projections, attention between them, and the projection of the result."""
    held = 0
    for projection in (layer.query, layer.key, layer.value):
        held += _linear(projection, tally, width)[0]
    tally.kept -= 2 * tally.tokens * layer.query.weight.shape[1]  # one input, three projections
    facts: dict[str, Any] = {
        "batch": tally.batch,
        "heads": layer.num_heads,
        "heads_kv": getattr(layer, "num_kv_heads", layer.num_heads),
        "head_dim": layer.query.weight.shape[0] // layer.num_heads,
        "mask": _mask(layer),
    }
    forward = attention_cost(tally.length, **facts)
    tally.attention_forward += forward.flops
    tally.attention_step += attention_cost(tally.length, **facts, backward=True).flops
    tally.exps += forward.exps
    tally.moved += forward.bytes_moved // 4  # counted in float32
    tally.kept += held + 2 * tally.tokens * layer.num_heads  # m and l
    attended = tally.tokens * layer.out.weight.shape[1]
    out, width = _linear(layer.out, tally, width)
    return held + attended + out, width


def _mask(layer: Any) -> Mask | None:
    """The mask of the layer itself: causal, window and its own."""
    causal, window = getattr(layer, "causal", False), getattr(layer, "window", None)
    masks: list[Mask] = [Causal()] if causal else []
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, 0 if causal else window)
        masks.append(Window(left, right))
    if getattr(layer, "mask", None) is not None:
        masks.append(layer.mask)
    mask: Mask | None = None
    for each in masks:
        mask = each if mask is None else mask & each
    return mask


def _block(layer: Any, tally: _Tally, width: int) -> tuple[int, int]:
    """Two branches, each a norm and a layer beside the residual path."""
    peaks = []
    for norm, inner in ((layer.attention_norm, layer.attention), (layer.mlp_norm, layer.mlp)):
        normed, width = _visit(norm, tally, width)
        held, width = _visit(inner, tally, width)
        tally.moved += 3 * tally.tokens * width  # the sum
        peaks.append(normed + held)
    return tally.tokens * width + max(peaks), width


_KINDS: dict[str, Callable[[Any, _Tally, int], tuple[int, int]]] = {
    "Linear": _linear,
    "Embedding": _lookup,
    "LearnedPosition": _position,
    "SinusoidalPosition": _position,
    "LayerNorm": _elementwise,
    "RMSNorm": _elementwise,
    "GELU": _elementwise,
    "SiLU": _elementwise,
    "Dropout": _position,
    "MLP": _mlp,
    "GatedMLP": _mlp,
    "MultiHeadAttention": _attention,
    "TransformerBlock": _block,
}


def _children(layer: Any) -> Iterator[Any]:
    """The layers in the fields of ``layer``, in order."""
    for value in vars(layer).values():
        for child in value if isinstance(value, list | tuple) else (value,):
            if hasattr(child, "named_parameters"):
                yield child

"""A page that shows a text and, under the mouse, what each token attends to, by layer and head."""

import base64
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.plots._axes import stack_of_heads

#: Weights in one page: a byte each, a third more as text.
_MOST_WEIGHTS = 64_000_000


def save_html(
    path: str | Path,
    weights: Array | Sequence[Array],
    tokens: Sequence[str],
    *,
    key_tokens: Sequence[str] | None = None,
    title: str = "attention",
) -> Path:
    """Write a self-contained page for reading a text with its attention under the mouse.

    Hover a token to see what it attends to in the chosen layer and head (or the mean of the heads), or,
    turned around, which tokens attend to it. A click holds the token; the arrow keys move it. Every head
    of the layer is drawn small for choosing.

    Parameters
    ----------
    path : str or Path
        The file to write.
    weights : ndarray or sequence of ndarray
        Weights of each layer, (heads, len_q, len_k) or with leading axes of length 1: what
        ``model.weights(ids)`` returns for one text. A single array of at most three axes is one layer.
    tokens : sequence of str
        The queries' tokens, as they shall be read.
    key_tokens : sequence of str, optional
        The keys' tokens for attention over another text; None means the same text.
    title : str, default "attention"
        Heading and window title.

    Returns
    -------
    path : Path
        The file written.

    Raises
    ------
    ValueError
        When shapes and tokens do not fit together, or the page would hold more than 64 million weights.

    Notes
    -----
    No network, no library: one file of about 1.4 bytes a weight, so a few hundred tokens. Weights are stored
    as the 8-bit square root, an error of at most 0.004 for a weight near 1 and 4e-6 near 0.

    Examples
    --------
    >>> import numpy as np
    >>> import os, tempfile
    >>> from npattn import plots
    >>> folder = tempfile.mkdtemp()
    >>> page = plots.save_html(os.path.join(folder, "page.html"), np.eye(3)[None], ["to", "be", "or"])
    >>> page.name, page.stat().st_size < 20_000
    ('page.html', True)
    """
    layers = _as_layers(weights)
    tokens = [str(token) for token in tokens]
    keys = tokens if key_tokens is None else [str(token) for token in key_tokens]
    for number, layer in enumerate(layers):
        if layer.shape[1:] != (len(tokens), len(keys)):
            raise ValueError(
                f"layer {number} has weights of shape {layer.shape} (heads, len_q, len_k), but there are "
                f"{len(tokens)} tokens and {len(keys)} key tokens"
            )
    data = {
        "tokens": tokens,
        "keys": None if key_tokens is None else keys,
        "layers": [{"heads": layer.shape[0], "weights": _encode(layer)} for layer in layers],
    }
    page = files("npattn.plots").joinpath("head_view.html").read_text(encoding="utf-8")
    # inside a script element only "</" could end the data early
    text = json.dumps(data, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    page = page.replace("{{title}}", html.escape(title)).replace("{{data}}", text)
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _as_layers(weights: Array | Sequence[Array]) -> list[Array]:
    one_layer = hasattr(weights, "ndim") and weights.ndim <= 3
    parts: Sequence[Any] = [weights] if one_layer else list(weights)
    total = sum(int(np.prod(np.shape(part))) for part in parts)
    if total > _MOST_WEIGHTS:
        raise ValueError(
            f"{total:,} weights are too many for a page (at most {_MOST_WEIGHTS:,}); choose layers, heads or "
            "a part of the text"
        )
    layers = [stack_of_heads(layer, f"weights[{number}]") for number, layer in enumerate(parts)]
    if not layers or min(layer.shape[0] for layer in layers) == 0:
        raise ValueError("weights must hold at least one layer with at least one head")
    return layers


def _encode(layer: Array) -> str:
    """Each weight w as the byte round(255 sqrt(w)), base64."""
    levels = np.round(255.0 * np.sqrt(np.clip(layer, 0.0, 1.0))).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode("ascii")

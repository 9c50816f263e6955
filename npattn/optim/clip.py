"""Clipping of gradients by their common norm."""

import math
from typing import Final

import numpy as np

from npattn._typing import Array, Grads
from npattn.kernels.pointwise import implementations
from npattn.optim.optimizer import not_negative

#: Smaller sums of squares have lost digits to float32's least number.
_LOW: Final = 1e-30


def clip_by_global_norm(grads: Grads, limit: float) -> tuple[Grads, float]:
    """Scale all gradients down together so that their common Euclidean norm is at most ``limit``.

    Parameters
    ----------
    grads : dict of str to ndarray
        Not written to.
    limit : float
        At least 0.

    Returns
    -------
    grads : dict of str to ndarray
        The same arrays when nothing had to be scaled, else new ones.
    norm : float
        Before clipping.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import optim
    >>> grads, norm = optim.clip_by_global_norm({"a": np.array([3.0]), "b": np.array([4.0])}, 1.0)
    >>> norm, grads["a"].round(6), grads["b"].round(6)
    (5.0, array([0.6]), array([0.8]))
    """
    limit = not_negative("limit", limit)
    names, arrays = list(grads), list(grads.values())
    parts = implementations(arrays)
    chosen = [(module, [arrays[row] for row in rows], rows) for module, rows in parts]
    with np.errstate(over="ignore", under="ignore"):
        square = sum(module.square_sum(some) for module, some, _ in chosen)
    norm = math.sqrt(square) if _LOW < square < math.inf else math.hypot(*map(_norm, arrays))
    if norm <= limit:
        return dict(grads), norm
    scaled: dict[int, Array] = {}
    for module, some, rows in chosen:
        scaled.update(zip(rows, module.scaled(some, limit / norm), strict=True))
    return {name: scaled[row] for row, name in enumerate(names)}, norm


def _norm(grad: Array) -> float:
    """Of squares that leave the dtype's range though the norm need not."""
    flat = grad.reshape(-1).astype("float64")
    largest = float(abs(flat).max()) if flat.size else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    flat /= largest
    return largest * math.sqrt(float(flat @ flat))


__all__ = ["clip_by_global_norm"]

"""Clipping of gradients by their common norm."""

import math
from typing import Final

import numpy as np

from npattn._arrays import accumulation_dtype
from npattn._typing import Array, Grads
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
    norm = math.hypot(*(_norm(grad) for grad in grads.values()))
    if norm <= limit:
        return dict(grads), norm
    scale = limit / norm
    return {name: _scaled(grad, scale) for name, grad in grads.items()}, norm


def _scaled(grad: Array, scale: float) -> Array:
    """``grad · scale``, rounded once: the scale itself may be beneath float16's range."""
    wide = accumulation_dtype(grad.dtype)
    scaled: Array = grad.astype(wide, copy=False) * wide.type(scale)
    return scaled.astype(grad.dtype, copy=False)


def _norm(grad: Array) -> float:
    flat = grad.reshape(-1)
    flat = flat.astype(accumulation_dtype(flat.dtype), copy=False)
    with np.errstate(over="ignore", under="ignore"):
        square = float(flat @ flat)
    if _LOW < square < math.inf or not flat.size:
        return math.sqrt(square)
    # The squares leave the dtype's range, the norm need not.
    largest = float(abs(flat).max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    flat = flat.astype("float64") / largest
    return largest * math.sqrt(float(flat @ flat))


__all__ = ["clip_by_global_norm"]

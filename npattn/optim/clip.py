"""Clipping of gradients by their common norm."""

import math

import numpy as np

from npattn._typing import Array, Grads
from npattn.optim.optimizer import not_negative


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
    norm = math.sqrt(sum(_square(grad) for grad in grads.values()))
    if norm <= limit:
        return dict(grads), norm
    scale = limit / norm
    return {name: grad * grad.dtype.type(scale) for name, grad in grads.items()}, norm


def _square(grad: Array) -> float:
    flat = grad.reshape(-1)
    if flat.dtype.itemsize < 4:
        flat = flat.astype("float32")
    with np.errstate(over="ignore"):
        square = float(flat @ flat)
    if math.isinf(square):  # beyond float32's range, not beyond float64's
        flat = flat.astype("float64")
        square = float(flat @ flat)
    return square


__all__ = ["clip_by_global_norm"]

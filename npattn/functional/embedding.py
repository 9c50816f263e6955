"""embedding, the lookup of rows by integer ids, beside its vjp."""

from typing import Any

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array, Pullback
from npattn.kernels.pointwise import implementation


def embedding(ids: Any, weight: Array) -> Array:
    """The rows of ``weight`` that ``ids`` name.

    Parameters
    ----------
    ids : integer ndarray, any shape
        Each in [0, num).
    weight : ndarray, shape (num, dim)

    Returns
    -------
    y : ndarray, shape ids.shape + (dim,)

    Raises
    ------
    TypeError
        When ids are not integers.
    ValueError
        When an id is out of range; negative ids do not count from the end.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import embedding
    >>> embedding(np.array([2, 0]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    array([[5., 6.],
           [1., 2.]])
    """
    y: Array = weight[array_module(weight).asarray(check_ids(ids, weight.shape[0], "ids"))]
    return y


def embedding_vjp(ids: Any, weight: Array) -> tuple[Array, Pullback]:
    """``embedding`` and its pullback dy -> dweight (num, dim), the sum of dy over each id's places.

    The sum runs over the places in order, so equal input gives equal bits.

    Parameters
    ----------
    ids, weight
        As in ``embedding``.

    Returns
    -------
    y : ndarray, shape (..., dim)
    pullback : callable
        ``pullback(dy) -> dweight``, shape (num, dim).

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import embedding_vjp
    >>> y, pullback = embedding_vjp(np.array([2, 0, 2]), np.zeros((3, 1)))
    >>> pullback(np.array([[1.0], [10.0], [100.0]])).ravel().tolist()
    [10.0, 0.0, 101.0]
    """
    ids = array_module(weight).asarray(check_ids(ids, weight.shape[0], "ids"))

    def pullback(dy: Array) -> Array:
        xp = array_module(dy, weight)
        flat = xp.ascontiguousarray(ids, np.int64).reshape(-1)
        rows = xp.ascontiguousarray(dy).reshape(flat.size, weight.shape[1])
        return implementation(rows, weight).sum_of_rows(rows, flat, weight)  # type: ignore[no-any-return]

    return weight[ids], pullback


def check_ids(ids: Any, num: int, name: str) -> Array:
    """``ids`` as an integer array, every one in [0, num)."""
    ids = ids if hasattr(ids, "dtype") else np.asarray(ids, dtype=np.int64 if not np.size(ids) else None)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {ids.dtype}")
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} must be in [0, {num}), got {wrong}: there are {num} rows to look up")
    return ids  # type: ignore[no-any-return]


__all__ = ["embedding", "embedding_vjp"]

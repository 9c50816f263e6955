"""Dropout by counter: of attention weights (``keep_mask``, the published generator) and of any array.

The hash itself, in words and in code, is in ``npattn._dropout``, beneath the kernels, which must not import
this package.
"""

from npattn._arrays import accumulation_dtype, array_module
from npattn._check import float_dtype
from npattn._dropout import fold_seed, keep_mask, threshold
from npattn._typing import Array, Pullback


def dropout(x: Array, p: float, seed: int) -> Array:
    """``x * keep / (1 - p)``, with ``keep = keep_mask(seed, x.shape, p)``.

    Parameters
    ----------
    x : float array
        Of at most four axes.
    p : float
        Probability of dropping an entry, in [0, 1]; p = 1 gives zeros.
    seed : int
        Which entries stay is a function of it and of the place alone.

    Returns
    -------
    y : array
        Shape and dtype of x. Dropped entries are 0 whatever x holds there.

    Raises
    ------
    ValueError
        When p is outside [0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional.dropout import dropout
    >>> dropout(np.ones(6), 0.5, seed=1)
    array([2., 0., 0., 2., 2., 0.])
    """
    xp = array_module(x)
    float_dtype("x", x.dtype)
    keep = xp.asarray(keep_mask(seed, x.shape, p))
    if p == 1.0:
        return xp.zeros_like(x)  # type: ignore[no-any-return]
    factor = accumulation_dtype(x.dtype).type(1.0 / (1.0 - p))
    y: Array = xp.where(keep, x * factor, 0).astype(x.dtype, copy=False)
    return y


def dropout_vjp(x: Array, p: float, seed: int) -> tuple[Array, Pullback]:
    """``dropout`` and its pullback dy -> dx, which drops the same entries."""
    return dropout(x, p, seed), lambda dy: dropout(dy, p, seed)


__all__ = ["dropout", "dropout_vjp", "fold_seed", "keep_mask", "threshold"]

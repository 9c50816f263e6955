"""cross_entropy over integer targets, fused with the softmax, beside its vjp."""

from typing import Any

import numpy as np

from npattn._arrays import array_module
from npattn._check import float_dtype
from npattn._typing import Array, Pullback
from npattn.kernels.pointwise import implementation


def cross_entropy(
    logits: Array, targets: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Mean negative log likelihood of the targets, in nats.

    ``loss = mean over the targets kept of  lse(logits) − (1 − s) · logits[target] − s · mean(logits)`` with
    ``s = label_smoothing``.

    Parameters
    ----------
    logits : float ndarray, shape (..., classes)
        Not probabilities: the softmax is inside.
    targets : integer ndarray, shape (...)
        Each in [0, classes), or ``ignore_index``.
    ignore_index : int, default -100
        Targets of this value count neither in the sum nor in the mean.
    label_smoothing : float, default 0.0
        In [0, 1]: this share of the target's probability is spread evenly over all classes.

    Returns
    -------
    loss : scalar
        float32, or float64 for float64 logits. 0 when every target is ignored (PyTorch: NaN).

    Raises
    ------
    TypeError
        When targets are not integers.
    ValueError
        When shapes do not fit, a target is out of range, or label_smoothing is outside [0, 1].

    Notes
    -----
    Beside logits only the log-sum of each row is kept; the gradient is the one array of its size.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import cross_entropy
    >>> logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    >>> bool(np.isclose(cross_entropy(logits, np.array([0, 1])), -np.log([0.5, 0.8]).mean()))
    True
    """
    return _forward(logits, targets, ignore_index, label_smoothing)[0]


def cross_entropy_vjp(
    logits: Array, targets: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Any, Pullback]:
    """``cross_entropy`` and its pullback dloss=1 -> dlogits, shape and dtype of logits.

    Parameters
    ----------
    logits, targets, ignore_index, label_smoothing
        As in ``cross_entropy``.

    Returns
    -------
    loss : float
    pullback : callable
        ``pullback(dloss=1.0) -> dlogits``, shape and dtype of logits.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import cross_entropy_vjp
    >>> loss, pullback = cross_entropy_vjp(np.zeros((1, 4)), np.array([1]))
    >>> round(float(loss), 4), pullback().tolist()
    (1.3863, [[0.25, -0.75, 0.25, 0.25]])
    """
    loss, rows, flat, lse, count = _forward(logits, targets, ignore_index, label_smoothing)

    def pullback(dloss: Any = 1.0) -> Array:
        run = implementation(rows, lse).cross_entropy_backward
        scale = float(dloss) / max(count, 1)
        return run(scale, rows, flat, lse, ignore_index, float(label_smoothing)).reshape(logits.shape)  # type: ignore[no-any-return]

    return loss, pullback


def _forward(
    logits: Array, targets: Any, ignore_index: int, label_smoothing: float
) -> tuple[Any, Array, Array, Array, int]:
    """Loss, logits as (rows, classes), targets as (rows,) int64, lse (rows,), number of targets kept."""
    xp = array_module(logits)
    float_dtype("logits", logits.dtype)
    targets = xp.asarray(targets)
    if targets.dtype.kind not in "iu":
        raise TypeError(f"targets must be integer class numbers, got dtype {targets.dtype}")
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of logits without its last axis (the classes): "
            f"logits {logits.shape}, targets {targets.shape}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    classes = logits.shape[-1]
    rows = xp.ascontiguousarray(logits).reshape(-1, classes)
    flat = xp.ascontiguousarray(targets, np.int64).reshape(-1)
    kept = flat != ignore_index
    count = int(kept.sum())
    wrong = kept & ((flat < 0) | (flat >= classes))
    if wrong.any():
        raise ValueError(
            f"targets must be in [0, {classes}) or ignore_index ({ignore_index}), got {int(flat[wrong][0])}"
        )
    loss, lse = implementation(rows).cross_entropy(rows, flat, ignore_index, float(label_smoothing))
    mean = loss.sum(dtype=np.float64) / max(count, 1)
    return mean.astype(lse.dtype), rows, flat, lse, count


__all__ = ["cross_entropy", "cross_entropy_vjp"]

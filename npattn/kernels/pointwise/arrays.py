"""The formulas as array code, for NumPy and CuPy, in any float dtype. See the package docstring."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.kernels.pointwise.erf import erf

USABLE: Final = True

SQRT_HALF: Final = 0.7071067811865476
SQRT_2_OVER_PI: Final = 0.7978845608028654
CUBIC: Final = 0.044715
#: Beyond ±FLAT GELU's slope is 1 or 0 to the last bit, and powers of x could overflow.
FLAT: Final = 40.0

#: Rows of the loss are worked on in blocks of about this many elements, so that temporaries stay in cache.
BLOCK: Final = 1 << 16

#: Adam's arrays are updated in pieces of this many elements.
PIECE: Final = 1 << 14


def gelu(x: Array, tanh: bool) -> Array:
    """``y = x Φ(x)``, or its tanh approximation ``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``."""
    xp = array_module(x)
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    y = xp.tanh(_tanh_argument(wide)) if tanh else erf(wide * SQRT_HALF)
    y += 1.0
    y *= wide
    y *= 0.5
    return _as(y, x)


def gelu_backward(dy: Array, x: Array, tanh: bool) -> Array:
    """``dx = dy (Φ(x) + x φ(x))``, or the derivative of the tanh approximation."""
    xp = array_module(dy, x)
    wide = xp.clip(x.astype(accumulation_dtype(x.dtype), copy=False), -FLAT, FLAT)
    if tanh:
        t = xp.tanh(_tanh_argument(wide))
        slope = wide * wide
        slope *= 3.0 * CUBIC
        slope += 1.0
        slope *= SQRT_2_OVER_PI  # d of tanh's argument
        slope *= 1.0 - t * t
        slope *= wide
        slope += t
        slope += 1.0
        slope *= 0.5
    else:
        slope = wide * wide
        slope *= -0.5
        xp.exp(slope, out=slope)
        slope *= 0.5 * SQRT_2_OVER_PI  # φ(x): 1 / sqrt(2π) = sqrt(2/π) / 2
        slope *= wide
        slope += 0.5 * (1.0 + erf(wide * SQRT_HALF))
    slope *= dy
    return _as(slope, x)


def silu(x: Array) -> Array:
    """``y = x σ(x)``."""
    y = _sigmoid(x.astype(accumulation_dtype(x.dtype), copy=False))
    y *= x
    return _as(y, x)


def silu_backward(dy: Array, x: Array) -> Array:
    """``dx = dy σ(x) (1 + x (1 − σ(x)))``."""
    s = _sigmoid(x.astype(accumulation_dtype(x.dtype), copy=False))
    dx = 1.0 - s
    dx *= x
    dx += 1.0
    dx *= s
    dx *= dy
    return _as(dx, x)


def swiglu(gate: Array, up: Array) -> Array:
    """``y = silu(gate) · up``."""
    y = _sigmoid(gate.astype(accumulation_dtype(gate.dtype), copy=False))
    y *= gate
    y *= up
    return _as(y, gate)


def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """``dup = dy silu(gate)``; ``dgate = dy up σ(gate) (1 + gate (1 − σ(gate)))``."""
    s = _sigmoid(gate.astype(accumulation_dtype(gate.dtype), copy=False))
    dgate = 1.0 - s
    dgate *= gate
    dgate += 1.0
    dgate *= s
    dgate *= up
    dgate *= dy
    s *= gate
    s *= dy
    return _as(dgate, gate), _as(s, up)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """``y = (x − mean) · rstd · weight + bias`` by row; also mean and rstd, each (rows,)."""
    xp = array_module(x, weight, bias)
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    mean = wide.mean(axis=1)
    y = wide - mean[:, None]
    rstd = 1.0 / xp.sqrt((y * y).mean(axis=1) + wide.dtype.type(eps))
    y *= rstd[:, None]
    y *= weight
    if bias is not None:
        y += bias
    return _as(y, x), mean, rstd


def layer_norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """Gradients dx, dweight, dbias of ``y = xhat · weight + bias``, ``xhat = (x − mean) · rstd``.

    ::

    dxhat = dy · weight
    dx    = rstd · (dxhat − mean(dxhat) − xhat · mean(dxhat · xhat))
    """
    xhat = x.astype(mean.dtype, copy=False) - mean[:, None]
    xhat *= rstd[:, None]
    dy = dy.astype(mean.dtype, copy=False)
    dbias = dy.sum(axis=0)
    dweight = (dy * xhat).sum(axis=0)
    dx = dy * weight
    along = (dx * xhat).mean(axis=1)
    dx -= dx.mean(axis=1)[:, None]
    xhat *= along[:, None]
    dx -= xhat
    dx *= rstd[:, None]
    return _as(dx, x), _as(dweight, weight), _as(dbias, weight)


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """``y = x · rstd · weight`` with ``rstd = 1 / sqrt(mean(x²) + eps)`` by row; also rstd (rows,)."""
    xp = array_module(x, weight)
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    rstd = 1.0 / xp.sqrt((wide * wide).mean(axis=1) + wide.dtype.type(eps))
    y = wide * rstd[:, None]
    y *= weight
    return _as(y, x), rstd


def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
    """Gradients dx, dweight of ``y = xhat · weight``, ``xhat = x · rstd``.

    ::

    dxhat = dy · weight
    dx    = rstd · (dxhat − xhat · mean(dxhat · xhat))
    """
    xhat = x.astype(rstd.dtype, copy=False) * rstd[:, None]
    dy = dy.astype(rstd.dtype, copy=False)
    dweight = (dy * xhat).sum(axis=0)
    dx = dy * weight
    along = (dx * xhat).mean(axis=1)
    xhat *= along[:, None]
    dx -= xhat
    dx *= rstd[:, None]
    return _as(dx, x), _as(dweight, weight)


def cross_entropy(logits: Array, targets: Array, ignore_index: int, smoothing: float) -> tuple[Array, Array]:
    """Loss by row (0 where ignored) and lse, each (rows,), accumulation dtype.

    ::

    loss = lse − (1 − smoothing) · logits[target] − smoothing · mean(logits)
    """
    xp = array_module(logits, targets)
    rows, classes = logits.shape
    dtype = accumulation_dtype(logits.dtype)
    lse = xp.empty(rows, dtype)
    loss = xp.empty(rows, dtype)
    for part in _row_blocks(rows, classes):
        block = logits[part].astype(dtype, copy=False)
        m = block.max(axis=1)
        m[~xp.isfinite(m)] = 0.0
        p = xp.exp(block - m[:, None])
        lse[part] = m + xp.log(p.sum(axis=1))
        ignored = targets[part] == ignore_index
        at = xp.where(ignored, 0, targets[part])
        value = lse[part] - (1.0 - smoothing) * xp.take_along_axis(block, at[:, None], axis=1)[:, 0]
        if smoothing:
            value -= smoothing * block.mean(axis=1)
        loss[part] = xp.where(ignored, dtype.type(0), value)
    return loss, lse


def cross_entropy_backward(
    scale: float, logits: Array, targets: Array, lse: Array, ignore_index: int, smoothing: float
) -> Array:
    """``scale · (softmax − (1 − smoothing) · onehot − smoothing / classes)`` by row, 0 where ignored."""
    xp = array_module(logits, targets)
    rows, classes = logits.shape
    dlogits: Array = xp.empty_like(logits)
    for part in _row_blocks(rows, classes):
        block = logits[part].astype(lse.dtype, copy=False) - lse[part, None]
        xp.exp(block, out=block)
        if smoothing:
            block -= smoothing / classes
        ignored = targets[part] == ignore_index
        at = xp.where(ignored, 0, targets[part])
        block[xp.arange(len(at)), at] -= 1.0 - smoothing
        block *= scale
        block[ignored] = 0.0
        dlogits[part] = block
    return dlogits


def sum_of_rows(rows: Array, ids: Array, like: Array) -> Array:
    """The sum of the rows (count, dim) of each of ``ids`` (count,), in an array like ``like`` (num, dim)."""
    xp = array_module(rows, like)
    y: Array = xp.zeros_like(like)
    if ids.size == 0:
        return y
    rows = rows.astype(accumulation_dtype(rows.dtype), copy=False)
    if xp is not np:
        xp.add.at(y, ids, rows)
        return y
    # Equal ids brought together by a stable sort, each run summed: many times faster than np.add.at.
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    y[ordered[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return y


def merge_heads(x: Array) -> Array:
    """(batch, heads, length, dim) -> (batch, length, heads · dim), a row's heads side by side."""
    batch, heads, length, dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * dim)


def adam(
    parameters: Sequence[Array],
    grads: Sequence[Array],
    ms: Sequence[Array],
    vs: Sequence[Array],
    shrinks: Sequence[float],
    betas: tuple[float, float],
    step_size: float,
    root: float,
    eps: float,
) -> None:
    """One step of Adam in place; parameters, ms and vs are written.

    Of each parameter and its shrink::

        m = β₁ m + (1 − β₁) grad
        v = β₂ v + (1 − β₂) grad²
        parameter = shrink · parameter − step_size · m / (root · sqrt(v) + eps)

    Pieces of PIECE elements and their scratch stay in the cache; strided arrays are one piece.
    """
    for *arrays, shrink in zip(parameters, grads, ms, vs, shrinks, strict=True):
        size = arrays[0].size
        if size > PIECE and all(array.flags.c_contiguous for array in arrays):
            flat = [array.reshape(-1) for array in arrays]
            pieces = [[array[i : i + PIECE] for array in flat] for i in range(0, size, PIECE)]
        else:
            pieces = [arrays]
        for p, g, m, v in pieces:
            _adam(p, g, m, v, betas, step_size, root, eps, shrink)


def square_sum(arrays: Sequence[Array]) -> float:
    """The sum of the squares of all elements."""
    total = 0.0
    for x in arrays:
        flat = x.reshape(-1).astype(accumulation_dtype(x.dtype), copy=False)
        total += float(flat @ flat)
    return total


def scaled(arrays: Sequence[Array], factor: float) -> list[Array]:
    """``array · factor``, rounded once: the factor itself may be beneath float16's range."""
    wides = [accumulation_dtype(x.dtype) for x in arrays]
    return [
        _as(x.astype(wide, copy=False) * wide.type(factor), x) for x, wide in zip(arrays, wides, strict=True)
    ]


def _adam(
    parameter: Array,
    grad: Array,
    m: Array,
    v: Array,
    betas: tuple[float, float],
    step_size: float,
    root: float,
    eps: float,
    shrink: float,
) -> None:
    grad = grad.astype(m.dtype, copy=False)
    m *= betas[0]
    m += (1.0 - betas[0]) * grad
    scratch = grad * grad
    scratch *= 1.0 - betas[1]
    v *= betas[1]
    v += scratch
    scratch = array_module(v).sqrt(v)
    scratch *= root
    scratch += eps
    array_module(v).divide(m, scratch, out=scratch)
    scratch *= step_size
    if shrink != 1.0:
        parameter *= shrink
    parameter -= scratch


def _as(result: Array, like: Array) -> Array:
    narrowed: Array = result.astype(like.dtype, copy=False)
    return narrowed


def _tanh_argument(x: Array) -> Array:
    x = array_module(x).clip(x, -FLAT, FLAT)
    u = x * x
    u *= CUBIC
    u += 1.0
    u *= x
    u *= SQRT_2_OVER_PI
    return u


def _sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(−x))`` as ``(1 + tanh(x / 2)) / 2``, which cannot overflow."""
    s: Array = array_module(x).tanh(x * 0.5)
    s += 1.0
    s *= 0.5
    return s


def _row_blocks(rows: int, width: int) -> list[Any]:
    step = max(1, BLOCK // max(1, width))
    return [np.s_[start : start + step] for start in range(0, rows, step)]

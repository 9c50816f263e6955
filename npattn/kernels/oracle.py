"""Attention over the whole matrix, forward and backward: what "correct" means.

Every line is a line of ``npattn.kernels.contract``. There are no tiles, no plan and no tricks; the only
care taken is that a masked pair contributes nothing, not even ``0 * NaN``. Any float dtype, NumPy or CuPy.
Time and memory are O(batch * heads_q * len_q * len_k), so this is for tests, small inputs and reading.

``plan`` is the bool mask here, (batch or 1, heads_q or 1, len_q, len_k), True where attention is allowed.
"""

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype, array_module, to_numpy
from npattn._dropout import keep_mask
from npattn._typing import Array
from npattn.kernels.contract import AttentionGrads, Forward, Problem, split_scale


class _Softmax(NamedTuple):
    """The weights and what the backward pass needs to know about them; all (batch, heads_q, len_q, len_k)."""

    p: Array  # softmax weights, 0 where not visible
    visible: Array  # bool: the mask, without the pairs whose bias is -inf
    slope: Array | None  # d logits after softcap / d logits before; None without softcap
    m: Array  # (batch, heads_q, len_q, 1)
    l: Array  # (batch, heads_q, len_q, 1)


def supports(problem: Problem) -> str | None:
    """Everything."""
    return None


def tile_shape(problem: Problem) -> tuple[int, int] | None:
    """None: it wants the dense mask."""
    return None


def forward(
    problem: Problem,
    plan: Array,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
) -> Forward:
    """``softmax(scale * q @ k.T) @ v``, with everything the contract lists in between."""
    with np.errstate(all="ignore"):  # masked NaN and inf may warn on their way to being dropped
        softmax = _softmax(problem, plan, q, k, bias, sinks)
        factor = _dropout_factor(problem, array_module(q))
        pd = softmax.p if factor is None else softmax.p * factor
        out = _product(pd, softmax.visible, _heads_of_queries(problem, v))
        return Forward(out.astype(problem.dtype), softmax.m[..., 0], softmax.l[..., 0])


def backward(
    problem: Problem,
    plan: Array,
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    m: Array,
    l: Array,
    bias: Array | None,
    sinks: Array | None,
    rest: Array | None = None,
) -> AttentionGrads:
    """The transposed formula; recomputes the weights and needs ``out``, ``m`` and ``l`` not at all."""
    with np.errstate(all="ignore"):
        xp = array_module(q)
        before, after = split_scale(problem.scale)
        p, visible, slope, m, l = _softmax(problem, plan, q, k, bias, sinks)
        factor = _dropout_factor(problem, xp)
        pd = p if factor is None else p * factor
        dout = dout.astype(p.dtype)

        # out = pd @ v
        dv = _product(_transpose(pd), _transpose(visible), dout)
        dp = xp.where(visible, dout @ _transpose(_heads_of_queries(problem, v)), 0)
        if factor is not None:
            dp = xp.where(visible, dp * factor, 0)

        # p = softmax(logits), lse = log of its denominator
        delta = xp.where(visible, p * dp, 0).sum(-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[..., None].astype(p.dtype)
        ds = xp.where(visible, p * (dp - delta), 0)
        dsinks = None
        if sinks is not None:  # the sink is one more key, whose value is 0
            p_sink = xp.where(l > 0, xp.exp(_per_head(sinks) - m) / l, 0)
            dsinks = xp.where(p_sink > 0, -p_sink * delta, 0).sum((0, 2, 3))
        dbias = None if bias is None else _sum_to_shape(ds, bias.shape)

        # logits = softcap * tanh(scale * (q @ k.T) / softcap)
        if slope is not None:
            ds = xp.where(visible, ds * slope, 0)
        ds = ds * before
        dq = _product(ds, visible, _heads_of_queries(problem, k)) * after
        dk = _product(_transpose(ds), _transpose(visible), q.astype(p.dtype)) * after
        return AttentionGrads(
            dq.astype(problem.dtype),
            _sum_over_queries_heads(problem, dk).astype(problem.dtype),
            _sum_over_queries_heads(problem, dv).astype(problem.dtype),
            dbias,
            dsinks,
        )


def weights(
    problem: Problem, plan: Array, q: Array, k: Array, bias: Array | None, sinks: Array | None
) -> Array:
    """The softmax weights alone, (batch, heads_q, len_q, len_k), in accumulation dtype, before dropout."""
    with np.errstate(all="ignore"):
        return _softmax(problem, plan, q, k, bias, sinks).p


def _softmax(
    problem: Problem, mask: Array, q: Array, k: Array, bias: Array | None, sinks: Array | None
) -> _Softmax:
    """From logits to weights."""
    xp = array_module(q)
    acc = accumulation_dtype(problem.dtype)
    before, after = split_scale(problem.scale)
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    visible = xp.broadcast_to(mask, shape)

    logits = (q.astype(acc) * before) @ _transpose(_heads_of_queries(problem, k)) * after
    slope = None
    if problem.softcap > 0:
        t = xp.tanh(logits / problem.softcap)
        logits = problem.softcap * t
        slope = 1 - t * t
    if bias is not None:
        logits = logits + bias.astype(acc)
        visible = visible & (bias != -np.inf)
    logits = xp.where(visible, logits, -np.inf)

    m = logits.max(-1, keepdims=True) if problem.len_k else xp.full((*shape[:3], 1), -np.inf, acc)
    if sinks is not None:
        m = xp.maximum(m, _per_head(sinks))
    m = xp.where(m == -np.inf, 0, m)  # a row that sees nothing: any finite number makes every exp below 0
    e = xp.where(visible, xp.exp(logits - m), 0)
    l = e.sum(-1, keepdims=True)
    if sinks is not None:
        l = l + xp.exp(_per_head(sinks) - m)
    p = xp.where(visible, e / xp.where(l == 0, 1, l), 0)  # again, for l may be NaN
    return _Softmax(p, visible, slope, m, l)


def _product(weight: Array, visible: Array, rows: Array) -> Array:
    """``weight @ rows``, where a pair that is not visible adds nothing even if its row holds NaN or inf.

    Rows that are finite throughout go through one matrix product; the others are added one by one.
    """
    xp = array_module(weight)
    finite = xp.isfinite(rows).all(-1)  # (batch, heads, length)
    result: Array = weight @ xp.where(finite[..., None], rows, 0)
    for j in np.flatnonzero(to_numpy(~finite.all((0, 1)))):
        bad = ~finite[:, :, j, None, None] & visible[:, :, :, j, None]
        result = result + xp.where(bad, weight[:, :, :, j, None] * rows[:, :, None, j], 0)
    return result


def _heads_of_queries(problem: Problem, x: Array) -> Array:
    """Keys or values repeated for every query head that reads them, in accumulation dtype."""
    x = x.astype(accumulation_dtype(problem.dtype))
    return x if problem.heads_q == problem.heads_kv else x.repeat(_group(problem), axis=1)


def _sum_over_queries_heads(problem: Problem, dx: Array) -> Array:
    """The transpose of ``_heads_of_queries``."""
    if problem.heads_q == problem.heads_kv:
        return dx
    batch, _, length, dim = dx.shape
    dx = dx.reshape(batch, problem.heads_kv, _group(problem), length, dim)
    summed: Array = dx.sum(2)
    return summed


def _group(problem: Problem) -> int:
    return problem.heads_q // problem.heads_kv if problem.heads_kv else 0


def _dropout_factor(problem: Problem, xp: Any) -> Array | None:
    """What dropout multiplies each weight by: 0 or 1 / (1 - p); None without dropout."""
    if problem.dropout_p == 0.0:
        return None
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    keep = xp.asarray(keep_mask(problem.seed, shape, problem.dropout_p))
    factor: Array = keep * accumulation_dtype(problem.dtype).type(1 / (1 - problem.dropout_p))
    return factor


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast to ``x.shape``."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    return x.sum(axes, keepdims=True) if axes else x


def _per_head(sinks: Array) -> Array:
    return sinks[:, None, None]  # (heads_q, 1, 1), against (batch, heads_q, len_q, 1)


def _transpose(x: Array) -> Array:
    return x.swapaxes(-1, -2)

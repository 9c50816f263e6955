"""Linear attention in array operations, NumPy or CuPy: ``contract`` as it is written.

One ones-column behind the values makes numerator and denominator a single product. Arrays have an axis for
the group of query heads that share a key head: (batch, heads_kv, group or 1, length, dim).
"""

from typing import Final

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.kernels.linear_attention.contract import Forward, Grads, State

_CHUNK: Final = 128  # queries whose products with each other are formed as they stand


def features(x: Array, name: str) -> Array:
    """φ(x)."""
    xp = array_module(x)
    y: Array
    if name == "elu1":
        y = xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))
    elif name == "relu":
        y = xp.maximum(x, 0)
    else:
        y = x
    return y


def slope(y: Array, name: str) -> Array | int:
    """The derivative of φ where its value is y."""
    xp = array_module(y)
    slopes: Array | int
    if name == "elu1":
        slopes = xp.minimum(y, 1)
    elif name == "relu":
        slopes = y > 0
    else:
        slopes = 1
    return slopes


def forward(
    q: Array,
    k: Array,
    v: Array,
    name: str,
    causal: bool,
    eps: float,
    state: State | None = None,
    keeps_state: bool = False,
) -> Forward:
    """See ``contract.Implementation``."""
    xp = array_module(q)
    phi_q, phi_k, values = _grouped(features(q, name), k.shape[1]), _alone(features(k, name)), _with_ones(v)
    both = _below(phi_q, phi_k, values, causal)
    if state is not None:
        both = both + phi_q @ xp.concatenate([state.kv, state.z[..., None]], axis=-1)[:, :, None]
    numerator, total = both[..., :-1], both[..., -1:] + eps
    is_zero = total == 0
    total = xp.where(is_zero, 1, total)
    out = xp.where(is_zero, 0, numerator / total)
    inverse = xp.where(is_zero, 0, 1 / total)
    after = None
    if keeps_state:
        added = (_t(phi_k) @ values)[:, :, 0]
        kv, z = added[..., :-1], added[..., -1]
        after = State(kv, z) if state is None else State(state.kv + kv, state.z + z)
    rows = q.shape[:3]
    return Forward(out.reshape(*rows, v.shape[3]), inverse.reshape(rows), after)


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    inverse: Array,
    dout: Array,
    name: str,
    causal: bool,
) -> Grads:
    """See ``contract.Implementation``."""
    xp = array_module(q)
    phi_q, phi_k = features(q, name), features(k, name)
    # out = numerator / total
    dnumerator = dout * inverse[..., None]
    dtotal = -(dout * out).sum(-1, keepdims=True) * inverse[..., None]
    dboth = _grouped(xp.concatenate([dnumerator, dtotal], axis=-1), v.shape[1])
    # both = below(phi_q, phi_k, values)
    grouped_q, alone_k, values = _grouped(phi_q, v.shape[1]), _alone(phi_k), _with_ones(v)
    dphi_q = _below(dboth, values, alone_k, causal).reshape(phi_q.shape)
    dphi_k = _sum_group(_above(values, dboth, grouped_q, causal))
    dvalues = _sum_group(_above(alone_k, grouped_q, dboth, causal))
    # phi_q = features(q), phi_k = features(k)
    return Grads(dphi_q * slope(phi_q, name), dphi_k * slope(phi_k, name), dvalues[..., :-1])


def _below(a: Array, b: Array, c: Array, causal: bool) -> Array:
    """``(a @ b.T, kept where j <= i if causal) @ c`` over the last two axes."""
    if not causal:
        result: Array = a @ (_t(b) @ c)
        return result
    xp = array_module(a)
    length = a.shape[-2]
    if length <= _CHUNK:
        return _below_as_written(a, b, c)
    count = -(-length // _CHUNK)
    a, b, c = (_chunks(x, count) for x in (a, b, c))
    # Inside a chunk as written; what lies in earlier chunks through the sums of b.T @ c.
    # Not cumsum(sums) − sums: huge or NaN keys of a chunk would reach its earlier queries.
    sums = _t(b) @ c
    before = xp.zeros_like(sums)
    before[..., 1:, :, :] = xp.cumsum(sums[..., :-1, :, :], axis=-3)
    out: Array = _below_as_written(a, b, c) + a @ before
    return out.reshape(*out.shape[:-3], count * _CHUNK, out.shape[-1])[..., :length, :]


def _below_as_written(a: Array, b: Array, c: Array) -> Array:
    """``tril(a @ b.T) @ c``; a row of c that is not finite reaches no row before it, not even as 0 · NaN."""
    xp = array_module(a)
    kept = xp.tril(a @ _t(b))
    finite = xp.isfinite(c)
    if finite.all():
        result: Array = kept @ c
        return result
    result = kept @ xp.where(finite, c, 0) + xp.cumsum(xp.where(finite, 0, c), axis=-2)
    return result


def _above(a: Array, b: Array, c: Array, causal: bool) -> Array:
    """``(a @ b.T, kept where j >= i if causal) @ c``: the transpose of `_below`, read backwards."""
    if not causal:
        return _below(a, b, c, False)
    a, b, c = (x[..., ::-1, :] for x in (a, b, c))
    return _below(a, b, c, True)[..., ::-1, :]


def _chunks(x: Array, count: int) -> Array:
    """(..., length, dim) -> (..., count, _CHUNK, dim), zeros behind the end."""
    xp = array_module(x)
    padded = xp.zeros((*x.shape[:-2], count * _CHUNK, x.shape[-1]), x.dtype)
    padded[..., : x.shape[-2], :] = x
    chunks: Array = padded.reshape(*x.shape[:-2], count, _CHUNK, x.shape[-1])
    return chunks


def _grouped(x: Array, heads_kv: int) -> Array:
    """(batch, heads_q, length, dim) -> (batch, heads_kv, group, length, dim)."""
    batch, heads, length, dim = x.shape
    grouped: Array = x.reshape(batch, heads_kv, heads // heads_kv if heads_kv else 1, length, dim)
    return grouped


def _alone(x: Array) -> Array:
    """(batch, heads_kv, length, dim) -> (batch, heads_kv, 1, length, dim)."""
    return x[:, :, None]


def _with_ones(v: Array) -> Array:
    """Values with a ones-column behind them, ``_alone``."""
    values: Array = array_module(v).ones((*v.shape[:-1], v.shape[-1] + 1), v.dtype)
    values[..., :-1] = v
    return _alone(values)


def _sum_group(x: Array) -> Array:
    """Sum over the query heads that share a key head."""
    summed: Array = x[:, :, 0] if x.shape[2] == 1 else x.sum(2)
    return summed


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


__all__ = ["backward", "forward"]

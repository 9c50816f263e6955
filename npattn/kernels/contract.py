"""What a kernel is given, what it must return, and the order of operations all of them follow.

One call of attention, for query head h reading key head g = h // (heads_q // heads_kv)::

    logits = scale * (q @ k.T)                        # (len_q, len_k), accumulation dtype
    logits = softcap * tanh(logits / softcap)         # when softcap > 0
    logits = logits + bias                            # when has_bias; -inf means masked
    logits = where(visible, logits, -inf)             # the plan
    m      = max(logits over keys, and sinks[h])      # 0 when the row sees nothing
    l      = sum(exp(logits - m)) + exp(sinks[h] - m) # 0 when the row sees nothing
    p      = exp(logits - m) / l                      # 0 when l == 0
    out    = (p * keep / (1 - dropout_p)) @ v

and backward, with ``pd = p * keep / (1 - dropout_p)`` the dropped weights::

    dv     = pd.T @ dout
    dp     = (dout @ v.T) * keep / (1 - dropout_p)
    delta  = rowsum(dout * out) where out != 0        # = rowsum(p * dp); a row that sees no key has out 0,
                                                      #   and its dout may be anything; out is out + rest
    ds     = p * (dp - delta + dlse)                  # d of the logits after bias
    dbias  = ds                                       # summed over the axes along which bias broadcasts
    dsinks = sum(exp(sinks - m) / l * (dlse - delta)) # over batch and queries
    ds     = ds * (1 - (capped / softcap)**2)         # capped: logits after softcap, before bias
    dq     = scale * ds @ k
    dk     = scale * ds.T @ q

``m`` and ``l`` are kept apart, never as their sum ``lse = m + log(l)`` alone: at logits of 1e5 in float32
there is no room for log(l) beside m, and p would no longer sum to one.

The scale goes where nothing overflows or underflows on the way (``split_scale``): |scale| <= 1 multiplies q
before the product (and ds before the products that give dq and dk), a larger one multiplies what comes out.

A masked pair contributes nothing, whatever its key, value, query, bias or dout rows hold: 0 * NaN must not
happen. See Implementation for the module protocol.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array


class Problem(NamedTuple):
    """The static facts of one call, validated by ``npattn.functional`` before a kernel sees them."""

    dtype: np.dtype[Any]  # of q, k, v, out: float16, bfloat16, float32 or float64
    batch: int
    heads_q: int
    heads_kv: int  # divides heads_q
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    softcap: float  # 0.0 = off
    has_bias: bool
    has_sinks: bool
    dropout_p: float  # in [0, 1); 0.0 = off. p = 1 is answered before any kernel
    seed: int  # 0 <= seed < 2**64; meaningless when dropout_p == 0
    keeps_rest: bool = False  # forward is asked for ``Forward.rest``


def split_scale(scale: float) -> tuple[float, float]:
    """(factor before, factor after) the products with q and k; one of them is 1.

    ``logits = (q * before) @ k.T * after``: shrinking first cannot overflow where the logits do not, growing
    last cannot underflow.
    """
    return (scale, 1.0) if abs(scale) <= 1.0 else (1.0, scale)


def dbias_of_rows(
    shape: tuple[int, ...], m: Array, l: Array, e: Array, dlse: Array | None, sinks: Array | None
) -> Array:
    """Gradient of a bias that all keys of a row share, without a look at a pair.

    ``sum_j p_j (dp_j - delta + dlse)``, with ``sum_j p_j dp_j = delta`` and ``sum_j p_j = 1 - p_sink``, is
    ``p_sink e + dlse`` with ``e = delta - dlse``: nothing without a sink and dlse, where the sum over the
    pairs would only round.

    ``shape`` is that of the bias, (batch or 1, heads_q or 1, len_q or 1, 1); m, l, e and dlse have one entry
    a row.
    """
    xp = array_module(m)
    rows = xp.zeros_like(m) if dlse is None else xp.where(l != 0, dlse, 0)
    if sinks is not None:
        with np.errstate(invalid="ignore"):  # a sink of -inf in a row that sees nothing
            share = xp.exp(sinks[:, None] - m) / xp.where(l != 0, l, 1)
            rows = rows + xp.where((l != 0) & (share != 0), share * e, 0)
    shared = tuple(axis for axis in range(3) if shape[axis] == 1)
    total: Array = rows.sum(axis=shared, dtype=np.float64, keepdims=True)
    return total[..., None]


class Forward(NamedTuple):
    """What ``forward`` returns. ``lse = m + log(l)`` is formed by the caller."""

    out: Array  # (batch, heads_q, len_q, head_dim_v), problem.dtype
    m: Array  # (batch, heads_q, len_q), accumulation dtype; 0 where l == 0
    l: Array  # (batch, heads_q, len_q), accumulation dtype; 0 where the row sees no key and has no sink
    # What rounding took from out, in problem.dtype, finite: delta from out alone would carry the rounding of
    # a 16-bit out into every sum of ds, those that cancel too. None where not asked for or not kept.
    rest: Array | None = None


class AttentionGrads(NamedTuple):
    """Gradients of one attention call, in the order of its arguments; None where the argument was None."""

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    sinks: Array | None = None


class Implementation(Protocol):
    """A module that computes attention. Arrays are 4-D, last axis contiguous, any other strides.

    q (batch, heads_q, len_q, head_dim), k (batch, heads_kv, len_k, head_dim),
    v (batch, heads_kv, len_k, head_dim_v), bias (batch or 1, heads_q or 1, len_q or 1, len_k or 1) in any
    float dtype (the implementation reads it as the accumulation dtype), sinks (heads_q,) accumulation dtype.
    All of q, k and v are of problem.dtype, but for k and v of ``forward``, which may both be stored in 16
    bits where it is float32.

    ``backward`` returns gradients in problem.dtype for query, key, value; accumulation dtype and bias's own
    (broadcast) shape for bias; accumulation dtype (heads_q,) for sinks. dlse may be None (zero).
    No argument is written to. Same input, same bits, whatever the number of threads.
    """

    def supports(self, problem: Problem) -> str | None:
        """None when it can compute ``problem``, else one sentence saying why not."""

    def tile_shape(self, problem: Problem) -> tuple[int, int] | None:
        """(tile_q, tile_k) of the TilePlan it wants; None when it wants the dense bool mask instead."""

    def forward(
        self,
        problem: Problem,
        plan: Any,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None,
        sinks: Array | None,
    ) -> Forward:
        """The formula above."""

    def backward(
        self,
        problem: Problem,
        plan: Any,
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
        """The transposed formula above."""


__all__ = ["AttentionGrads", "Forward", "Implementation", "Problem", "dbias_of_rows", "split_scale"]

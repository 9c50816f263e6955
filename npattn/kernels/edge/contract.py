"""What an edge kernel is given and must return: attention along the edges of a graph.

Edge e goes from the sending node u = source[e] to the receiving node v = target[e]: v attends to u. In
every head::

    ke[e]     = k[u] + edge_features[e] @ edge_weight      # k[u] alone without edge features
    ve[e]     = v[u] + edge_features[e] @ edge_weight      # "dot" only; else v[u] alone

    "dot":      logit = softcap(scale * q[v] . ke[e]) + bias[e]
    "additive": logit = leaky_relu(q[v] + k[u] + bias[e])          # head_dim is 1
    "dynamic":  logit = att . leaky_relu(q[v] + ke[e])

    m[v]   = max over the in-edges of v                    # 0 when v sees nothing
    l[v]   = sum of exp(logit - m[v])                      # 0 when v sees nothing
    p[e]   = exp(logit - m[v]) / l[v]                      # 0 when logit is -inf
    out[v] = sum of p[e] * keep[e] / (1 - dropout_p) * ve[e]

and backward, with ``pd = p * keep / (1 - dropout_p)``::

    dp    = (dout[v] . ve[e]) * keep / (1 - dropout_p)
    delta = dout[v] . out[v]                               # = sum of p * dp over the in-edges of v
    ds    = p * (dp - delta)                               # d of the logit
    dve   = pd * dout[v]
    "dot":      dbias = ds;  ds *= 1 - (capped / softcap)**2;  dq += scale * ds * ke;  dke = scale * ds * q[v]
    "additive": ds *= slope(sum);  dbias = ds;  dq += ds;  dk[u] += ds
    "dynamic":  dt = ds * att * slope(sum);  datt += ds * leaky_relu(sum);  dq += dt;  dke = dt
    dk[u] += dke;  dv[u] += dve
    df = dke (+ dve for "dot")
    dedge_weight += outer(edge_features[e], df);  dedge_features[e] = edge_weight . df

where ``slope(x)`` is 1 for x > 0, else ``negative_slope``. Sums over in-edges walk the plan's lists by
receiving node; sums over out-edges (dk, dv) walk its lists by sending node, so that nothing is added to the
same place by two threads. An edge whose bias is -inf is masked: its rows are not multiplied by zero but not
looked at, so that NaN or inf in them stays where it is.

Dropout keeps edge e, head h by ``keep_mask(seed, (0, h, e >> 32, e & 0xffffffff), dropout_p)`` with e counted
in the caller's order.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from npattn._typing import Array
from npattn.plans.edges import EdgePlan


class EdgeProblem(NamedTuple):
    """The static facts of one call, validated by ``npattn.functional`` before a kernel sees them."""

    score: str  # "dot", "additive" or "dynamic"
    dtype: np.dtype[Any]  # of q, k, v, out: float16, bfloat16, float32 or float64
    num_targets: int  # receiving nodes: rows of q and out
    num_sources: int  # sending nodes: rows of k and v
    num_edges: int
    heads: int
    head_dim: int
    head_dim_v: int
    scale: float  # "dot"
    softcap: float  # "dot"; 0.0 = off
    negative_slope: float  # "additive" and "dynamic"
    has_bias: bool
    edge_dim: int  # 0 = no edge features
    dropout_p: float  # in [0, 1); 0.0 = off. p = 1 is answered before any kernel
    seed: int  # 0 <= seed < 2**64; meaningless when dropout_p == 0


class EdgeArrays(NamedTuple):
    """The inputs of one call, last axis contiguous, any other strides; None where the score has none."""

    q: Array  # (num_targets, heads, head_dim), problem.dtype
    k: Array  # (num_sources, heads, head_dim), problem.dtype
    v: Array  # (num_sources, heads, head_dim_v), problem.dtype
    bias: Array | None = None  # (num_edges, heads or 1), any float dtype, caller's edge order
    att: Array | None = None  # (heads, head_dim), accumulation dtype
    edge_features: Array | None = None  # (num_edges, edge_dim), accumulation dtype, caller's edge order
    edge_weight: Array | None = None  # (edge_dim, heads, head_dim), accumulation dtype


class EdgeForward(NamedTuple):
    """What ``forward`` returns."""

    out: Array  # (num_targets, heads, head_dim_v), problem.dtype
    m: Array  # (num_targets, heads), accumulation dtype; 0 where l == 0
    l: Array  # (num_targets, heads), accumulation dtype; 0 where the node sees nothing


class EdgeGrads(NamedTuple):
    """Gradients of ``EdgeArrays``, each in its argument's shape, None where the argument was None.

    dq, dk and dv in problem.dtype, the others in the accumulation dtype.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    att: Array | None = None
    edge_features: Array | None = None
    edge_weight: Array | None = None


class EdgeImplementation(Protocol):
    """A module that computes attention along edges. No argument is written to.

    Same input, same bits, whatever the number of threads. No array of num_edges x heads x head_dim.
    """

    def supports(self, problem: EdgeProblem) -> str | None:
        """None when it can compute ``problem``, else one sentence saying why not."""

    def forward(self, problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays) -> EdgeForward:
        """The formula above."""

    def weights(self, problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays, m: Array, l: Array) -> Array:
        """``p`` before dropout: (num_edges, heads), accumulation dtype, caller's edge order."""

    def backward(
        self,
        problem: EdgeProblem,
        plan: EdgePlan,
        dout: Array,
        arrays: EdgeArrays,
        out: Array,
        m: Array,
        l: Array,
    ) -> EdgeGrads:
        """The transposed formula above; dout (num_targets, heads, head_dim_v) in problem.dtype."""


__all__ = ["EdgeArrays", "EdgeForward", "EdgeGrads", "EdgeImplementation", "EdgeProblem"]

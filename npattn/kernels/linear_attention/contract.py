"""What an implementation of linear attention is given and must return.

With features φ and, for each query i, the keys j it meets (all, or with ``causal`` those with j <= i)::

    total[i] = sum_j φ(q[i]) · φ(k[j]) + eps
    out[i]   = (sum_j (φ(q[i]) · φ(k[j])) v[j]) / total[i]        # 0 where total is 0
    inverse  = 1 / total                                          # 0 where total is 0
    state    = sum_j φ(k[j]) [v[j] | 1]ᵀ                          # of all keys

Forward and backward are one operation::

    below(a, b, c) = (a @ b.T, kept where j <= i) @ c             # above: kept where j >= i

    both = below(φ(q), φ(k), [v | 1])                             # numerator | denominator
    dboth = [dout * inverse | -(dout · out) * inverse]
    dφ(q) = below(dboth, [v | 1], φ(k))
    dφ(k) = above([v | 1], dboth, φ(q))
    dv    = above(φ(k), φ(q), dboth) without its last column

computed by chunks: inside a chunk as written, between chunks through the running sum of b_j c_jᵀ. Nothing a
later key or value holds, not even NaN, reaches a query before it.

A feature map's name is that of φ: "elu1" is elu(x) + 1, "relu" max(x, 0), "identity" x (where the caller's
own functions make the features). Arrays are of one dtype, float32 or float64; heads_q is a multiple of
heads_kv; last axes are contiguous.
"""

from typing import NamedTuple, Protocol

from npattn._typing import Array


class State(NamedTuple):
    """What all keys so far sum up to."""

    kv: Array  # (batch, heads_kv, features, head_dim_v): Σ φ(k) vᵀ
    z: Array  # (batch, heads_kv, features): Σ φ(k)


class Forward(NamedTuple):
    """What ``forward`` returns."""

    out: Array  # (batch, heads_q, len_q, head_dim_v)
    inverse: Array  # (batch, heads_q, len_q)
    state: State | None  # with keeps_state


class Grads(NamedTuple):
    """What ``backward`` returns."""

    q: Array
    k: Array
    v: Array


class Implementation(Protocol):
    """A module that computes linear attention."""

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        name: str,
        causal: bool,
        eps: float,
        state: State | None = None,
        keeps_state: bool = False,
    ) -> Forward:
        """The formulas above; with ``state`` (causal) the keys it sums up come before all of k."""

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        inverse: Array,
        dout: Array,
        name: str,
        causal: bool,
    ) -> Grads:
        """Gradients of q, k and v, given what ``forward`` returned (without a state before)."""


__all__ = ["Forward", "Grads", "Implementation", "State"]

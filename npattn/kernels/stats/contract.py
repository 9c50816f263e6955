"""What a statistics kernel is given and must return.

With the weights p of ``kernels.contract`` (before dropout; a sink takes its share but is no key)::

    entropy[i]     = -sum_j p[i, j] * log(p[i, j])          # 0 * log 0 = 0
    max_weight[i]  = max_j p[i, j],  argmax_key[i] = the first j that has it
    self_weight[i] = p[i, i + len_k - len_q]                # 0 where there is no such key
    top[i]         = the top_k largest p[i, j] of visible j, largest first, then smallest j first
    received[j]    = sum_i p[i, j]

A query that sees no key has entropy, weights 0 and keys -1; so have places of ``top`` beyond the number of
visible keys. Nothing a masked key, query or bias holds has any influence.
"""

from typing import Any, NamedTuple, Protocol

from npattn._typing import Array
from npattn.kernels.contract import Problem


class Statistics(NamedTuple):
    """What ``statistics`` returns; floats in accumulation dtype."""

    m: Array  # (batch, heads_q, len_q), as in ``kernels.contract.Forward``
    l: Array  # (batch, heads_q, len_q)
    entropy: Array  # (batch, heads_q, len_q), natural units
    max_weight: Array  # (batch, heads_q, len_q)
    argmax_key: Array  # (batch, heads_q, len_q), int64
    self_weight: Array  # (batch, heads_q, len_q)
    top_weights: Array  # (batch, heads_q, len_q, top_k)
    top_keys: Array  # (batch, heads_q, len_q, top_k), int64
    received: Array  # (batch, heads_q, len_k)


class Implementation(Protocol):
    """A module that computes statistics; arrays as in ``kernels.contract.Implementation``."""

    def supports(self, problem: Problem) -> str | None:
        """None when it can compute ``problem``, else one sentence saying why not."""

    def tile_shape(self, problem: Problem) -> tuple[int, int]:
        """(tile_q, tile_k) of the TilePlan it wants."""

    def statistics(
        self,
        problem: Problem,
        plan: Any,
        q: Array,
        k: Array,
        bias: Array | None,
        sinks: Array | None,
        top_k: int,
    ) -> Statistics:
        """The formulas above."""


__all__ = ["Implementation", "Statistics"]

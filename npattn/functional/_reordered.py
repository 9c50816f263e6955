"""Attention in another order of queries and keys, given back in the caller's."""

from dataclasses import dataclass
from typing import Any

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.kernels.contract import AttentionGrads, Forward, Problem
from npattn.plans.order import Order


@dataclass(frozen=True)
class Reordered:
    """An implementation (`npattn.kernels.contract`) that sorts first; its plans are those of ``order.mask``.

    Costs a copy of query, key and value, and of out; backward of their gradients too.
    """

    implementation: Any
    order: Order

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
        """See ``kernels.contract.Implementation``."""
        rows, cols, row_of, _ = self._places(q)
        bias = None if bias is None else _both(bias, rows, cols)
        result = self.implementation.forward(
            problem, plan, _taken(q, rows), _taken(k, cols), _taken(v, cols), bias, sinks
        )
        out, m, l = (_taken(x, row_of) for x in result[:3])
        return Forward(out, m, l, None if result.rest is None else _taken(result.rest, row_of))

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
        """See ``kernels.contract.Implementation``."""
        rows, cols, row_of, col_of = self._places(q)
        dout, q, out, m, l = (_taken(x, rows) for x in (dout, q, out, m, l))
        dlse = None if dlse is None else _taken(dlse, rows)
        rest = None if rest is None else _taken(rest, rows)
        bias = None if bias is None else _both(bias, rows, cols)
        grads: AttentionGrads = self.implementation.backward(
            problem, plan, dout, dlse, q, _taken(k, cols), _taken(v, cols), out, m, l, bias, sinks, rest
        )
        return AttentionGrads(
            _taken(grads.query, row_of),
            _taken(grads.key, col_of),
            _taken(grads.value, col_of),
            None if grads.bias is None else _both(grads.bias, row_of, col_of),
            grads.sinks,
        )

    def _places(self, like: Array) -> tuple[Array, ...]:
        """``rows, cols, row_of, col_of`` of the order, on the device of ``like``."""
        xp = array_module(like)
        return tuple(xp.asarray(places) for places in self.order[:4])


def _taken(x: Array, places: Array) -> Array:
    taken: Array = x.take(places, axis=2)
    return taken


def _both(bias: Array, rows: Array, cols: Array) -> Array:
    """A bias, or its gradient, in another order along the axes it does not share."""
    if bias.shape[2] > 1:
        bias = bias.take(rows, axis=2)
    return bias.take(cols, axis=3) if bias.shape[3] > 1 else bias


__all__ = ["Reordered"]

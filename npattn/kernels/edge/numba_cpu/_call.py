"""One call of the edge kernels as a record: addresses, strides, tables and offsets into a thread's scratch.

Kernels take the record's address, so that layouts are data: one compiled version per precision.
"""

from typing import Any, Final

import numpy as np

from npattn._dropout import R0, R1, _fold, threshold
from npattn._typing import Array
from npattn.kernels._jit import address
from npattn.kernels._simd._host import lanes
from npattn.kernels.edge.contract import EdgeArrays, EdgeProblem
from npattn.plans.edges import EdgePlan

DOT: Final = 0
ADDITIVE: Final = 1
DYNAMIC: Final = 2
SCORES: Final = {"dot": DOT, "additive": ADDITIVE, "dynamic": DYNAMIC}

#: Edges handled at once: their logits stay in the first-level cache.
CHUNK: Final = 64

_PROBLEM = (
    "score heads head_dim head_dim_v edge_dim has_bias has_softcap has_dropout is_masked "
    "needs_edges threshold constants hash_0 hash_1"
)
_PLAN = "row_ptr row_source row_edge row_items col_ptr col_target col_slot col_items"
_INPUTS = (
    "q q_node k k_node v v_node att bias bias_edge bias_head features edge_weight edge_row "
    "out m l m_node dout "
    "key_units key_blocks key_tail value_units value_blocks value_tail"
)
_OUTPUTS = "part_out part_dv part_m part_l edge_out edge_pairs dq dk dv datt dfeatures dedge_weight"
#: Offsets into a thread's scratch.
_SCRATCH = (
    "logits weights inner ds spare_pairs "  # a chunk's pairs
    "key_rows value_rows bias_rows edges visible_rows "  # a chunk's int64 lists
    "alpha alpha_2 spare "  # one vector each
    "visible_weights acc acc_2 key_buffer value_buffer edge_gradient"
)
_NAMES = " ".join((_PROBLEM, _PLAN, _INPUTS, _OUTPUTS, _SCRATCH)).split()

CALL: Final = np.dtype([(name, np.int64) for name in _NAMES])


class Call:
    """The record of one head group of one call; keeps alive what it points to."""

    def __init__(
        self, problem: EdgeProblem, plan: EdgePlan, arrays: EdgeArrays, first_head: int, heads: int
    ) -> None:
        dtype = arrays.q.dtype
        size, width = dtype.itemsize, lanes(dtype.itemsize * 8)
        padded = 1 << (heads - 1).bit_length()
        row_dim, row_dim_v = problem.heads * problem.head_dim, problem.heads * problem.head_dim_v
        self.record = np.zeros(1, CALL)
        self.keep: list[Any] = [plan, arrays]
        self.one = dtype.type(1)
        self.pairs = (False,) * padded  # its length tells the kernels how many lanes an edge takes
        self.heads = slice(first_head, first_head + heads)
        head = np.minimum(np.arange(width) & (padded - 1), heads - 1)
        edge_width = -(-heads * problem.head_dim // width) * width if problem.edge_dim else 0
        key_offset = first_head * problem.head_dim * size
        value_offset = first_head * problem.head_dim_v * size
        self.set(
            score=SCORES[problem.score],
            heads=heads,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            edge_dim=problem.edge_dim,
            has_softcap=problem.softcap > 0,
            has_dropout=problem.dropout_p > 0,
            threshold=threshold(problem.dropout_p),
            constants=np.array(
                [
                    problem.scale,
                    problem.softcap,
                    problem.negative_slope,
                    1.0 / (1.0 - problem.dropout_p),
                    -np.inf,
                ],
                dtype,
            ),
            hash_0=_head_words(R0, problem.seed, first_head + head),
            hash_1=_head_words(R1, problem.seed, first_head + head),
            q=address(arrays.q) + key_offset,
            k=address(arrays.k) + key_offset,
            v=address(arrays.v) + value_offset,
            q_node=row_dim * size,
            k_node=row_dim * size,
            v_node=row_dim_v * size,
            m_node=problem.heads * size,
            needs_edges=problem.has_bias or problem.dropout_p > 0 or problem.edge_dim > 0,
            **{name: getattr(plan, name) for name in _PLAN.split()},
        )
        for name, dim in (("key", problem.head_dim), ("value", problem.head_dim_v)):
            blocks = -(-dim // width)
            self.set(
                **{
                    f"{name}_units": _units(heads, dim, width, size),
                    f"{name}_blocks": blocks,
                    f"{name}_tail": dim % width,
                }
            )
        if arrays.bias is not None:
            step = 0 if arrays.bias.shape[1] == 1 else size
            self.set(
                has_bias=True,
                is_masked=bool(np.isneginf(arrays.bias).any()),
                bias=address(arrays.bias) + first_head * step,
                bias_edge=arrays.bias.shape[1] * size,
                bias_head=step,
            )
        if arrays.att is not None:
            self.set(att=address(arrays.att) + key_offset)
        if arrays.edge_features is not None and arrays.edge_weight is not None:
            weight = np.zeros((problem.edge_dim, edge_width), dtype)
            own = arrays.edge_weight[:, self.heads].reshape(problem.edge_dim, heads * problem.head_dim)
            weight[:, : own.shape[1]] = own
            self.set(features=arrays.edge_features, edge_weight=weight, edge_row=edge_width * size)
        self.edge_width = edge_width
        self.scratch_size = self._lay_out_scratch(padded, heads, size, width, problem)

    def set(self, **fields: Any) -> None:
        """Store ints, or the addresses of arrays, which are kept alive."""
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                self.keep.append(value)
                value = address(value)
            self.record[name] = value

    def _lay_out_scratch(self, padded: int, heads: int, size: int, width: int, problem: EdgeProblem) -> int:
        pairs = (CHUNK * padded + width) * size
        units = heads * max(-(-problem.head_dim // width), -(-problem.head_dim_v // width), 1) + 8
        bytes_of = {"edge_gradient": self.edge_width * size, "visible_weights": CHUNK * size}
        for names, amount in (
            ("logits weights inner ds spare_pairs", pairs),
            ("key_rows value_rows bias_rows edges visible_rows", (CHUNK + width) * 8),
            ("acc acc_2", units * width * size),
            ("key_buffer value_buffer", CHUNK * self.edge_width * size),
        ):
            bytes_of |= dict.fromkeys(names.split(), amount)
        offset = 0
        for name in _SCRATCH.split():
            self.record[name] = offset
            offset += -(-bytes_of.get(name, width * 8) // 64) * 64
        return offset


def _units(heads: int, dim: int, width: int, size: int) -> Array:
    """The unit table: byte offset in a row, byte offset of the head's weight, valid lanes."""
    blocks = -(-dim // width)
    head, block = np.divmod(np.arange(heads * blocks), max(blocks, 1))
    valid = np.minimum(width, dim - block * width)
    return np.stack([(head * dim + block * width) * size, head * size, valid], axis=1).astype(np.int64)


def _head_words(start: int, seed: int, heads: Array) -> Array:
    """The dropout generator's state after seed, b = 0 and the head, one per lane."""
    state = np.full(len(heads), start, np.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32, 0):
        state = _fold(state, np.full(len(heads), word, np.uint32))
    return _fold(state, heads.astype(np.uint32))


__all__ = ["ADDITIVE", "CALL", "CHUNK", "DOT", "DYNAMIC", "SCORES", "Call"]

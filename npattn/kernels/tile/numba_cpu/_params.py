"""Everything a kernel needs to know about one call, as one record at one address.

Kernels take ``(address of the record, first unit, last unit, scratch address, one)``: five scalars, so that
dispatch costs a third of a microsecond and no layout, stride or flag of an array is a type to compile for.
Addresses and strides are in bytes; a stride's suffix names the axis: b(atch), h(ead), i (query), j (key).
"""

import ctypes
import struct
from typing import Any, Final

import numba
import numpy as np

from npattn._dropout import threshold
from npattn.kernels._jit import address
from npattn.kernels._simd.vectors import record_reader
from npattn.kernels.contract import Problem, split_scale
from npattn.plans.tiles import TilePlan

CALL: Final = (  # noqa: SIM905 (a list of fifty strings reads worse)
    # the arrays of one call and their strides
    "bias_kind q q_b q_h q_i k k_b k_h k_j v v_b v_h v_j out out_b out_h out_i out_split rest m l "
    "bias bias_b bias_h bias_i bias_j sinks dout dout_b dout_h dout_i dlse dlse_b dlse_h dlse_i "
    # results of the backward pass and what it keeps between its phases
    "dq dk dv dq_out e rl dsinks dbias dbias_b dbias_h dbias_i dbias_j dbias_heads dbias_batches"
).split()
SHAPE: Final = (  # noqa: SIM905
    # sizes
    "batch heads_q heads_kv group len_q len_k dim dim_v kind dq_row "
    # switches
    "has_softcap has_bias has_sinks has_dropout threshold seed_lo seed_hi "
    # plan
    "tile_q tile_k num_rows num_cols list_batches list_heads list_of "
    "row_ptr row_first row_stop row_kind row_bits "
    "col_ptr col_first col_stop col_kind col_bits lo hi lo_row bits "
    # how the work is cut
    "chunks chunk_start reach heads_together splits lazy"
).split()
# of the logits; of their gradients (apart, as bfloat16 keys are not scaled before the product)
FLOATS: Final = (
    "scale_before",
    "scale_after",
    "grad_before",
    "grad_after",
    "softcap",
    "keep_factor",
    "out_factor",
)
FORWARD_CALL: Final = CALL.index("dout")  # the fields of CALL a forward call fills

_DTYPE = np.dtype([(name, np.int64) for name in CALL + SHAPE] + [(name, np.float64) for name in FLOATS])
_FORMAT = struct.Struct(f"{len(CALL) + len(SHAPE)}q{len(FLOATS)}d")
_CALL_FORMAT = struct.Struct(f"{len(CALL)}q")
_FORWARD_FORMAT = struct.Struct(f"{FORWARD_CALL}q")
Buffer = ctypes.c_char * _FORMAT.size

params_at = record_reader(numba.from_dtype(_DTYPE))

_KIND = {np.dtype(np.float16): 1}


def storage_kind(dtype: np.dtype[Any]) -> int:
    """0: lanes are stored as they are computed; 1: float16; 2: bfloat16."""
    kind = _KIND.get(dtype)
    if kind is None:
        kind = _KIND[dtype] = 2 if dtype.name == "bfloat16" else 0
    return kind


def describe(problem: Problem, plan: TilePlan) -> dict[str, Any]:
    """The fields that both directions fill alike, as a dictionary to be completed."""
    lo_row = plan.lo.shape[1] * 4
    before, after = split_scale(problem.scale)
    return {
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "group": problem.heads_q // problem.heads_kv,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.head_dim,
        "dim_v": problem.head_dim_v,
        "kind": storage_kind(problem.dtype),
        "has_softcap": problem.softcap > 0.0,
        "has_bias": problem.has_bias,
        "has_sinks": problem.has_sinks,
        "has_dropout": problem.dropout_p > 0.0,
        "threshold": threshold(problem.dropout_p),
        "seed_lo": problem.seed & 0xFFFFFFFF,
        "seed_hi": (problem.seed >> 32) & 0xFFFFFFFF,
        "scale_before": before,
        "scale_after": after,
        "grad_before": before,
        "grad_after": after,
        "softcap": problem.softcap,
        "keep_factor": 1.0 / (1.0 - problem.dropout_p),
        "out_factor": 1.0,
        "tile_q": plan.tile_q,
        "tile_k": plan.tile_k,
        "num_rows": plan.row_ptr.shape[1] - 1,
        "num_cols": plan.col_ptr.shape[1] - 1,
        "list_batches": plan.list_of.shape[0],
        "list_heads": plan.list_of.shape[1],
        "list_of": address(plan.list_of),
        "row_ptr": address(plan.row_ptr),
        "row_first": address(plan.row_first),
        "row_stop": address(plan.row_stop),
        "row_kind": address(plan.row_kind),
        "row_bits": address(plan.row_bits),
        "col_ptr": address(plan.col_ptr),
        "col_first": address(plan.col_first),
        "col_stop": address(plan.col_stop),
        "col_kind": address(plan.col_kind),
        "col_bits": address(plan.col_bits),
        "lo": address(plan.lo),
        "hi": address(plan.hi),
        "lo_row": lo_row,
        "bits": address(plan.bits),
    }


def template(fields: dict[str, Any]) -> bytes:
    """The record with everything but the arrays of a call filled in."""
    get = fields.get
    zeros = [0] * len(CALL)
    return _FORMAT.pack(*zeros, *[int(get(name, 0)) for name in SHAPE], *[fields[name] for name in FLOATS])


def record(prefilled: bytes, values: Any) -> Any:
    """A record of one call; keep it alive while kernels read it. ``values`` are those of CALL, in order.

    A forward call may leave out those from ``dout`` on.
    """
    buffer = Buffer.from_buffer_copy(prefilled)
    (_FORWARD_FORMAT if len(values) == FORWARD_CALL else _CALL_FORMAT).pack_into(buffer, 0, *values)
    return buffer


def at(array: Any) -> tuple[int, ...]:
    """Address and strides of the first three axes of a 4-D (or 3-D) array."""
    return (address(array), *array.strides[:3])


def broadcast_at(array: Any) -> tuple[int, ...]:
    """Address and four strides, 0 along axes of length 1, which stand for all indices."""
    strides = (stride if size > 1 else 0 for stride, size in zip(array.strides, array.shape, strict=True))
    return (address(array), *strides)

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

INTEGERS: Final = (
    # sizes
    "batch heads_q heads_kv group len_q len_k dim dim_v kind bias_kind "
    # switches
    "has_softcap has_bias has_sinks has_dropout threshold seed_lo seed_hi "
    # plan
    "tile_q tile_k num_rows num_cols list_batches list_heads list_of row_ptr row_first row_stop row_kind row_bits "
    "col_ptr col_first col_stop col_kind col_bits lo hi lo_row bits "
    # arrays and their strides
    "q q_b q_h q_i k k_b k_h k_j v v_b v_h v_j bias bias_b bias_h bias_i bias_j sinks "
    "out out_b out_h out_i m l dout dout_b dout_h dout_i dlse dlse_b dlse_h dlse_i "
    # results of the backward pass and what it keeps between its phases
    "dq dq_row dk dv dbias dbias_b dbias_h dbias_i dbias_j dbias_heads dbias_batches e rl dsinks dq_out "
    # how the work is cut
    "chunks chunk_start reach heads_together"
).split()
FLOATS: Final = "scale_before scale_after softcap keep_factor".split()

_DTYPE = np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float64) for name in FLOATS])
_FORMAT = struct.Struct(f"{len(INTEGERS)}q{len(FLOATS)}d")

params_at = record_reader(numba.from_dtype(_DTYPE))

_KIND = {"float16": 1, "bfloat16": 2}


def storage_kind(dtype: np.dtype[Any]) -> int:
    """0: lanes are stored as they are computed; 1: float16; 2: bfloat16."""
    return _KIND.get(dtype.name, 0)


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
        "softcap": problem.softcap,
        "keep_factor": 1.0 / (1.0 - problem.dropout_p),
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


def place(fields: dict[str, Any], name: str, array: Any, axes: str) -> None:
    """Enter the address of ``array`` and its strides along ``axes``; a length-1 axis is entered as stride 0."""
    fields[name] = address(array)
    for axis, stride, size in zip(axes, array.strides, array.shape, strict=False):
        fields[f"{name}_{axis}"] = stride if size > 1 else 0


def pack(fields: dict[str, Any]) -> Any:
    """The record in memory; keep the returned buffer alive while kernels read it."""
    buffer = ctypes.create_string_buffer(_FORMAT.size)
    get = fields.get
    _FORMAT.pack_into(buffer, 0, *[get(name, 0) for name in INTEGERS], *[fields[name] for name in FLOATS])
    return buffer

"""What the decode kernel knows about a call: the record of `_params`, less what backward needs, and pages."""

import ctypes
import struct
from typing import Any, Final

import numba
import numpy as np

from npattn.kernels._simd.vectors import record_reader

CALL: Final = (  # noqa: SIM905
    # the arrays of one call and their strides; with pages k_b and v_b are those of a page
    "bias_kind q q_b q_h q_i k k_b k_h k_j v v_b v_h v_j out out_b out_h out_i out_split m l "
    "bias bias_b bias_h bias_i bias_j sinks page_table page_row"
).split()
SHAPE: Final = (  # noqa: SIM905
    # sizes; kind_kv is how k and v are stored, kind how q and out are
    "batch heads_q heads_kv group len_q len_k dim dim_v kind kind_kv item page_size "
    # switches
    "has_softcap has_bias has_sinks has_dropout threshold seed_lo seed_hi "
    "copies_keys copies_values pages_touch "
    # plan
    "tile_q tile_k num_rows num_cols list_batches list_heads list_of "
    "row_ptr row_first row_stop row_kind row_bits lo hi lo_row bits splits"
).split()
FLOATS: Final = ("scale_before", "scale_after", "softcap", "keep_factor")

_DTYPE = np.dtype([(name, np.int64) for name in CALL + SHAPE] + [(name, np.float64) for name in FLOATS])
_FORMAT = struct.Struct(f"{len(CALL) + len(SHAPE)}q{len(FLOATS)}d")
_CALL_FORMAT = struct.Struct(f"{len(CALL)}q")
Buffer = ctypes.c_char * _FORMAT.size

params_at = record_reader(numba.from_dtype(_DTYPE))


def template(fields: dict[str, Any]) -> bytes:
    """The record with everything but the arrays of a call filled in."""
    zeros = [0] * len(CALL)
    return _FORMAT.pack(*zeros, *[int(fields[name]) for name in SHAPE], *[fields[name] for name in FLOATS])


def record(prefilled: bytes, values: Any) -> Any:
    """A record of one call, ``values`` being those of CALL in order; keep it alive while kernels read it."""
    buffer = Buffer.from_buffer_copy(prefilled)
    _CALL_FORMAT.pack_into(buffer, 0, *values)
    return buffer

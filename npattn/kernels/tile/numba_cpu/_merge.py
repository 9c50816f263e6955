"""Joining what splits of the keys found, in their order: the last step of a call with few queries.

Each split has left its normalised output in whole vectors of the accumulation dtype, and its m and l.
"""

import ctypes
from typing import Any, Final

import numba
import numpy as np

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp_scalar
from npattn.kernels._simd.vectors import (
    cast,
    fma,
    lanes,
    load,
    load_scalar,
    record_reader,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.contract import Forward
from npattn.kernels.tile.numba_cpu._params import at, storage_kind
from npattn.kernels.tile.numba_cpu._rows import NEGATIVE_INFINITY, fill_zero, store_rest, store_row

# part, m, l: of all splits. The others: of the result.
FIELDS: Final = "part m l out out_b out_h out_i out_m out_l rest splits heads rows len_q dim_v kind".split()  # noqa: SIM905

_read = record_reader(numba.from_dtype(np.dtype([(name, np.int64) for name in FIELDS])))
Record = ctypes.c_int64 * len(FIELDS)


def record(part_out: Array, m: Array, l: Array, result: Forward) -> Any:
    """The arguments of ``merge_units``; keep them alive while it runs.

    part_out (splits, batch, heads_q, len_q, whole vectors), m and l (splits, batch, heads_q, len_q).
    """
    splits, _, heads, len_q, _ = part_out.shape
    rest = 0 if result.rest is None else address(result.rest)
    return Record(
        address(part_out), address(m), address(l), *at(result.out), address(result.m), address(result.l),
        rest, splits, heads, result.m.size, len_q, result.out.shape[3], storage_kind(result.out.dtype),
    )  # fmt: skip


@jit
def merge_units(where, first, stop, scratch, one):
    """See ``_merge_units``."""
    _merge_units(where, first, stop, scratch, one)


@part()
def _merge_units(where, first, stop, scratch, one):
    """Rows of unit = b * heads_q + h."""
    p = _read(where)
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = (p.dim_v + n - 1) // n
    zero = cast(0.0, one)
    unity = cast(1.0, one)
    for unit in range(first, stop):
        out = p.out + unit // p.heads * p.out_b + unit % p.heads * p.out_h
        for i in range(p.len_q):
            row = unit * p.len_q + i
            top = cast(NEGATIVE_INFINITY, one)
            for split in range(p.splits):
                at = (split * p.rows + row) * size
                if load_scalar(p.l + at, one) != zero:
                    m = load_scalar(p.m + at, one)
                    # a NaN stays: comparisons with it are false
                    top = m if not m <= top else top
            total = zero
            for split in range(p.splits):
                at = (split * p.rows + row) * size
                l = load_scalar(p.l + at, one)
                if l != zero:
                    total += l * exp_scalar(load_scalar(p.m + at, one) - top)
            fill_zero(scratch, vectors, one)
            for split in range(p.splits):
                at = split * p.rows + row
                l = load_scalar(p.l + at * size, one)
                if l != zero:
                    share = splat(l * exp_scalar(load_scalar(p.m + at * size, one) - top) / total)
                    source = p.part + at * vectors * width
                    for c in range(vectors):
                        sum_at = scratch + c * width
                        store(sum_at, fma(load(source + c * width, one), share, load(sum_at, one)))
            store_row(scratch, out + i * p.out_i, p.dim_v, unity, p.kind, one)
            if p.rest != 0:
                store_rest(scratch, p.rest + row * p.dim_v * 2, p.dim_v, unity, p.kind, one)
            store_scalar(p.out_m + row * size, top if total != zero else zero)
            store_scalar(p.out_l + row * size, total)


__all__ = ["merge_units", "record"]

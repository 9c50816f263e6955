"""How these kernels get their arguments, and how work is cut."""

import struct
from array import array
from typing import Any, Final

import numpy as np
from numba.types import float32, intp

from npattn.kernels import _team
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.vectors import load_int64, load_scalar

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)

#: Flat work is cut into pieces of this many elements, rows into blocks of about as many.
PIECE: Final = 1 << 14

_FLOAT: Final = struct.Struct("<fi")
_BITS: Final = struct.Struct("<q")


@part(intp)
def word(where, n):  # type: ignore[no-untyped-def]
    """The n-th argument, an integer."""
    return load_int64(where + 8 * n)


@part(float32)
def number(where, n):  # type: ignore[no-untyped-def]
    """The n-th argument, a float32."""
    return load_scalar(where + 8 * n, ONE)


def bits(value: float) -> int:
    """``value`` as ``number`` reads it."""
    found: int = _BITS.unpack(_FLOAT.pack(value, 0))[0]
    return found


def run(kernel: Any, units: int, *arguments: int) -> None:
    """Work on ``units`` units, each an item."""
    if units:
        words = array("q", arguments)
        _team.run(kernel, words.buffer_info()[0], units, units)


def pieces(size: int) -> int:
    """Into how many pieces flat work is cut. A rest shorter than a vector joins the piece before it."""
    return max(1, -(-(size - LANES + 1) // PIECE)) if size else 0


def block(n: int) -> int:
    """How many rows of n features make a block."""
    return max(1, PIECE // max(n, 1))


__all__ = ["LANES", "ONE", "PIECE", "F", "bits", "block", "number", "pieces", "run", "word"]

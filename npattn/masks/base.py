"""Mask: which query may see which key. (Skeleton; see the class docstring.)"""

from typing import NamedTuple


class Extent(NamedTuple):
    """The sizes a mask is asked about."""

    batch: int
    heads: int  # query heads
    len_q: int
    len_k: int

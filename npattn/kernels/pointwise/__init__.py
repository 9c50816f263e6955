"""Row-wise and element-wise work beside the matmuls: activations, norms, cross-entropy, Adam's step.

Two modules with the same functions and parameter names (a parity test holds them equal)::

    arrays.py     any array module, any float dtype: the formulas as array code, forward beside backward
    numba_cpu.py  float32 on the CPU: the same formulas, one pass over memory

Why a kernel at all: written as array code, GELU is eight passes over memory and layer norm seven, each into a
new temporary. In a small transformer's training step that costs as much as all its matmuls.

Contract of both modules. ``x`` and ``dy`` are C-contiguous: 1-D for the activations, 2-D (rows, features) for
the norms and the loss; ``merge_heads`` reads any strides, and the functions of several arrays take
C-contiguous arrays of any shapes. Nothing given is written to, every result is a new array; only ``adam``
updates its arrays in place. Sums are kept in the accumulation dtype. A row is summed in an order of its own,
so results do not depend on the number of rows.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from npattn._typing import Array

#: Below this many elements a first call would spend more on loading Numba than it could ever win back.
SMALL = 1 << 12


def implementation(*arrays: Array | None) -> Any:
    """The module that serves these arrays: ``numba_cpu`` where it can, else ``arrays``."""
    first = arrays[0]
    if first is None or first.size < SMALL or first.dtype != np.float32:
        return _module("arrays")
    for array in arrays:
        if array is not None and (type(array) is not np.ndarray or array.dtype != first.dtype):
            return _module("arrays")
    return _module("numba_cpu") or _module("arrays")


def implementations(*columns: Sequence[Array]) -> list[tuple[Any, list[int]]]:
    """Modules, each with the rows it serves, for the functions of several arrays.

    A row is an array of each column. Small arrays go with the others: all are one call.
    """
    rows = range(len(columns[0]))
    size = sum(array.size for array in columns[0])
    fast = [row for row in rows if all(_is_plain(column[row]) for column in columns)] if size >= SMALL else []
    numba_cpu = _module("numba_cpu") if fast else None
    if numba_cpu is None:
        return [(_module("arrays"), list(rows))]
    if len(fast) == len(rows):
        return [(numba_cpu, fast)]
    return [(numba_cpu, fast), (_module("arrays"), sorted({*rows} - {*fast}))]


def _is_plain(array: Array) -> bool:
    return type(array) is np.ndarray and array.dtype == np.float32 and array.flags.c_contiguous


@cache
def _module(name: str) -> Any:
    """None when the module's tool is missing here, or cannot run compiled (NUMBA_DISABLE_JIT)."""
    try:
        module = importlib.import_module(f"npattn.kernels.pointwise.{name}")
    except ImportError:
        return None
    return module if module.USABLE else None


__all__ = ["implementation", "implementations"]

"""Reading a mask's arguments: whole numbers, one or one per batch element, and what to say otherwise."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.masks.base import Extent

#: Beyond any length that can occur; sums of two of them and an index still fit in 64 bits.
FAR = 2**61


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    """``value`` as an int in 64 bits; TypeError for bools and floats, ValueError below ``least``."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got {number}")
    return number


def whole_numbers(name: str, values: Any, *, least: int | None = None) -> tuple[int, ...]:
    """A 1-D sequence or array of ints, copied."""
    if isinstance(values, (str, bytes)) or not (isinstance(values, Iterable) or hasattr(values, "shape")):
        raise TypeError(f"{name} must be a sequence of ints, got {type(values).__name__} ({values!r})")
    array = np.asarray(values if hasattr(values, "shape") else list(values))
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if array.size == 0:
        return ()
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold ints, got dtype {array.dtype}")
    numbers = tuple(int(number) for number in array.tolist())
    if not (min(numbers) >= -(2**63) and max(numbers) < 2**63):
        raise ValueError(f"{name} must fit in 64 bits")
    if least is not None and min(numbers) < least:
        raise ValueError(f"{name} must be at least {least}, got {min(numbers)}")
    return numbers


def one_or_per_batch(name: str, value: Any, *, least: int | None = None) -> int | tuple[int, ...]:
    """An int for every batch element alike, or a tuple of one for each."""
    if isinstance(value, (int, np.integer)) or not (hasattr(value, "__len__") and np.ndim(value) > 0):
        if hasattr(value, "shape") and value.shape == () and not isinstance(value, np.generic):
            value = value[()]
        return whole_number(name, value, least=least)
    return whole_numbers(name, value, least=least)


def check_batch(name: str, value: object, extent: Extent) -> None:
    """Per-batch values must have one entry per batch element."""
    if isinstance(value, tuple) and len(value) != extent.batch:
        raise ValueError(
            f"{name} has {len(value)} entries, one per batch element, but batch is {extent.batch}"
        )


def per_batch(value: int | tuple[int, ...], shift: int = 0) -> Array:
    """``value + shift`` as int64 of shape (batch or 1,), kept within ±FAR so that adding indices is safe."""
    values = value if isinstance(value, tuple) else (value,)
    return np.array([min(max(number + shift, -FAR), FAR) for number in values], np.int64)


def take(values: Array, b: Array) -> Array:
    """The entry of each batch index: ``values`` has shape (batch,) or (1,)."""
    return values[b] if len(values) > 1 else values[0]

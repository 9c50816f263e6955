"""Argument checks: the text of every TypeError and ValueError about shapes and dtypes.

A message says the rule, what came, and the likely fix. Functions return the checked value.
"""

import math
import operator
from typing import Any

import numpy as np

from npattn._arrays import is_attention_dtype
from npattn._typing import Array

FLOATS = "float64, float32, float16 or (with ml_dtypes installed) bfloat16"


def shapes_differ(rule: str, axis: str, **shapes: tuple[int, ...]) -> ValueError:
    """The error of two arrays that disagree about one axis; names the axis and every shape."""
    given = ", ".join(f"{name} has shape {tuple(shape)}" for name, shape in shapes.items())
    return ValueError(f"{rule} (axis {axis}): {given}")


def float_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype`` in this machine's byte order, when attention computes in it."""
    native = dtype.newbyteorder("=")
    if not is_attention_dtype(native):
        raise TypeError(f"{name} must be {FLOATS}, got {dtype}. Convert it with {name}.astype(np.float32).")
    return native


def promote(names: str, *dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """The common dtype by NumPy's rules."""
    try:
        return np.result_type(*dtypes)
    except TypeError as error:
        given = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{names} have no common dtype ({given}); convert them to one of {FLOATS}."
        ) from error


def number(name: str, value: Any) -> float:
    """``value`` as a float; an array of several, a string or None is a TypeError that names the argument."""
    if hasattr(value, "__float__") or hasattr(value, "__index__"):
        try:
            return float(value)
        except TypeError:  # an array of other than one entry
            pass
    shape = getattr(value, "shape", ())
    came = f"an array of shape {tuple(shape)}" if shape else f"{type(value).__name__} ({value!r})"
    raise TypeError(f"{name} must be one number, got {came}; write {name}=<float>")


def integer(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {whole}")
    return whole


def scale_value(scale: float | None, head_dim: int) -> float:
    """``scale`` as a finite float; 1/sqrt(head_dim) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    value = number("scale", scale)
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite, got {value}")
    return value


def softcap_value(softcap: float | None) -> float:
    """``softcap`` as a float >= 0, 0.0 meaning off."""
    if softcap is None:
        return 0.0
    value = number("softcap", softcap)
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"softcap must be a finite number > 0, or 0 or None to switch it off; got {value}")
    return value


def dropout_values(dropout_p: float, seed: int | None) -> tuple[float, int]:
    """(p, seed modulo 2**64), the seed 0 when p is 0."""
    p = number("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {p}")
    if p == 0.0:
        return 0.0, 0
    if seed is None:
        raise ValueError(
            f"dropout_p={p} needs seed=<int>: dropout is a pure function of its seed, there is no global "
            "random state. Pass another seed at every training step."
        )
    try:
        return p, operator.index(seed) % 2**64
    except TypeError:
        raise TypeError(f"seed must be an int, got {type(seed).__name__}") from None


def mask_dtype(array: Array, name: str = "mask") -> Array:
    """``array`` itself when it is a bool array."""
    if array.dtype == np.bool_:
        return array
    rule = f"{name} must be a bool array (True = may attend)" + (" or a Mask" if name == "mask" else "")
    if array.dtype.kind in "iu":
        raise TypeError(
            f"{rule}, got {array.dtype}. Integer masks are refused because 0/1 marks padding in some "
            f"libraries and visibility in others; write {name} != 0 or {name} == 0."
        )
    if array.dtype.kind in "fV":
        raise TypeError(f"{rule}, got {array.dtype}. A float array is added to the logits: pass it as bias=.")
    came = repr(array.item()) if array.ndim == 0 else str(array.dtype)
    if array.ndim == 0 and isinstance(array.item(), type):
        came = f"the class {array.item().__name__}: make a mask of it, {array.item().__name__}(...)"
    raise TypeError(f"{rule}, got {came}")


__all__ = [
    "FLOATS",
    "dropout_values",
    "float_dtype",
    "integer",
    "mask_dtype",
    "number",
    "promote",
    "scale_value",
    "shapes_differ",
    "softcap_value",
]

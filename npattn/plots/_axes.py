"""Making Axes, labelling them, and checking those that were given: what every picture shares."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays import is_cupy
from npattn._typing import Array

try:
    import matplotlib
    from matplotlib import pyplot
except ImportError as error:  # pragma: no cover - the test environment has it
    raise ImportError(
        'npattn.plots draws with matplotlib, which is not installed: pip install "npattn[plot]"'
    ) from error

Axes: TypeAlias = Any  # matplotlib.axes.Axes; matplotlib is optional, also for the type checker

#: Up to this many tokens each one is written beside its row or column.
MOST_LABELS = 40
INK = "#1f3a5f"
ACCENT = "#d1495b"
PALE = "#9fb3c8"
#: Masked pairs, which carry no weight at all.
NOTHING = "#e8e8e8"


def new_axes(ax: Axes | None, size: tuple[float, float] = (5.0, 4.2)) -> Axes:
    """``ax`` itself, or the Axes of a new figure."""
    if ax is not None:
        return ax
    _, ax = pyplot.subplots(figsize=size, layout="constrained")
    return ax


def new_grid(axes: Any, rows: int, columns: int, cell: tuple[float, float]) -> Any:
    """``axes`` checked to be rows * columns Axes, or those of a new figure; a (rows, columns) array."""
    if axes is None:
        _, axes = pyplot.subplots(
            rows, columns, figsize=(cell[0] * columns, cell[1] * rows), layout="constrained", squeeze=False
        )
    flat = np.asarray(axes, dtype=object).ravel()
    if flat.size != rows * columns:
        raise ValueError(f"axes must hold {rows} * {columns} = {rows * columns} Axes, got {flat.size}")
    return flat.reshape(rows, columns)


def on_cpu(array: Any) -> Array:
    """``array`` as a float64 NumPy array, fetched from the GPU when it is there."""
    host = array.get() if is_cupy(array) else array
    return np.asarray(host).astype(np.float64)


def one_matrix(weights: Any, what: str = "weights") -> Array:
    """A single (len_q, len_k) matrix; leading axes of length 1 are dropped."""
    matrix = on_cpu(weights)
    while matrix.ndim > 2 and matrix.shape[0] == 1:
        matrix = matrix[0]
    if matrix.ndim != 2:
        raise ValueError(
            f"{what} must be one matrix (len_q, len_k), got shape {matrix.shape}; choose a batch element and "
            "a head, for example weights[0, 2], or average them: weights.mean(axis=(0, 1))"
        )
    return matrix


def stack_of_heads(weights: Any, what: str = "weights") -> Array:
    """(heads, len_q, len_k); leading axes of length 1 are dropped, a matrix is one head."""
    stack = on_cpu(weights)
    while stack.ndim > 3 and stack.shape[0] == 1:
        stack = stack[0]
    if stack.ndim == 2:
        stack = stack[None]
    if stack.ndim != 3:
        raise ValueError(
            f"{what} must be (heads, len_q, len_k), got shape {stack.shape}; choose a batch element, for "
            "example weights[0]"
        )
    return stack


def label_tokens(axis: Any, tokens: Sequence[str] | None, count: int, *, rotate: bool = False) -> None:
    """Write ``tokens`` along an ``ax.xaxis`` or ``ax.yaxis``; all of them when they fit, else every n-th."""
    if tokens is None:
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=8))
        return
    if len(tokens) != count:
        raise ValueError(f"there are {len(tokens)} tokens for {count} rows or columns of the weights")
    places = np.arange(0, count, max(1, -(-count // MOST_LABELS)))
    # a dollar sign would start matplotlib's own mathematics
    names = [str(tokens[int(place)]).replace("$", r"\$") for place in places]
    size = 9 if len(places) <= 16 else 7
    axis.set_ticks(places, names, rotation=60 if rotate else 0, fontsize=size, rotation_mode="anchor")
    for label in axis.get_ticklabels():
        label.set_horizontalalignment("right")


__all__ = ["ACCENT", "INK", "NOTHING", "PALE", "Axes", "label_tokens", "matplotlib", "pyplot"]

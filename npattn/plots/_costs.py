"""Operations and memory over the length of a sequence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from npattn import analysis
from npattn._typing import Array
from npattn.masks import Causal, Window
from npattn.plots._axes import new_grid

_LENGTHS = tuple(2**n for n in range(8, 17))


def cost_curves(
    lengths: Sequence[int] = _LENGTHS,
    curves: Mapping[str, Callable[[int], analysis.Cost]] | None = None,
    *,
    axes: Any = None,
) -> Array:
    """Draw operations and peak memory of attention over the length, on logarithmic axes.

    Parameters
    ----------
    lengths : sequence of int, default 256 to 65,536
        Where to evaluate the curves.
    curves : mapping of str to function, optional
        Name and ``length -> analysis.Cost`` of each curve. None compares, for 8 heads of 64: the formula
        with whole matrices, npattn's tiles, causal, a window of 512 keys, and linear attention.
    axes : two matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    axes : ndarray of matplotlib Axes
        (2,): operations, and bytes beyond the inputs.

    Raises
    ------
    ValueError
        When ``axes`` are not two.

    Examples
    --------
    >>> from npattn import analysis, plots
    >>> axes = plots.cost_curves([1024, 2048], {"tiled": analysis.attention_cost})
    >>> axes[0].lines[0].get_ydata() / 2**20
    array([ 256., 1024.])
    """
    if curves is None:
        curves = _default_curves()
    grid: Array = new_grid(axes, 1, 2, (5.2, 3.8))[0]
    places = np.asarray(lengths, np.int64)
    for name, curve in curves.items():
        costs = [curve(int(length)) for length in places]
        grid[0].plot(places, np.array([float(cost.flops) for cost in costs]), label=name, marker=".")
        grid[1].plot(places, np.array([float(cost.peak_bytes) for cost in costs]), label=name, marker=".")
    for ax, label in zip(grid, ("multiplications and additions", "bytes beyond the inputs"), strict=True):
        ax.set(xscale="log", yscale="log", xlabel="length (tokens)", ylabel=label)
        ax.set_xscale("log", base=2)
        ax.grid(color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    grid[0].legend(fontsize=8, frameon=False)
    return grid


def _default_curves() -> dict[str, Callable[[int], analysis.Cost]]:
    def attention(mask: Any, algorithm: str = "tiled") -> Callable[[int], analysis.Cost]:
        return lambda length: analysis.attention_cost(length, heads=8, mask=mask, algorithm=algorithm)

    return {
        "whole matrices": attention(None, "dense"),
        "tiles": attention(None),
        "tiles, causal": attention(Causal()),
        "tiles, window of 512": attention(Window(511)),
        "linear attention": lambda length: analysis.linear_attention_cost(length, heads=8),
    }

"""What the heads do, as bars and curves: entropy, focus, distance, agreement."""

from typing import TYPE_CHECKING, Any

import numpy as np

from npattn import analysis
from npattn._typing import Array
from npattn.plots._axes import ACCENT, INK, PALE, Axes, matplotlib, new_axes, new_grid, on_cpu

if TYPE_CHECKING:
    from npattn.functional.statistics import AttentionStats

_PANELS = (
    ("entropy", "entropy (nats)"),
    ("max_weight", "largest weight"),
    ("spread", "effective number of keys"),
    ("self_weight", "weight on itself"),
)


def head_summary(source: "Array | AttentionStats", *, axes: Any = None) -> Array:
    """Draw the four numbers of ``analysis.head_summary`` as bars, one panel each.

    Parameters
    ----------
    source : ndarray or AttentionStats
        Weights (..., heads, len_q, len_k), or statistics where the weights would be too large; an
        ``analysis.HeadSummary`` is drawn as it is.
    axes : four matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    axes : ndarray of matplotlib Axes
        (2, 2): entropy, largest weight, spread, weight on itself. The most focused head is red, the least
        focused one dark.

    Raises
    ------
    ValueError
        When there is no head, or not four Axes.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> axes = plots.head_summary(np.stack([np.eye(4), np.full((4, 4), 0.25)]))
    >>> [float(bar.get_height()) for bar in axes[1, 1].patches]
    [1.0, 0.25]
    """
    summary = source if isinstance(source, analysis.HeadSummary) else analysis.head_summary(source)
    grid: Array = new_grid(axes, 2, 2, (4.0, 2.8))
    heads = np.arange(len(summary.entropy))
    colours = [PALE] * len(heads)
    colours[summary.least_focused] = INK
    colours[summary.most_focused] = ACCENT
    for ax, (field, label) in zip(grid.ravel(), _PANELS, strict=True):
        ax.bar(heads, on_cpu(getattr(summary, field)), color=colours)
        ax.set(ylabel=label, xlabel="head", xlim=(-0.6, len(heads) - 0.4))
        ax.set_ylim(bottom=0.0)
        if field in ("max_weight", "self_weight"):
            ax.set_ylim(top=1.0)
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        ax.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_title(
        f"most focused: head {summary.most_focused}, least: head {summary.least_focused}", fontsize=9
    )
    return grid


def head_agreement(weights: Array, *, ax: Axes | None = None) -> Axes:
    """Draw ``analysis.head_agreement`` as a matrix: which heads look at the same keys.

    Parameters
    ----------
    weights : ndarray
        Attention weights (..., heads, len_q, len_k).
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        The scale goes from 0, disjoint, to 1, equal.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> ax = plots.head_agreement(np.stack([np.eye(4), np.eye(4), np.full((4, 4), 0.25)]))
    >>> ax.images[0].get_array().shape
    (3, 3)
    """
    agreement = on_cpu(analysis.head_agreement(weights))
    ax = new_axes(ax, (4.4, 3.8))
    image = ax.imshow(agreement, cmap="magma", vmin=0.0, vmax=1.0)
    ax.set(xlabel="head", ylabel="head", title="agreement of heads")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    ax.figure.colorbar(image, ax=ax, label="1 - Jensen-Shannon divergence (bits)")
    return ax


def distance_profile(
    source: "Array | analysis.DistanceProfile", *, most: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw how the weight of each head is spread over the distance from query to key.

    Parameters
    ----------
    source : ndarray or DistanceProfile
        Weights (..., heads, len_q, len_k), or what ``analysis.distance_profile`` returned for them.
    most : int, optional
        Draw distances from -most to most only; None draws all that carry weight.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        One line per head, its mean distance in the legend.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> ax = plots.distance_profile(np.eye(5)[[0, 0, 1, 2, 3]])
    >>> ax.get_legend_handles_labels()[1]
    ['head 0, mean 0.8']
    """
    profile = source if isinstance(source, analysis.DistanceProfile) else analysis.distance_profile(source)
    distance, weight, mean = (on_cpu(part) for part in profile)
    used = weight.sum(axis=0) > 0 if most is None else abs(distance) <= most
    low, high = (
        (int(place) for place in np.flatnonzero(used)[[0, -1]]) if used.any() else (0, len(distance) - 1)
    )
    ax = new_axes(ax, (6.0, 3.6))
    for head, line in enumerate(weight):
        ax.plot(
            distance[low : high + 1],
            line[low : high + 1],
            label=f"head {head}, mean {mean[head]:.1f}",
            marker="." if high - low <= 40 else None,
        )
    ax.set(xlabel="key position - query position", ylabel="share of the weight")
    ax.set_ylim(bottom=0.0)
    if len(weight) <= 12:
        ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax

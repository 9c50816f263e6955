"""Masks pair by pair, and the plans made of them tile by tile."""

from typing import TYPE_CHECKING

import numpy as np

from npattn._typing import Array
from npattn.plans.tiles import FULL, TilePlan
from npattn.plots._axes import ACCENT, INK, NOTHING, PALE, Axes, matplotlib, new_axes

if TYPE_CHECKING:
    from npattn.masks import Mask


def mask_picture(
    mask: "Mask",
    len_q: int,
    len_k: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw which query may see which key.

    Parameters
    ----------
    mask : Mask
        Any of ``npattn.masks``.
    len_q, len_k : int
        The lengths to draw it at; ``len_k`` None means ``len_q``.
    batch, head : int, default 0
        Which batch element and head, where the mask differs between them.
    title : str, optional
        Above the picture; None writes the mask and its density.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        Visible pairs are dark.

    Examples
    --------
    >>> from npattn import masks, plots
    >>> ax = plots.mask_picture(masks.Causal(), 4)
    >>> int(ax.images[0].get_array().sum())
    10
    """
    len_k = len_q if len_k is None else len_k
    dense = np.asarray(mask.to_dense(len_q, len_k, batch=batch + 1, heads=head + 1))
    visible = np.broadcast_to(dense, (batch + 1, head + 1, len_q, len_k))[batch, head]
    ax = new_axes(ax, (4.0, 4.0))
    colours = matplotlib.colors.ListedColormap([NOTHING, INK])
    ax.imshow(visible.astype(int), cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    if title is None:
        density = visible.mean() if visible.size else 0.0
        title = (
            f"{mask!r}: {density:.0%}" if len(repr(mask)) <= 48 else f"{type(mask).__name__}: {density:.0%}"
        )
    ax.set_title(title, fontsize=9)
    ax.set(xlabel="key", ylabel="query")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    return ax


def plan_picture(
    plan: TilePlan, *, batch: int = 0, head: int = 0, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw which tiles a plan visits: whole ones, partial ones, and those it leaves out.

    Parameters
    ----------
    plan : TilePlan
        What ``npattn.plans.tile_plan`` made of a mask.
    batch, head : int, default 0
        Which batch element and query head.
    title : str, optional
        Above the picture; None counts the tiles.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        At ``ax.images[0]`` an array (query tiles, key tiles) of 0 (not visited), 1 (partial: each pair is
        tested) and 2 (whole: no test), drawn in query and key positions.

    Examples
    --------
    >>> from npattn import masks, plots
    >>> from npattn.masks.base import Extent
    >>> from npattn.plans.build import tile_plan
    >>> ax = plots.plan_picture(tile_plan(masks.Causal(), Extent(1, 1, 128, 128), 32, 32))
    >>> ax.get_title()
    '6 whole, 4 partial of 16 tiles (32 x 32)'
    """
    tiles = _tile_kinds(plan, batch, head)
    rows, columns = tiles.shape
    ax = new_axes(ax, (4.0, 4.0))
    edges = (0, columns * plan.tile_k, rows * plan.tile_q, 0)
    colours = matplotlib.colors.ListedColormap([NOTHING, ACCENT, INK])
    ax.imshow(tiles, cmap=colours, vmin=0, vmax=2, extent=edges, interpolation="nearest", aspect="auto")
    ax.set(xlim=(0, plan.len_k), ylim=(plan.len_q, 0), xlabel="key", ylabel="query")
    if rows <= 64 and columns <= 64:
        ax.set_xticks(np.arange(0, plan.len_k, plan.tile_k), minor=True)
        ax.set_yticks(np.arange(0, plan.len_q, plan.tile_q), minor=True)
        ax.grid(which="minor", color="white", linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    if title is None:
        title = (
            f"{int((tiles == 2).sum())} whole, {int((tiles == 1).sum())} partial of {tiles.size} tiles "
            f"({plan.tile_q} x {plan.tile_k})"
        )
    ax.set_title(title, fontsize=9)
    names = ("partial: tested", ACCENT), ("whole", INK), ("left out", NOTHING)
    patches = [matplotlib.patches.Patch(facecolor=c, edgecolor=PALE, label=n) for n, c in names]
    ax.legend(
        handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=3, frameon=False
    )
    return ax


def _tile_kinds(plan: TilePlan, batch: int, head: int) -> Array:
    """(query tiles, key tiles): 0 not visited, 1 partial, 2 whole."""
    rows, columns = -(-plan.len_q // plan.tile_q), -(-plan.len_k // plan.tile_k)
    kinds = np.zeros((rows, columns), np.int64)
    which = plan.list_of[batch % plan.list_of.shape[0], head % plan.list_of.shape[1]]
    for row in range(rows):
        for span in range(plan.row_ptr[which, row], plan.row_ptr[which, row + 1]):
            kind = 2 if plan.row_kind[span] == FULL else 1
            kinds[row, plan.row_first[span] : plan.row_stop[span]] = kind
    return kinds

"""Attention weights as coloured matrices: one, two beside each other, or a grid of heads."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.plots._axes import (
    NOTHING,
    Axes,
    label_tokens,
    matplotlib,
    new_axes,
    new_grid,
    one_matrix,
    stack_of_heads,
)

#: Up to this many rows and columns the weights themselves are written into the cells.
_MOST_VALUES = 10


def attention_heatmap(
    weights: Array,
    tokens: Sequence[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    vmax: float | None = None,
    values: bool | None = None,
    colorbar: bool = True,
    title: str | None = None,
    cmap: str = "viridis",
    ax: Axes | None = None,
) -> Axes:
    """Draw attention weights as a matrix: a row for each query, a column for each key.

    Parameters
    ----------
    weights : ndarray
        (len_q, len_k); leading axes of length 1 are dropped. Pairs of weight exactly 0, which is what masks
        leave, are grey.
    tokens : sequence of str, optional
        The queries' names; also the keys' when both are as many.
    key_tokens : sequence of str, optional
        The keys' names where they differ from the queries'.
    vmax : float, optional
        The weight of the brightest colour; None means the largest one. Give 1.0 to compare pictures.
    values : bool, optional
        Write the weights into the cells. None does so up to 10 by 10.
    colorbar : bool, default True
        Draw the scale beside the picture.
    title : str, optional
        Above the picture.
    cmap : str, default "viridis"
        A matplotlib colour map.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        With the picture on it, at ``ax.images[0]``.

    Raises
    ------
    ValueError
        When the weights are not one matrix, or tokens are more or fewer than rows or columns.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> ax = plots.attention_heatmap(np.eye(3), ["to", "be", "or"])
    >>> ax.get_xlabel(), [label.get_text() for label in ax.get_yticklabels()]
    ('key', ['to', 'be', 'or'])
    """
    matrix = one_matrix(weights)
    if key_tokens is None and tokens is not None and matrix.shape[0] == matrix.shape[1]:
        key_tokens = tokens
    ax = new_axes(ax)
    image = _draw(ax, matrix, vmax, cmap)
    label_tokens(ax.xaxis, key_tokens, matrix.shape[1], rotate=True)
    label_tokens(ax.yaxis, tokens, matrix.shape[0])
    ax.set(xlabel="key", ylabel="query")
    if title is not None:
        ax.set_title(title)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, label="weight")
    if values is None:
        values = max(matrix.shape) <= _MOST_VALUES
    if values:
        _write_values(ax, matrix, image)
    return ax


def compare_attention(
    left: Array,
    right: Array,
    tokens: Sequence[str] | None = None,
    *,
    titles: tuple[str, str] = ("full", "causal"),
    cmap: str = "viridis",
    axes: Any = None,
) -> Array:
    """Draw two weight matrices beside each other on one colour scale, such as full and causal attention.

    Parameters
    ----------
    left, right : ndarray
        (len_q, len_k) each.
    tokens : sequence of str, optional
        Names of the queries and keys.
    titles : tuple of str, default ("full", "causal")
        Above the two pictures.
    cmap : str, default "viridis"
        A matplotlib colour map.
    axes : two matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    axes : ndarray of matplotlib Axes
        Shape (2,).

    Raises
    ------
    ValueError
        When one is not a matrix, or ``axes`` are not two.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> from npattn import masks, plots
    >>> query = np.random.default_rng(0).normal(size=(6, 8))
    >>> full = npattn.attention_weights(query, query)
    >>> causal = npattn.attention_weights(query, query, mask=masks.Causal())
    >>> axes = plots.compare_attention(full, causal, list("attend"))
    >>> [ax.get_title() for ax in axes]
    ['full', 'causal']
    """
    pair = (one_matrix(left, "left"), one_matrix(right, "right"))
    grid: Array = new_grid(axes, 1, 2, (4.6, 4.2))[0]
    brightest = max((float(matrix.max()) for matrix in pair if matrix.size), default=1.0)
    for ax, matrix, title in zip(grid, pair, titles, strict=True):
        attention_heatmap(
            matrix, tokens, vmax=brightest, values=False, colorbar=False, title=title, cmap=cmap, ax=ax
        )
    grid[0].figure.colorbar(grid[1].images[0], ax=list(grid), label="weight")
    return grid


def head_grid(
    weights: Array,
    tokens: Sequence[str] | None = None,
    *,
    columns: int | None = None,
    cmap: str = "viridis",
    axes: Any = None,
) -> Array:
    """Draw the weights of every head in a grid, on one colour scale.

    Parameters
    ----------
    weights : ndarray
        (heads, len_q, len_k); leading axes of length 1 are dropped.
    tokens : sequence of str, optional
        Names of the queries and keys, written at the left and lower edge of the grid.
    columns : int, optional
        Heads in a row; None makes the grid nearly square, at most 4 wide.
    cmap : str, default "viridis"
        A matplotlib colour map.
    axes : matplotlib Axes, optional
        Array of rows * columns Axes to draw on; None makes a new figure.

    Returns
    -------
    axes : ndarray of matplotlib Axes
        (rows, columns); those without a head are switched off.

    Raises
    ------
    ValueError
        When the weights are not (heads, len_q, len_k), or there are too few Axes.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> plots.head_grid(np.full((6, 5, 5), 0.2)).shape
    (2, 3)
    """
    stack = stack_of_heads(weights)
    heads, len_q, len_k = stack.shape
    if heads == 0:
        raise ValueError(f"a grid needs at least one head, got weights of shape {stack.shape}")
    columns = min(4, int(np.ceil(np.sqrt(heads)))) if columns is None else columns
    rows = -(-heads // columns)
    grid: Array = new_grid(axes, rows, columns, (2.3, 2.3))
    brightest = float(stack.max()) if stack.size else 1.0
    for place, ax in enumerate(grid.ravel()):
        if place >= heads:
            ax.set_axis_off()
            continue
        image = _draw(ax, stack[place], brightest, cmap)
        ax.set_title(f"head {place}", fontsize=9)
        ax.set(xticks=[], yticks=[])
        if tokens is not None and place % columns == 0:
            label_tokens(ax.yaxis, tokens, len_q)
        if tokens is not None and len_q == len_k and place >= (rows - 1) * columns:
            label_tokens(ax.xaxis, tokens, len_k, rotate=True)
    grid[0, 0].figure.colorbar(image, ax=list(grid.ravel()), label="weight")
    return grid


def _draw(ax: Axes, matrix: Array, vmax: float | None, cmap: str) -> Any:
    """The image of ``matrix`` from 0 to ``vmax``, exact zeros in grey."""
    colours = matplotlib.colormaps[cmap].with_extremes(bad=NOTHING)
    if vmax is None:
        vmax = float(matrix.max()) if matrix.size else 1.0
    shown = np.ma.masked_equal(matrix, 0.0)
    return ax.imshow(shown, cmap=colours, vmin=0.0, vmax=vmax or 1.0, aspect="auto", interpolation="nearest")


def _write_values(ax: Axes, matrix: Array, image: Any) -> None:
    for (row, column), weight in np.ndenumerate(matrix):
        if weight == 0.0:
            continue
        red, green, blue, _ = image.cmap(image.norm(weight))
        is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        ax.text(
            column,
            row,
            f"{weight:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="black" if is_bright else "white",
        )

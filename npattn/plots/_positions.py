"""Positional encodings, as a heatmap and as curves."""

from collections.abc import Sequence

import numpy as np

from npattn._typing import Array
from npattn.plots._axes import Axes, matplotlib, new_axes, one_matrix


def positional_encoding(
    encoding: Array, *, title: str | None = None, cmap: str = "RdBu_r", ax: Axes | None = None
) -> Axes:
    """Draw a table of positional encodings as a heatmap: a row for each position, a column for each feature.

    Parameters
    ----------
    encoding : ndarray
        (length, dim), for example ``nn.SinusoidalPosition(dim)(np.zeros((length, dim)))``.
    title : str, optional
        Above the picture.
    cmap : str, default "RdBu_r"
        A matplotlib colour map; zero is its middle.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        With the picture at ``ax.images[0]``.

    Raises
    ------
    ValueError
        When the encoding is not a matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> ax = plots.positional_encoding(np.sin(np.arange(20)[:, None] / 10.0 ** np.arange(4)))
    >>> ax.get_ylabel(), ax.images[0].get_clim()[0] == -ax.images[0].get_clim()[1]
    ('position', True)
    """
    matrix = one_matrix(encoding, "encoding")
    ax = new_axes(ax, (6.0, 4.0))
    limit = float(abs(matrix).max()) or 1.0 if matrix.size else 1.0
    image = ax.imshow(
        matrix, cmap=cmap, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest", origin="upper"
    )
    ax.set(xlabel="feature", ylabel="position")
    if title is not None:
        ax.set_title(title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    ax.figure.colorbar(image, ax=ax, label="value")
    return ax


def positional_curves(
    encoding: Array, features: Sequence[int] | None = None, *, ax: Axes | None = None
) -> Axes:
    """Draw single features of a positional encoding as curves over the position.

    Parameters
    ----------
    encoding : ndarray
        (length, dim).
    features : sequence of int, optional
        Which features; None takes up to six of them, evenly from the first to the last.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        One line for each feature.

    Raises
    ------
    ValueError
        When the encoding is not a matrix.
    IndexError
        When there is no such feature.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import plots
    >>> ax = plots.positional_curves(np.sin(np.arange(20)[:, None] / 10.0 ** np.arange(4)), [0, 2])
    >>> [line.get_label() for line in ax.lines]
    ['feature 0', 'feature 2']
    """
    matrix = one_matrix(encoding, "encoding")
    if features is None:
        features = np.unique(np.linspace(0, matrix.shape[1] - 1, 6).round().astype(int)).tolist()
    ax = new_axes(ax, (6.0, 3.4))
    for feature in features:
        ax.plot(np.arange(matrix.shape[0]), matrix[:, feature], label=f"feature {feature}")
    ax.set(xlabel="position", ylabel="value", xlim=(0, max(matrix.shape[0] - 1, 1)))
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax

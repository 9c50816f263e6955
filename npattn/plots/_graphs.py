"""Attention over the edges of a graph, drawn on a layout of its nodes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._typing import Array
from npattn.plots._axes import INK, PALE, Axes, matplotlib, new_axes, on_cpu

if TYPE_CHECKING:
    from npattn.graph import Adjacency

#: Up to this many nodes their labels are written into them.
_MOST_LABELS = 60


def graph_attention(
    weights: Array,
    adjacency: "Adjacency",
    *,
    positions: Any = None,
    head: int | None = None,
    colors: Any = None,
    widest: float = 4.0,
    seed: int = 0,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a graph with an arrow for each edge, as wide and dark as its attention weight.

    Parameters
    ----------
    weights : ndarray
        (num_edges,) or (num_edges, heads), in the order of ``adjacency.edges()``: what ``layer.weights`` or
        ``graph_attention(..., return_weights=True)`` returns.
    adjacency : Adjacency
        The graph; an edge u -> v carries from u to v, and the weights of the edges into v add up to 1.
    positions : dict or ndarray, optional
        Node label -> (x, y), as networkx's layouts return it, or an array (num_nodes, 2) in node order. None
        computes networkx's spring layout.
    head : int, optional
        Which head; None draws the mean of all.
    colors : sequence, optional
        A colour, or a number for matplotlib to colour by, for each node.
    widest : float, default 4.0
        Width of the edge of largest weight, in points.
    seed : int, default 0
        For the spring layout.
    title : str, optional
        Above the picture.
    ax : matplotlib Axes, optional
        Where to draw; None makes a new figure.

    Returns
    -------
    ax : matplotlib Axes
        With one arrow (``ax.patches``) for each edge between two nodes, in edge order; self-loops are drawn
        as rings around their node.

    Raises
    ------
    ValueError
        When there is not one weight for each edge, or not one position for each node.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import graph, plots
    >>> adjacency = graph.Adjacency.from_edges([0, 1, 2], [1, 2, 1])
    >>> ax = plots.graph_attention(np.array([0.75, 1.0, 0.25]), adjacency, positions=np.eye(3)[:, :2])
    >>> [round(arrow.get_linewidth(), 2) for arrow in ax.patches]
    [3.05, 4.0, 1.15]
    """
    weight = on_cpu(weights)
    if weight.ndim == 2:
        weight = weight.mean(axis=1) if head is None else weight[:, head]
    if weight.shape != (adjacency.num_edges,):
        raise ValueError(
            f"weights must be ({adjacency.num_edges},) or ({adjacency.num_edges}, heads), one for each edge, "
            f"got shape {np.shape(weights)}"
        )
    places = _positions(adjacency, positions, seed)
    ax = new_axes(ax, (6.0, 5.2))
    size = 220.0 if len(places) <= _MOST_LABELS else 30.0
    radius = np.sqrt(size) / 2
    largest = float(weight.max()) if weight.size else 1.0
    share = weight / (largest or 1.0)
    source, target = np.asarray(adjacency.source), np.asarray(adjacency.target)
    both_ways = {(int(u), int(v)) for u, v in zip(source, target, strict=True)}
    for edge, (u, v) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        if u == v:
            ring = size * (1.6 + 0.2 * share[edge])
            width = 0.2 + (widest - 0.2) * share[edge]
            ax.scatter(*places[u], s=ring, facecolors="none", edgecolors=INK, linewidths=width, zorder=2)
            continue
        bend = 0.12 if (v, u) in both_ways else 0.0
        ax.add_patch(
            matplotlib.patches.FancyArrowPatch(
                places[u],
                places[v],
                arrowstyle="-|>",
                mutation_scale=8,
                connectionstyle=f"arc3,rad={bend}",
                shrinkA=radius,
                shrinkB=radius,
                linewidth=0.2 + (widest - 0.2) * share[edge],
                color=INK,
                alpha=0.15 + 0.85 * float(share[edge]),
                zorder=1,
            )
        )
    paint: dict[str, Any] = {"color": PALE} if colors is None else {"c": colors}
    if colors is not None and np.issubdtype(np.asarray(colors).dtype, np.number):
        paint["cmap"] = "Set2"
    ax.scatter(*places.T, s=size, edgecolors="white", zorder=3, **paint)
    if len(places) <= _MOST_LABELS:
        for label, place in zip(adjacency.nodes, places, strict=True):
            ax.text(*place, str(label), ha="center", va="center", fontsize=7, zorder=4)
    ax.margins(0.08)
    ax.set_aspect("equal", adjustable="datalim")
    ax.set_axis_off()
    if title is not None:
        ax.set_title(title)
    return ax


def _positions(adjacency: "Adjacency", positions: Any, seed: int) -> Array:
    """(num_nodes, 2) in node order."""
    nodes = list(adjacency.nodes)
    if positions is None:
        import networkx

        graph: Any = networkx.MultiDiGraph()
        graph.add_nodes_from(range(len(nodes)))
        graph.add_edges_from(zip(adjacency.source.tolist(), adjacency.target.tolist(), strict=True))
        layout = networkx.spring_layout(graph.to_undirected(), seed=seed)
        return np.array([layout[place] for place in range(len(nodes))], np.float64).reshape(-1, 2)
    if isinstance(positions, dict):
        missing = [node for node in nodes if node not in positions]
        if missing:
            raise ValueError(f"positions has no entry for {len(missing)} nodes, first of them {missing[0]!r}")
        positions = [positions[node] for node in nodes]
    places = np.asarray(positions, np.float64)
    if places.shape != (len(nodes), 2):
        raise ValueError(f"positions must be ({len(nodes)}, 2), one for each node, got {places.shape}")
    return places

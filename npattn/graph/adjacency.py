"""Adjacency: a graph's edges in the caller's order, and the plan to walk them."""

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from numbers import Real
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from npattn._arrays import array_module, is_attention_dtype
from npattn._typing import Array
from npattn.masks import Mask
from npattn.plans.edges import EdgePlan, edge_plan, sum_by_target, target_of_slot


class Adjacency:
    """The edges of a graph, each from a sending node u to a receiving node v: v attends to u.

    Made by ``from_networkx``, ``from_scipy`` or ``from_edges``. Immutable: it copies what it is made from and
    its arrays are read-only, so a graph that changes later needs a new Adjacency.

    Attributes
    ----------
    source, target : (num_edges,) int64 ndarray
        Positions in ``nodes`` of each edge's sending and receiving node, in input order.
    nodes : sequence
        Node labels: a tuple for networkx graphs, else ``range(num_nodes)``. On a bipartite graph the pair
        (sending nodes, receiving nodes).
    num_nodes : int or (int, int)
        On a bipartite graph (num_sources, num_targets).
    num_edges : int
    edge_attrs : Mapping[str, ndarray]
        Numbers attached to the edges, (num_edges, ...), in input order.
    keys : tuple or None
        Keys of a multigraph's edges.

    Notes
    -----
    Parallel edges stay separate edges. Which node a label is, and in which order edges come, never depends on
    sorting: node order is the graph's own (or ``nodelist``), edge order is the input's.

    Examples
    --------
    >>> graph = Adjacency.from_edges([0, 1, 1], [1, 2, 0])
    >>> graph.num_nodes, graph.num_edges, graph.edges()
    (3, 3, [(0, 1), (1, 2), (1, 0)])
    >>> graph.with_self_loops().edges()[3:]
    [(0, 0), (1, 1), (2, 2)]
    >>> print(graph.to_mask().picture(3, 3))
    ·█·
    █··
    ·█·
    """

    source: Array
    target: Array
    edge_attrs: Mapping[str, Array]
    keys: tuple[Any, ...] | None

    def __init__(
        self,
        source: Array,
        target: Array,
        labels: tuple[Any, Any],
        *,
        bipartite: bool = False,
        edge_attrs: Mapping[str, Array] | None = None,
        keys: tuple[Any, ...] | None = None,
    ) -> None:
        """Trusts its arguments; use the ``from_`` constructors."""
        self.source, self.target = _frozen(source), _frozen(target)
        self.edge_attrs = MappingProxyType({name: _frozen(a) for name, a in (edge_attrs or {}).items()})
        self.keys = keys
        self._labels = labels
        self._bipartite = bipartite

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as its arguments; a mappingproxy cannot be, and the plan is made anew."""
        options: dict[str, Any] = {
            "bipartite": self._bipartite,
            "edge_attrs": dict(self.edge_attrs),
            "keys": self.keys,
        }
        return partial(type(self), **options), (self.source, self.target, self._labels)

    @classmethod
    def from_edges(
        cls, source: Any, target: Any, num_nodes: int | tuple[int, int] | None = None
    ) -> "Adjacency":
        """The edges ``source[e] -> target[e]`` between numbered nodes.

        Parameters
        ----------
        source, target : (num_edges,) array of ints
        num_nodes : int or (int, int), optional
            None is the highest id plus one. A pair (num_sources, num_targets) makes a bipartite graph, whose
            sending and receiving nodes are numbered apart.

        Raises
        ------
        TypeError
            When ids or num_nodes are not integers.
        ValueError
            When source and target differ in length or are not 1-D, or an id is negative or too high.

        Examples
        --------
        >>> Adjacency.from_edges([0, 4], [1, 0], num_nodes=(5, 2)).num_nodes
        (5, 2)
        """
        ids = [_ids("source", source), _ids("target", target)]
        if ids[0].shape != ids[1].shape:
            raise ValueError(
                f"source and target need one entry per edge, got shapes {ids[0].shape} and {ids[1].shape}"
            )
        bipartite = isinstance(num_nodes, (tuple, list))
        if num_nodes is None:
            highest = max((int(a.max()) for a in ids if a.size), default=-1)
            counts = [highest + 1, highest + 1]
        else:
            given: Any = num_nodes if bipartite else (num_nodes, num_nodes)
            if len(given) != 2:
                raise ValueError(f"num_nodes must be an int or (num_sources, num_targets), got {num_nodes!r}")
            counts = [_count(count) for count in given]
        for name, array, count in zip(("source", "target"), ids, counts, strict=True):
            wrong = (array < 0) | (array >= count)
            if wrong.any():
                edge = int(wrong.argmax())
                raise ValueError(
                    f"{name}[{edge}] = {array[edge]} is out of range for {count} nodes (0 .. {count - 1}); "
                    "pass a larger num_nodes or renumber"
                )
        return cls(ids[0], ids[1], (range(counts[0]), range(counts[1])), bipartite=bipartite)

    @classmethod
    def from_scipy(cls, matrix: Any) -> "Adjacency":
        """Every stored entry (u, v) of a square sparse matrix, zeros too, as an edge u -> v.

        Parameters
        ----------
        matrix : scipy sparse array or matrix, (num_nodes, num_nodes)
            Edges come in storage order; entries stored twice are parallel edges.

        Returns
        -------
        adjacency : Adjacency
            With the entries' values in ``edge_attrs["weight"]``.

        Raises
        ------
        TypeError
            When it is not a scipy sparse matrix.
        ValueError
            When it is not square, or its values are not real numbers.

        Examples
        --------
        >>> from scipy.sparse import csr_array
        >>> graph = Adjacency.from_scipy(csr_array([[0.0, 2.0], [3.0, 4.0]]))
        >>> graph.edges(), graph.edge_attrs["weight"].tolist()
        ([(0, 1), (1, 0), (1, 1)], [2.0, 3.0, 4.0])
        """
        if not (hasattr(matrix, "tocoo") and hasattr(matrix, "nnz")):
            raise TypeError(
                f"from_scipy takes a scipy sparse matrix, got {type(matrix).__name__}; "
                "wrap a dense array with scipy.sparse.csr_array(A)"
            )
        if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                f"an adjacency matrix must be square, got shape {tuple(matrix.shape)}; for a bipartite graph "
                "use from_edges(source, target, num_nodes=(num_sources, num_targets))"
            )
        coo = matrix.tocoo(copy=False)
        if coo.dtype.kind not in "fiub":
            raise ValueError(f"the values of an adjacency matrix must be real numbers, got {coo.dtype}")
        weight = coo.data.astype(coo.dtype if coo.dtype.kind == "f" else np.float64)
        labels = range(matrix.shape[0])
        source, target = coo.row.astype(np.int64), coo.col.astype(np.int64)
        return cls(source, target, (labels, labels), edge_attrs={"weight": weight})

    @classmethod
    def from_networkx(
        cls,
        G: Any,
        nodelist: Iterable[Any] | None = None,
        edge_attrs: str | Iterable[str] = (),
        default: Any = None,
    ) -> "Adjacency":
        """The edges of a networkx graph of any class.

        Parameters
        ----------
        G : networkx Graph, DiGraph, MultiGraph or MultiDiGraph
            An undirected edge {u, v} becomes u -> v followed by v -> u, with the same key and attributes; an
            undirected self-loop becomes one edge.
        nodelist : iterable of node labels, optional
            The nodes and their order; None is G's own. Fewer nodes than G has are the induced subgraph.
        edge_attrs : str or iterable of str
            Names of edge attributes to read: real numbers, or vectors of one length.
        default : number or vector, optional
            For edges where an attribute is absent.

        Returns
        -------
        adjacency : Adjacency
            With ``edge_attrs[name]`` float64 arrays, (num_edges,) or (num_edges, ...) for vectors.

        Raises
        ------
        TypeError
            When G is not a networkx graph.
        ValueError
            When nodelist repeats a label or names one that G lacks; when an attribute is absent without
            default, is None, a string or another non-number (default does not serve those), or changes shape.

        Examples
        --------
        >>> import networkx as nx
        >>> G = nx.Graph([("a", "b"), ("b", "b")])
        >>> graph = Adjacency.from_networkx(G)
        >>> graph.nodes, graph.edges()
        (('a', 'b'), [('a', 'b'), ('b', 'a'), ('b', 'b')])
        """
        import networkx as nx

        if not isinstance(G, nx.Graph):
            raise TypeError(f"from_networkx takes a networkx graph, got {type(G).__name__}")
        nodes = tuple(G) if nodelist is None else _checked_nodelist(G, nodelist)
        position = {label: index for index, label in enumerate(nodes)}
        multi, directed = G.is_multigraph(), G.is_directed()
        source: list[int] = []
        target: list[int] = []
        keys: list[Any] = []
        data: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
        view: Any = G.edges
        for edge in view(keys=True, data=True) if multi else view(data=True):
            u, v = position.get(edge[0]), position.get(edge[1])
            if u is None or v is None:
                continue
            pairs = [(u, v)] if directed or u == v else [(u, v), (v, u)]
            for s, t in pairs:
                source.append(s)
                target.append(t)
                data.append((edge[:-1], edge[-1]))
                if multi:
                    keys.append(edge[2])
        names = (edge_attrs,) if isinstance(edge_attrs, str) else tuple(edge_attrs)
        return cls(
            np.array(source, np.int64),
            np.array(target, np.int64),
            (nodes, nodes),
            edge_attrs={name: _attribute(name, data, default) for name in names},
            keys=tuple(keys) if multi else None,
        )

    @property
    def nodes(self) -> Any:
        """Labels in node order; the pair (sending, receiving) on a bipartite graph."""
        return self._labels if self._bipartite else self._labels[0]

    @property
    def num_nodes(self) -> Any:
        """How many nodes; the pair (sending, receiving) on a bipartite graph."""
        counts = self.num_sources, self.num_targets
        return counts if self._bipartite else counts[0]

    @property
    def num_sources(self) -> int:
        """How many nodes can send."""
        return len(self._labels[0])

    @property
    def num_targets(self) -> int:
        """How many nodes can receive."""
        return len(self._labels[1])

    @property
    def num_edges(self) -> int:
        """How many edges, parallel ones counted each."""
        return len(self.source)

    @property
    def is_bipartite(self) -> bool:
        """Whether sending and receiving nodes are numbered apart."""
        return self._bipartite

    @cached_property
    def plan(self) -> EdgePlan:
        """The edges by receiving and by sending node; made on first use."""
        return edge_plan(self.source, self.target, self.num_sources, self.num_targets)

    def edges(self) -> list[tuple[Any, ...]]:
        """(u, v) of every edge in labels, or (u, v, key) for multigraphs, in input order."""
        senders, receivers = self._labels
        ends = [senders[i] for i in self.source.tolist()], [receivers[i] for i in self.target.tolist()]
        if self.keys is None:
            return list(zip(*ends, strict=True))
        return list(zip(*ends, self.keys, strict=True))

    def edge_values(self, values: Array) -> dict[tuple[Any, ...], Any]:
        """Per-edge results by edge: ``{(u, v): values[e]}``, for multigraphs ``{(u, v, key): values[e]}``.

        Parameters
        ----------
        values : (num_edges, ...) array
            For instance attention weights.

        Returns
        -------
        by_edge : dict
            What ``networkx.set_edge_attributes`` takes. An undirected graph has two values per edge: attach
            them to ``G.to_directed()``.

        Raises
        ------
        ValueError
            When the first axis is not num_edges, or parallel edges without keys would overwrite each other.
        """
        if len(values) != self.num_edges:
            raise ValueError(f"values must have one row per edge, {self.num_edges}, got {len(values)}")
        by_edge = dict(zip(self.edges(), values, strict=True))
        if len(by_edge) != self.num_edges:
            raise ValueError("parallel edges without keys: (u, v) does not name one edge")
        return by_edge

    @cached_property
    def loopless_nodes(self) -> Array:
        """The nodes without an edge to themselves, ascending: where ``with_self_loops`` adds one."""
        has_loop = np.zeros(min(self.num_sources, self.num_targets), bool)
        has_loop[self.source[self.source == self.target]] = True
        return _frozen(np.flatnonzero(~has_loop))

    def with_self_loops(self) -> "Adjacency":
        """The same graph with an edge v -> v behind the others for every node without one, in node order.

        Returns
        -------
        adjacency : Adjacency
            Nothing is removed, merged or moved. An added edge's attributes are the mean of those coming into
            its node, 0 where nothing comes in; its multigraph key is 0.

        Notes
        -----
        On a bipartite graph, sending node i is linked to receiving node i as far as both exist, as PyTorch
        Geometric does: sensible only if they are the same thing.
        """
        return self._looped

    @cached_property
    def _looped(self) -> "Adjacency":
        added = self.loopless_nodes
        return Adjacency(
            np.concatenate([self.source, added]),
            np.concatenate([self.target, added]),
            self._labels,
            bipartite=self._bipartite,
            edge_attrs={
                name: np.concatenate([values, incoming_mean(self, values)[added]])
                for name, values in self.edge_attrs.items()
            },
            keys=None if self.keys is None else self.keys + (0,) * len(added),
        )

    def reverse(self) -> "Adjacency":
        """Every edge u -> v as v -> u; node order, edge order, keys and attributes stay."""
        return Adjacency(
            self.target,
            self.source,
            self._labels[::-1],
            bipartite=self._bipartite,
            edge_attrs=self.edge_attrs,
            keys=self.keys,
        )

    def to_mask(self) -> Mask:
        """The graph as a mask: query v may see key u where there is an edge u -> v.

        Returns
        -------
        mask : masks.Sparse
            Of num_targets rows and num_sources columns. ``attention`` with it over the nodes as a sequence
            gives what ``graph_attention`` gives on the same edges.

        Raises
        ------
        ValueError
            When there are parallel edges: a mask sees a pair once, graph_attention counts it as often as it
            occurs.
        """
        from npattn.masks import Sparse

        plan = self.plan
        pairs = np.sort(target_of_slot(plan) * max(plan.num_sources, 1) + plan.row_source)
        if (pairs[1:] == pairs[:-1]).any():
            raise ValueError(
                "parallel edges cannot be expressed by a mask, which sees each pair of nodes once; "
                "merge them first, or use graph_attention"
            )
        shape = (plan.num_targets, plan.num_sources)
        indices = pairs % max(plan.num_sources, 1)
        return Sparse(SimpleNamespace(indptr=plan.row_ptr, indices=indices, shape=shape))

    def __repr__(self) -> str:
        if self._bipartite:
            return f"Adjacency({self.num_sources} -> {self.num_targets} nodes, {self.num_edges} edges)"
        return f"Adjacency({self.num_nodes} nodes, {self.num_edges} edges)"


def incoming_mean(adjacency: Adjacency, values: Array) -> Array:
    """Mean over each receiving node's in-edges of (num_edges, ...) values; 0 where nothing comes in."""
    plan = adjacency.plan
    # float16 has no room for the sum, and bfloat16 no digits for the count
    wide = (
        values.astype(np.float32)
        if values.dtype.itemsize < 4 and is_attention_dtype(values.dtype)
        else values
    )
    xp = array_module(values)
    count = xp.asarray(np.maximum(np.diff(plan.row_ptr), 1).astype(wide.dtype))
    total = sum_by_target(plan, wide[xp.asarray(plan.row_edge)])
    mean: Array = total / count.reshape(-1, *(1,) * (values.ndim - 1))
    return mean if wide is values else mean.astype(values.dtype)


def _frozen(array: Array) -> Array:
    """A read-only copy, or the array itself when it is read-only and owns its memory."""
    if array.flags.writeable or array.base is not None:
        array = array.copy()
        array.flags.writeable = False
    return array


def _ids(name: str, ids: Any) -> Array:
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, one node id per edge, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integer node ids, got {array.dtype}")
    if array.size and array.dtype.kind == "u" and int(array.max()) >= 2**63:
        raise ValueError(f"{name} holds the id {array.max()}, out of range")
    return array.astype(np.int64)


def _count(count: Any) -> int:
    try:
        number = operator.index(count)
    except TypeError:
        raise TypeError(f"num_nodes must be an int or a pair of ints, got {type(count).__name__}") from None
    if number < 0:
        raise ValueError(f"num_nodes must not be negative, got {number}")
    return number


def _checked_nodelist(G: Any, nodelist: Iterable[Any]) -> tuple[Any, ...]:
    nodes = tuple(nodelist)
    unknown = [label for label in nodes if label not in G]
    if unknown:
        raise ValueError(f"nodelist has labels that the graph lacks: {_some(unknown)}")
    seen: set[Any] = set()
    repeated = [label for label in nodes if label in seen or seen.add(label)]  # type: ignore[func-returns-value]
    if repeated:
        raise ValueError(f"nodelist repeats labels: {_some(repeated)}")
    return nodes


def _some(labels: list[Any]) -> str:
    more = f" and {len(labels) - 5} more" if len(labels) > 5 else ""
    return ", ".join(map(repr, labels[:5])) + more


def _attribute(name: str, data: list[tuple[tuple[Any, ...], Mapping[str, Any]]], default: Any) -> Array:
    """One attribute of all edges as a float64 array."""
    if not data:
        return np.zeros(0)
    absent = [name not in attributes for _, attributes in data]
    if any(absent) and default is None:
        edge = data[absent.index(True)][0]
        raise ValueError(f"edge {edge} has no attribute {name!r}; pass default= for edges without")
    fallback = _number(name, default, "default") if any(absent) else None
    rows = [
        fallback if missing else _number(name, attributes[name], f"edge {edge}")
        for (edge, attributes), missing in zip(data, absent, strict=True)
    ]
    shapes = {row.shape for row, missing in zip(rows, absent, strict=True) if not missing}  # type: ignore[union-attr]
    if len(shapes) > 1:
        raise ValueError(f"edge attribute {name!r} has vectors of different shapes: {sorted(shapes)}")
    shape = shapes.pop() if shapes else fallback.shape  # type: ignore[union-attr]
    if fallback is not None and fallback.shape not in ((), shape):
        raise ValueError(f"default of shape {fallback.shape} does not fit edge attribute {name!r}, {shape}")
    return np.stack([np.broadcast_to(row, shape) for row in rows])  # type: ignore[arg-type]


def _number(name: str, value: Any, where: str) -> Array:
    """A real number, or an array of them, as float64."""
    if isinstance(value, Real):
        try:
            return np.asarray(float(value))
        except OverflowError:
            raise ValueError(
                f"edge attribute {name!r} must be within float64's range, got an int beyond it at {where}"
            ) from None
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray | np.generic) else None
    except ValueError:  # rows of different lengths
        array = None
    if array is None or array.dtype.kind not in "fiub":
        raise ValueError(
            f"edge attribute {name!r} must be a real number or a vector of them, got {value!r} "
            f"({type(value).__name__}) at {where}"
        )
    return array.astype(np.float64)


__all__ = ["Adjacency", "incoming_mean"]

"""EdgePlan: the visible pairs of a sparse graph one by one, sorted by receiving and by sending node.

Edge e of the caller goes from node ``source[e]`` to node ``target[e]``. A *slot* is an edge's place in the
order by receiving node; edges of one node keep the caller's order::

    for t in range(num_targets):
        for slot in range(row_ptr[t], row_ptr[t + 1]):
            edge row_edge[slot] goes from row_source[slot] to t

    for s in range(num_sources):
        for place in range(col_ptr[s], col_ptr[s + 1]):
            edge row_edge[col_slot[place]] goes from s to col_target[place]

The *items* cut both walks into pieces of similar cost for threads. They depend on the graph alone, never on
the number of threads, so neither do the bits of a result::

    for first, stop, begin, end, piece in row_items:
        piece == -1: the nodes first .. stop - 1, which own the slots begin .. end - 1
        piece >= 0:  part number `piece` of the one node `first`, a hub with too many edges for one item:
                     the slots begin .. end - 1; parts are merged in ascending order

Invariants (``check_edge_plan`` asserts them): the lists by sending node hold the same edges as those by
receiving node; items cover every node and slot exactly once, in ascending order.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array

#: Edges (plus nodes) of one work item: some tens of microseconds of work.
ITEM_COST: Final = 4096

#: A node with more edges than this is split into parts of this many.
HUB_EDGES: Final = 8192


class EdgePlan(NamedTuple):
    """A graph's edges by receiving node (out, dQ) and by sending node (dK, dV).

    All arrays are C-contiguous and read-only; node ids are int32, offsets and edge numbers int64.
    """

    num_targets: int
    num_sources: int
    num_edges: int
    # by receiving node
    row_ptr: Array  # (num_targets + 1,) int64: first slot of each receiving node
    row_source: Array  # (num_edges,) int32: sending node of the slot
    row_edge: Array  # (num_edges,) int64: the caller's number of the slot's edge
    row_items: Array  # (items, 5) int64: first node, stop node, first slot, stop slot, part or -1
    # by sending node
    col_ptr: Array  # (num_sources + 1,) int64: first place of each sending node
    col_target: Array  # (num_edges,) int32: receiving node
    col_slot: Array  # (num_edges,) int64: the slot of the same edge
    col_items: Array  # (items, 5) int64


def edge_plan(source: Array, target: Array, num_sources: int, num_targets: int) -> EdgePlan:
    """The plan of the edges ``source[e] -> target[e]``.

    Parameters
    ----------
    source, target : (num_edges,) int64 ndarray
        Ids in ``range(num_sources)`` and ``range(num_targets)``; checked by the caller.
    num_sources, num_targets : int
        Below 2**31.

    Returns
    -------
    plan : EdgePlan

    Notes
    -----
    Linear time: two or four passes of a stable counting sort on 16-bit digits.

    Examples
    --------
    >>> plan = edge_plan(np.array([0, 1, 0]), np.array([1, 0, 1]), 2, 2)
    >>> plan.row_ptr.tolist(), plan.row_source.tolist(), plan.row_edge.tolist()
    ([0, 1, 3], [1, 0, 0], [1, 0, 2])
    """
    if max(num_sources, num_targets) >= 2**31:
        raise ValueError(f"an edge plan holds less than 2**31 nodes, got {max(num_sources, num_targets)}")
    row_edge = _stable_order(target, num_targets)
    slot_of_edge = np.empty(len(row_edge), np.int64)
    slot_of_edge[row_edge] = np.arange(len(row_edge))
    col_edge = _stable_order(source, num_sources)
    row_ptr, col_ptr = _offsets(target, num_targets), _offsets(source, num_sources)
    plan = EdgePlan(
        num_targets=num_targets,
        num_sources=num_sources,
        num_edges=len(row_edge),
        row_ptr=row_ptr,
        row_source=source[row_edge].astype(np.int32),
        row_edge=row_edge,
        row_items=work_items(row_ptr),
        col_ptr=col_ptr,
        col_target=target[col_edge].astype(np.int32),
        col_slot=slot_of_edge[col_edge],
        col_items=work_items(col_ptr),
    )
    for field in plan:
        if isinstance(field, np.ndarray):
            field.flags.writeable = False
    return plan


def work_items(ptr: Array, item_cost: int = ITEM_COST, hub_edges: int = HUB_EDGES) -> Array:
    """Cut the nodes of a CSR offset array into items of about ``item_cost`` edges plus nodes.

    Returns (items, 5) int64 rows as described at the top of this file.

    >>> work_items(np.array([0, 2, 9, 9, 10]), item_cost=4, hub_edges=4).tolist()
    [[0, 1, 0, 2, -1], [1, 2, 2, 6, 0], [1, 2, 6, 9, 1], [2, 4, 9, 10, -1]]
    """
    num_nodes = len(ptr) - 1
    degree = np.diff(ptr)
    hubs = np.flatnonzero(degree > hub_edges)
    cost = np.concatenate([[0], np.cumsum(np.where(degree > hub_edges, 0, degree) + 1)])
    regular = np.searchsorted(cost, np.arange(item_cost, cost[-1], item_cost))
    bounds = np.unique(np.concatenate([[0, num_nodes], hubs, hubs + 1, regular]))
    first, stop = bounds[:-1], bounds[1:]
    is_hub = np.isin(first, hubs)
    parts = np.where(is_hub, -(-(ptr[stop] - ptr[first]) // hub_edges), 1)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    hub = np.repeat(is_hub, parts)
    first, stop = np.repeat(first, parts), np.repeat(stop, parts)
    begin = np.where(hub, ptr[first] + part * hub_edges, ptr[first])
    end = np.where(hub, np.minimum(begin + hub_edges, ptr[stop]), ptr[stop])
    return np.stack([first, stop, begin, end, np.where(hub, part, -1)], axis=1).astype(np.int64)


def sum_by_target(plan: EdgePlan, values: Array) -> Array:
    """Sums over the in-edges of each receiving node.

    Parameters
    ----------
    plan : EdgePlan
    values : (num_edges, ...) NumPy or CuPy array
        In slot order (``x[plan.row_edge]`` of an array in the caller's order).

    Returns
    -------
    sums : (num_targets, ...) ndarray
        0 for a node without in-edges.
    """
    return _reduce(np.add, plan.row_ptr, values, 0)


def max_by_target(plan: EdgePlan, values: Array) -> Array:
    """Maximum over the in-edges of each receiving node; −inf for a node without; see ``sum_by_target``."""
    return _reduce(np.maximum, plan.row_ptr, values, -np.inf)


def sum_by_source(plan: EdgePlan, values: Array) -> Array:
    """Sums over the out-edges of each sending node; ``values`` in the order of ``plan.col_slot``."""
    return _reduce(np.add, plan.col_ptr, values, 0)


def target_of_slot(plan: EdgePlan) -> Array:
    """The receiving node of every slot, (num_edges,) int64."""
    return np.repeat(np.arange(plan.num_targets), np.diff(plan.row_ptr))


def check_edge_plan(plan: EdgePlan) -> None:
    """Assert the invariants listed at the top of this file."""
    targets = target_of_slot(plan)
    sources = np.repeat(np.arange(plan.num_sources), np.diff(plan.col_ptr))
    assert plan.row_ptr[0] == plan.col_ptr[0] == 0
    assert plan.row_ptr[-1] == plan.col_ptr[-1] == plan.num_edges
    assert (np.sort(plan.row_edge) == np.arange(plan.num_edges)).all()
    assert (np.sort(plan.col_slot) == np.arange(plan.num_edges)).all()
    assert (plan.row_source[plan.col_slot] == sources).all()
    assert (targets[plan.col_slot] == plan.col_target).all()
    assert (np.diff(plan.row_edge)[np.diff(targets) == 0] > 0).all()
    for ptr, items in ((plan.row_ptr, plan.row_items), (plan.col_ptr, plan.col_items)):
        slots = np.concatenate([np.arange(begin, end) for _, _, begin, end, _ in items] or [np.arange(0)])
        nodes = np.concatenate([np.arange(a, b) for a, b, _, _, part in items if part <= 0] or [np.arange(0)])
        assert (slots == np.arange(plan.num_edges)).all()
        assert (nodes == np.arange(len(ptr) - 1)).all()


def _reduce(operation: Any, ptr: Array, values: Array, empty: float) -> Array:
    """reduceat, which gives an element where a segment is empty: those are left out and filled in."""
    xp = array_module(values)
    result: Array = xp.full((len(ptr) - 1, *values.shape[1:]), empty, values.dtype)
    filled = np.flatnonzero(ptr[1:] > ptr[:-1])
    if not (filled.size and result.size):
        return result
    if operation is np.maximum and xp is not np:  # CuPy has reduceat for sums only
        owner = xp.asarray(np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)))
        xp.maximum.at(result, owner, values)
    else:
        reduceat = operation.reduceat if xp is np else xp.add.reduceat
        result[xp.asarray(filled)] = reduceat(values, xp.asarray(ptr[filled]), axis=0)
    return result


def _offsets(ids: Array, count: int) -> Array:
    ptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(ids, minlength=count), out=ptr[1:])
    return ptr


def _stable_order(ids: Array, count: int) -> Array:
    """``argsort(ids, kind="stable")`` in linear time: NumPy sorts 16-bit keys by counting."""
    order = np.argsort((ids & 0xFFFF).astype(np.uint16), kind="stable")
    if count > 0x10000:
        order = order[np.argsort((ids >> 16)[order].astype(np.uint16), kind="stable")]
    return order.astype(np.int64, copy=False)

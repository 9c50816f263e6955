"""What to launch for attention along the edges of a graph on a CUDA GPU: items, specialisations, grids.

Pure arithmetic, no CuPy: the tests run the same launches on a CPU model of the GPU.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._dropout import threshold
from npattn._typing import Array
from npattn.kernels._cuda import Kernel, Launch, pointer, struct_dtype
from npattn.kernels.edge.contract import EdgeProblem

C_TYPES: Final = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}
SCORES: Final = {"dot": "DOT", "additive": "ADDITIVE", "dynamic": "DYNAMIC"}
PARAMS: Final = struct_dtype("edge/edge.cuh", "Params")

#: Edges of one item; a node with more is a hub, whose parts go to several warps.
PART_EDGES: Final = 1024
#: Warps that share the items where each keeps a part of a sum over all edges (datt, dfeatures, dweight).
SHARING_WARPS: Final = 1024
#: Elements of a row a lane may hold.
MAX_PER_LANE: Final = 16

_WARPS: Final = 4  # of a block; WARPS in edge.cuh
_FILES: Final = {
    "forward": ("device.cuh", "edge/edge.cuh", "edge/forward.cu"),
    "backward": ("device.cuh", "edge/edge.cuh", "edge/backward.cu"),
}


class Items(NamedTuple):
    """The work of one walk, one warp (and group of heads) each; and the hubs whose parts are to be joined."""

    begin: Array  # (items,) int64
    end: Array  # (items,) int64
    node: Array  # (items,) int32
    part: Array  # (items,) int32: -1, or the number of the part
    hub_node: Array  # (hubs,) int32
    hub_part: Array  # (hubs + 1,) int32: parts of each hub


def items_of(ptr: Array, part_edges: int = PART_EDGES) -> Items:
    """Cut the nodes of a CSR offset array into items.

    >>> for field in items_of(np.array([0, 2, 7, 7]), part_edges=3):
    ...     print(field.tolist())
    [0, 2, 5, 7]
    [2, 5, 7, 7]
    [0, 1, 1, 2]
    [-1, 0, 1, -1]
    [1]
    [0, 2]
    """
    degree = np.diff(ptr)
    count = np.maximum(1, -(-degree // part_edges))
    node = np.repeat(np.arange(len(degree)), count)
    inside = np.arange(len(node)) - np.repeat(np.cumsum(count) - count, count)
    begin = ptr[:-1][node] + inside * part_edges
    end = np.minimum(begin + part_edges, ptr[1:][node])
    is_part = count[node] > 1
    part = np.where(is_part, np.cumsum(is_part) - 1, -1)
    hub_node = np.flatnonzero(count > 1)
    hub_part = np.append(0, np.cumsum(count[hub_node]))
    return Items(begin, end, *(x.astype(np.int32) for x in (node, part, hub_node, hub_part)))


class Cut(NamedTuple):
    """How a row of a node is spread over a warp; the macros of edge.cuh."""

    lanes: int
    per_lane: int
    per_lane_v: int

    def groups(self, heads: int) -> int:
        """Warps that share an item, each with its heads."""
        return -(-heads // (32 // self.lanes))


@lru_cache(maxsize=256)
def cut_of(itemsize: int, heads: int, head_dim: int, head_dim_v: int) -> Cut:
    """16 bytes a lane where the heads fill the warp so, else fewer."""
    widest = max(head_dim, head_dim_v)
    lanes = 1
    while lanes < 32 and lanes < widest and (widest > lanes * (16 // itemsize) or heads * lanes < 32):
        lanes *= 2

    def per_lane(dim: int) -> int:
        elements = -(-dim // lanes)
        chunk = 16 // itemsize
        return -(-elements // chunk) * chunk if elements > chunk // 2 and elements > 1 else max(elements, 1)

    return Cut(lanes, per_lane(head_dim), per_lane(head_dim_v))


@lru_cache(maxsize=256)
def specialise(
    direction: str,
    score: str,
    c_type: str,
    cut: Cut,
    has_bias: bool,
    has_softcap: bool,
    has_dropout: bool,
    has_features: bool,
) -> Kernel:
    """The source files and macros of one kernel."""
    defines = {
        "T": c_type,
        "SCORE": SCORES[score],
        "LANES": cut.lanes,
        "PER_LANE": cut.per_lane,
        "PER_LANE_V": cut.per_lane_v,
        "HAS_BIAS": int(has_bias),
        "HAS_SOFTCAP": int(has_softcap),
        "HAS_DROPOUT": int(has_dropout),
        "HAS_FEATURES": int(has_features),
    }
    return Kernel(_FILES[direction], tuple((name, str(value)) for name, value in defines.items()))


def kernel_of(direction: str, problem: EdgeProblem) -> tuple[Kernel, Cut]:
    """The specialisation for a problem, and how its rows are cut."""
    cut = cut_of(problem.dtype.itemsize, problem.heads, problem.head_dim, problem.head_dim_v)
    kernel = specialise(
        direction,
        problem.score,
        C_TYPES[problem.dtype.name],
        cut,
        problem.has_bias,
        problem.softcap > 0,
        problem.dropout_p > 0,
        problem.edge_dim > 0,
    )
    return kernel, cut


def params_of(problem: EdgeProblem, items: Items, arrays: dict[str, Any]) -> Array:
    """The Params record; ``arrays`` are by field name, strides taken from them."""
    p = np.zeros(1, PARAMS)
    for name in ("num_targets", "num_edges", "heads", "head_dim", "head_dim_v", "edge_dim"):
        p[name] = getattr(problem, name)
    p["scale"], p["softcap"], p["negative_slope"] = problem.scale, problem.softcap, problem.negative_slope
    p["keep_scale"] = 1.0 / (1.0 - problem.dropout_p)
    p["drop_threshold"] = threshold(problem.dropout_p)
    p["seed_lo"], p["seed_hi"] = problem.seed & 0xFFFFFFFF, problem.seed >> 32 & 0xFFFFFFFF
    p["num_items"], p["num_hubs"] = len(items.node), len(items.hub_node)
    p["num_warps"] = sharing_warps(problem, items)
    for name in Items._fields:
        p[name] = pointer(getattr(items, name))
    for name, array in arrays.items():
        if array is not None:
            p[name] = pointer(array)
            if f"{name}_stride" in PARAMS.names:  # type: ignore[operator]
                p[f"{name}_stride"] = [
                    0 if size == 1 else stride // array.itemsize
                    for size, stride in zip(array.shape[:2], array.strides[:2], strict=True)
                ]
    p["aligned"] = all(
        _is_aligned(arrays[name]) for name in ("q", "k", "v", "dout") if arrays.get(name) is not None
    )
    return p


def _is_aligned(x: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if size > 1]
    return not any(size % 16 for size in (pointer(x), x.shape[-1] * x.itemsize, *steps))


def sharing_warps(problem: EdgeProblem, items: Items) -> int:
    """Warps of the backward walk by receiving node: one an item, unless each has to keep a sum of its own."""
    keeps_sums = problem.score == "dynamic" or problem.edge_dim > 0
    return min(len(items.node), SHARING_WARPS) if keeps_sums else len(items.node)


def _grid(count: int, cut: Cut, heads: int) -> int:
    return -(-count * cut.groups(heads) // _WARPS)


def forward_launches(problem: EdgeProblem, items: Items, arrays: dict[str, Any]) -> list[Launch]:
    """Out, m and l; with hubs ``arrays`` holds part_out, part_m and part_l too."""
    kernel, cut = kernel_of("forward", problem)
    params = params_of(problem, items, arrays)
    return [
        Launch(kernel, "edge_forward", _grid(len(items.node), cut, problem.heads), 32 * _WARPS, 0, params),
        Launch(kernel, "edge_merge", _grid(len(items.hub_node), cut, problem.heads), 32 * _WARPS, 0, params),
    ]


def weights_launches(problem: EdgeProblem, items: Items, arrays: dict[str, Any]) -> list[Launch]:
    """The weights ``p`` from m and l."""
    kernel, cut = kernel_of("forward", problem)
    params = params_of(problem, items, arrays)
    return [
        Launch(kernel, "edge_weights", _grid(len(items.node), cut, problem.heads), 32 * _WARPS, 0, params)
    ]


def backward_rows_launches(problem: EdgeProblem, items: Items, arrays: dict[str, Any]) -> list[Launch]:
    """Delta, then dq, dbias, datt, dfeatures and dweight; with hubs ``arrays`` holds part_out."""
    kernel, cut = kernel_of("backward", problem)
    params = params_of(problem, items, arrays)
    heads, threads = problem.heads, 32 * _WARPS
    return [
        Launch(kernel, "edge_delta", _grid(problem.num_targets, cut, heads), threads, 0, params),
        Launch(
            kernel, "edge_backward_rows", _grid(sharing_warps(problem, items), cut, heads), threads, 0, params
        ),
        Launch(kernel, "edge_sum_parts", _grid(len(items.hub_node), cut, heads), threads, 0, params),
    ]


def backward_cols_launches(problem: EdgeProblem, items: Items, arrays: dict[str, Any]) -> list[Launch]:
    """Then dk and dv, from the delta that is there; with hubs ``arrays`` holds part_out and part_v."""
    kernel, cut = kernel_of("backward", problem)
    params = params_of(problem, items, arrays)
    heads, threads = problem.heads, 32 * _WARPS
    return [
        Launch(kernel, "edge_backward_cols", _grid(len(items.node), cut, heads), threads, 0, params),
        Launch(kernel, "edge_sum_parts", _grid(len(items.hub_node), cut, heads), threads, 0, params),
    ]

"""What to launch for one attention call on a CUDA GPU: specialisations, grids, shared memory, parameters.

Pure arithmetic, no CuPy: the tests run the same launches on a CPU model of the GPU. ``cupy_cuda`` allocates
and calls.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._dropout import threshold
from npattn._typing import Array
from npattn.kernels import _cuda
from npattn.kernels._cuda import Box, Kernel, Launch, pointer, struct_dtype
from npattn.kernels.contract import Problem
from npattn.plans.tiles import TilePlan

C_TYPES: Final = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}

#: The most rows (queries times the heads of a group) that the split-key kernel takes.
MAX_DECODE_ROWS: Final = 64
#: Keys one part of a split-key call should have at least.
MIN_PART: Final = 256


class Config(NamedTuple):
    """How a kernel is cut into blocks; the macros of tile.cuh."""

    warps: int
    frags: int  # a block owns 16 * warps * frags rows
    step: int  # columns in shared memory at a time
    stages: int
    out_cols: int  # accumulator columns of a block

    @property
    def block(self) -> int:
        """Rows a block owns."""
        return 16 * self.warps * self.frags


# (itemsize, largest head_dim) -> Config. Two limits shape the tables: 255 registers a thread, of which the
# accumulators take frags * out_cols / 2 words (twice that in float64), and 99 KiB of shared memory, so that
# consumer cards (sm_86, sm_89) run the same kernels; data-center cards then hold two blocks or more.
_FORWARD: Final = {
    (2, 64): Config(4, 2, 64, 2, 64),
    (2, 128): Config(4, 2, 32, 2, 128),
    (2, 256): Config(4, 1, 32, 2, 256),
    (4, 64): Config(4, 1, 64, 2, 64),
    (4, 128): Config(4, 1, 32, 2, 128),
    (4, 256): Config(2, 1, 32, 1, 256),
    (8, 64): Config(4, 1, 16, 2, 64),
    (8, 128): Config(2, 1, 16, 2, 128),
    (8, 256): Config(1, 1, 16, 1, 128),
}
_DECODE: Final = {
    (2, 64): Config(1, 1, 64, 2, 64),
    (2, 128): Config(1, 1, 32, 2, 128),
    (2, 256): Config(1, 1, 32, 2, 256),
    (4, 64): Config(1, 1, 32, 2, 64),
    (4, 128): Config(1, 1, 16, 2, 128),
    (4, 256): Config(1, 1, 16, 2, 256),
    (8, 64): Config(1, 1, 16, 2, 64),
    (8, 128): Config(1, 1, 16, 1, 128),
    (8, 256): Config(1, 1, 16, 1, 128),
}
_BACKWARD_ROWS: Final = {  # dq, and dbias
    (2, 64): Config(4, 2, 32, 2, 64),
    (2, 128): Config(4, 1, 32, 2, 128),
    (2, 256): Config(4, 1, 32, 1, 256),
    (4, 64): Config(4, 1, 32, 2, 64),
    (4, 128): Config(4, 1, 16, 2, 128),
    (4, 256): Config(2, 1, 16, 1, 256),
    (8, 64): Config(2, 1, 16, 2, 64),
    (8, 128): Config(2, 1, 16, 1, 128),
    (8, 256): Config(1, 1, 16, 1, 128),
}
_BACKWARD_COLS: Final = {  # dk and dv
    (2, 64): Config(4, 1, 64, 2, 64),
    (2, 128): Config(4, 1, 32, 2, 128),
    (2, 256): Config(4, 1, 32, 1, 128),
    (4, 64): Config(4, 1, 32, 2, 64),
    (4, 128): Config(4, 1, 16, 2, 128),
    (4, 256): Config(2, 1, 16, 1, 128),
    (8, 64): Config(2, 1, 16, 2, 64),
    (8, 128): Config(2, 1, 16, 1, 64),
    (8, 256): Config(1, 1, 16, 1, 64),
}
_FORWARD_WGMMA: Final = {
    (2, 64): Config(8, 1, 128, 4, 64),
    (2, 128): Config(8, 1, 128, 2, 128),
}
_TABLES: Final = {
    "forward": _FORWARD,
    "forward_wgmma": _FORWARD_WGMMA,
    "forward_tma": _FORWARD_WGMMA,
    "decode": _DECODE,
    "backward_rows": _BACKWARD_ROWS,
    "backward_cols": _BACKWARD_COLS,
    "backward_atomic": _BACKWARD_COLS,
    "dbias": _BACKWARD_ROWS | {(2, 64): Config(4, 1, 32, 1, 64)},
}
_WARPGROUPS: Final = (
    *("device.cuh", "hopper.cuh", "tile/tile.cuh", "tile/softmax.cuh"),
    "tile/warpgroups.cuh",
)
_FILES: Final = {
    "forward": ("device.cuh", "tile/tile.cuh", "tile/softmax.cuh", "tile/forward.cu"),
    "forward_wgmma": (*_WARPGROUPS, "tile/copy_async.cuh", "tile/forward_wgmma.cu"),
    "forward_tma": (*_WARPGROUPS, "tile/copy_tma.cuh", "tile/forward_wgmma.cu"),
    "decode": ("device.cuh", "tile/tile.cuh", "tile/softmax.cuh", "tile/forward.cu", "tile/merge.cu"),
    "backward_rows": ("device.cuh", "tile/tile.cuh", "tile/pairs.cuh", "tile/backward_rows.cu"),
    "backward_cols": ("device.cuh", "tile/tile.cuh", "tile/pairs.cuh", "tile/backward_cols.cu"),
    "backward_atomic": (
        *("device.cuh", "tile/tile.cuh", "tile/pairs.cuh", "tile/backward_dq.cuh"),
        "tile/backward_cols.cu",
    ),
    "dbias": ("device.cuh", "tile/tile.cuh", "tile/pairs.cuh", "tile/backward_bias.cu"),
}

_ON_HOPPER: Final = ("forward_wgmma", "forward_tma")

PARAMS: Final = struct_dtype("tile/tile.cuh", "Params")
_MAPS_AT: Final = -(-PARAMS.itemsize // 64) * 64
#: Arguments of copy_tma.cuh: Params, then three tensor maps.
MAPPED_PARAMS: Final = np.dtype(
    {
        "names": ["p", "maps"],
        "formats": [PARAMS, ("u1", (3, 128))],
        "offsets": [0, _MAPS_AT],
        "itemsize": _MAPS_AT + 3 * 128,
    }
)
MAX_HEAD_DIM: Final = 256
DELTA_WARPS: Final = 4
#: Threads of a block of forward_wgmma.cu that copy.
COPIERS: Final = 128


def fits_wgmma(problem: Problem) -> bool:
    """Whether forward_wgmma.cu takes the problem (on an sm_90)."""
    return problem.dtype.itemsize == 2 and max(problem.head_dim, problem.head_dim_v) <= 128


def tile_shape(problem: Problem, wgmma: bool = False) -> tuple[int, int]:
    """(tile_q, tile_k) that every kernel's blocks and steps divide."""
    if wgmma:
        return 128, 128
    wide = problem.dtype.itemsize > 2 or max(problem.head_dim, problem.head_dim_v) > 128
    return (64 if wide else 128), 64


def padded(dim: int) -> int:
    """``head_dim`` as the kernels see it: the next multiple of 16."""
    return max(16, -(-dim // 16) * 16)


@lru_cache(maxsize=256)
def config(family: str, c_type: str, head_dim: int, head_dim_v: int) -> Config:
    """The table's entry, its accumulator no wider than need be."""
    itemsize = {"f16": 2, "bf16": 2, "float": 4, "double": 8}[c_type]
    dims = padded(head_dim), padded(head_dim_v)
    limit = next(size for size in (64, 128, 256) if max(dims) <= size)
    found = _TABLES[family][itemsize, limit]
    if family in _ON_HOPPER:
        return found
    columns = {"forward": dims[1], "decode": dims[1], "backward_rows": dims[0], "dbias": 16}
    return found._replace(out_cols=min(found.out_cols, columns.get(family, max(dims))))


@lru_cache(maxsize=256)
def specialise(
    family: str,
    c_type: str,
    head_dim: int,
    head_dim_v: int,
    has_bias: bool,
    has_softcap: bool,
    has_dropout: bool,
    paged: bool = False,
) -> Kernel:
    """The source files and macros of one kernel."""
    cut = config(family, c_type, head_dim, head_dim_v)
    wgmma = family in _ON_HOPPER
    wide = cut.out_cols > 64
    if (wgmma and wide and (has_bias or has_dropout)) or (
        family == "forward_tma" and (has_dropout or (wide and has_softcap))
    ):
        # 128 weights a row beside what these need would be more than 232 registers
        cut = cut._replace(step=64, stages=4)
    defines = {
        "T": c_type,
        "HEAD_DIM": cut.out_cols if wgmma else padded(head_dim),  # one or two panels of 64
        "HEAD_DIM_V": cut.out_cols if wgmma else padded(head_dim_v),
        "HAS_BIAS": int(has_bias),
        "HAS_SOFTCAP": int(has_softcap),
        "HAS_DROPOUT": int(has_dropout),
        "PAGED": int(paged),
        "DECODE": int(family == "decode"),
        "ATOMIC_DQ": int(family == "backward_atomic"),
        "WARPS": cut.warps,
        "FRAGS": cut.frags,
        "STEP": cut.step,
        "STAGES": cut.stages,
        "OUT_COLS": cut.out_cols,
    }
    values = tuple((name, str(value)) for name, value in defines.items())
    return Kernel(_FILES[family], values, "a" if wgmma else "")


def kernel_of(family: str, problem: Problem, paged: bool = False) -> tuple[Kernel, Config]:
    """The specialisation for a problem, and how it is cut."""
    c_type = C_TYPES[problem.dtype.name]
    dims = problem.head_dim, problem.head_dim_v
    kernel = specialise(
        family, c_type, *dims, problem.has_bias, problem.softcap > 0, problem.dropout_p > 0, paged
    )
    return kernel, config(family, c_type, *dims)


def _tile_bytes(rows: int, cols: int, itemsize: int) -> int:
    """Bytes of a Tile of tile.cuh."""
    return rows * (cols * itemsize + (32 if itemsize == 8 else 16))


def shared_bytes(family: str, kernel: Kernel, itemsize: int) -> int:
    """Dynamic shared memory of a block."""
    d = dict(kernel.defines)
    dim, dim_v, out_cols, step = (int(d[n]) for n in ("HEAD_DIM", "HEAD_DIM_V", "OUT_COLS", "STEP"))
    block, stages = 16 * int(d["WARPS"]) * int(d["FRAGS"]), int(d["STAGES"])
    if family in _ON_HOPPER:
        return block * dim * 2 + stages * (step * (dim + dim_v) * 2 + 3 * 8 + 4) + 8
    if family in ("forward", "decode"):
        stage = _tile_bytes(step, dim, itemsize) + _tile_bytes(step, out_cols, itemsize)
        return _tile_bytes(block, dim, itemsize) + stages * stage
    both = _tile_bytes(block, dim, itemsize) + _tile_bytes(block, dim_v, itemsize)
    stage = _tile_bytes(step, dim, itemsize) + _tile_bytes(step, dim_v, itemsize)
    if family == "dbias":
        return max(both + stage, block * step * max(itemsize, 4))
    if family in ("backward_cols", "backward_atomic"):
        stage += step * (3 * max(itemsize, 4) + 16)  # the rows' m, 1 / l, delta, lo, hi, r0, r1
    turned = _tile_bytes(step, block, itemsize) if family == "backward_atomic" else 0
    return both + stages * stage + turned


def num_splits(problem: Problem, processors: int) -> int:
    """Parts to cut the keys into, so that about four one-warp blocks run on each multiprocessor."""
    rows = problem.len_q * (problem.heads_q // problem.heads_kv)
    blocks = problem.batch * problem.heads_kv * -(-rows // 16)
    most = max(1, problem.len_k // MIN_PART)
    return max(1, min(most, 4 * processors // max(blocks, 1), 128))


def wants_decode(problem: Problem, plan: TilePlan) -> bool:
    """Whether a call has so few queries that the keys should be split among blocks instead."""
    group = problem.heads_q // problem.heads_kv
    same_list = group == 1 or plan.list_of.shape[1] == 1
    rows = problem.len_q * group
    return same_list and rows <= MAX_DECODE_ROWS and problem.len_q <= plan.tile_q and problem.len_k >= 64


def params_of(problem: Problem, plan: TilePlan, arrays: dict[str, Any]) -> Array:
    """The Params record of one call; ``arrays`` are by field name, strides taken from them."""
    p = np.zeros(1, PARAMS)
    for name in ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim", "head_dim_v"):
        p[name] = getattr(problem, name)
    p["scale"] = problem.scale
    p["softcap"] = problem.softcap
    p["keep_scale"] = 1.0 / (1.0 - problem.dropout_p)
    p["drop_threshold"] = threshold(problem.dropout_p)
    p["seed_lo"], p["seed_hi"] = problem.seed & 0xFFFFFFFF, problem.seed >> 32 & 0xFFFFFFFF
    p["tile_q"], p["tile_k"] = plan.tile_q, plan.tile_k
    p["list_batch"], p["list_heads"] = plan.list_of.shape
    p["num_rows"], p["num_cols"] = plan.row_ptr.shape[1] - 1, plan.col_ptr.shape[1] - 1
    p["has_intervals"] = plan.lo.shape[1] > 0
    p["part_rows"] = problem.batch * problem.heads_q * problem.len_q
    p["num_splits"] = 1
    for name, field in plan._asdict().items():
        if not isinstance(field, int):
            p[name] = pointer(field)
    for name, array in arrays.items():
        if array is not None:
            p[name] = pointer(array)
            if f"{name}_stride" in PARAMS.names:  # type: ignore[operator]
                p[f"{name}_stride"] = _strides(array, 4 if name == "bias" else 3)
    p["aligned_qk"] = _aligned(arrays.get("q"), arrays.get("k"))
    p["aligned_v"] = _aligned(arrays.get("v"), arrays.get("dout"))
    bias = arrays.get("bias")
    if bias is not None:
        p["bias_batch"], p["bias_heads"], p["bias_rows"], p["bias_cols"] = bias.shape
    return p


def _strides(array: Any, count: int) -> list[int]:
    """In elements; 0 along axes of size 1."""
    return [
        0 if size == 1 else stride // array.itemsize
        for size, stride in zip(array.shape[:count], array.strides[:count], strict=True)
    ]


def _aligned(*arrays: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    for x in arrays:
        if x is None:
            continue
        sizes = [
            pointer(x),
            x.shape[-1] * x.itemsize,
            *(stride for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if size > 1),
        ]
        if any(size % 16 for size in sizes):
            return False
    return True


def tma_boxes(problem: Problem, arrays: dict[str, Any], step: int) -> list[Box] | None:
    """What TMA should know of q, k and v; None where it cannot describe them."""
    boxes = []
    for name, rows in (("q", 128), ("k", step), ("v", step)):
        x = arrays[name]
        address, sizes = pointer(x), x.shape[::-1]
        strides, whole = [], -(-x.shape[-1] * x.itemsize // 16) * 16
        for size, stride in zip(x.shape[-2::-1], x.strides[-2::-1], strict=True):
            strides.append(stride if size > 1 else whole)  # that of an axis of one is never used
            whole = max(whole, strides[-1] * size)
        if address % 16 or min(sizes) == 0 or any(s % 16 or not 0 < s < 2**40 for s in strides):
            return None
        boxes.append(Box(address, problem.dtype.name == "bfloat16", tuple(sizes), tuple(strides), rows))
    return boxes


def forward_launches(
    problem: Problem, plan: TilePlan, arrays: dict[str, Any], wgmma: str = ""
) -> list[Launch]:
    """One launch that writes out, m and l.

    ``wgmma``: "1" by forward_wgmma.cu, "tma" with its other copier, where the arrays and the plan allow it.
    """
    if wgmma and plan.tile_q % 128 == plan.tile_k % 128 == 0:
        kernel, cut = kernel_of("forward_wgmma", problem)
        params = params_of(problem, plan, arrays)
        boxes = None
        if wgmma == "tma":
            by_tma, _ = kernel_of("forward_tma", problem)
            boxes = tma_boxes(problem, arrays, int(dict(by_tma.defines)["STEP"]))
        if boxes is not None:
            kernel = by_tma
            mapped = np.zeros(1, MAPPED_PARAMS)
            mapped["p"] = params
            for n, box in enumerate(boxes):
                mapped["maps"][0, n] = np.frombuffer(_cuda.tensor_map(box), np.uint8)
            params = mapped
        grid = problem.batch * problem.heads_q * -(-problem.len_q // cut.block)
        size = shared_bytes("forward_wgmma", kernel, problem.dtype.itemsize)
        return [Launch(kernel, "attention_forward_wgmma", grid, 32 * cut.warps + COPIERS, size, params)]
    kernel, cut = kernel_of("forward", problem)
    params = params_of(problem, plan, arrays)
    chunks = -(-padded(problem.head_dim_v) // cut.out_cols)
    grid = problem.batch * problem.heads_q * chunks * -(-problem.len_q // cut.block)
    size = shared_bytes("forward", kernel, problem.dtype.itemsize)
    return [Launch(kernel, "attention_forward", grid, 32 * cut.warps, size, params)]


def decode_launches(
    problem: Problem,
    plan: TilePlan,
    arrays: dict[str, Any],
    splits: int,
    pages: tuple[int, int] | None = None,
) -> list[Launch]:
    """Two launches: the parts, and what joins them into out, m and l.

    ``arrays`` holds part_out, part_m and part_l too; ``pages`` is (page_size, pages_per_sequence) when k and
    v are (pages, heads_kv, page_size, dim) and arrays has page_table (batch, pages_per_sequence).
    """
    kernel, cut = kernel_of("decode", problem, paged=pages is not None)
    params = params_of(problem, plan, arrays)
    params["num_splits"] = splits
    if pages is not None:
        params["page_size"], params["pages_per_sequence"] = pages
    chunks = -(-padded(problem.head_dim_v) // cut.out_cols)
    rows = problem.len_q * (problem.heads_q // problem.heads_kv)
    grid = splits * problem.batch * problem.heads_kv * chunks * -(-rows // cut.block)
    size = shared_bytes("decode", kernel, problem.dtype.itemsize)
    merge_grid = -(-problem.batch * problem.heads_q * problem.len_q // cut.warps)
    return [
        Launch(kernel, "attention_forward", grid, 32 * cut.warps, size, params),
        Launch(kernel, "attention_merge", merge_grid, 32 * cut.warps, 0, params),
    ]


def part_shapes(problem: Problem, splits: int) -> dict[str, tuple[int, ...]]:
    """The workspace of ``decode_launches``, in accumulation dtype."""
    rows = (splits, problem.batch, problem.heads_q, problem.len_q)
    return {"part_out": (*rows, problem.head_dim_v), "part_m": rows, "part_l": rows}


def fits_atomics(problem: Problem) -> bool:
    """Whether backward_dq.cuh takes the problem: one block has all columns of its keys, float32 sums."""
    return problem.dtype.itemsize <= 4 and max(problem.head_dim, problem.head_dim_v) <= 128


def backward_launches(
    problem: Problem, plan: TilePlan, arrays: dict[str, Any], atomics: bool = False
) -> list[Launch]:
    """Delta and dsinks, then dq by rows, dk and dv by columns, and dbias where there is a bias.

    ``atomics``: dq comes from the pass by columns, added up in arrays["dq_sum"].
    """
    params = params_of(problem, plan, arrays)
    itemsize = problem.dtype.itemsize
    rows_kernel, rows_cut = kernel_of("backward_rows", problem)
    cols_family = "backward_atomic" if atomics else "backward_cols"
    cols_kernel, cols_cut = kernel_of(cols_family, problem)
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    row_threads, col_threads = 32 * rows_cut.warps, 32 * cols_cut.warps

    num_rows = problem.batch * problem.heads_q * problem.len_q
    launches = [
        Launch(rows_kernel, "attention_delta", -(-num_rows // rows_cut.warps), row_threads, 0, params)
    ]
    if problem.has_sinks:
        launches.append(
            Launch(rows_kernel, "attention_dsinks", problem.heads_q, row_threads, 8 * row_threads, params)
        )
    if not atomics:
        grid = problem.batch * problem.heads_q * -(-dims[0] // rows_cut.out_cols)
        grid *= -(-problem.len_q // rows_cut.block)
        size = shared_bytes("backward_rows", rows_kernel, itemsize)
        launches.append(Launch(rows_kernel, "attention_backward_rows", grid, row_threads, size, params))

    grid = problem.batch * problem.heads_kv * -(-max(dims) // cols_cut.out_cols)
    grid *= -(-problem.len_k // cols_cut.block)
    size = shared_bytes(cols_family, cols_kernel, itemsize)
    launches.append(Launch(cols_kernel, "attention_backward_cols", grid, col_threads, size, params))
    if atomics:
        grid = -(-num_rows * problem.head_dim // col_threads)
        launches.append(Launch(cols_kernel, "attention_dq_from_sum", grid, col_threads, 0, params))

    if problem.has_bias and arrays["bias"].shape[3] > 1:  # else kernels.contract.dbias_of_rows
        kernel, cut = kernel_of("dbias", problem)
        bias = arrays["bias"].shape
        grid = bias[0] * bias[1] * (-(-problem.len_q // cut.block) if bias[2] > 1 else 1)
        grid *= -(-problem.len_k // cut.step) if bias[3] > 1 else 1
        size = shared_bytes("dbias", kernel, itemsize)
        launches.append(Launch(kernel, "attention_dbias", grid, 32 * cut.warps, size, params))
    return launches


@lru_cache(maxsize=256)
def largest_shared_bytes(problem: Problem) -> int:
    """What the hungriest kernel of forward and backward asks for."""
    families = ["forward", "decode", "backward_rows", "backward_cols"] + ["dbias"] * problem.has_bias
    return max(shared_bytes(f, kernel_of(f, problem)[0], problem.dtype.itemsize) for f in families)

"""Attention on an NVIDIA GPU: the .cu files of this folder, launched through CuPy.

``cuda_launch`` says what to launch; here arrays and plans are put on the device and the launches on the
current stream of the arrays' device. Nothing is copied back and nothing waits for the GPU.

forward.cu (and merge.cu where few queries meet many keys; forward_wgmma.cu on an sm_90 where
NPATTN_WGMMA asks for it), backward_rows.cu (dq), backward_cols.cu (dk, dv), backward_bias.cu.
Every result is the same bit for bit each time, but dq where NPATTN_CUDA_ATOMICS=1 asks for fewer products.
"""

import threading
from collections import OrderedDict
from typing import Any, Final

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array
from npattn.kernels import _cuda
from npattn.kernels.contract import AttentionGrads, Forward, Problem, dbias_of_rows
from npattn.kernels.tile import cuda_launch
from npattn.plans.tiles import TilePlan

_MAX_PLANS: Final = 64
_plans: OrderedDict[tuple[int, int], tuple[TilePlan, TilePlan]] = OrderedDict()
_plans_lock = threading.Lock()


def supports(problem: Problem) -> str | None:
    """None, or what stands in the way: no CuPy, driver, device, or a shape it has no kernel for."""
    reason = _cuda.why_unavailable()
    if reason is not None:
        return reason
    if problem.dtype.name not in cuda_launch.C_TYPES:
        return f"the CUDA kernels take float16, bfloat16, float32 and float64, not {problem.dtype}"
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > cuda_launch.MAX_HEAD_DIM:
        return f"the CUDA kernels go up to head_dim {cuda_launch.MAX_HEAD_DIM}, got {widest}"
    longest = max(problem.len_q, problem.len_k)
    if longest >= 2**31 - 128 or problem.batch * problem.heads_q * -(-longest // 16) >= 2**31:
        return "a CUDA grid holds less than 2**31 blocks of 16 queries over all heads and batch elements"
    need, limit = cuda_launch.largest_shared_bytes(problem), _cuda.shared_limit(_cuda.current_device())
    if need > limit:
        return (
            f"head_dim {widest} in {problem.dtype} needs {need / 1024:.0f} KiB of shared memory a block, "
            f"this card has {limit / 1024:.0f}"
        )
    return None


def tile_shape(problem: Problem) -> tuple[int, int]:
    """(128, 64) for 16-bit numbers up to head_dim 128, (128, 128) with wgmma, else (64, 64)."""
    return cuda_launch.tile_shape(problem, _wgmma(problem) != "")


def _wgmma(problem: Problem) -> str:
    """Which of the sm_90a kernels the caller asked for (NPATTN_WGMMA=1 or tma), if it can run; else ""."""
    wanted = _cuda.opted_in("NPATTN_WGMMA", "tma")
    if not (wanted and cuda_launch.fits_wgmma(problem)):
        return ""
    return wanted if _cuda.architecture(_cuda.current_device()) == "sm_90" else ""


def forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
) -> Forward:
    """``softmax(scale * q @ k.T) @ v``, with everything the contract lists in between."""
    return _forward(problem, plan, q, k, v, bias, sinks, None)


def reads_pages(problem: Problem, plan: TilePlan, storage: Any) -> bool:
    """Whether ``paged_forward`` computes this call with pages of dtype ``storage``."""
    wide = problem._replace(len_k=max(problem.len_k, 64))  # where pages are read, short sequences are too
    return storage == problem.dtype and cuda_launch.wants_decode(wide, plan)


def paged_forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> Forward:
    """``forward`` with keys and values in pages, for few queries a sequence (decoding).

    Parameters
    ----------
    problem : Problem
        len_q times heads_q / heads_kv at most 64; len_k is that of the longest sequence (a mask such as
        ``Padding`` ends the others).
    plan : TilePlan
        Equal for all heads of a group.
    q : (batch, heads_q, len_q, head_dim) array
    key_pages, value_pages : (num_pages, heads_kv, page_size, head_dim or head_dim_v) array
    page_table : (batch, pages_per_sequence) int32 array
        Page of keys 0 .. page_size - 1, page_size .. and so on; entries behind the last key are not read.
    bias, sinks : array, optional
        As in ``forward``.

    Returns
    -------
    Forward

    Raises
    ------
    ValueError
        When there are too many queries, or page_table is not int32 or too short.
    """
    page_size, pages = key_pages.shape[2], page_table.shape[1]
    if not reads_pages(problem, plan, key_pages.dtype):
        raise ValueError(
            f"paged attention takes up to {cuda_launch.MAX_DECODE_ROWS} queries times heads of a group and "
            f"one mask for all heads; got len_q={problem.len_q}, heads_q={problem.heads_q}, "
            f"heads_kv={problem.heads_kv}: gather the pages and call forward"
        )
    if page_table.dtype.name != "int32" or pages * page_size < problem.len_k:
        raise ValueError(
            f"page_table must be int32 and cover len_k={problem.len_k} keys; got {page_table.dtype} and "
            f"{pages} pages of {page_size}"
        )
    return _forward(problem, plan, q, key_pages, value_pages, bias, sinks, page_table)


def _forward(
    problem: Problem,
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
    page_table: Array | None,
) -> Forward:
    for array in (q, k, v):
        _cuda.require_gpu_array(array)
    xp, acc = array_module(q), accumulation_dtype(problem.dtype)
    with _cuda.device_of(q):
        k, v = k.astype(problem.dtype, copy=False), v.astype(problem.dtype, copy=False)
        rows = (problem.batch, problem.heads_q, problem.len_q)
        arrays: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "bias": None if bias is None else bias.astype(acc, copy=False),
            "sinks": None if sinks is None else xp.ascontiguousarray(sinks.astype(acc, copy=False)),
            "out": xp.empty((*rows, problem.head_dim_v), problem.dtype),
            "rest": xp.empty((*rows, problem.head_dim_v), problem.dtype) if _keeps_rest(problem) else None,
            "m": xp.empty(rows, acc),
            "l": xp.empty(rows, acc),
        }
        plan = _on_device(plan, q)
        if page_table is not None or cuda_launch.wants_decode(problem, plan):
            splits = cuda_launch.num_splits(problem, _cuda.processors(_cuda.current_device()))
            for name, shape in cuda_launch.part_shapes(problem, splits).items():
                arrays[name] = xp.empty(shape, acc)
            pages = None
            if page_table is not None:
                arrays["page_table"] = xp.ascontiguousarray(page_table)
                pages = (k.shape[2], page_table.shape[1])
            launches = cuda_launch.decode_launches(problem, plan, arrays, splits, pages)
        else:
            launches = cuda_launch.forward_launches(problem, plan, arrays, _wgmma(problem))
        _cuda.run(launches)
    return Forward(arrays["out"], arrays["m"], arrays["l"], arrays["rest"])


def _keeps_rest(problem: Problem) -> bool:
    """Only 16-bit results lose what delta would miss."""
    return problem.keeps_rest and problem.dtype.itemsize == 2


def backward(
    problem: Problem,
    plan: TilePlan,
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    m: Array,
    l: Array,
    bias: Array | None,
    sinks: Array | None,
    rest: Array | None = None,
) -> AttentionGrads:
    """The transposed formula: seven matrix products instead of five, and no atomics.

    With NPATTN_CUDA_ATOMICS=1 five, where there is a kernel for it; the last bits of dq then differ by run.
    """
    for array in (dout, q, k, v, out):
        _cuda.require_gpu_array(array)
    xp, acc = array_module(q), accumulation_dtype(problem.dtype)
    with _cuda.device_of(q):
        if bias is not None:
            bias = bias.astype(acc, copy=False)
        if sinks is not None:
            sinks = xp.ascontiguousarray(sinks.astype(acc, copy=False))
        if dlse is not None:
            dlse = xp.ascontiguousarray(dlse.astype(acc, copy=False))
        arrays: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "bias": bias,
            "sinks": sinks,
            "out": out,
            "rest": None if rest is None else xp.ascontiguousarray(rest),
            "m": xp.ascontiguousarray(m),
            "l": xp.ascontiguousarray(l),
            "dout": dout,
            "dlse": dlse,
            "dq": xp.empty(q.shape, problem.dtype),
            "dk": xp.empty(k.shape, problem.dtype),
            "dv": xp.empty(v.shape, problem.dtype),
            "dbias": None if bias is None else xp.empty(bias.shape, acc),
            "dsinks": None if sinks is None else xp.empty(sinks.shape, acc),
            "delta": xp.empty(m.shape, acc),
            "absmax": xp.zeros(1, "float32"),
        }
        atomics = _uses_atomics(problem)
        if atomics:
            arrays["dq_sum"] = xp.zeros(q.shape, acc)
        _cuda.run(cuda_launch.backward_launches(problem, _on_device(plan, q), arrays, atomics))
        if bias is not None and bias.shape[3] == 1:
            rows = (arrays[name] for name in ("m", "l", "delta", "dlse", "sinks"))
            arrays["dbias"][...] = dbias_of_rows(bias.shape, *rows)
    return AttentionGrads(arrays["dq"], arrays["dk"], arrays["dv"], arrays["dbias"], arrays["dsinks"])


def _uses_atomics(problem: Problem) -> bool:
    """Whether the caller asked for the backward pass with atomic additions and it can run here."""
    if not (_cuda.opted_in("NPATTN_CUDA_ATOMICS") and cuda_launch.fits_atomics(problem)):
        return False
    kernel, _ = cuda_launch.kernel_of("backward_atomic", problem)
    need = cuda_launch.shared_bytes("backward_atomic", kernel, problem.dtype.itemsize)
    return need <= _cuda.shared_limit(_cuda.current_device())


def _on_device(plan: TilePlan, like: Array) -> TilePlan:
    """The plan with its arrays on the device of ``like``; the last used ones are kept there."""
    xp = array_module(like)
    key = (id(plan), _cuda.current_device())
    with _plans_lock:
        found = _plans.get(key)
        if found is not None and found[0] is plan:
            _plans.move_to_end(key)
            return found[1]
    moved = plan._replace(
        **{name: xp.asarray(field) for name, field in plan._asdict().items() if not isinstance(field, int)}
    )
    with _plans_lock:
        _plans[key] = (plan, moved)  # the plan itself is kept too, so that its id stays its own
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    return moved


__all__ = ["backward", "forward", "paged_forward", "reads_pages", "supports", "tile_shape"]

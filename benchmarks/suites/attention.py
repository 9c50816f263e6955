"""Attention: npattn's Numba kernels beside PyTorch, onnxruntime and JAX, float32, on the named cases.

A suite is a module in this folder with

- ``WORKLOADS``: names, in the order of the table; ``QUICK``: those of ``--quick``;
- ``CONTENDERS``: name -> function(workload) that returns a function without arguments to be timed, or None
  where it cannot do the workload. The first is ours. Contenders import their library inside; each runs in a
  process of its own;
- ``is_right(workload, result)``: whether a contender's result is right, asked before any time is taken;
- ``limit(workload, peak, bandwidth)``: (GFLOP to be done, seconds at the machine's limit).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.testing import bench
from npattn.testing.cases import Case, case, cases

_GROUPS = ("long", "small", "tiny", "decode", "window")


def _workloads() -> list[str]:
    names = []
    for entry in cases(*_GROUPS):
        names.append(f"{entry.name} | forward")
        if entry.group not in ("tiny", "decode"):
            names.append(f"{entry.name} | forward + backward")
    for name in ("1,8,4096,64 full", "1,8,4096,64 causal", "1,8,4096,128 full"):
        names += [f"{name} bfloat16 | forward", f"{name} bfloat16 | forward + backward"]
    names += [f"{name} float16 | forward" for name in ("1,8,4096,64 full",)]
    return names


WORKLOADS = _workloads()
QUICK = [
    f"{name} | {direction}"
    for name in bench.QUICK
    for direction in ("forward", "forward + backward")
    if f"{name} | {direction}" in WORKLOADS
]


def _parse(workload: str) -> tuple[Case, Any, str]:
    name, direction = workload.split(" | ")
    dtype: Any = np.float32
    if name.endswith(" bfloat16"):
        import ml_dtypes

        name, dtype = name.removesuffix(" bfloat16"), ml_dtypes.bfloat16
    if name.endswith(" float16"):
        name, dtype = name.removesuffix(" float16"), np.float16
    return case(name), dtype, direction


def is_right(workload: str, result: Any) -> bool:
    """On some rows of some heads, against float64."""
    entry, dtype, _ = _parse(workload)
    return bench.is_right(entry, result, dtype, 1e-4 if dtype is np.float32 else 3e-2)


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """Multiply-adds at the float32 peak, or for decoding the reading of keys and values."""
    entry, _, direction = _parse(workload)
    flops, read = bench.work(entry, direction)
    return flops / 1e9, read / bandwidth if bench.is_memory_bound(entry) else flops / peak


def npattn_numba(workload: str) -> Callable[[], Any] | None:
    """Ours."""
    entry, dtype, direction = _parse(workload)
    return bench.call(entry, direction, dtype, "numba")


def pytorch(workload: str) -> Callable[[], Any] | None:
    """scaled_dot_product_attention and its autograd."""
    entry, dtype, direction = _parse(workload)
    if entry.group == "window" or not _is_plain(entry):
        return None  # a dense mask of 65,536 x 65,536 takes 20 GiB
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(_threads())
    arguments = entry.arguments(dtype)
    kind = {np.float32: torch.float32, np.float16: torch.float16}.get(dtype, torch.bfloat16)
    q, k, v = (
        torch.from_numpy(arguments[name].astype(np.float32)).to(kind) for name in ("query", "key", "value")
    )
    options = {"is_causal": entry.mask is not None, "enable_gqa": q.shape[1] != k.shape[1]}
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return scaled_dot_product_attention(q, k, v, **options)

        return lambda: forward().float().numpy() if dtype is not np.float32 else forward().numpy()
    dout = np.random.default_rng(1).standard_normal((*q.shape[:-1], v.shape[-1])).astype(dtype)
    cotangent = torch.from_numpy(dout.astype(np.float32)).to(kind)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def both() -> Any:
        out = scaled_dot_product_attention(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, cotangent)
        return [tensor.detach().float().numpy() for tensor in (out, *grads)]

    def run() -> Any:
        out, *grads = both()
        return out, grads

    return run


def onnxruntime(workload: str) -> Callable[[], Any] | None:
    """The MultiHeadAttention operator, (batch, length, heads * head_dim)."""
    entry, dtype, direction = _parse(workload)
    if direction != "forward" or dtype is not np.float32 or entry.group in ("window", "decode"):
        return None
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    arguments = entry.arguments(np.float32)
    feeds = {}
    inputs = []
    for name in ("query", "key", "value"):
        array = arguments[name]
        batch, heads, length, dim = array.shape
        feeds[name] = np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(batch, length, heads * dim)
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(feeds[name].shape)))
    causal = int(entry.mask is not None)
    node = helper.make_node(
        "MultiHeadAttention", list(feeds), ["out"], domain="com.microsoft", num_heads=entry.heads_q,
        unidirectional=causal,
    )  # fmt: skip
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, list(feeds["query"].shape))
    graph = helper.make_graph([node], "attention", inputs, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = _threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = (entry.batch, entry.len_q, entry.heads_q, entry.head_dim)
    return lambda: session.run(None, feeds)[0].reshape(shape).transpose(0, 2, 1, 3)


def jax(workload: str) -> Callable[[], Any] | None:
    """jax.nn.dot_product_attention, jitted."""
    entry, dtype, direction = _parse(workload)
    if dtype is not np.float32 or entry.group in ("window", "decode") or entry.len_q > 4096:
        return None
    import jax as library

    arguments = entry.arguments(np.float32)
    # (batch, length, heads, head_dim)
    arrays = [
        library.numpy.asarray(arguments[name].transpose(0, 2, 1, 3)) for name in ("query", "key", "value")
    ]
    causal = entry.mask is not None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return library.nn.dot_product_attention(q, k, v, is_causal=causal)

    if direction == "forward":
        function = library.jit(attend)
        return lambda: np.asarray(function(*arrays).block_until_ready()).transpose(0, 2, 1, 3)
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    dout = np.random.default_rng(1).standard_normal(shape).astype(np.float32).transpose(0, 2, 1, 3)

    @library.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        out, pullback = library.vjp(attend, q, k, v)
        return out, pullback(dout)

    def run() -> Any:
        out, grads = library.block_until_ready(both(*arrays))
        return np.asarray(out).transpose(0, 2, 1, 3), [np.asarray(g).transpose(0, 2, 1, 3) for g in grads]

    return run


def _is_plain(entry: Case) -> bool:
    """Whether is_causal says the mask (PyTorch aligns at the top left: the same for equal lengths)."""
    return entry.mask is None or (entry.len_q == entry.len_k and "causal" in entry.name)


@lru_cache(maxsize=1)
def _threads() -> int:
    import npattn

    return npattn.get_num_threads()


CONTENDERS = {"npattn": npattn_numba, "PyTorch": pytorch, "onnxruntime": onnxruntime, "JAX": jax}

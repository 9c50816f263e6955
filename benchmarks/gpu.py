"""Is it right, and how fast, on the GPU at hand: one run, under ten minutes, the table last.

    python benchmarks/gpu.py                 check every kernel, then time beside PyTorch's SDPA
    python benchmarks/gpu.py --only check    (or: time)
    python benchmarks/gpu.py --compile       registers and shared memory of every kernel; needs no GPU
    python benchmarks/gpu.py --model         the same program on the CPU model of tests/cuda_host, small sizes

No time is printed for a kernel whose check failed. PyTorch is used where it is installed with CUDA. The run's
table, with card and date, belongs into docs/performance.md.
"""

import argparse
import contextlib
import datetime
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from npattn import attention, attention_vjp, masks  # noqa: E402
from npattn.graph import Adjacency, graph_attention_vjp  # noqa: E402
from npattn.kernels import _cuda  # noqa: E402
from npattn.kernels.edge import cuda_launch as edge_launch  # noqa: E402
from npattn.kernels.tile import cuda_launch  # noqa: E402
from npattn.testing import cases  # noqa: E402

ARRAYS = ("query", "key", "value", "bias", "sinks")
#: Norm of the error over norm of the result; float16 and bfloat16 round the result and the weights.
LIMITS = {"float64": 1e-13, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


class Variant(NamedTuple):
    """What an environment variable asks for instead of the default; checked and timed beside it."""

    name: str
    variable: str
    value: str
    timed: str  # the pass it changes
    itemsize: int  # of the widest dtype it takes
    repeats: bool  # whether results are the same bits every time

    def asked(self) -> Any:
        """A block in which it is asked for."""
        return environment(**{self.variable: self.value})


DEFAULT = Variant("", "", "", "", 8, True)


def variants() -> list[Variant]:
    """Those this card has."""
    atomics = Variant("atomics", "NPATTN_CUDA_ATOMICS", "1", "forward + backward", 4, False)
    wgmma = Variant("wgmma", "NPATTN_WGMMA", "1", "forward", 2, True)
    tma = wgmma._replace(name="wgmma with TMA", value="tma")
    return [wgmma, tma, atomics] if has_wgmma() else [atomics]


def bfloat16() -> Any:
    """The dtype, where ml_dtypes is installed."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def relative(actual: Any, exact: Any) -> float:
    """|actual - exact| / |exact|; inf when NaN or inf are not where they should be."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    if (
        not np.array_equal(actual[~finite], exact[~finite], equal_nan=True)
        or not np.isfinite(actual[finite]).all()
    ):
        return np.inf
    size = np.linalg.norm(exact[finite])
    return float(np.linalg.norm(actual[finite] - exact[finite]) / (size if size > 1e-9 else 1.0))


# ---------------------------------------------------------------------------------------------------- checks


def probe(
    cp: Any, run: Any, entry: str, a: Any, b: Any, d: Any, is_bf16: bool = False, hopper: int = 0
) -> Any:
    """``d`` after one block of a probe; ``hopper``: threads of a block of hopper_probes.cu."""
    defines = (("IS_BF16", str(int(is_bf16))),)
    if hopper:
        files: tuple[str, ...] = ("device.cuh", "hopper.cuh", "../../benchmarks/hopper_probes.cu")
        kernel = _cuda.Kernel(files, defines, "a")
    else:
        kernel = _cuda.Kernel(("device.cuh", "../../benchmarks/gpu_probes.cu"), defines)
    a, b, d = (None if x is None else cp.asarray(x) for x in (a, b, d))
    params = np.zeros(1, [("a", "u8"), ("b", "u8"), ("d", "u8")])
    params["a"], params["d"] = _cuda.pointer(a), _cuda.pointer(d)
    params["b"] = 0 if b is None else _cuda.pointer(b)
    threads, shared = (hopper, 48 << 10) if hopper else (32, 512)
    run([_cuda.Launch(kernel, entry, 1, threads, shared, params)])
    return cp.asnumpy(d)


def probes(cp: Any, run: Any) -> list[tuple[str, float, float]]:
    """Each wrapper of device.cuh alone: (name, error, limit)."""
    rng = np.random.default_rng(0)
    found = []
    launch = partial(probe, cp, run)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    d = launch("probe_mma_f16", a.view(np.uint16), b.view(np.uint16), np.full((16, 8), np.nan, np.float32))
    found.append(("mma f16", relative(d, a.astype(float) @ b.astype(float)), 1e-6))
    a, b = rng.integers(-8, 8, (16, 16)).astype(np.float32), rng.integers(-8, 8, (16, 8)).astype(np.float32)
    upper = [np.ascontiguousarray((x.view(np.uint32) >> 16).astype(np.uint16)) for x in (a, b)]
    d = launch("probe_mma_f16", *upper, np.full((16, 8), np.nan, np.float32), True)
    found.append(("mma bf16", relative(d, a.astype(float) @ b), 0.0))
    a, b = rng.integers(-99, 99, (16, 8)).astype(np.float32), rng.integers(-99, 99, (8, 8)).astype(np.float32)
    d = launch("probe_mma_tf32", a, b, np.full((16, 8), np.nan, np.float32))
    found.append(("mma tf32", relative(d, a.astype(float) @ b), 0.0))
    a, b = rng.standard_normal((8, 4)), rng.standard_normal((4, 8))
    d = launch("probe_mma_f64", a, b, np.full((8, 8), np.nan))
    found.append(("mma f64", relative(d, a @ b), 1e-15))
    a = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    d = launch("probe_ldmatrix", a, None, np.zeros((2, 4, 8, 8), np.uint16))
    found.append(("ldmatrix, cp.async", relative(d, np.stack([a, a.swapaxes(1, 2)])), 0.0))
    a = (rng.standard_normal(32) * 4).astype(np.float32)
    d = launch("probe_convert", a, None, np.full((5, 32), np.nan, np.float32))
    bits = a.view(np.uint32).astype(np.uint64)
    rounded = [
        ((bits + (1 << n - 1) - 1 + (bits >> n & 1)) >> n << n).astype(np.uint32).view(np.float32)
        for n in (16,)
    ]
    tf32 = ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)
    half = a.astype(np.float16).astype(np.float32)
    found.append(("conversions", relative(d[[0, 1, 2, 4]], np.stack([half, *rounded, tf32, half])), 0.0))
    found.append(("exp2", relative(d[3], np.exp2(a.astype(float))), 5e-7))
    return found


def hopper_probes(cp: Any, run: Any) -> list[tuple[str, float, float]]:
    """Each wrapper of hopper.cuh alone."""
    rng = np.random.default_rng(0)
    found = []
    numbers = rng.integers(-8, 8, (192, 128)).astype(np.float32)  # exact in either dtype
    exact_a, exact_b = numbers[:64].astype(float), numbers[64:].astype(float)
    for name, is_bf16 in (("f16", False), ("bf16", True)):
        upper = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        bits = np.ascontiguousarray(upper if is_bf16 else numbers.astype(np.float16).view(np.uint16))
        for entry, exact in (("rows", exact_a @ exact_b.T), ("into", exact_a @ exact_b)):
            d = np.full((64, 128), np.nan, np.float32)
            d = probe(cp, run, f"probe_wgmma_{entry}", bits[:64], bits[64:], d, is_bf16, 128)
            found.append((f"wgmma_{entry} {name}", relative(d, exact), 0.0))
    handed = numbers[:3, :64].copy()
    d = probe(cp, run, "probe_mbarrier", handed, None, np.zeros((3, 64), np.float32), False, 256)
    found.append(("mbarrier, named barriers, registers", relative(d, handed[:, ::-1]), 0.0))
    return found


def tma_probe(cp: Any, run: Any) -> list[tuple[str, float, float]]:
    """One box of an array whose last rows and columns it leaves."""
    array = np.arange(3 * 2 * 40 * 72, dtype=np.float32).astype(np.float16).reshape(3, 2, 40, 72)
    wanted = np.zeros((32, 64), np.float16)
    wanted[:30, :8] = array[2, 1, 10:, 64:]
    a, d = cp.asarray(array), cp.asarray(np.full((32, 64), np.nan, np.float16))
    box = _cuda.Box(_cuda.pointer(a), False, array.shape[::-1], array.strides[2::-1], 32)
    params = np.zeros(
        1, {"names": ["d", "map"], "formats": ["u8", ("u1", 128)], "offsets": [16, 64], "itemsize": 192}
    )
    params["d"] = _cuda.pointer(d)
    params["map"][0] = np.frombuffer(_cuda.tensor_map(box), np.uint8)
    files = ("device.cuh", "hopper.cuh", "../../benchmarks/hopper_probes.cu")
    kernel = _cuda.Kernel(files, (("IS_BF16", "0"),), "a")
    run([_cuda.Launch(kernel, "probe_tma", 1, 32, 8192, params)])
    return [("TMA", relative(cp.asnumpy(d), wanted), 0.0)]


def has_wgmma() -> bool:
    """Whether the sm_90a kernels run on this card."""
    return _cuda.architecture(_cuda.current_device()) == "sm_90"


@contextlib.contextmanager
def environment(**variables: str) -> Any:
    """Environment variables set for the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def both_passes(arguments: dict[str, Any], cotangents: Any, move: Any, back: Any, backend: str) -> list[Any]:
    """[out, lse, the five gradients], brought back to the CPU."""
    moved = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    (out, lse), pullback = attention_vjp(**moved, return_lse=True, backend=backend)
    dout, dlse = cotangents(out.shape, lse.shape)
    grads = pullback(move(dout), move(dlse))
    return [None if x is None else back(x) for x in (out, lse, *grads)]


def check_attention(cp: Any, small: bool, variant: Variant = DEFAULT) -> list[tuple[str, float, float]]:
    """The shared table of cases in every dtype, forward and backward, against the oracle in float64.

    In the dtypes that ``variant`` takes.
    """
    chosen = cases("shapes", "masks", "features")
    if small:
        chosen = [entry for entry in chosen if entry.name in ("gqa, causal", "one query")]
    found = []
    for dtype in (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), bfloat16()):
        if dtype is None or dtype.itemsize > variant.itemsize:
            continue
        worst, where = 0.0, ""
        for entry in chosen:
            if max(entry.head_dim, entry.head_dim_v or 0) > cuda_launch.MAX_HEAD_DIM:
                continue
            arguments = entry.arguments(dtype)

            def cotangents(out: Any, lse: Any, dtype: Any = dtype) -> Any:
                rng = np.random.default_rng(1)
                acc = np.float64 if dtype == np.float64 else np.float32
                return rng.standard_normal(out).astype(dtype), rng.standard_normal(lse).astype(acc)

            wide = {n: x.astype(np.float64) if n in ARRAYS else x for n, x in arguments.items()}
            exact = both_passes(
                wide,
                lambda out, lse, c=cotangents: [x.astype(np.float64) for x in c(out, lse)],
                np.asarray,
                np.asarray,
                "oracle",
            )
            first = both_passes(arguments, cotangents, cp.asarray, cp.asnumpy, "cupy")
            again = both_passes(arguments, cotangents, cp.asarray, cp.asnumpy, "cupy")
            for name, x, y, z in zip(
                ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), first, exact, again, strict=True
            ):
                if x is None or y.size <= 1:
                    continue
                same_bits = x.tobytes() == z.tobytes() or not variant.repeats
                error = relative(x, y) if same_bits else np.inf
                if error > worst:
                    worst, where = error, f"{entry.name}: {name}"
        found.append((f"{variant.name} attention {dtype.name} (worst: {where})", worst, LIMITS[dtype.name]))
    return found


def check_long(cp: Any, small: bool, variant: Variant = DEFAULT) -> list[tuple[str, float, float]]:
    """Many steps a row, more than any pipeline has stages: causal, and a window that ends the rows early."""
    rng = np.random.default_rng(4)
    length = 700 if small else 3000
    found = []
    for dim, mask in ((64, masks.Causal()), (128, masks.Window(300, 300))):
        q, k, v = (rng.standard_normal((1, 2, length, dim)).astype(np.float16) for _ in range(3))
        exact = attention(*(x.astype(np.float64) for x in (q, k, v)), mask=mask, backend="numpy")
        out = cp.asnumpy(attention(*map(cp.asarray, (q, k, v)), mask=mask, backend="cupy"))
        found.append((f"{variant.name} {length} keys, head_dim {dim}, float16", relative(out, exact), 1e-3))
    return found


def check_masked(cp: Any, variant: Variant = DEFAULT) -> list[tuple[str, float, float]]:
    """NaN in what is masked changes nothing; long rows through many tiles."""
    rng = np.random.default_rng(2)
    found = []
    for dtype in (np.float32, np.float16):
        if np.dtype(dtype).itemsize > variant.itemsize:
            continue
        q, k, v = (rng.standard_normal((1, 2, 333, 64)).astype(dtype) for _ in range(3))
        mask = masks.Causal() & masks.Padding(np.array([200]))
        dout = rng.standard_normal(q.shape).astype(dtype)
        results = []
        for fill in (0.0, np.nan):
            k[:, :, 200:] = v[:, :, 200:] = fill
            out, pullback = attention_vjp(*map(cp.asarray, (q, k, v)), mask=mask, backend="cupy")
            results.append([cp.asnumpy(x) for x in (out, *pullback(cp.asarray(dout))[:3])])
        change = max(relative(x, y) for x, y in zip(*results, strict=True))
        if variant.repeats:
            change = 0.0 if all(x.tobytes() == y.tobytes() for x, y in zip(*results, strict=True)) else np.inf
        found.append(
            (f"{variant.name} masked NaN {np.dtype(dtype).name}", change, 0.0 if variant.repeats else 1e-3)
        )
    return found


def check_graph(cp: Any) -> list[tuple[str, float, float]]:
    """graph_attention with a hub, both passes."""
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, 400, 6000), rng.integers(0, 400, 6000)
    target[:2500] = 7
    graph = Adjacency.from_edges(source, target, 400)
    found = []
    for dtype, limit in ((np.float32, 3e-6), (np.float16, 3e-3)):
        q, k, v, dout = (rng.standard_normal((400, 8, 16)).astype(dtype) for _ in range(4))
        exact, pullback = graph_attention_vjp(*(x.astype(float) for x in (q, k, v)), graph, backend="numpy")
        wanted = [exact, *pullback(dout.astype(float))[:3]]
        out, pullback = graph_attention_vjp(*map(cp.asarray, (q, k, v)), graph, backend="cupy")
        worst = max(
            relative(cp.asnumpy(x), y)
            for x, y in zip([out, *pullback(cp.asarray(dout))[:3]], wanted, strict=True)
        )
        found.append((f"graph attention {np.dtype(dtype).name}", worst, limit))
    return found


# ---------------------------------------------------------------------------------------------------- timing


class Clock:
    """Median milliseconds of a call, by CUDA events (by the wall clock on the CPU model)."""

    def __init__(self, cp: Any, is_model: bool) -> None:
        self.cp, self.is_model = cp, is_model

    def __call__(self, call: Any, repeat: int = 15) -> float:
        """Call it once to warm up, then time it."""
        call()
        times = []
        for _ in range(2 if self.is_model else repeat):
            if self.is_model:
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
                continue
            begin, end = self.cp.cuda.Event(), self.cp.cuda.Event()
            begin.record()
            for _ in range(4):
                call()
            end.record()
            end.synchronize()
            times.append(self.cp.cuda.get_elapsed_time(begin, end) / 4)
        return float(np.median(times))


def torch_with_cuda() -> Any:
    """PyTorch, or None where it is missing or sees no GPU."""
    try:
        import torch
    except Exception:
        return None
    return torch if torch.cuda.is_available() else None


def time_torch(
    torch: Any, shape: tuple[int, ...], causal: bool, dtype: str, backend: str, backward: bool
) -> float | None:
    """Milliseconds of PyTorch's SDPA by one of its backends; None where it refuses."""
    from torch.nn import attention as sdpa

    try:
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=backward)
            for _ in range(3)
        )
        dout = torch.randn_like(q)

        def call() -> None:
            with sdpa.sdpa_kernel([getattr(sdpa.SDPBackend, backend)]):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            if backward:
                torch.autograd.grad(out, (q, k, v), dout)

        for _ in range(3):
            call()
        times = []
        for _ in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(4):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 4)
        return float(np.median(times))
    except Exception as error:
        print(f"  PyTorch {backend}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return None


def time_attention(cp: Any, clock: Clock, small: bool, right: list[Variant]) -> list[str]:
    """Forward, and forward + backward, beside PyTorch's backends and the variants that are right."""
    torch = torch_with_cuda()
    gains: dict[Variant, list[float]] = {}
    default_ms = np.nan
    lines = [
        "| batch, heads, length, head_dim | dtype | mask | pass | ms | TFLOP/s | flash | cuDNN | efficient |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    shapes = [
        (4, 16, 4096, 128),
        (4, 16, 4096, 64),
        (1, 16, 16384, 128),
        (16, 16, 1024, 128),
        (2, 8, 4096, 256),
    ]
    if small:
        shapes = [(1, 1, 128, 64)]
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float16", "float32"):
        kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
        if kind is None:
            continue
        for shape in shapes if dtype != "float32" else shapes[:2]:
            q, k, v, dout = (
                cp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(kind)) for _ in range(4)
            )
            for causal in (False, True):
                mask = masks.Causal() if causal else None
                usable = [v for v in right if kind.itemsize <= v.itemsize and shape[-1] <= 128]
                both = ("forward", "forward + backward")
                passes = [(t, x) for t in both for x in [DEFAULT, *(u for u in usable if u.timed == t)]]
                for timed, variant in passes:
                    backward = timed == "forward + backward"

                    def call(
                        backward: bool = backward, mask: Any = mask, q: Any = q, k: Any = k, v: Any = v
                    ) -> None:
                        _, pullback = attention_vjp(q, k, v, mask=mask, backend="cupy")
                        if backward:
                            pullback(dout)  # noqa: B023

                    with variant.asked() if variant is not DEFAULT else contextlib.nullcontext():
                        ms = clock(call)
                    if variant is DEFAULT:
                        default_ms = ms
                    else:
                        gains.setdefault(variant, []).append(default_ms / ms)
                    b, h, length, dim = shape
                    flops = (
                        4.0 * b * h * length**2 * dim * (0.5 if causal else 1.0) * (3.5 if backward else 1.0)
                    )
                    peers = ["", "", ""]
                    if variant is not DEFAULT:
                        peers[0] = f"{default_ms / ms:.2f} x the default"
                    elif torch is not None:
                        peer_names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
                        timed = [time_torch(torch, shape, causal, dtype, x, backward) for x in peer_names]
                        peers = ["" if t is None else f"{t:.3f} ms ({t / ms:.2f} x)" for t in timed]
                    lines.append(
                        f"| {', '.join(map(str, shape))} | {dtype} | {'causal' if causal else 'full'} | "
                        f"{timed}{', ' + variant.name if variant.name else ''} | {ms:.3f} | "
                        f"{flops / ms / 1e9:.1f} | "
                        f"{' | '.join(peers)} |"
                    )
                    print(lines[-1], flush=True)
    for variant, ratios in gains.items():
        gain = float(np.exp(np.mean(np.log(ratios))))
        advice = f"set {variant.variable}={variant.value} on this card" if gain > 1.02 else "leave it off"
        lines.append(f"\n{variant.name}: right in every check, {gain:.2f} x the default's speed: {advice}.")
    return lines


def time_memory_bound(cp: Any, clock: Clock, small: bool) -> list[str]:
    """A large copy, decoding, graph attention: in gigabytes a second."""
    lines = ["| work | ms | GB/s |", "| --- | --- | --- |"]
    rng = np.random.default_rng(0)
    size = 2**16 if small else 2**30
    source, target = cp.zeros(size, np.uint8), cp.empty(size, np.uint8)
    ms = clock(lambda: target.__setitem__(slice(None), source))
    lines.append(f"| copy of {size >> 20} MiB | {ms:.3f} | {2 * size / ms / 1e6:.0f} |")
    for batch, length in ((1, 300),) if small else ((1, 131072), (16, 16384), (64, 4096)):
        q = cp.asarray(rng.standard_normal((batch, 32, 1, 128)).astype(np.float16))
        k, v = (cp.zeros((batch, 8, length, 128), np.float16) for _ in range(2))
        k += cp.asarray(rng.standard_normal((1, 8, length, 128)).astype(np.float16))
        v += cp.asarray(rng.standard_normal((1, 8, length, 128)).astype(np.float16))
        ms = clock(lambda q=q, k=k, v=v: attention_vjp(q, k, v, backend="cupy"))
        lines.append(
            f"| decode {batch}, 32 on 8 heads, {length} keys, 128, float16 | {ms:.3f} | "
            f"{2 * k.nbytes / ms / 1e6:.0f} |"
        )
    nodes, edges = (300, 2000) if small else (13752, 491722)
    graph = Adjacency.from_edges(rng.integers(0, nodes, edges), rng.integers(0, nodes, edges), nodes)
    q, k, v = (cp.asarray(rng.standard_normal((nodes, 8, 16)).astype(np.float32)) for _ in range(3))
    gathered = 2 * edges * 8 * 16 * 4
    ms = clock(lambda: graph_attention_vjp(q, k, v, graph, backend="cupy"))
    lines.append(
        f"| graph, {nodes} nodes, {edges} edges, 8 x 16, forward | {ms:.3f} | "
        f"{gathered / ms / 1e6:.0f} gathered |"
    )
    ms = clock(lambda: graph_attention_vjp(q, k, v, graph, backend="cupy")[1](q))
    lines.append(f"| graph, forward + backward | {ms:.3f} | |")
    print("\n".join(lines[2:]), flush=True)
    return lines


# ---------------------------------------------------------------------------------------------- compile table


def compile_table(architectures: list[str]) -> list[str]:
    """Registers, stack, spills and shared memory of the kernels, as NVRTC makes them; needs no GPU."""
    lines = [
        "| kernel | dtype | head_dim | features | registers "
        + "".join(f"{a} / " for a in architectures).rstrip("/ ")
        + " | shared memory | spills |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    bytes_of = {"f16": 2, "bf16": 2, "float": 4, "double": 8}
    families = (
        "forward",
        "forward_wgmma",
        "forward_tma",
        "decode",
        "backward_rows",
        "backward_cols",
        "backward_atomic",
        "dbias",
    )
    for family in families:
        widths, dims = (2, 4, 8), (64, 128, 256)
        if family in ("forward_wgmma", "forward_tma"):
            widths, dims = (2,), (64, 128)  # type: ignore[assignment]
        if family == "backward_atomic":
            widths, dims = (2, 4), (64, 128)  # type: ignore[assignment]
        for c_type in (t for t, size in bytes_of.items() if size in widths and t != "bf16"):
            for dim in dims:
                for features in (False, True):
                    kernel = cuda_launch.specialise(family, c_type, dim, dim, *(features,) * 3)
                    named = {
                        "decode": "forward",
                        "forward_tma": "forward_wgmma",
                        "backward_atomic": "backward_cols",
                    }
                    entry = f"attention_{named.get(family, family)}"
                    shared = cuda_launch.shared_bytes(family, kernel, bytes_of[c_type])
                    what = [family, c_type, str(dim), "all" if features else "none"]
                    lines.append(_row(kernel, entry, architectures, what, shared))
                    print(lines[-1], flush=True)
    for direction, entries in (
        ("forward", ["edge_forward"]),
        ("backward", ["edge_backward_rows", "edge_backward_cols"]),
    ):
        for score in ("dot", "additive", "dynamic"):
            cut = edge_launch.cut_of(4, 8, 1 if score == "additive" else 16, 16)
            kernel = edge_launch.specialise(direction, score, "float", cut, True, score == "dot", True, False)
            for entry in entries:
                lines.append(_row(kernel, entry, architectures, [entry, "float", "8 x 16", score], 0))
                print(lines[-1], flush=True)
    return lines


def _row(kernel: _cuda.Kernel, entry: str, architectures: list[str], what: list[str], shared: int) -> str:
    registers, spills = [], 0
    for arch in architectures:
        if kernel.variant and not arch.endswith(kernel.variant):
            registers.append("–")
            continue
        _, log = _cuda.compile_cubin(_cuda.source_text(kernel), arch, ("--ptxas-options=-v",))
        found = next(r for r in _cuda.resources(log) if r.entry == entry)
        registers.append(str(found.registers))
        spills += found.spills + found.stack
    return f"| {' | '.join(what)} | {' / '.join(registers)} | {shared / 1024:.1f} KiB | {spills} |"


def report(found: list[tuple[str, float, float]]) -> int:
    """Print one line a check; how many failed."""
    failed = 0
    for name, error, limit in found:
        is_right = error <= limit
        failed += not is_right
        print(
            f"{'ok   ' if is_right else 'WRONG'} {name.strip()}: error {error:.1e}, limit {limit:.0e}",
            flush=True,
        )
    return failed


def main() -> int:
    """Run what was asked for; 0 when every check passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["check", "time"])
    parser.add_argument("--compile", action="store_true", help="registers and shared memory; needs no GPU")
    parser.add_argument("--arch", default="sm_80,sm_90,sm_90a", help="architectures of --compile")
    parser.add_argument(
        "--model", action="store_true", help="on the CPU model of tests/cuda_host, small sizes"
    )
    options = parser.parse_args()
    if options.compile:
        compile_table(options.arch.split(","))
        return 0
    with contextlib.ExitStack() as stack:
        if options.model:
            sys.path.insert(0, str(ROOT / "tests"))
            from cuda_host import fake_cupy

            cp = stack.enter_context(fake_cupy.installed())
            card = "CPU model of a GPU (times mean nothing)"
        else:
            reason = _cuda.why_unavailable()
            if reason is not None:
                print(f"no GPU to run on: {reason}")
                return 2
            import cupy as cp

            card = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        right = variants()
        if options.only != "time":
            found = [
                *probes(cp, _cuda.run),
                *check_masked(cp),
                *check_attention(cp, options.model),
                *check_long(cp, options.model),
                *check_graph(cp),
            ]
            failed = report(found)
            if failed:
                print(f"{failed} of {len(found)} checks failed: nothing is timed")
                return 1
            for variant in variants():
                found = hopper_probes(cp, _cuda.run) if variant.variable == "NPATTN_WGMMA" else []
                found += tma_probe(cp, _cuda.run) if variant.value == "tma" else []
                with variant.asked():
                    found += check_masked(cp, variant) + check_attention(cp, options.model, variant)
                    found += check_long(cp, options.model, variant)
                if report(found):
                    print(f"{variant.name} is wrong on this card: leave {variant.variable} unset")
                    right.remove(variant)
        if options.only != "check":
            clock = Clock(cp, options.model)
            tables = [
                time_attention(cp, clock, options.model, right),
                time_memory_bound(cp, clock, options.model),
            ]
            print(f"\n{card}, {datetime.date.today()}, numpy {np.__version__}\n")
            print("\n\n".join("\n".join(table) for table in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Timing attention against the machine's limits: what ``npattn bench`` and benchmarks/run.py share.

A speed is stated beside two limits measured in the same run: the peak of the vector units and the bandwidth
of a large copy. Machines are shared, so every time is the best of several.
"""

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn import _threads
from npattn.functional.attention import attention, attention_vjp
from npattn.testing.cases import Case, case

QUICK = (
    "1,8,1024,64 full",
    "1,8,1024,64 causal",
    "1,8,4096,64 causal",
    "8,12,128,64 full",
    "32,12,64,32 full",
    "1,1,16,64 full",
    "decode",
    "window 512",
)
"""The cases of ``npattn bench``: about a minute on two cores."""


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> str:
    """One line: processor, threads, vector width, versions."""
    parts = [processor(), f"{_threads.get_num_threads()} threads", f"Python {platform.python_version()}"]
    parts.append(f"NumPy {np.__version__}")
    try:
        import numba

        from npattn.kernels._simd import _host

        parts.insert(2, f"{_host.WIDTH} float32 lanes ({_host.CPU_NAME})")
        parts.append(f"Numba {numba.__version__}")
    except ImportError:
        parts.append("no Numba")
    return ", ".join(parts)


def copy_bandwidth(seconds: float = 0.5) -> float:
    """Bytes read per second while all threads copy arrays far larger than the caches (and are written)."""
    threads = _threads.get_num_threads()
    source = np.ones((threads, 16 << 20), np.float32)
    target = np.empty_like(source)
    target.fill(0)
    best = 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or best == 0.0:
        start = time.perf_counter()
        _threads.run(lambda n: np.copyto(target[n], source[n]), list(range(threads)))
        best = max(best, source.nbytes / (time.perf_counter() - start))
    return best


def best_time(function: Callable[[], Any], seconds: float = 0.5, at_least: int = 3) -> float:
    """The shortest of as many runs as fit into ``seconds``, ``at_least`` some; in seconds."""
    best = float("inf")
    runs = 0
    begin = time.perf_counter()
    while runs < at_least or time.perf_counter() - begin < seconds:
        inner = max(1, int(2e-4 / best)) if best < 1e-4 else 1
        start = time.perf_counter()
        for _ in range(inner):
            function()
        best = min(best, (time.perf_counter() - start) / inner)
        runs += 1
        if time.perf_counter() - begin > 10 * seconds:
            break
    return best


def call(entry: Case, direction: str, dtype: Any = np.float32, backend: str = "auto") -> Callable[[], Any]:
    """A function without arguments that does what is timed: "forward" or "forward + backward"."""
    arguments = entry.arguments(dtype)
    if direction == "forward":
        return lambda: attention(**arguments, backend=backend)
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    dout = np.random.default_rng(1).standard_normal(shape).astype(dtype)

    def both() -> Any:
        out, pullback = attention_vjp(**arguments, backend=backend)
        return out, pullback(dout)

    return both


def work(entry: Case, direction: str) -> tuple[float, float]:
    """(floating-point operations, bytes that must be read) of one call; backward counts 2.5 forwards."""
    flops = entry.flops * (1.0 if direction == "forward" else 3.5)
    heads_kv = entry.heads_kv or entry.heads_q
    width = entry.head_dim + (entry.head_dim_v or entry.head_dim)
    return flops, 4.0 * entry.batch * heads_kv * entry.len_k * width


def is_memory_bound(entry: Case) -> bool:
    """Whether reading the keys and values is the limit: few queries against many keys."""
    return entry.group == "decode"


def bench(seconds: float = 60.0, write: Callable[[str], Any] = sys.stdout.write) -> None:
    """Time the quick cases here and now, in about ``seconds``, and write a table.

    Each case is first checked against float64 on a few rows; a wrong one gets no time.
    """
    try:
        from npattn.kernels.tile.numba_cpu._peak import fma_peak

        peak = fma_peak()
    except ImportError:
        peak = float("nan")
    bandwidth = copy_bandwidth()
    write(f"{machine()}\n")
    write(f"limits: {peak / 1e9:.0f} GFLOP/s of float32 multiply-adds, {bandwidth / 1e9:.1f} GB/s copied\n")
    write(f"{'case':24s} {'direction':20s} {'ms':>9s} {'GFLOP/s':>8s} {'of limit':>9s}\n")
    share = seconds / (2 * len(QUICK)) / 3
    for name in QUICK:
        entry = case(name)
        for direction in ("forward", "forward + backward"):
            if entry.group in ("tiny", "decode") and direction != "forward":
                continue
            function = call(entry, direction)
            if not is_right(entry, function()):
                write(f"{name:24s} {direction:20s}     wrong result\n")
                continue
            elapsed = best_time(function, share)
            flops, read = work(entry, direction)
            limit = read / bandwidth if is_memory_bound(entry) else flops / peak
            write(
                f"{name:24s} {direction:20s} {elapsed * 1e3:9.3f} {flops / elapsed / 1e9:8.0f} "
                f"{limit / elapsed:8.0%}\n"
            )


def is_right(entry: Case, result: Any, dtype: Any = np.float32, tolerance: float = 1e-4) -> bool:
    """Whether a result of ``call`` (any contender's, as arrays) agrees with float64 on some rows.

    The output is compared in the first, a middle and the last rows of the first and last head; with a
    backward pass (result = (out, gradients)) so is dQ, and dK and dV are compared through the identity
    sum(dk * k) = sum(dq * q), which holds for every softmax, and sum(dv * v) = sum(dout * out).
    """
    arguments = entry.arguments(dtype)
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    grads = None
    out = result
    if isinstance(result, tuple):
        out, grads = result[0], result[1]
    out = np.asarray(out)
    if out.shape != (*q.shape[:-1], v.shape[-1]):
        return False
    scale = arguments.get("scale", q.shape[-1] ** -0.5)
    rows = sorted({0, q.shape[2] // 2, q.shape[2] - 1})
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(dtype) if grads is not None else None
    columns = np.arange(k.shape[2])
    for b, h in {(0, 0), (q.shape[0] - 1, q.shape[1] - 1)}:
        g = h // (q.shape[1] // k.shape[1])
        for i in rows:
            logits = scale * k[b, g].astype(np.float64) @ q[b, h, i].astype(np.float64)
            if entry.mask is not None:
                logits[~_visible(entry, b, h, i, columns)] = -np.inf
            p = np.exp(logits - logits.max())
            p /= p.sum()
            exact = p @ v[b, g].astype(np.float64)
            if not _close(out[b, h, i], exact, tolerance):
                return False
            if grads is not None and dout is not None:
                dp = v[b, g].astype(np.float64) @ dout[b, h, i].astype(np.float64)
                ds = p * (dp - dout[b, h, i] @ exact)
                if not _close(np.asarray(grads[0])[b, h, i], scale * ds @ k[b, g], 10 * tolerance):
                    return False
    if grads is not None and dout is not None:
        dq, dk, dv = (np.asarray(gradient).astype(np.float64) for gradient in grads[:3])
        for left, right in (((dk, k), (dq, q)), ((dv, v), (dout, out))):
            a = float(np.vdot(left[0], left[1].astype(np.float64)))
            b_ = float(np.vdot(right[0].astype(np.float64), right[1].astype(np.float64)))
            size = float(
                np.linalg.norm(right[0].astype(np.float64)) * np.linalg.norm(right[1].astype(np.float64))
            )
            if abs(a - b_) > tolerance * max(size, 1e-30):
                return False
    return True


def _visible(entry: Case, b: int, h: int, i: int, columns: Any) -> Any:
    from npattn.masks.base import Extent

    mask: Any = entry.mask
    extent = Extent(entry.batch, entry.heads_q, entry.len_q, entry.len_k)
    return np.broadcast_to(
        mask.allowed(extent, np.int64(b), np.int64(h), np.int64(i), columns), columns.shape
    )


def _close(ours: Any, exact: Any, tolerance: float) -> bool:
    error = np.abs(np.asarray(ours).astype(np.float64) - exact).max(initial=0.0)
    return bool(error <= tolerance * max(1e-3, float(np.abs(exact).max(initial=0.0))))


__all__ = ["QUICK", "bench", "best_time", "call", "copy_bandwidth", "is_right", "machine", "work"]

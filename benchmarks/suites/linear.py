"""Linear attention against attention, and the statistics of attention, by length.

Time of ``linear_attention`` grows with the length: each row of the table takes about four times the one of a
quarter of its length. ``attention_stats`` is beside the attention it describes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import npattn
from npattn.masks import Causal

_HEADS, _DIM = 8, 64
WORKLOADS = [
    *(f"linear_attention, causal, L {length} | forward" for length in (1024, 4096, 16384, 65536)),
    *(f"linear_attention, causal, L {length} | forward + backward" for length in (1024, 4096, 16384)),
    *(f"attention_stats, causal, L {length} | forward" for length in (1024, 4096, 16384)),
    *(f"attention_stats with top 8, causal, L {length} | forward" for length in (4096,)),
]
QUICK = [name for name in WORKLOADS if "L 4096" in name]


def _arrays(workload: str) -> list[Any]:
    length = int(workload.split(" L ")[1].split(" ")[0])
    return list(np.random.default_rng(0).standard_normal((3, 1, _HEADS, length, _DIM), np.float32))


def is_right(workload: str, result: Any) -> bool:
    """Finite, and for statistics: the received mass is the number of queries."""
    if isinstance(result, npattn.AttentionStats):
        return bool(np.allclose(result.received.sum(-1), result.entropy.shape[-1], rtol=1e-4))
    out = result[0] if isinstance(result, tuple) else result
    return bool(np.isfinite(out).all())


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """Multiply-adds at the float32 peak: those of the formula for linear, of q·kᵀ once for statistics."""
    length = int(workload.split(" L ")[1].split(" ")[0])
    if workload.startswith("linear"):
        flops = 2.0 * _HEADS * length * _DIM * _DIM * 2
    else:
        flops = _HEADS * length * length * _DIM * 1.0
    flops *= 3.0 if "backward" in workload else 1.0
    return flops / 1e9, flops / peak


def ours(workload: str) -> Callable[[], Any]:
    """What the workload names."""
    q, k, v = _arrays(workload)
    if workload.startswith("attention_stats"):
        top_k = 8 if "top 8" in workload else 0
        return lambda: npattn.attention_stats(q, k, mask=Causal(), top_k=top_k)
    if "backward" not in workload:
        return lambda: npattn.linear_attention(q, k, v, causal=True)

    def both() -> Any:
        out, pullback = npattn.linear_attention_vjp(q, k, v, causal=True)
        return out, pullback(v)

    return both


def attention(workload: str) -> Callable[[], Any] | None:
    """Softmax attention of the same size."""
    q, k, v = _arrays(workload)
    if q.shape[2] > 16384:
        return None
    if "backward" not in workload:
        return lambda: npattn.attention(q, k, v, mask=Causal())

    def both() -> Any:
        out, pullback = npattn.attention_vjp(q, k, v, mask=Causal())
        return out, pullback(v)

    return both


CONTENDERS = {"npattn": ours, "attention": attention}

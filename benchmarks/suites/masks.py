"""Sparse masks: what they cost beside the same number of pairs without a mask, and beside all pairs.

Every workload names its density. "as many pairs" is full attention of the same queries over so many keys that
the number of pairs is that of the mask: the price of holes is the ratio to it. "all pairs" is what attention
without the mask takes, at lengths where that is bearable.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from npattn import masks
from npattn.testing import bench
from npattn.testing.cases import Case

_ALL_PAIRS_UP_TO = 16384


@lru_cache(maxsize=1)
def _cases() -> dict[str, tuple[Case, str]]:
    """Workload -> (case, direction)."""
    found = {}
    for length in (16384, 65536):
        kinds = {
            "causal": masks.Causal(),
            "window 512": masks.Window(511),
            "documents of 1,024, causal": masks.Documents([1024] * (length // 1024), causal=True),
            "longformer(256, 4)": masks.longformer(256, [0, 1, 2, length // 2]),
            "bigbird(64, 3, 2, 3)": masks.bigbird(64, 3, 2, 3, seed=0),
            "dilated(128, 4)": masks.Dilated(128, 4),
            "local_strided(512, 128)": masks.local_strided(512, 128),
        }
        for name, mask in kinds.items():
            if length > _ALL_PAIRS_UP_TO and name == "causal":
                continue
            entry = Case(f"{name}, L {length:,}", "sparse", 1, 2, length, length, 64, mask=mask)
            density = mask.density(length, length)
            for direction in ("forward", "forward + backward"):
                found[f"{entry.name}, density {density:.2%} | {direction}"] = (entry, direction)
    return found


WORKLOADS = list(_cases())
QUICK = [name for name in WORKLOADS if "16,384" in name and "backward" not in name]


def is_right(workload: str, result: Any) -> bool:
    """Ours on some rows against float64; the yardsticks are other problems."""
    entry, _ = _cases()[workload]
    out = result[0] if isinstance(result, tuple) else result
    if _YARDSTICK in result_owner:
        return bool(out.shape[2] == entry.len_q)
    return bench.is_right(entry, result)


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """Multiply-adds of the visible pairs at the float32 peak."""
    entry, direction = _cases()[workload]
    assert entry.mask is not None
    flops = 4.0 * entry.heads_q * entry.head_dim * entry.mask.density(entry.len_q, entry.len_k)
    flops *= entry.len_q * entry.len_k * (1.0 if direction == "forward" else 3.5)
    return flops / 1e9, flops / peak


_YARDSTICK = "yardstick"
result_owner: set[str] = set()  # each contender has a process of its own, which says here what it is


def npattn_numba(workload: str) -> Callable[[], Any]:
    """Ours."""
    entry, direction = _cases()[workload]
    return bench.call(entry, direction, backend="numba")


def as_many_pairs(workload: str) -> Callable[[], Any]:
    """No mask, fewer keys."""
    result_owner.add(_YARDSTICK)
    entry, direction = _cases()[workload]
    assert entry.mask is not None
    keys = max(1, round(entry.len_k * entry.mask.density(entry.len_q, entry.len_k)))
    return bench.call(replace(entry, mask=None, len_k=keys), direction, backend="numba")


def all_pairs(workload: str) -> Callable[[], Any] | None:
    """No mask, all keys."""
    result_owner.add(_YARDSTICK)
    entry, direction = _cases()[workload]
    if entry.len_q > _ALL_PAIRS_UP_TO:
        return None
    return bench.call(replace(entry, mask=None), direction, backend="numba")


CONTENDERS = {"npattn": npattn_numba, "as many pairs": as_many_pairs, "all pairs": all_pairs}

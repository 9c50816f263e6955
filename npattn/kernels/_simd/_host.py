"""How wide this processor's vectors are and how many registers hold them.

``NPATTN_VECTOR_WIDTH`` (16, 8 or 4: lanes of float32) overrides the width, so that every path is tested on
one machine. float64 vectors have half as many lanes.
"""

import os

import llvmlite.binding as llvm
import numba


def _features() -> set[str]:
    if numba.config.CPU_FEATURES is not None:
        listed = numba.config.CPU_FEATURES.split(",")
        return {name[1:] for name in listed if name.startswith("+")}
    try:
        return {name for name, there in llvm.get_host_cpu_features().items() if there}
    except RuntimeError:  # LLVM does not know this processor
        return set()


def _width() -> int:
    forced = os.environ.get("NPATTN_VECTOR_WIDTH", "")
    if forced:
        if forced not in ("4", "8", "16"):
            raise ValueError(f"NPATTN_VECTOR_WIDTH must be 4, 8 or 16 (lanes of float32), got {forced!r}")
        return int(forced)
    if "avx512f" in CPU_FEATURES:
        return 16
    return 8 if {"avx2", "fma"} <= CPU_FEATURES else 4


CPU_NAME: str = numba.config.CPU_NAME or llvm.get_host_cpu_name()
CPU_FEATURES = frozenset(_features())
IS_X86 = llvm.get_process_triple().startswith(("x86_64", "i686", "i386"))
WIDTH = _width()
"""Lanes of float32 in one vector."""
HAS_FMA = not IS_X86 or "fma" in CPU_FEATURES or "avx512f" in CPU_FEATURES
HAS_SCALEF = IS_X86 and WIDTH == 16 and "avx512f" in CPU_FEATURES
HAS_HALF = not IS_X86 or "f16c" in CPU_FEATURES or "avx512f" in CPU_FEATURES
HAS_RINT = not IS_X86 or "sse4.1" in CPU_FEATURES or "avx" in CPU_FEATURES or "avx512f" in CPU_FEATURES
# before LLVM 16 (numba < 0.62) the intrinsics of bf16 had other operand types
HAS_BF16_DOT = IS_X86 and WIDTH == 16 and "avx512bf16" in CPU_FEATURES and llvm.llvm_version_info[0] >= 16
TILE_ROWS = 6
TILE_VECTORS = 4 if (WIDTH == 16 or not IS_X86) else 2
"""The register tile of the matmul: 6 x 4 vectors with 32 registers, 6 x 2 with 16 (see matmul.py)."""


def lanes(bits: int) -> int:
    """Lanes of one vector of ``bits``-wide floats."""
    return WIDTH * 32 // bits

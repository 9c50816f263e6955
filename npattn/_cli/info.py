"""``npattn info``: what this installation can do, and why it cannot do the rest."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import npattn
from npattn.kernels.contract import Problem
from npattn.kernels.edge.contract import EdgeProblem
from npattn.kernels.select import EDGE, TILE, load

PACKAGES = ("numpy", "scipy", "numba", "llvmlite", "networkx", "threadpoolctl", "ml_dtypes", "matplotlib")
GPU_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def info() -> None:
    """Print versions, processor, threads and backends."""
    print(f"npattn {npattn.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("packages   " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    gpu = [f"{name} {_version(name)}" for name in GPU_PACKAGES if _version(name) != "missing"]
    print("cupy       " + (", ".join(gpu) or "missing"))
    print(f"processor  {_processor()}")
    print(f"vectors    {_vectors()}")
    print(f"threads    {npattn.get_num_threads()} (npattn.set_num_threads, NPATTN_NUM_THREADS)")
    problem = Problem(
        *(np.dtype(np.float32), 1, 1, 1, 16, 16, 64, 64),
        scale=0.125,
        softcap=0.0,
        has_bias=False,
        has_sinks=False,
        dropout_p=0.0,
        seed=0,
    )
    edges = EdgeProblem(
        *("dot", np.dtype(np.float32), 2, 2, 1, 1, 16, 16),
        scale=0.25,
        softcap=0.0,
        negative_slope=0.2,
        has_bias=False,
        edge_dim=0,
        dropout_p=0.0,
        seed=0,
    )
    print("backends   attention")
    for name, path in TILE.items():
        module, reason = load(path)
        print(f"             {name:<7}{reason or module.supports(problem) or 'usable'}")
    print("           graph attention")
    for name, path in EDGE.items():
        module, reason = load(path)
        print(f"             {name:<7}{reason or module.supports(edges) or 'usable'}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _processor() -> str:
    if sys.platform.startswith("linux"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _vectors() -> str:
    """Width of the explicit vectors in the CPU kernels and the processor features that decide it."""
    module, reason = load("npattn.kernels._simd._host")
    if reason is not None:
        return f"none: {reason}"
    wanted = ("avx2", "fma", "avx512f", "avx512bf16", "f16c", "neon", "sve")
    present = [name for name in wanted if name in module.CPU_FEATURES]
    return f"{module.WIDTH} float32 ({module.CPU_NAME}: {' '.join(present)})"

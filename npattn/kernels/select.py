"""Which module computes a call: (problem, device, backend) -> implementation, and why the others do not.

``backend="auto"`` takes the first in order of speed that can be imported and supports the problem; a named
backend is used or raises with its reason. Nothing is replaced silently.
"""

from functools import cache
from importlib import import_module
from typing import Any, Final

#: Fastest first; a module is imported when it is first considered.
TILE: Final = {
    "cupy": "npattn.kernels.tile.cupy_cuda",
    "numba": "npattn.kernels.tile.numba_cpu",
    "numpy": "npattn.kernels.tile.numpy_tiled",
    "oracle": "npattn.kernels.oracle",
}
EDGE: Final = {
    "cupy": "npattn.kernels.edge.cupy_cuda",
    "numba": "npattn.kernels.edge.numba_cpu",
    "numpy": "npattn.kernels.edge.numpy_segment",
}
STATS: Final = {
    "numba": "npattn.kernels.stats.numba_cpu",
    "numpy": "npattn.kernels.stats.numpy_tiled",
}
_GPU_ONLY: Final = ("cupy",)
_CPU_ONLY: Final = ("numba",)
_INSTALL: Final = {
    "numba": "pip install numba",
    "cupy": "pip install cupy-cuda12x or cupy-cuda13x, for the CUDA version of the driver",
}


class BackendError(ValueError, RuntimeError):
    """The named backend cannot compute this call; the message says why."""


def select(family: dict[str, str], problem: Any, on_gpu: bool, backend: str) -> Any:
    """The implementation module for ``problem``.

    Parameters
    ----------
    family : dict
        ``TILE``, ``EDGE`` or ``STATS``: backend name -> module, fastest first.
    problem : Problem
        Passed to each module's ``supports``.
    on_gpu : bool
        Whether the arrays are CuPy's.
    backend : str
        "auto" or a name in ``family``.

    Raises
    ------
    ValueError
        Unknown backend, or (as BackendError) one that cannot be used for this call.
    TypeError
        A backend for the other device.
    """
    if backend == "auto":
        for name in family:
            if name not in (_CPU_ONLY if on_gpu else _GPU_ONLY):
                module, reason = load(family[name])
                if reason is None and module.supports(problem) is None:
                    return module
        raise BackendError(f"no backend supports this call: {'; '.join(reasons(family, problem))}")

    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    if backend not in family:
        raise ValueError(f"unknown backend {backend!r}; there are {', '.join(map(repr, ('auto', *family)))}")
    module, reason = load(family[backend])
    reason = reason or module.supports(problem)
    if backend in _GPU_ONLY and not on_gpu:
        hint = f" (and here it could not run: {reason})" if reason else ""
        raise TypeError(
            f"backend={backend!r} computes on the GPU, but the arrays are NumPy arrays: move them with "
            f"cupy.asarray(x), or leave backend='auto'.{hint}"
        )
    if backend in _CPU_ONLY and on_gpu:
        raise TypeError(
            f"backend={backend!r} computes on the CPU, but the arrays are CuPy arrays: move them with "
            "cupy.asnumpy(x), or leave backend='auto'."
        )
    if reason is not None:
        raise BackendError(f"backend={backend!r} cannot compute this call: {reason}")
    return module


def reasons(family: dict[str, str], problem: Any) -> list[str]:
    """One "name: reason" for each backend that cannot compute ``problem``."""
    lines = []
    for name, path in family.items():
        module, reason = load(path)
        reason = reason or module.supports(problem)
        if reason is not None:
            lines.append(f"{name}: {reason}")
    return lines


@cache
def load(path: str) -> tuple[Any, str | None]:
    """(module, None), or (None, why it cannot be imported)."""
    try:
        return import_module(path), None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "npattn"):
            return None, f"{error}"
        return None, f"{package} is not installed ({_INSTALL.get(package, f'pip install {package}')})"
    except Exception as error:  # a broken or incompatible installation must not take the other backends along
        return None, f"importing it failed with {type(error).__name__}: {error}"


__all__ = ["EDGE", "STATS", "TILE", "BackendError", "load", "reasons", "select"]

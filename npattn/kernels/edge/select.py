"""Which edge implementation computes a problem: the first that supports it, or the named one, or an error."""

import importlib
from typing import Any, Final

from npattn.kernels.edge.contract import EdgeImplementation, EdgeProblem

#: Backend name -> module, in the order "auto" asks them.
CPU_BACKENDS: Final = {
    "numba": "npattn.kernels.edge.numba_cpu",
    "numpy": "npattn.kernels.edge.numpy_segment",
}
GPU_BACKENDS: Final = {"cupy": "npattn.kernels.edge.cupy_cuda"}


def edge_implementation(problem: EdgeProblem, backend: str, on_gpu: bool) -> EdgeImplementation:
    """The module that will compute ``problem``.

    Parameters
    ----------
    problem : EdgeProblem
    backend : str
        "auto", "numba", "numpy" or "cupy".
    on_gpu : bool
        Whether the arrays are CuPy's.

    Returns
    -------
    module : EdgeImplementation

    Raises
    ------
    ValueError
        When the name is unknown, when the named backend cannot compute the problem, or when none can; the
        message holds every backend's reason.
    """
    table = GPU_BACKENDS if on_gpu else CPU_BACKENDS
    if backend not in ("auto", *CPU_BACKENDS, *GPU_BACKENDS):
        raise ValueError(f"backend must be 'auto', 'numba', 'numpy' or 'cupy', got {backend!r}")
    if backend != "auto" and backend not in table:
        kind, fix = ("CuPy", "cupy.asnumpy(x)") if on_gpu else ("NumPy", "cupy.asarray(x)")
        raise ValueError(f"backend={backend!r} does not take {kind} arrays; move them with {fix}")
    reasons = []
    for name in table if backend == "auto" else [backend]:
        module, reason = _load(table[name])
        if module is not None:
            reason = module.supports(problem)
            if reason is None:
                chosen: EdgeImplementation = module
                return chosen
        reasons.append(f"{name}: {reason}")
    raise ValueError("no backend can compute this graph attention. " + "; ".join(reasons))


def _load(name: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        return None, f"it could not be imported ({error})"


__all__ = ["edge_implementation"]

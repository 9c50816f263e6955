"""Attention without a deep-learning framework.

A *mask* says which query may see which key. A *plan* lists those pairs in the order a machine wants. A
*kernel* walks a plan. Everything above is ordinary array code.

Every name below is loaded on first use, so that ``import npattn`` costs little more than ``import numpy`` and
works where numba, scipy, networkx, cupy or matplotlib are missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npattn import analysis as analysis
    from npattn import cache as cache
    from npattn import functional as functional
    from npattn import graph as graph
    from npattn import io as io
    from npattn import masks as masks
    from npattn import models as models
    from npattn import nn as nn
    from npattn import optim as optim
    from npattn import plots as plots
    from npattn import testing as testing
    from npattn._threads import get_num_threads as get_num_threads
    from npattn._threads import set_num_threads as set_num_threads
    from npattn.functional.attention import attention as attention
    from npattn.functional.attention import attention_vjp as attention_vjp
    from npattn.functional.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from npattn.functional.graph_attention import GraphAttentionGrads as GraphAttentionGrads
    from npattn.functional.graph_attention import edge_softmax as edge_softmax
    from npattn.functional.graph_attention import edge_softmax_vjp as edge_softmax_vjp
    from npattn.functional.graph_attention import graph_attention as graph_attention
    from npattn.functional.graph_attention import graph_attention_vjp as graph_attention_vjp
    from npattn.functional.linear_attention import LinearAttentionGrads as LinearAttentionGrads
    from npattn.functional.linear_attention import LinearAttentionState as LinearAttentionState
    from npattn.functional.linear_attention import linear_attention as linear_attention
    from npattn.functional.linear_attention import linear_attention_step as linear_attention_step
    from npattn.functional.linear_attention import linear_attention_vjp as linear_attention_vjp
    from npattn.functional.merge import merge_attention as merge_attention
    from npattn.functional.merge import merge_attention_vjp as merge_attention_vjp
    from npattn.functional.statistics import AttentionStats as AttentionStats
    from npattn.functional.statistics import attention_stats as attention_stats
    from npattn.functional.varlen import varlen_attention as varlen_attention
    from npattn.functional.varlen import varlen_attention_vjp as varlen_attention_vjp
    from npattn.functional.weights import attention_weights as attention_weights
    from npattn.kernels.contract import AttentionGrads as AttentionGrads

__version__ = "0.1.0"

_MODULES = (
    *("analysis", "cache", "functional", "graph", "io", "masks"),
    *("models", "nn", "optim", "plots", "testing"),
)
_FUNCTIONS = (
    "AttentionGrads",
    "AttentionStats",
    "GraphAttentionGrads",
    "LinearAttentionGrads",
    "LinearAttentionState",
    "attention",
    "attention_stats",
    "attention_vjp",
    "attention_weights",
    "edge_softmax",
    "edge_softmax_vjp",
    "graph_attention",
    "graph_attention_vjp",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
    "merge_attention",
    "merge_attention_vjp",
    "scaled_dot_product_attention",
    "varlen_attention",
    "varlen_attention_vjp",
)
_HOME = {
    **dict.fromkeys(_FUNCTIONS, "npattn.functional"),
    **dict.fromkeys(("get_num_threads", "set_num_threads"), "npattn._threads"),
}

__all__ = [*_MODULES, *_HOME]


def __getattr__(name: str) -> Any:
    """Load ``name`` on first use (PEP 562)."""
    if name in _MODULES:
        return import_module(f"npattn.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'npattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

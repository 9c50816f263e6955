"""Graph attention beside PyTorch Geometric, float32, 8 heads of 16; and beside reading the rows at all.

Workloads are "<graph> <layer> | <direction>". The graphs are made here, degrees following a power law: one
the size of Amazon Computers (13,752 nodes, 491,722 edges), one of 200,000 nodes and 2,000,000 edges. The
variable NPATTN_GRAPH adds a third: the path of an npz with ``edge_index`` (2, num_edges).

``gather`` is no contender but a bound: it reads one key and one value row per edge and adds them up, with the
same threads; 1 / its ratio is the share of that bound.

    python benchmarks/suites/graph.py       prints peak memory of each workload, ours and PyTorch Geometric's
"""

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

HEADS, DIM = 8, 16
GRAPHS = ["computers-like", "power law"]
if os.environ.get("NPATTN_GRAPH"):
    GRAPHS.insert(0, os.path.splitext(os.path.basename(os.environ["NPATTN_GRAPH"]))[0])
DIRECTIONS = ["forward", "forward + backward"]
WORKLOADS = [
    f"{g} {layer} | {d}" for g in GRAPHS for layer in ("dot", "GATConv", "GATv2Conv") for d in DIRECTIONS
]
QUICK = [w for w in WORKLOADS if w.startswith("computers-like")]


@lru_cache(maxsize=1)
def edges(name: str) -> tuple[np.ndarray, int]:
    """(2, num_edges) and the number of nodes."""
    if name not in ("computers-like", "power law"):
        with np.load(os.environ["NPATTN_GRAPH"]) as data:
            edge_index = data["edge_index"].astype(np.int64)
        return edge_index, int(edge_index.max()) + 1
    num_nodes, num_edges = (13_752, 491_722) if name == "computers-like" else (200_000, 2_000_000)
    rng = np.random.default_rng(0)
    chance = (np.arange(num_nodes) + 10.0) ** -0.8
    ends = rng.choice(num_nodes, size=(2, num_edges), p=chance / chance.sum())
    return rng.permutation(num_nodes)[ends], num_nodes


@lru_cache(maxsize=1)
def arrays(name: str) -> dict[str, np.ndarray]:
    """Inputs of all layers on one graph."""
    num_nodes = edges(name)[1]
    rng = np.random.default_rng(1)
    shapes = dict.fromkeys(("query", "key", "value", "dout"), (num_nodes, HEADS, DIM))
    shapes |= {
        "x": (num_nodes, HEADS * DIM),
        "w": (HEADS * DIM, HEADS * DIM),
        "w_r": (HEADS * DIM, HEADS * DIM),
    }
    shapes |= {"a": (1, HEADS, DIM), "b": (1, HEADS, DIM)}
    made = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name in ("w", "w_r"):
        made[name] /= np.float32(np.sqrt(HEADS * DIM))
    return made


def parse(workload: str) -> tuple[str, str, bool]:
    """Graph, layer, whether backward too."""
    what, direction = workload.split(" | ")
    graph, _, layer = what.rpartition(" ")
    return graph, layer, direction != "forward"


def npattn(workload: str) -> Callable[[], Any]:
    """Ours."""
    from npattn.graph import Adjacency, GATConv, GATv2Conv, graph_attention, graph_attention_vjp

    name, layer_name, backward = parse(workload)
    edge_index, num_nodes = edges(name)
    adjacency = Adjacency.from_edges(*edge_index, num_nodes)
    x = arrays(name)
    if layer_name == "dot":
        qkv = x["query"], x["key"], x["value"]
        if not backward:
            return lambda: graph_attention(*qkv, adjacency)

        def run_dot() -> Any:
            _, pullback = graph_attention_vjp(*qkv, adjacency)
            return pullback(x["dout"]).query

        return run_dot
    layer = {"GATConv": GATConv, "GATv2Conv": GATv2Conv}[layer_name]
    made = layer(HEADS * DIM, DIM, HEADS, self_loops=False, bias=False, rng=np.random.default_rng(0))
    made.load_parameters(_parameters(layer_name, x))
    if not backward:
        return lambda: made(x["x"], adjacency)

    def run() -> Any:
        _, pullback = made.vjp(x["x"], adjacency)
        return pullback(x["dout"].reshape(num_nodes, -1))[0]

    return run


def pyg(workload: str) -> Callable[[], Any]:
    """GATConv, GATv2Conv, and dot-product attention as PyTorch Geometric's documentation builds it."""
    import torch
    import torch_geometric.nn as pyg_nn
    from torch_geometric.utils import softmax

    class Dot(pyg_nn.MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="add", node_dim=0)

        def forward(self, q: Any, k: Any, v: Any, edge_index: Any) -> Any:
            return self.propagate(edge_index, q=q, k=k, v=v)

        def message(self, q_i: Any, k_j: Any, v_j: Any, index: Any, ptr: Any, size_i: Any) -> Any:
            logits = (q_i * k_j).sum(-1) / DIM**0.5
            return softmax(logits, index, ptr, size_i)[:, :, None] * v_j

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    name, layer_name, backward = parse(workload)
    x = {key: torch.from_numpy(value) for key, value in arrays(name).items()}
    edge_index = torch.from_numpy(edges(name)[0])
    if layer_name == "dot":
        layer: Any = Dot()
        inputs = [x["query"], x["key"], x["value"]]
    else:
        kind = getattr(pyg_nn, layer_name)
        layer = kind(HEADS * DIM, DIM, HEADS, add_self_loops=False, bias=False)
        own = {key: torch.from_numpy(value) for key, value in _parameters(layer_name, arrays(name)).items()}
        layer.load_state_dict(own)
        inputs = [x["x"]]
    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return layer(*inputs, edge_index).numpy()

        return forward
    inputs = [tensor.requires_grad_() for tensor in inputs]
    dout = x["dout"].reshape(-1, HEADS, DIM) if layer_name == "dot" else x["dout"].reshape(-1, HEADS * DIM)

    def both() -> Any:
        for tensor in (*inputs, *layer.parameters()):
            tensor.grad = None
        layer(*inputs, edge_index).backward(dout)
        return inputs[0].grad.numpy()

    return both


def gather(workload: str) -> Callable[[], Any] | None:
    """Read one key row and one value row per edge, sorted by receiving node, and add them up."""
    import numba

    from npattn import _threads
    from npattn.graph import Adjacency

    name, layer_name, backward = parse(workload)
    if backward or layer_name != "dot":
        return None

    @numba.njit(nogil=True, fastmath=True)
    def read(key: Any, value: Any, ids: Any, total: Any) -> None:
        for e in range(len(ids)):
            node = ids[e]
            for d in range(HEADS * DIM):
                total[d] += key[node, d] + value[node, d]

    edge_index, num_nodes = edges(name)
    ids = Adjacency.from_edges(*edge_index, num_nodes).plan.row_source
    x = arrays(name)
    key, value = x["key"].reshape(num_nodes, -1), x["value"].reshape(num_nodes, -1)
    pieces = np.array_split(ids, 128)

    def run() -> Any:
        _threads.run(
            lambda i: read(key, value, pieces[i], np.zeros(HEADS * DIM, np.float32)), list(range(128))
        )

    return run


CONTENDERS = {"npattn": npattn, "PyG": pyg, "gather": gather}


def _parameters(layer_name: str, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if layer_name == "GATConv":
        return {"lin.weight": x["w"], "att_src": x["a"], "att_dst": x["b"]}
    return {"lin_l.weight": x["w"], "lin_r.weight": x["w_r"], "att": x["a"]}


@lru_cache(maxsize=1)
def _reference(workload: str) -> Any:
    """The NumPy backend's result, in float64."""
    from npattn.functional.graph_attention import EdgeCall
    from npattn.graph import Adjacency

    name, layer_name, backward = parse(workload)
    edge_index, num_nodes = edges(name)
    adjacency = Adjacency.from_edges(*edge_index, num_nodes)
    x = {key: value.astype(np.float64) for key, value in arrays(name).items()}
    if layer_name == "dot":
        call = EdgeCall("dot", adjacency, x["query"], x["key"], x["value"], backend="numpy")
        result = call.forward()
        return call.backward(x["dout"], result).q if backward else result.out
    h = (x["x"] @ x["w"].T).reshape(num_nodes, HEADS, DIM)
    if layer_name == "GATConv":
        scores = [(h * x[part]).sum(-1, keepdims=True) for part in ("b", "a")]
        call = EdgeCall("additive", adjacency, *scores, h, backend="numpy")
    else:
        right = (x["x"] @ x["w_r"].T).reshape(num_nodes, HEADS, DIM)
        call = EdgeCall("dynamic", adjacency, right, h, h, att=x["a"][0], backend="numpy")
    result = call.forward()
    if not backward:
        return result.out.reshape(num_nodes, -1)
    grads = call.backward(x["dout"], result)
    if layer_name == "GATConv":
        dh = grads.v + grads.k * x["a"] + grads.q * x["b"]
        return dh.reshape(num_nodes, -1) @ x["w"]
    return (grads.k + grads.v).reshape(num_nodes, -1) @ x["w"] + grads.q.reshape(num_nodes, -1) @ x["w_r"]


def is_right(workload: str, result: Any) -> bool:
    """Against float64."""
    if result is None:
        return True
    exact = _reference(workload)
    if result.shape != exact.shape:
        return False
    # A pair whose input to the leaky ReLU is near 0 takes the other slope in float32 and moves the gradient
    # of its node, in all features: a few nodes in thousands may differ, all others must agree.
    error = (np.abs(result - exact) / (1 + np.abs(exact))).reshape(len(exact), -1).max(axis=1)
    return bool(np.mean(error > 1e-4) < 1e-3)


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """Multiply-adds of the dot products and sums, at the float32 peak."""
    name, layer_name, backward = parse(workload)
    num_edges = edges(name)[0].shape[1]
    products = 2 if layer_name != "GATConv" else 1
    flops = 2 * num_edges * HEADS * DIM * products * (3.0 if backward else 1.0)
    return flops / 1e9, flops / peak


def _peak_memory() -> None:
    """One line per workload: most memory held above what was held before the call, in MiB."""
    import resource
    import subprocess

    if len(sys.argv) == 3:
        run = CONTENDERS[sys.argv[1]](sys.argv[2])
        assert run is not None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
        return
    for workload in WORKLOADS:
        cells = []
        for contender in ("npattn", "PyG"):
            command = [sys.executable, __file__, contender, workload]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            cells.append(f"{contender} {done.stdout.strip() or 'not installed'} MiB")
        print(f"{workload}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    _peak_memory()

"""The graph part of ``npattn demo``: graph attention learns Zachary's karate club from two labels."""

import numpy as np

from npattn._typing import Array, Pullback


def train_karate_club(steps: int = 100) -> tuple[float, list[tuple[int, int, float]]]:
    """Train a two-layer GAT on the two leaders' labels alone.

    Parameters
    ----------
    steps : int
        Of Adam.

    Returns
    -------
    accuracy : float
        On the 32 other members, against the club they joined after the split.
    links : list of (u, v, weight)
        The five links v attends to most, self-loops left out, mean over heads of the first layer.
    """
    import networkx as nx

    from npattn.functional import cross_entropy_vjp
    from npattn.graph import Adjacency, GATConv
    from npattn.optim import Adam

    graph = nx.karate_club_graph()
    adjacency = Adjacency.from_networkx(graph)
    clubs = np.array([graph.nodes[node]["club"] == "Officer" for node in adjacency.nodes], np.int64)
    leaders = [0, 33]  # the instructor and the administrator
    targets = np.full(len(clubs), -100)
    targets[leaders] = clubs[leaders]

    rng = np.random.default_rng(0)
    first = GATConv(len(clubs), 8, heads=4, rng=rng)
    second = GATConv(32, 2, heads=1, rng=rng)
    layers = {"first": first, "second": second}
    parameters = {
        f"{name}.{key}": array
        for name, layer in layers.items()
        for key, array in layer.named_parameters().items()
    }
    optimizer = Adam(parameters, lr=0.01, weight_decay=5e-4)
    features = np.eye(len(clubs), dtype=np.float32)
    for _ in range(steps):
        hidden, back_first = first.vjp(features, adjacency)
        active, back_tanh = _tanh_vjp(hidden)
        logits, back_second = second.vjp(active, adjacency)
        _, back_loss = cross_entropy_vjp(logits, targets)
        dactive, grads_second = back_second(back_loss(np.float32(1.0)))
        _, grads_first = back_first(back_tanh(dactive))
        optimizer.step(
            {f"first.{key}": grad for key, grad in grads_first.items()}
            | {f"second.{key}": grad for key, grad in grads_second.items()}
        )

    logits = second(np.tanh(first(features, adjacency)), adjacency)
    others = np.setdiff1d(np.arange(len(clubs)), leaders)
    accuracy = float((logits.argmax(1) == clubs)[others].mean())
    edges = adjacency.with_self_loops().edges()
    weights = first.weights(features, adjacency).mean(axis=1)
    strongest = [int(e) for e in np.argsort(-weights) if edges[e][0] != edges[e][1]][:5]
    return accuracy, [(edges[e][0], edges[e][1], float(weights[e])) for e in strongest]


def _tanh_vjp(x: Array) -> tuple[Array, Pullback]:
    y = np.tanh(x)
    return y, lambda dy: dy * (1.0 - y * y)

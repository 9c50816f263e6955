"""Who sides with whom in Zachary's karate club: graph attention on a networkx graph, two labels known.

python examples/karate_club.py

The club of 34 split in two. We tell a two-layer GAT only what became of the instructor (node 0) and of the
officer (node 33); every other member's side is predicted from the friendships and from the Laplacian
encoding of their place in the graph. Then the attention is written back onto the networkx graph.
"""

import networkx as nx
import numpy as np
from _device import parse, to_numpy

from npattn import functional as F
from npattn import optim
from npattn.functional.dropout import fold_seed
from npattn.graph import Adjacency, GATConv, laplacian_encoding


def main():
    """Run the example and print."""
    arguments, xp = parse(__doc__, epochs={"type": int, "default": 100, "help": "training steps"})
    G = nx.karate_club_graph()
    side = np.array([G.nodes[node]["club"] == "Officer" for node in G]).astype(int)
    known = xp.array([0, 33])
    graph = Adjacency.from_networkx(G)
    x = xp.asarray(laplacian_encoding(graph, 4).astype(np.float32))

    rng = np.random.default_rng(0)
    first = GATConv(4, 8, heads=4, dropout_p=0.2, rng=rng)
    second = GATConv(32, 2, dropout_p=0.2, rng=rng)
    layers = {"first": first, "second": second}
    for layer in layers.values():
        layer.move_to(xp)
    parameters = {f"{n}.{k}": p for n, layer in layers.items() for k, p in layer.named_parameters().items()}
    optimizer = optim.Adam(parameters, lr=0.01)
    print(f"{graph.num_nodes} members, {G.number_of_edges()} friendships, {len(known)} known sides")

    for epoch in range(arguments.epochs):
        h, pull_first = first.vjp(x, graph, seed=fold_seed(0, 2 * epoch))
        logits, pull_second = second.vjp(xp.tanh(h), graph, seed=fold_seed(0, 2 * epoch + 1))
        loss, pull_loss = F.cross_entropy_vjp(logits[known], xp.asarray(side)[known])

        dlogits = xp.zeros_like(logits)
        dlogits[known] = pull_loss()
        dhidden, second_grads = pull_second(dlogits)
        _, first_grads = pull_first(dhidden * (1 - xp.tanh(h) ** 2))
        grads = {f"first.{k}": g for k, g in first_grads.items()}
        grads |= {f"second.{k}": g for k, g in second_grads.items()}
        optimizer.step(grads)
        if (epoch + 1) % max(arguments.epochs // 4, 1) == 0:
            print(f"epoch {epoch + 1:4}: loss {float(loss):.3f}")

    predicted = to_numpy(second(xp.tanh(first(x, graph)), graph).argmax(axis=1))
    right = predicted == side
    print(f"right for {right.sum()} of {len(side)} members; wrong for {np.flatnonzero(~right).tolist()}")

    # The weights come in the order of the edges walked, self-loops behind; a directed copy of the graph has
    # a place for both directions of a friendship.
    weights = to_numpy(first.weights(x, graph).mean(axis=1))
    walked = graph.with_self_loops()
    D = G.to_directed()
    D.add_edges_from((node, node) for node in G)
    nx.set_edge_attributes(D, walked.edge_values(weights), "attention")
    for node in (0, 33):
        incoming = sorted(D.in_edges(node, data="attention"), key=lambda edge: -edge[2])[:3]
        text = ", ".join(f"{u} ({weight:.2f})" for u, _, weight in incoming)
        print(f"node {node} attends most to {text}")


if __name__ == "__main__":
    main()

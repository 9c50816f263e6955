"""What GATv2 can do and GAT cannot: look up a word in a dictionary of ten (Brody et al., section 4.2).

python examples/dictionary_lookup.py

Ten key nodes hold a letter and a number each, in random pairing; ten query nodes hold a letter each and are
to name the number beside it. Every query has an edge from every key. GAT's score is a sum of two parts, one
of the key and one of the query, under a monotone function: all queries rank the keys alike, so that at most
one in ten is answered. GATv2 puts the sum of both through the nonlinearity feature by feature first.

References
----------
Brody, Alon and Yahav, How Attentive are Graph Attention Networks?, ICLR 2022.
"""

import numpy as np
from _device import parse

from npattn import functional as F
from npattn import nn, optim
from npattn.graph import Adjacency, GATConv, GATv2Conv


def dictionaries(rng, count, k, xp=np):
    """(keys, queries, answers) of ``count`` dictionaries of k entries, one below the other."""
    one_hot = np.eye(k, dtype=np.float32)
    letters = np.tile(np.arange(k), count)
    numbers = np.concatenate([rng.permutation(k) for _ in range(count)])
    nothing = np.zeros((count * k, k), np.float32)
    keys = np.concatenate([one_hot[letters], nothing, one_hot[numbers]], axis=1)
    queries = np.concatenate([nothing, one_hot[letters], nothing], axis=1)
    return xp.asarray(keys), xp.asarray(queries), xp.asarray(numbers)


def all_pairs(count, k):
    """Every key to every query of the same dictionary: a bipartite adjacency."""
    source, target = np.divmod(np.arange(k * k), k)
    first = k * np.arange(count)[:, None]
    return Adjacency.from_edges((source + first).ravel(), (target + first).ravel(), (count * k, count * k))


def train(layer_class, k, steps, rng, xp=np):
    """Train attention and a linear readout; accuracy on dictionaries never seen."""
    hidden = 6 * k
    attention = layer_class(3 * k, hidden, self_loops=False, rng=rng)
    readout = nn.Linear(hidden, k, rng=rng)
    attention.move_to(xp)
    readout.move_to(xp)
    parameters = {f"attention.{n}": p for n, p in attention.named_parameters().items()}
    parameters |= {f"readout.{n}": p for n, p in readout.named_parameters().items()}
    optimizer = optim.Adam(parameters, lr=0.01)
    graph = all_pairs(16, k)
    for _ in range(steps):
        keys, queries, answers = dictionaries(rng, 16, k, xp)
        found, pull_attention = attention.vjp((keys, queries), graph)
        logits, pull_readout = readout.vjp(found)
        _, pull_loss = F.cross_entropy_vjp(logits, answers)
        dfound, readout_grads = pull_readout(pull_loss())
        _, attention_grads = pull_attention(dfound)
        grads = {f"attention.{n}": g for n, g in attention_grads.items()}
        optimizer.step(grads | {f"readout.{n}": g for n, g in readout_grads.items()})
    keys, queries, answers = dictionaries(rng, 100, k, xp)
    logits = readout(attention((keys, queries), all_pairs(100, k)))
    return float((logits.argmax(axis=1) == answers).mean())


def main():
    """Run the example and print."""
    arguments, xp = parse(
        __doc__,
        k={"type": int, "default": 10, "help": "entries of a dictionary"},
        steps={"type": int, "default": 1000, "help": "training steps"},
    )
    for layer_class in (GATConv, GATv2Conv):
        accuracy = train(layer_class, arguments.k, arguments.steps, np.random.default_rng(0), xp)
        print(f"{layer_class.__name__:10} answers {accuracy:6.1%} of unseen queries")


if __name__ == "__main__":
    main()

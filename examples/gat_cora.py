"""Train the graph attention network of Veličković et al. on Cora or Citeseer, in NumPy arrays.

    python examples/gat_cora.py cora.npz --seeds 10

Two GATConv layers (8 heads of 8 features, ELU; then one head of classes), dropout 0.6 on features (before
and after the projection, as in the original code) and on attention weights, Adam at 0.005, L2 5e-4, early
stopping with a patience of 100 epochs: the setup of the paper, which reports 83.0 ± 0.7 % on
Cora and 72.5 ± 0.7 % on Citeseer.

The data is one npz file of plain arrays:

    x_data, x_indices, x_indptr, x_shape    node features, a CSR matrix
    edge_index                              (2, num_edges), every edge in both directions
    y                                       class of each node, -1 where unknown
    train, val, test                        node numbers of the three parts

The original files `ind.cora.*` and `ind.citeseer.*` are in the repository kimiyoung/planetoid under data/. To
convert them: stack `allx` and `tx` (for Citeseer with zero rows for the test ids missing in test.index), put
the rows of `tx` at the places that test.index names, do the same with `ally` and `ty`, read `graph` as a
dictionary of neighbours, and take the first 20 nodes per class as train, the next 500 as val.

References
----------
Veličković et al., Graph Attention Networks, ICLR 2018, section 3.3.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from _device import arrays, to_numpy
from scipy.sparse import csr_array

from npattn import functional as F
from npattn import optim
from npattn.functional.dropout import fold_seed, keep_mask
from npattn.graph import Adjacency, GATConv
from npattn.nn.layer import Layer, join


class Citations(NamedTuple):
    """A citation graph with bag-of-words features."""

    x: csr_array  # (nodes, words), rows sum to one
    y: np.ndarray
    graph: Adjacency
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def load(path: str) -> Citations:
    """Read the npz file described above."""
    with np.load(path) as data:
        words = np.diff(data["x_indptr"])  # of each node; features are 0 or 1
        values = np.repeat(1 / np.maximum(words, 1), words).astype(np.float32)
        x = csr_array((values, data["x_indices"], data["x_indptr"]), shape=tuple(data["x_shape"]))
        source, target = data["edge_index"]
        graph = Adjacency.from_edges(source, target, x.shape[0])
        parts = (data[name] for name in ("train", "val", "test"))
        return Citations(x, data["y"], graph, *parts)


@dataclass(init=False, eq=False, repr=False)
class GAT(Layer):
    """Two layers of graph attention for classifying nodes."""

    first: GATConv
    second: GATConv
    dropout_p: float
    xp: Any  # numpy, or cupy once moved

    def __init__(
        self,
        in_dim: int,
        classes: int,
        *,
        heads: int = 8,
        hidden: int = 8,
        dropout_p: float = 0.6,
        rng: Any,
        xp: Any = np,
    ) -> None:
        dropout = {"dropout_p": dropout_p, "message_dropout_p": dropout_p}
        self.first = GATConv(in_dim, hidden, heads, **dropout, rng=rng)
        self.second = GATConv(heads * hidden, classes, **dropout, rng=rng)
        self.dropout_p = dropout_p
        self.xp = xp
        self.move_to(xp)

    def __call__(self, x: csr_array, graph: Adjacency) -> Any:
        """Class logits (nodes, classes), without dropout; on the device of the parameters."""
        return self.vjp(x, graph)[0]

    def vjp(self, x: csr_array, graph: Adjacency, seed: int | None = None) -> Any:
        """Logits and pullback; dropout everywhere with a seed."""
        seeds = [None if seed is None else fold_seed(seed, i) for i in range(4)]
        xp = self.xp
        x = drop_nonzero(x, self.dropout_p, seeds[0])
        h, pull_first = self.first.vjp(x if xp is np else dense(x, xp), graph, seed=seeds[1])
        active = xp.where(h > 0, h, xp.expm1(xp.minimum(h, 0)))  # ELU
        keep = np.float32(1)
        if seeds[2] is not None:
            keep = xp.asarray(keep_mask(seeds[2], h.shape, self.dropout_p)) / np.float32(1 - self.dropout_p)
        logits, pull_second = self.second.vjp(active * keep, graph, seed=seeds[3])

        def pullback(dlogits: np.ndarray) -> tuple[None, dict[str, np.ndarray]]:
            dactive, second_grads = pull_second(dlogits)
            dh = dactive * keep * xp.where(h > 0, 1, active + 1)  # the slope of ELU is ELU + 1 below 0
            dx, first_grads = pull_first(dh)
            return dx, join(("first", first_grads), ("second", second_grads))

        return logits, pullback


def drop_nonzero(x: csr_array, p: float, seed: int | None) -> csr_array:
    """Dropout of a sparse array: only what it stores needs a decision."""
    if seed is None:
        return x
    kept = x.data * keep_mask(seed, x.data.shape, p) / np.float32(1 - p)
    return csr_array((kept, x.indices, x.indptr), shape=x.shape)


def dense(x: csr_array, xp: Any) -> Any:
    """A sparse array as one of ``xp``'s, filled there."""
    y = xp.zeros(x.shape, x.dtype)
    row = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    y[xp.asarray(row), xp.asarray(x.indices)] = xp.asarray(x.data)
    return y


def train(
    data: Citations, seed: int, *, epochs: int = 2000, patience: int = 100, xp: Any = np
) -> tuple[float, int]:
    """Train one model; the test accuracy where validation was best, and the number of epochs."""
    model = GAT(data.x.shape[1], data.y.max() + 1, rng=np.random.default_rng(seed), xp=xp)
    parameters = model.named_parameters()
    optimizer = optim.Adam(dict(parameters), lr=0.005)
    best_accuracy, best_loss, waited, test_accuracy = 0.0, np.inf, 0, 0.0
    for epoch in range(epochs):
        logits, pullback = model.vjp(data.x, data.graph, seed=fold_seed(seed, epoch))
        known = xp.asarray(data.train)
        _, pull_loss = F.cross_entropy_vjp(logits[known], xp.asarray(data.y[data.train]))
        dlogits = xp.zeros_like(logits)
        dlogits[known] = pull_loss()
        _, grads = pullback(dlogits)
        for name, value in parameters.items():  # L2 on everything but biases
            if not name.endswith("bias"):
                grads[name] = grads[name] + np.float32(5e-4) * value
        optimizer.step(grads)

        logits = to_numpy(model(data.x, data.graph))
        correct = logits.argmax(1) == data.y
        accuracy = correct[data.val].mean()
        loss = F.cross_entropy(logits[data.val], data.y[data.val])
        if accuracy >= best_accuracy or loss <= best_loss:
            if accuracy >= best_accuracy and loss <= best_loss:
                test_accuracy = correct[data.test].mean()
            best_accuracy, best_loss, waited = max(best_accuracy, accuracy), min(best_loss, loss), 0
        else:
            waited += 1
            if waited == patience:
                break
    return float(test_accuracy), epoch + 1


def main() -> None:
    """Train several models and print the mean of their test accuracies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="npz file, see above")
    parser.add_argument("--seeds", type=int, default=10, help="how many models")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2000, help="at most")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where the model is trained")
    arguments = parser.parse_args()
    xp = arrays(arguments.device)
    data = load(arguments.data)
    accuracies = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        started = time.perf_counter()
        accuracy, epochs = train(data, seed, epochs=arguments.epochs, xp=xp)
        accuracies.append(accuracy)
        seconds = time.perf_counter() - started
        print(f"seed {seed}: test {accuracy:.1%} after {epochs} epochs, {seconds:.0f} s", flush=True)
    print(f"mean of {len(accuracies)} seeds: {np.mean(accuracies):.2%} ± {np.std(accuracies):.2%}")


if __name__ == "__main__":
    main()

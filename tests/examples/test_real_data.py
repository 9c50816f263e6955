"""The examples on the data sets they were written for; skipped where ``NPATTN_DATA`` has none.

The quick tests take seconds; those marked slow reach the published figures.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import npattn
from npattn.graph import Adjacency

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("NPATTN_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture
def data():
    """``data(name)``: the path of a data file, or a skip."""

    def find(name):
        if not (DATA / name).is_file():
            pytest.skip(f"{name} is not in {DATA} (set NPATTN_DATA)")
        return DATA / name

    return find


@pytest.fixture
def gat(monkeypatch):
    """The module examples/gat_cora.py."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gat_cora

    return gat_cora


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "isolated"), [("cora", 2708, 10556, 0), ("citeseer", 3327, 9104, 48)]
)
def test_citation_graphs_are_read_whole(gat, data, name, nodes, edges, isolated):
    citations = gat.load(data(f"{name}.npz"))
    assert (citations.graph.num_nodes, citations.graph.num_edges) == (nodes, edges)
    degree = np.bincount(citations.graph.target, minlength=nodes)
    assert (degree == 0).sum() == isolated


def test_gat_learns_cora_in_thirty_epochs(gat, data):
    accuracy, _ = gat.train(gat.load(data("cora.npz")), seed=0, epochs=30)
    assert accuracy > 0.7


def test_kernels_agree_on_a_graph_with_hubs(data):
    """Amazon Photo: 7,650 nodes, the largest hub has 1,434 neighbours."""
    with np.load(data("amazon_photo.npz")) as arrays:
        graph = Adjacency.from_edges(*arrays["edge_index"], len(arrays["y"]))
    assert np.bincount(graph.target).max() == 1434
    rng = np.random.default_rng(0)
    query, key, value, dout = rng.standard_normal((4, graph.num_nodes, 2, 8))
    results = []
    for backend in ("numpy", "numba"):
        out, pullback = npattn.graph_attention_vjp(query, key, value, graph, backend=backend)
        results.append((out, *pullback(dout)[:3]))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(a).max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "paper"), [("cora", 0.830), ("citeseer", 0.725)])
def test_gat_reaches_the_papers_accuracy(gat, data, name, paper):
    citations = gat.load(data(f"{name}.npz"))
    accuracy = [gat.train(citations, seed)[0] for seed in range(10)]
    assert np.mean(accuracy) > paper - 0.007


@pytest.mark.slow
def test_char_gpt_reaches_the_published_loss_on_tinyshakespeare(data, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    checkpoint = str(tmp_path / "model.safetensors")
    monkeypatch.setattr(
        sys, "argv", ["train_char_gpt.py", str(data("tinyshakespeare.txt")), "--checkpoint", checkpoint]
    )
    import train_char_gpt

    options = train_char_gpt.options()
    run = train_char_gpt.Run(options, train_char_gpt.read_text(options.text))
    for _ in range(2000):
        run.advance()
    assert run.validate() <= 1.90

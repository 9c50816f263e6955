"""The layers give PyTorch Geometric's numbers from its weights (recorded by data/make_pyg_layers.py)."""

import json
import pathlib

import numpy as np
import pytest

from npattn import graph
from npattn.graph import Adjacency

FOLDER = pathlib.Path(__file__).parent / "data"
CASES = json.loads((FOLDER / "pyg_layers.json").read_text())["cases"]


@pytest.fixture(scope="module")
def recorded():
    with np.load(FOLDER / "pyg_layers.npz") as data:
        return dict(data)


@pytest.mark.parametrize("case", CASES)
def test_layer_gives_pyg_output_weights_and_gradients(case, recorded):
    name, options = CASES[case]
    data = {key.partition("/")[2]: value for key, value in recorded.items() if key.startswith(f"{case}/")}
    bipartite = "x_target" in data
    num_nodes = (len(data["x"]), len(data["x_target"])) if bipartite else len(data["x"])
    adjacency = Adjacency.from_edges(data["source"], data["target"], num_nodes)
    layer = getattr(graph, name)(5, 4, rng=np.random.default_rng(0), dtype=np.float64, **options)
    parameters = {k.removeprefix("parameter."): v for k, v in data.items() if k.startswith("parameter.")}
    if options.get("share_weights"):  # PyG may list the shared map under both names
        parameters = {k: v for k, v in parameters.items() if not k.startswith("lin_r.")}
    layer.load_parameters(parameters)
    x = (data["x"], data["x_target"]) if bipartite else data["x"]
    features = data.get("edge_features")

    out, pullback = layer.vjp(x, adjacency, features)
    np.testing.assert_allclose(out, data["out"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer(x, adjacency, features), data["out"], rtol=1e-12, atol=1e-12)

    walked = (
        adjacency.with_self_loops() if options.get("self_loops", name != "TransformerConv") else adjacency
    )
    assert walked.source.tolist() == data["weights_source"].tolist()
    assert walked.target.tolist() == data["weights_target"].tolist()
    np.testing.assert_allclose(layer.weights(x, adjacency, features), data["weights"], rtol=1e-12, atol=1e-13)

    dx, grads = pullback(data["dout"])
    if features is not None:
        dx, dfeatures = dx
        np.testing.assert_allclose(dfeatures, data["dedge_features"], rtol=1e-10, atol=1e-11)
    if bipartite:
        np.testing.assert_allclose(dx[1], data["dx_target"], rtol=1e-10, atol=1e-11)
        dx = dx[0]
    np.testing.assert_allclose(dx, data["dx"], rtol=1e-10, atol=1e-11)
    assert list(grads) == list(layer.named_parameters())
    for key, gradient in grads.items():
        np.testing.assert_allclose(gradient, data[f"gradient.{key}"], rtol=1e-10, atol=1e-11, err_msg=key)

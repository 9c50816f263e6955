"""Record what PyTorch Geometric's layers give, as test data (needs torch and torch-geometric).

Writes pyg_layers.npz: for each case its weights, inputs, output, attention weights and gradients for a random
cotangent, in float64. Keys are "<case>/<what>"; options are in pyg_layers.json.
"""

import json
import pathlib

import numpy as np
import torch
import torch_geometric
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

LAYERS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}
RENAMED = {"dropout_p": "dropout", "self_loops": "add_self_loops"}

CASES = {
    "gat": ("GATConv", {"heads": 2}),
    "gat_mean_residual": ("GATConv", {"heads": 3, "concat": False, "residual": True, "negative_slope": 0.1}),
    "gat_edges": ("GATConv", {"heads": 2, "edge_dim": 3}),
    "gat_plain": ("GATConv", {"heads": 1, "self_loops": False, "bias": False}),
    "gat_bipartite": ("GATConv", {"heads": 2, "self_loops": False}),
    "gatv2": ("GATv2Conv", {"heads": 2}),
    "gatv2_mean_residual": ("GATv2Conv", {"heads": 3, "concat": False, "residual": True}),
    "gatv2_edges": ("GATv2Conv", {"heads": 2, "edge_dim": 3, "negative_slope": 0.3}),
    "gatv2_shared": ("GATv2Conv", {"heads": 2, "share_weights": True, "bias": False, "self_loops": False}),
    "gatv2_bipartite": ("GATv2Conv", {"heads": 2, "self_loops": False, "edge_dim": 3}),
    "transformer": ("TransformerConv", {"heads": 2}),
    "transformer_beta": ("TransformerConv", {"heads": 2, "beta": True, "edge_dim": 3}),
    "transformer_mean": ("TransformerConv", {"heads": 3, "concat": False, "beta": True, "bias": False}),
    "transformer_rootless": ("TransformerConv", {"heads": 2, "root_weight": False, "edge_dim": 3}),
    "transformer_bipartite": ("TransformerConv", {"heads": 2, "edge_dim": 3}),
}
IN_DIM, OUT_DIM = 5, 4


def main() -> None:
    """Run every case once."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    arrays: dict[str, np.ndarray] = {}
    for name, (layer_name, options) in CASES.items():
        layer = LAYERS[layer_name](IN_DIM, OUT_DIM, **{RENAMED.get(k, k): v for k, v in options.items()})
        for parameter in layer.parameters():  # biases too, which begin at zero
            torch.nn.init.normal_(parameter, std=0.7)
        bipartite = name.endswith("bipartite")
        num_sources, num_targets, num_edges = (7, 6, 20) if bipartite else (9, 9, 30)
        # node 8 receives nothing; parallel edges occur; no self-loops, whose features PyG replaces
        source = torch.randint(num_sources, (num_edges,))
        target = torch.randint(min(num_targets, 8), (num_edges,))
        if not bipartite:
            source = torch.where(source == target, (source + 1) % num_sources, source)
        x = torch.randn(num_sources, IN_DIM, requires_grad=True)
        x_target = torch.randn(num_targets, IN_DIM, requires_grad=True)
        features = torch.randn(num_edges, 3, requires_grad=True) if "edge_dim" in options else None
        inputs = (x, x_target) if bipartite else x
        out, (edge_index, weights) = layer(
            inputs, torch.stack([source, target]), features, return_attention_weights=True
        )
        cotangent = torch.randn_like(out)
        (out * cotangent).sum().backward()
        record = {"source": source, "target": target, "x": x, "out": out, "dout": cotangent, "dx": x.grad}
        record |= {"weights": weights, "weights_source": edge_index[0], "weights_target": edge_index[1]}
        if bipartite:
            record |= {"x_target": x_target, "dx_target": x_target.grad}
        if features is not None:
            record |= {"edge_features": features, "dedge_features": features.grad}
        for parameter_name, parameter in layer.named_parameters():
            if parameter.grad is None:  # TransformerConv without root_weight makes a skip and does not use it
                continue
            record[f"parameter.{parameter_name}"] = parameter
            record[f"gradient.{parameter_name}"] = parameter.grad
        arrays |= {f"{name}/{key}": value.detach().numpy() for key, value in record.items()}

    folder = pathlib.Path(__file__).parent
    np.savez_compressed(folder / "pyg_layers.npz", **arrays)
    versions = {"torch": torch.__version__, "torch_geometric": torch_geometric.__version__}
    text = json.dumps({"versions": versions, "cases": CASES}, indent=1)
    (folder / "pyg_layers.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""The same numbers as PyTorch's layers on the same weights (recorded by data/make_torch_numbers.py)."""

from pathlib import Path

import numpy as np
import pytest

from npattn import nn, optim
from npattn.functional import cross_entropy_vjp

NUMBERS = dict(np.load(Path(__file__).parent / "data" / "torch_numbers.npz"))
F8 = np.float64


def case(name):
    return {key.partition("/")[2]: value for key, value in NUMBERS.items() if key.startswith(f"{name}/")}


def agree(layer, numbers, ours, *inputs):
    """Compare output and gradients; ``ours``: our name -> (torch's array, its gradient)."""
    parameters = {name: array for name, (array, _) in ours.items()}
    layer.load_parameters(parameters)
    y, pullback = layer.vjp(*inputs)
    np.testing.assert_allclose(y, numbers["y"], rtol=1e-12, atol=1e-12)
    dx, grads = pullback(numbers["dy"])
    dxs = dx if isinstance(dx, tuple) else (dx,)
    for i, one in enumerate(dxs):
        if one is not None:
            np.testing.assert_allclose(one, numbers[f"dx{i}"], rtol=1e-11, atol=1e-11)
    for name, (_, grad) in ours.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-11, atol=1e-11, err_msg=name)


def same_names(numbers):
    skip = {"y", "dy", "x0", "x1", "dx0", "dx1"}
    return {
        name: (numbers[name], numbers[f"d{name}"])
        for name in numbers
        if name not in skip and f"d{name}" in numbers
    }


LAYERS = {
    "linear": lambda: nn.Linear(6, 7, rng=0, dtype=F8),
    "layer_norm": lambda: nn.LayerNorm(6, dtype=F8),
    "rms_norm": lambda: nn.RMSNorm(6, dtype=F8),
    "embedding": lambda: nn.Embedding(9, 6, rng=0, dtype=F8),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    numbers = case(name)
    agree(LAYERS[name](), numbers, same_names(numbers), numbers["x0"])


def attention_names(numbers, prefix, ours=""):
    """PyTorch stacks the three input projections in one array."""
    names = {}
    for kind, torch_kind in (("weight", "in_proj_weight"), ("bias", "in_proj_bias")):
        arrays = np.split(numbers[prefix + torch_kind], 3)
        grads = np.split(numbers["d" + prefix + torch_kind], 3)
        for which, array, grad in zip(("query", "key", "value"), arrays, grads, strict=True):
            names[f"{ours}{which}.{kind}"] = (array, grad)
        out = f"{prefix}out_proj.{kind}"
        names[f"{ours}out.{kind}"] = (numbers[out], numbers["d" + out])
    return names


@pytest.mark.parametrize("name", ["attention", "causal_attention", "cross_attention"])
def test_multi_head_attention(name):
    numbers = case(name)
    layer = nn.MultiHeadAttention(6, 3, bias=True, causal=name.startswith("causal"), rng=0, dtype=F8)
    inputs = [numbers["x0"], numbers["x1"]] if name.startswith("cross") else [numbers["x0"]]
    agree(layer, numbers, attention_names(numbers, "inner."), *inputs)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_block(norm_first):
    numbers = case("pre_norm_block" if norm_first else "post_norm_block")
    names = attention_names(numbers, "self_attn.", "attention.")
    for ours, theirs in (
        ("attention_norm", "norm1"),
        ("mlp_norm", "norm2"),
        ("mlp.up", "linear1"),
        ("mlp.down", "linear2"),
    ):
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = (numbers[f"{theirs}.{kind}"], numbers[f"d{theirs}.{kind}"])
    agree(
        nn.TransformerBlock(6, 3, 10, norm_first=norm_first, rng=0, dtype=F8), numbers, names, numbers["x0"]
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing):
    numbers = case(f"cross_entropy_{smoothing}")
    loss, pullback = cross_entropy_vjp(numbers["logits"], numbers["targets"], label_smoothing=smoothing)
    np.testing.assert_allclose(loss, numbers["loss"], rtol=1e-13)
    np.testing.assert_allclose(pullback(), numbers["dlogits"], rtol=1e-12, atol=1e-15)


OPTIMISERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.02),
    "adam": lambda p: optim.Adam(p, 0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.03),
    "adamw": lambda p: optim.AdamW(p, 0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser(name):
    numbers = case(name)
    p = {"p": numbers["start"].copy()}
    optimiser = OPTIMISERS[name](p)
    for grad, expected in zip(numbers["grads"], numbers["path"], strict=True):
        optimiser.step({"p": grad})
        np.testing.assert_allclose(p["p"], expected, rtol=1e-12, atol=1e-14)

"""Write torch_numbers.npz: outputs and gradients of PyTorch's layers, beside their weights and inputs.

Run once, with PyTorch 2.13, in an environment of its own:  python tests/nn/data/make_torch_numbers.py
Keys are "<case>/<array>"; float64 throughout. A gradient has the name of its array with a leading "d".
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
numbers = {}


def keep(case, **arrays):
    for name, value in arrays.items():
        numbers[f"{case}/{name}"] = np.asarray(value.detach() if torch.is_tensor(value) else value)


def run(case, layer, *inputs, **options):
    """The layer's output for random weights, and the gradients of everything for a random cotangent."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = layer(*inputs, **options)
    y = y[0] if isinstance(y, tuple) else y
    dy = torch.randn_like(y)
    y.backward(dy)
    keep(case, y=y, dy=dy)
    for i, x in enumerate(inputs):
        keep(case, **{f"x{i}": x})
        if x.is_floating_point():
            keep(case, **{f"dx{i}": x.grad})
    for name, p in layer.named_parameters():
        keep(case, **{name: p, f"d{name}": p.grad})


x = torch.randn(2, 5, 6)
run("linear", nn.Linear(6, 7), x.clone())
run("layer_norm", nn.LayerNorm(6), x.clone())
run("rms_norm", nn.RMSNorm(6, eps=1e-6), x.clone())
run("embedding", nn.Embedding(9, 6), torch.randint(0, 9, (2, 5)))
run("gelu", nn.GELU(), x.clone())
run("gelu_tanh", nn.GELU("tanh"), x.clone())
run("silu", nn.SiLU(), x.clone())


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 3, batch_first=True)
        self.causal = causal

    def forward(self, x, context=None):
        context = x if context is None else context
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.inner(x, context, context, attn_mask=mask, need_weights=False)[0]


run("attention", Attention(False), x.clone())
run("causal_attention", Attention(True), x.clone())
run("cross_attention", Attention(False), x.clone(), torch.randn(2, 8, 6))
for first in (True, False):
    layer = nn.TransformerEncoderLayer(
        6, 3, 10, dropout=0.0, activation="gelu", batch_first=True, norm_first=first
    )
    run("pre_norm_block" if first else "post_norm_block", layer, x.clone())

logits = torch.randn(6, 5, requires_grad=True)
targets = torch.tensor([0, 4, -100, 2, 1, -100])
for smoothing in (0.0, 0.1):
    logits.grad = None
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    loss.backward()
    keep(f"cross_entropy_{smoothing}", logits=logits, targets=targets, loss=loss, dlogits=logits.grad)

makers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.03),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
}
start = torch.randn(4, 3)
grads = torch.randn(5, 4, 3)
for name, make in makers.items():
    p = start.clone().requires_grad_()
    optimizer = make([p])
    path = []
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        path.append(p.detach().clone())
    keep(name, start=start, grads=grads, path=torch.stack(path))

np.savez_compressed(Path(__file__).with_name("torch_numbers.npz"), **numbers)

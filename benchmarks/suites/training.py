"""Training: one step of nanoGPT's CPU recipe, npattn beside the same model written plainly in PyTorch.

4 layers, 4 heads, 128 wide, float32: forward, cross-entropy, backward, clipping, AdamW. Both start from the
same weights and see the same batch. The limit is the matmuls of the projections at the peak.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

SHAPES = {"nanoGPT, context 64, batch 12": (12, 64), "nanoGPT, context 256, batch 8": (8, 256)}
WORKLOADS = list(SHAPES)
QUICK = WORKLOADS[:1]

VOCAB, DIM, HEADS, LAYERS = 65, 128, 4, 4


def _batch(workload: str) -> Any:
    batch, context = SHAPES[workload]
    return np.random.default_rng(1).integers(0, VOCAB, (batch, context + 1))


def _model(workload: str, dtype: Any = np.float32) -> Any:
    from npattn.nn import TransformerDecoder

    context = SHAPES[workload][1]
    rng = np.random.default_rng(0)
    return TransformerDecoder(VOCAB, DIM, HEADS, LAYERS, 4 * DIM, context, bias=False, rng=rng, dtype=dtype)


@lru_cache(maxsize=4)
def _first_loss(workload: str) -> float:
    from npattn.functional import cross_entropy

    ids = _batch(workload)
    return float(cross_entropy(_model(workload, np.float64)(ids[:, :-1]), ids[:, 1:]))


def is_right(workload: str, result: Any) -> bool:
    """The loss before the first step, against float64."""
    return abs(float(result) - _first_loss(workload)) < 1e-5


def limit(workload: str, peak: float, bandwidth: float) -> tuple[float, float]:
    """Six operations for each parameter of a matmul and token."""
    batch, context = SHAPES[workload]
    flops = 6.0 * batch * context * (LAYERS * 12 * DIM**2 + VOCAB * DIM)
    return flops / 1e9, flops / peak


def _npattn(workload: str) -> Callable[[], Any]:
    from npattn.functional import cross_entropy_vjp
    from npattn.nn import keep_freed_memory
    from npattn.optim import AdamW, clip_by_global_norm

    keep_freed_memory()  # as examples/train_char_gpt.py does
    model, ids = _model(workload), _batch(workload)
    optimiser = AdamW(model.named_parameters(), betas=(0.9, 0.99), weight_decay=0.1)

    def step() -> Any:
        logits, back_model = model.vjp(ids[:, :-1])
        loss, back_loss = cross_entropy_vjp(logits, ids[:, 1:])
        grads, _ = clip_by_global_norm(back_model(back_loss())[1], 1.0)
        optimiser.step(grads)
        return loss

    return step


def _torch(workload: str) -> Callable[[], Any]:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(DIM, bias=False)
            self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
            self.out = nn.Linear(DIM, DIM, bias=False)
            self.mlp_norm = nn.LayerNorm(DIM, bias=False)
            self.up = nn.Linear(DIM, 4 * DIM, bias=False)
            self.down = nn.Linear(4 * DIM, DIM, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = (
                part.view(batch, length, HEADS, DIM // HEADS).transpose(1, 2)
                for part in self.qkv(self.attention_norm(x)).split(DIM, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, DIM))
            return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    class Decoder(nn.Module):
        def __init__(self, context: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, DIM)
            self.position = nn.Embedding(context, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(DIM, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embedding.weight.T

    model = Decoder(SHAPES[workload][1])
    model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in _torch_names(_model(workload)).items()}
    )
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    ids = torch.from_numpy(_batch(workload))

    def step() -> Any:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return loss.item()

    return step


def _torch_names(model: Any) -> dict[str, Any]:
    """Our parameters under the names of the PyTorch model above."""
    named = model.named_parameters()
    renamed = {}
    for name, array in named.items():
        if ".attention.query." in name:
            parts = [named[name.replace("query", which)] for which in ("query", "key", "value")]
            renamed[name.replace("attention.query", "qkv")] = np.concatenate(parts)
        elif ".attention.key." not in name and ".attention.value." not in name:
            renamed[name.replace("attention.out", "out").replace("mlp.", "", 1)] = array
    return renamed


CONTENDERS = {"npattn": _npattn, "PyTorch": _torch}

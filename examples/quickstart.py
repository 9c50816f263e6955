"""The library in a minute: attention with a mask, its gradients, and what the mask saves.

python examples/quickstart.py
"""

from _device import parse

import npattn
from npattn.analysis import attention_cost
from npattn.masks import Causal, Prefix, Window

length = {"type": int, "default": 2048, "help": "tokens"}
arguments, xp = parse(__doc__, length=length)

rng = xp.random.default_rng(0)
query, key, value = (rng.standard_normal((1, 8, arguments.length, 64), dtype=xp.float32) for _ in range(3))

# Attention and its gradients. `pullback` is an ordinary function: what the loss wants of `out` goes in,
# what that means for query, key and value comes out.
out, pullback = npattn.attention_vjp(query, key, value, mask=Causal())
grads = pullback(rng.standard_normal(out.shape, dtype=xp.float32))
print(f"causal: out {out.shape}, d query {grads.query.shape}, d key {grads.key.shape}")

# A mask is a rule, and rules combine. Here: the last 256 tokens, and the first token for everybody.
mask = Causal() & (Window(255) | Prefix(1))
out = npattn.attention(query, key, value, mask=mask)
print(
    f"window of 256 and the first token: {mask.density(arguments.length, arguments.length):.1%} of the pairs"
)
small = Causal() & (Window(3) | Prefix(1))
print(f"the same with a window of 4, at 12 tokens:\n{small.picture(12, 12)}")

# What a call costs, before it is made.
for name, cost in {
    "whole matrices": attention_cost(arguments.length, heads=8, algorithm="dense"),
    "npattn": attention_cost(arguments.length, heads=8),
    "npattn, windowed": attention_cost(arguments.length, heads=8, mask=mask),
}.items():
    print(f"{name:17} {cost.flops / 1e9:7.2f} GFLOP, {cost.peak_bytes / 2**20:7.1f} MiB beyond the inputs")

# Whole models are in npattn.nn; `npattn demo` trains one.

"""Local and global, strided, dilated and block patterns: long reach with few pairs.

For each pattern: its picture, the share of pairs it keeps, how far a token reaches through two layers, and
whether npattn's result is that of the dense mask. With `--save FOLDER` masks and plans are drawn.

    python examples/sparse_patterns.py
"""

from pathlib import Path

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn import analysis, masks

PATTERNS = {
    "longformer: neighbours and token 0": masks.longformer(2, [0]),
    "local + strided (sparse transformer)": masks.local_strided(4, 4),
    "dilated: every second neighbour": masks.Dilated(radius=2, dilation=2),
    "bigbird: blocks, local, global, random": masks.bigbird(
        block_size=4, window_blocks=1, global_blocks=1, random_blocks=1, seed=0
    ),
    "a rule of your own": masks.Predicate(lambda b, h, i, j: (i ^ j) & (i ^ j) - 1 == 0),
}


def main():
    """Run the example and print."""
    save = {"type": Path, "default": None, "help": "folder to write pictures to (needs matplotlib)"}
    arguments, xp = parse(__doc__, save=save)
    rng = np.random.default_rng(0)
    query, key, value = (xp.asarray(array) for array in rng.standard_normal((3, 2, 16, 8)))
    for name, mask in PATTERNS.items():
        print(f"\n{name}\n{mask.picture(16, 16)}")
        visible = np.broadcast_to(mask.to_dense(16, 16), (1, 1, 16, 16))[0, 0]
        two_layers = visible.astype(int) @ visible > 0
        print(f"{visible.mean():.0%} of the pairs; through two layers {two_layers.mean():.0%}")
        out = npattn.attention(query, key, value, mask=mask)
        dense = npattn.attention(query, key, value, mask=xp.asarray(visible))
        assert np.allclose(to_numpy(out), to_numpy(dense))

    # What one layer's cost becomes at length: pairs that are left out are not computed.
    print(f"\n{'':38} {'GFLOP at 8,192 tokens, 8 heads of 64':>38}")
    full = analysis.attention_cost(8192, heads=8)
    print(f"{'full':38} {full.flops / 1e9:>38.1f}")
    for name, mask in {
        "longformer(256, [0])": masks.longformer(256, [0]),
        "Window(256, 256)": masks.Window(256, 256),
        "Causal() & Window(511)": masks.Causal() & masks.Window(511),
    }.items():
        cost = analysis.attention_cost(8192, heads=8, mask=mask)
        print(f"{name:38} {cost.flops / 1e9:>38.1f}")

    if arguments.save is not None:
        draw(arguments.save)


def draw(folder):
    """Write the pictures into ``folder``."""
    from npattn import plots
    from npattn.masks.base import Extent
    from npattn.plans.build import tile_plan

    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, mask) in enumerate(PATTERNS.items()):
        plots.mask_picture(mask, 64, title=name).figure.savefig(folder / f"mask_{number}.png")
    plan = tile_plan(masks.longformer(100, [0]), Extent(1, 1, 1024, 1024), 64, 64)
    plots.plan_picture(plan).figure.savefig(folder / "plan.png")


if __name__ == "__main__":
    main()

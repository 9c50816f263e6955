"""Positions: sinusoidal, learned, rotary and ALiBi, and what each does to attention.

Without positions attention cannot tell one order of the words from another. With `--save FOLDER` pictures are
drawn as well.

    python examples/positional_encodings.py
"""

from pathlib import Path

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn import nn

LENGTH, DIM = 48, 32


def main():
    """Run the example and print."""
    save = {"type": Path, "default": None, "help": "folder to write pictures to (needs matplotlib)"}
    arguments, xp = parse(__doc__, save=save)
    rng = np.random.default_rng(0)

    # Without positions: shuffle the tokens, and the outputs are the same, shuffled.
    x = xp.asarray(rng.standard_normal((LENGTH, DIM)))
    order = rng.permutation(LENGTH)
    out, shuffled = npattn.attention(x, x, x), npattn.attention(x[order], x[order], x[order])
    assert np.allclose(to_numpy(out)[order], to_numpy(shuffled))
    print("no positions: attention over shuffled tokens is the shuffled attention")

    # Sinusoidal: waves of falling frequency, added to the tokens. How alike two positions are depends on
    # their distance alone, and falls with it.
    encoding = nn.SinusoidalPosition(DIM)(np.zeros((LENGTH, DIM)))
    alike = encoding @ encoding.T
    print(
        "sinusoidal: product of the encodings at distance 0, 1, 4, 16:", alike[20, [20, 21, 24, 36]].round(1)
    )
    assert np.allclose(np.diag(alike, 3), alike[0, 3])

    # Learned: a table like that of the words; it ends where it ends.
    learned = nn.LearnedPosition(LENGTH, DIM, rng=rng)
    try:
        learned(np.zeros((LENGTH + 1, DIM), np.float32))
    except ValueError as error:
        print("learned:", error)

    # Rotary: queries and keys are turned by an angle that grows with the position, so that their product
    # depends on the distance alone. Nothing is added, and values are not touched.
    rotary = nn.Rotary(DIM)
    query, key = rng.standard_normal((2, DIM))
    at = lambda x, position: rotary(x[None], positions=[position])[0]  # noqa: E731
    products = [at(query, 3 + shift) @ at(key, 1 + shift) for shift in (0, 10, 1000)]
    print("rotary: a query at 3, a key at 1, both moved by 0, 10, 1000:", np.round(products, 4))
    assert np.allclose(products, products[0])

    # ALiBi: a penalty on distance, steeper from head to head, as a bias of the logits.
    bias = nn.ALiBi(4)(LENGTH, LENGTH)
    query, key = rng.standard_normal((2, 4, LENGTH, 8)).astype(np.float32)
    weights = npattn.attention_weights(query, key, bias=bias, mask=npattn.masks.Causal())
    print("ALiBi: mean distance of each head:", npattn.analysis.distance_profile(weights).mean.round(1))

    if arguments.save is not None:
        from npattn import plots

        arguments.save.mkdir(parents=True, exist_ok=True)
        plots.positional_encoding(encoding).figure.savefig(arguments.save / "sinusoidal.png")
        plots.positional_curves(encoding).figure.savefig(arguments.save / "sinusoidal_curves.png")
        plots.distance_profile(weights).figure.savefig(arguments.save / "alibi_distance.png")


if __name__ == "__main__":
    main()

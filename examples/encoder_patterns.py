"""A transformer encoder end to end, and what its heads look at: summary, distance, agreement, rollout.

The encoder learns, in a few seconds, to say which word stood two places before each word. Only attention can
bring that word here, so a head must learn to look two places back: the analysis finds it. A published model,
`npattn.models.Bert.from_pretrained(folder)`, has the same methods. With `--save FOLDER` pictures are written,
and an HTML page to hover in.

    python examples/encoder_patterns.py
"""

from pathlib import Path

import numpy as np
from _device import parse

from npattn import analysis, masks, nn, optim
from npattn.functional import cross_entropy_vjp

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "more", "big", "dogs"]
LENGTH, BACK = 10, 2
LABELS = ["?", *WORDS]  # 0 is padding


def train(encoder, steps, rng):
    """Adam on random word salads; the loss of every position but the first two."""
    optimizer = optim.Adam(encoder.named_parameters(), lr=3e-3)
    for step in range(steps):
        ids = rng.integers(1, len(LABELS), (32, LENGTH))
        states, pullback = encoder.vjp(ids)
        # the embedding read backwards: logits of each word
        table = encoder.embedding.weight
        loss, loss_pullback = cross_entropy_vjp(states[:, BACK:] @ table.T, ids[:, :-BACK])
        dlogits = loss_pullback()
        dstates = np.zeros_like(states)
        dstates[:, BACK:] = dlogits @ table
        _, grads = pullback(dstates)
        # the table was used twice: at the entrance and here
        grads["embedding.weight"] += np.einsum("bnw,bnd->wd", dlogits, states[:, BACK:])
        optimizer.step(grads)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:>4}: loss {loss:.3f}")


def report(weights):
    """A line for each head of each layer."""
    print(f"{'layer':>5} {'head':>5} {'entropy':>8} {'largest':>8} {'keys':>6} {'itself':>7} {'two back':>9}")
    for number, layer in enumerate(weights):
        summary, profile = analysis.head_summary(layer), analysis.distance_profile(layer)
        for head in range(layer.shape[1]):
            two_back = profile.weight[head, profile.distance == -BACK][0]
            print(
                f"{number:>5} {head:>5} {summary.entropy[head]:>8.2f} {summary.max_weight[head]:>8.2f} "
                f"{summary.spread[head]:>6.1f} {summary.self_weight[head]:>7.2f} {two_back:>9.2f}"
            )


def main():
    """Run the example and print."""
    save = {"type": Path, "default": None, "help": "folder to write pictures to (needs matplotlib)"}
    steps = {"type": int, "default": 300, "help": "training steps"}
    arguments, _ = parse(__doc__, save=save, steps=steps)
    rng = np.random.default_rng(0)
    encoder = nn.TransformerEncoder(
        len(LABELS), embed_dim=32, num_heads=2, num_layers=2, ff_dim=64, max_length=LENGTH, rng=rng
    )
    text = ["the", "big", "cat", "sat", "on", "a", "mat", "and", "saw", "two"]
    ids = np.array([[LABELS.index(word) for word in text]])

    print(f"{encoder.num_parameters():,} parameters; before training")
    report(encoder.weights(ids))
    train(encoder, arguments.steps, rng)

    # Two texts of different lengths in a batch: padding never matters.
    lengths = [LENGTH, 6]
    batch = np.concatenate([ids, np.where(np.arange(LENGTH) < 6, ids, 0)])
    states = encoder(batch, mask=masks.Padding(lengths))
    assert np.allclose(states[1, :6], encoder(ids[:, :6])[0], atol=1e-4)
    said = (states[0] @ encoder.embedding.weight.T).argmax(axis=-1)
    print("text:           ", *text)
    print("two places back:", *(LABELS[word] for word in said))

    # Weights are computed when asked for; no ordinary call keeps them.
    weights = encoder.weights(ids)
    print("after training")
    report(weights)

    # The same summary without the weights, for texts too long to hold them.
    stats = encoder.attention_stats(ids)
    assert np.allclose(
        analysis.head_summary(stats[0]).entropy, analysis.head_summary(weights[0]).entropy, atol=1e-4
    )

    # Through all layers: which words the last state of "mat" stems from.
    row = analysis.rollout(weights, rows=[text.index("mat")])[0, 0]
    strongest = np.argsort(-row)[:4]
    print("'mat' stems from:", ", ".join(f"{text[j]} {row[j]:.2f}" for j in strongest))
    agreement = analysis.head_agreement(weights[0])
    print(f"agreement of layer 0's heads: {agreement[0, 1]:.2f}")

    if arguments.save is not None:
        draw(arguments.save, weights, text)


def draw(folder, weights, words):
    """Write the pictures into ``folder``."""
    from npattn import plots

    folder.mkdir(parents=True, exist_ok=True)
    first = weights[0][0]
    plots.attention_heatmap(first[0], words, title="layer 0, head 0").figure.savefig(folder / "head.png")
    plots.head_grid(np.concatenate([layer[0] for layer in weights]), words)[0, 0].figure.savefig(
        folder / "heads.png"
    )
    plots.head_summary(first)[0, 0].figure.savefig(folder / "summary.png")
    plots.distance_profile(first).figure.savefig(folder / "distance.png")
    plots.head_agreement(first).figure.savefig(folder / "agreement.png")
    page = plots.save_html(folder / "page.html", weights, words, title="two places back")
    print(f"pictures and {page}")


if __name__ == "__main__":
    main()

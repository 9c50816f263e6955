"""A transformer encoder end to end, and what its heads look at: summary, distance, agreement, rollout.

The encoder is new, so its heads have learned nothing; the numbers show what to expect of chance. A trained
model, `npattn.models.Bert.from_pretrained(folder)`, has the same methods. With `--save FOLDER` pictures and a
HTML page to hover in are written.

    python examples/encoder_patterns.py
"""

from pathlib import Path

import numpy as np
from _device import parse

from npattn import analysis, masks, nn

TEXTS = [
    "the quick brown fox jumps over the lazy dog while the cat looks on",
    "attention is a weighted mean and nothing else",
]


def main():
    """Run the example and print."""
    save = {"type": Path, "default": None, "help": "folder to write pictures to (needs matplotlib)"}
    arguments, _ = parse(__doc__, save=save)

    # words -> numbers, padded to the longer text
    texts = [text.split() for text in TEXTS]
    vocabulary = {word: number for number, word in enumerate(sorted({w for t in texts for w in t}), start=1)}
    lengths = [len(text) for text in texts]
    ids = np.zeros((len(texts), max(lengths)), np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = [vocabulary[word] for word in text]

    encoder = nn.TransformerEncoder(
        len(vocabulary) + 1,
        embed_dim=64,
        num_heads=4,
        num_layers=3,
        ff_dim=128,
        max_length=64,
        rng=np.random.default_rng(0),
    )
    padding = masks.Padding(lengths)
    states = encoder(ids, mask=padding)
    print(f"ids {ids.shape} -> states {states.shape}, {encoder.num_parameters():,} parameters")

    # Padding never matters: the short text alone gives the same states.
    alone = encoder(ids[1:, : lengths[1]])
    assert np.allclose(states[1, : lengths[1]], alone[0], atol=1e-5)

    # Weights are computed when asked for; no ordinary call keeps them.
    weights = encoder.weights(ids, mask=padding)
    print(
        f"\n{'layer':>5} {'head':>5} {'entropy':>8} {'largest':>8} {'keys':>6} {'itself':>7} {'distance':>9}"
    )
    for number, layer in enumerate(weights):
        summary = analysis.head_summary(layer)
        distance = analysis.distance_profile(layer).mean
        for head in range(layer.shape[1]):
            print(
                f"{number:>5} {head:>5} {summary.entropy[head]:>8.2f} {summary.max_weight[head]:>8.2f} "
                f"{summary.spread[head]:>6.1f} {summary.self_weight[head]:>7.2f} {distance[head]:>9.1f}"
            )
        print(f"      most focused: head {summary.most_focused}, least: head {summary.least_focused}")

    # The same summary without the weights, for texts too long to hold them.
    stats = encoder.attention_stats(ids, mask=padding)
    assert np.allclose(
        analysis.head_summary(stats[0]).entropy, analysis.head_summary(weights[0]).entropy, atol=1e-4
    )

    # Through all layers: which input words a word's last state stems from.
    words = texts[0]
    inner = [layer[0, :, : len(words), : len(words)] for layer in weights]
    row = analysis.rollout(inner, rows=[words.index("cat")])[0]
    strongest = np.argsort(-row)[:5]
    print("\n'cat' after three layers:", ", ".join(f"{words[j]} {row[j]:.2f}" for j in strongest))
    agreement = analysis.head_agreement(inner[0])
    print("agreement of layer 0's heads:\n", agreement.round(2))

    if arguments.save is not None:
        draw(arguments.save, inner, words)


def draw(folder, weights, words):
    """Write the pictures into ``folder``."""
    from npattn import plots

    folder.mkdir(parents=True, exist_ok=True)
    plots.attention_heatmap(weights[0].mean(axis=0), words, title="layer 0, mean").figure.savefig(
        folder / "mean.png"
    )
    plots.head_grid(weights[0], words)[0, 0].figure.savefig(folder / "heads.png")
    plots.head_summary(weights[0])[0, 0].figure.savefig(folder / "summary.png")
    plots.distance_profile(weights[0]).figure.savefig(folder / "distance.png")
    plots.head_agreement(weights[0]).figure.savefig(folder / "agreement.png")
    page = plots.save_html(folder / "page.html", weights, words, title="a new encoder")
    print(f"pictures and {page}")


if __name__ == "__main__":
    main()

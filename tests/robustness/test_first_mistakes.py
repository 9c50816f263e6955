"""What a newcomer does wrong first is answered with what to do instead."""

import numpy as np
import pytest

import npattn
from npattn import masks, nn, optim

x = np.ones((2, 4, 8, 16), np.float32)

MISTAKES = {
    "a mask's class": (lambda: npattn.attention(x, x, x, mask=masks.Causal), TypeError, r"Causal\(\.\.\.\)"),
    "a mask's name": (lambda: npattn.attention(x, x, x, mask="causal"), TypeError, "a Mask, got 'causal'"),
    "a 0/1 mask": (lambda: npattn.attention(x, x, x, mask=np.tri(8, dtype=int)), TypeError, "mask != 0"),
    "an additive mask": (lambda: npattn.attention(x, x, x, mask=np.zeros((8, 8))), TypeError, "bias="),
    "dropout without seed": (lambda: npattn.attention(x, x, x, dropout_p=0.1), ValueError, "needs seed="),
    "integers": (lambda: npattn.attention(*[x.astype(int)] * 3), TypeError, r"query\.astype\(np\.float32\)"),
    "other heads": (lambda: npattn.attention(x, x[:, :3], x[:, :3]), ValueError, "heads_q=4, heads_kv=3"),
    "and for &": (lambda: masks.Causal() and masks.Window(3), TypeError, r"& \| ~"),
    "a model for its parameters": (
        lambda: optim.Adam(nn.Linear(2, 2, rng=np.random.default_rng(0))),
        TypeError,
        r"model\.named_parameters\(\)",
    ),
    "a graph for an adjacency": (
        lambda: npattn.graph_attention(x[0], x[0], x[0], {0: [1]}),
        TypeError,
        "from_networkx",
    ),
    "too long a text": (
        lambda: nn.TransformerEncoder(9, 8, 2, 1, 16, 4, rng=np.random.default_rng(0))([[1, 2, 3, 4, 5]]),
        ValueError,
        "5 positions, but there are only 4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_says_what_to_do(mistake):
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text):
        call()

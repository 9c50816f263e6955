"""Every layer's pullback against differences of its own forward, in float64."""

import numpy as np
import pytest

from npattn import masks, nn

F8 = np.float64


def x(rng, *shape):
    return rng.standard_normal(shape)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(check_layer, rng, bias):
    check_layer(nn.Linear(5, 3, bias=bias, rng=rng, dtype=F8), x(rng, 2, 7, 5))


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(5, dtype=F8), nn.RMSNorm(5, dtype=F8), nn.LayerNorm(5, bias=False, dtype=F8)]
)
def test_norms(check_layer, rng, layer):
    check_layer(layer, x(rng, 2, 7, 5))


@pytest.mark.parametrize("layer", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_activations(check_layer, rng, layer):
    check_layer(layer, 2 * x(rng, 3, 7))


def test_embedding(check_layer, rng):
    check_layer(nn.Embedding(11, 4, rng=rng, dtype=F8), fixed=(rng.integers(0, 11, (3, 7)),))


def test_dropout(check_layer, rng):
    check_layer(nn.Dropout(0.4), x(rng, 3, 7), seed=5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_mlp(check_layer, rng, activation):
    check_layer(nn.MLP(5, 11, activation=activation, rng=rng, dtype=F8), x(rng, 2, 3, 5))


@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp(check_layer, rng, bias):
    check_layer(nn.GatedMLP(5, 11, bias=bias, rng=rng, dtype=F8), x(rng, 2, 3, 5))


def test_sequential_with_dropout(check_layer, rng):
    layers = [
        nn.Linear(4, 8, rng=rng, dtype=F8),
        nn.Dropout(0.3),
        nn.GELU(),
        nn.Linear(8, 2, rng=rng, dtype=F8),
    ]
    check_layer(nn.Sequential(*layers), x(rng, 5, 4), seed=3)


def test_a_layer_standing_twice_gets_the_sum_of_both_gradients(check_layer, rng):
    shared = nn.Linear(4, 4, rng=rng, dtype=F8)
    model = nn.Sequential(shared, nn.SiLU(), shared)
    assert list(model.named_parameters()) == ["layers.0.weight", "layers.0.bias"]
    check_layer(model, x(rng, 5, 4))


@pytest.mark.parametrize("positions", [None, [4, 0, 2], [[0, 1, 2], [5, 5, 1]]])
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_added_positions(check_layer, rng, kind, positions):
    layer = (
        nn.SinusoidalPosition(6, 7) if kind == "sinusoidal" else nn.LearnedPosition(7, 6, rng=rng, dtype=F8)
    )
    check_layer(layer, x(rng, 2, 3, 6), positions=None if positions is None else np.array(positions))


@pytest.mark.parametrize("positions", [None, [4, 0, 2], [[0, 1, 2], [5, 5, 1]]])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_rotary(check_layer, rng, rotary_dim, interleaved, positions):
    layer = nn.Rotary(6, interleaved=interleaved, rotary_dim=rotary_dim)
    check_layer(layer, x(rng, 2, 4, 3, 6), positions=None if positions is None else np.array(positions))


ATTENTION = {
    "plain": {},
    "biases": {"bias": True},
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1, "causal": True},
    "head_dim": {"head_dim": 5, "out_bias": False},
    "window": {"window": 2},
    "causal window": {"window": 2, "causal": True},
    "window pair": {"window": (None, 1)},
    "mask": {"mask": masks.Padding([6, 4])},
    "rotary": {"rotary": nn.Rotary(3, rotary_dim=2), "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "qk_norm": {"qk_norm": True, "rotary": nn.Rotary(3, rotary_dim=2)},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_multi_head_attention(check_layer, rng, options):
    check_layer(nn.MultiHeadAttention(12, 4, **options, rng=rng, dtype=F8), x(rng, 2, 6, 12))


CALLS = {
    "bool mask": {"mask": np.tri(6, dtype=bool)},
    "mask and window": {"mask": masks.Padding([3, 6])},
    "positions": {"positions": np.array([[3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5]])},
    "dropout": {"seed": 11},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_multi_head_attention_called_with(check_layer, rng, call):
    layer = nn.MultiHeadAttention(
        12,
        4,
        window=3,
        rotary=nn.Rotary(3, rotary_dim=2),
        alibi=True,
        dropout_p=0.3,
        rng=rng,
        dtype=F8,
    )
    check_layer(layer, x(rng, 2, 6, 12), **call)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "bias": True}, {"alibi": True, "causal": True}])
def test_cross_attention(check_layer, rng, options):
    layer = nn.MultiHeadAttention(12, 4, **options, rng=rng, dtype=F8)
    check_layer(layer, x(rng, 2, 5, 12), x(rng, 2, 7, 12))


@pytest.mark.parametrize("causal", [False, True])
def test_linear_multi_head_attention(check_layer, rng, causal):
    check_layer(nn.LinearMultiHeadAttention(12, 4, causal=causal, rng=rng, dtype=F8), x(rng, 2, 6, 12))


def test_linear_cross_attention(check_layer, rng):
    layer = nn.LinearMultiHeadAttention(12, 4, bias=True, rng=rng, dtype=F8)
    check_layer(layer, x(rng, 2, 5, 12), x(rng, 2, 7, 12))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("seed", [None, 3])
def test_block(check_layer, rng, norm_first, norm, mlp, seed):
    block = nn.TransformerBlock(
        8, 2, 12, norm_first=norm_first, norm=norm, mlp=mlp, causal=True, dropout_p=0.2, rng=rng, dtype=F8
    )
    check_layer(block, x(rng, 2, 5, 8), seed=seed)


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "sinusoidal"])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder(check_layer, rng, position, tied):
    model = nn.TransformerDecoder(
        7, 8, 4, 2, 12, 6, num_kv_heads=2, position=position, tied=tied, rng=rng, dtype=F8
    )
    check_layer(model, fixed=(rng.integers(0, 7, (2, 5)),))


@pytest.mark.parametrize("checkpoint", [True, False])
def test_decoder_with_everything_else(check_layer, rng, checkpoint):
    model = nn.TransformerDecoder(
        7, 8, 2, 2, 12, 6,
        norm="rms", mlp="swiglu", norm_first=False, bias=False, dropout_p=0.2, window=3, qk_norm=True,
        position="rotary", rng=rng, dtype=F8,
    )  # fmt: skip
    check_layer(model, fixed=(rng.integers(0, 7, (2, 5)),), seed=4, checkpoint=checkpoint)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(check_layer, rng, norm_first):
    model = nn.TransformerEncoder(7, 8, 2, 2, 12, 6, norm_first=norm_first, dropout_p=0.1, rng=rng, dtype=F8)
    ids = rng.integers(0, 7, (2, 5))
    check_layer(model, fixed=(ids,), mask=masks.Padding([5, 3]), seed=9)

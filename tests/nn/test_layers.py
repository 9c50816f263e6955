"""What layers promise beside their numbers: names, sharing, batches, positions, seeds, errors."""

import threading

import ml_dtypes
import numpy as np
import pytest

from npattn import masks, nn
from npattn.cache import KVCache
from npattn.functional.dropout import keep_mask

F8 = np.float64


@pytest.fixture
def attention(rng):
    return nn.MultiHeadAttention(12, 4, num_kv_heads=2, rng=rng, dtype=F8)


def decoder(rng, **options):
    return nn.TransformerDecoder(11, 16, 4, 2, 24, 12, rng=rng, dtype=F8, **options)


# --- parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: nn.Linear(8, 8, **options),
        lambda **options: nn.MLP(8, 12, **options),
        lambda **options: nn.GatedMLP(8, 12, **options),
        lambda **options: nn.LearnedPosition(5, 8, **options),
        lambda **options: nn.MultiHeadAttention(8, 2, num_kv_heads=1, rotary=nn.Rotary(4), **options),
        lambda **options: nn.LinearMultiHeadAttention(8, 2, **options),
        lambda **options: nn.TransformerBlock(8, 2, 12, qk_norm=True, **options),
    ],
)
def test_halves_stay_halves(make, dtype, rng):
    """NumPy's product of bfloat16 matrices is float32: every layer with a weight answered in float32."""
    layer = make(rng=rng, dtype=dtype)
    x = rng.standard_normal((2, 5, 8)).astype(dtype)
    y, pullback = layer.vjp(x)
    dx, grads = pullback(y)
    assert y.dtype == layer(x).dtype == dx.dtype == dtype
    assert {grad.dtype for grad in grads.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder_of_halves_answers_in_halves(dtype, tied, rng):
    model = nn.TransformerDecoder(11, 8, 2, 1, 12, 12, tied=tied, rng=rng, dtype=dtype)
    logits, pullback = model.vjp(np.arange(6).reshape(2, 3))
    assert logits.dtype == dtype
    assert {grad.dtype for grad in pullback(logits)[1].values()} == {np.dtype(dtype)}


def test_window_is_checked_when_the_layer_is_made(rng):
    """NumPy's integers were no window, and a wrong one was refused only at the first call."""
    x = rng.standard_normal((1, 5, 8))
    made = [
        nn.MultiHeadAttention(8, 2, causal=True, window=window, rng=np.random.default_rng(0), dtype=F8)
        for window in (2, np.int64(2), [2, 0])
    ]
    for layer in made[1:]:
        np.testing.assert_array_equal(layer(x), made[0](x))
    for window, error in ((-1, ValueError), (1.5, TypeError), ("a", TypeError), ((1,), ValueError)):
        with pytest.raises(error, match=r"at least 0|window must be an int or the pair"):
            nn.MultiHeadAttention(8, 2, window=window, rng=rng)


def test_parameters_are_named_by_path_and_live(rng):
    block = nn.TransformerBlock(8, 2, 12, rng=rng)
    parameters = block.named_parameters()
    assert list(parameters)[:4] == [
        "attention_norm.weight",
        "attention_norm.bias",
        "attention.query.weight",
        "attention.query.bias",
    ]
    parameters["mlp.up.weight"][...] = 7
    assert (block.mlp.up.weight == 7).all()


def test_constants_and_layers_without_weights_are_no_parameters():
    for layer in (nn.GELU(), nn.SiLU(), nn.Dropout(0.5), nn.Rotary(4), nn.ALiBi(4), nn.SinusoidalPosition(4)):
        assert layer.named_parameters() == {}
        assert layer.num_parameters() == 0


def test_multi_head_attention_has_the_contracts_names(rng):
    plain = nn.MultiHeadAttention(12, 4, num_kv_heads=2, rng=rng)
    assert {name: p.shape for name, p in plain.named_parameters().items()} == {
        "query.weight": (12, 12),
        "key.weight": (6, 12),
        "value.weight": (6, 12),
        "out.weight": (12, 12),
        "out.bias": (12,),
    }


def test_tied_decoder_names_the_shared_array_once(rng):
    tied, untied = decoder(rng), decoder(rng, tied=False)
    assert "head.weight" not in tied.named_parameters()
    assert "head.weight" in untied.named_parameters()
    assert untied.num_parameters() - tied.num_parameters() == 11 * 16


def test_load_parameters_lists_every_mismatch_and_changes_nothing(rng):
    layer = nn.MLP(3, 5, rng=rng)
    before = {name: p.copy() for name, p in layer.named_parameters().items()}
    wrong = {"up.weight": np.ones((5, 3)), "up.bias": np.ones(4), "down.wieght": np.ones((3, 5))}
    with pytest.raises(ValueError, match="4 mismatches") as raised:
        layer.load_parameters(wrong)
    for text in (
        "up.bias: shape (4,), expected (5,)",
        "down.weight: missing",
        "down.bias: missing",
        "down.wieght",
    ):
        assert text in str(raised.value)
    for name, p in layer.named_parameters().items():
        assert np.array_equal(p, before[name])


def test_load_parameters_refuses_what_is_not_a_number_and_changes_nothing(rng):
    layer = nn.Linear(2, 2, rng=rng)
    before = layer.weight.copy()
    with pytest.raises(TypeError, match="bias"):
        layer.load_parameters({"weight": np.ones((2, 2)), "bias": np.array(["a", "b"])})
    assert np.array_equal(layer.weight, before)


def test_load_parameters_keeps_the_arrays_and_converts(rng):
    layer = nn.Linear(2, 2, rng=rng)
    weight = layer.weight
    layer.load_parameters({"weight": np.eye(2, dtype=np.float16), "bias": [1, 2]})
    assert layer.weight is weight
    assert weight.dtype == np.float32
    assert np.array_equal(weight, np.eye(2))


def test_summary_counts(rng):
    text = decoder(rng).summary()
    assert text.splitlines()[0] == "TransformerDecoder"
    assert text.splitlines()[-1].split() == ["total", f"{decoder(rng).num_parameters():,}"]
    assert "blocks.1.mlp.down.bias" in text


def test_repr_shows_shapes_not_numbers(rng):
    assert repr(nn.Linear(2, 3, rng=rng)) == "Linear(weight=float32[3, 2], bias=float32[3])"
    assert "blocks=2 × TransformerBlock(" in repr(decoder(rng))


def test_one_seed_is_one_model_in_every_dtype():
    models = [
        nn.TransformerDecoder(11, 16, 4, 1, 24, 12, rng=np.random.default_rng(1), dtype=t)
        for t in ("f4", "f8")
    ]
    for a, b in zip(*(m.named_parameters().values() for m in models), strict=True):
        assert a.dtype == np.float32
        assert b.dtype == F8
        assert np.array_equal(a, b.astype(np.float32))


def test_blank_builds_without_drawing():
    model = nn.TransformerDecoder(11, 16, 4, 1, 24, 12, tied=False, rng=nn.init.BLANK)
    for name, p in model.named_parameters().items():
        assert (p == (1 if name.endswith("norm.weight") else 0)).all(), name


def test_initial_values_follow_gpt_2(rng):
    model = nn.TransformerDecoder(500, 128, 4, 8, 512, 64, rng=rng)
    p = model.named_parameters()
    assert p["embedding.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert p["blocks.3.attention.query.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert p["blocks.3.mlp.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert not p["blocks.0.mlp.up.bias"].any()


# --- purity -------------------------------------------------------------------------------------------------


def test_nothing_is_stored_and_pullbacks_of_two_calls_do_not_mix(rng, attention):
    before = dict(vars(attention))
    a, b = rng.standard_normal((2, 3, 5, 12))
    _, back_a = attention.vjp(a)
    expected = back_a(a)
    attention.vjp(b)[1](b)
    again = back_a(a)
    assert np.array_equal(expected[0], again[0])
    assert all(np.array_equal(expected[1][name], again[1][name]) for name in expected[1])
    assert vars(attention) == before


def test_threads_share_a_layer(rng):
    model = decoder(rng)
    batches = rng.integers(0, 11, (6, 2, 9))

    def work(ids):
        logits, pullback = model.vjp(ids)
        return logits, pullback(np.cos(logits))[1]

    expected = [work(ids) for ids in batches]
    got = [None] * len(batches)

    def run(i):
        got[i] = work(batches[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (logits, grads), (logits_2, grads_2) in zip(expected, got, strict=True):
        assert np.array_equal(logits, logits_2)
        for name in grads:
            np.testing.assert_allclose(grads[name], grads_2[name], rtol=1e-12, atol=1e-13)


# --- meaning ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda r: decoder(r), lambda r: decoder(r, position="rotary", mlp="swiglu", norm="rms")]
)
def test_batched_equals_alone(rng, make):
    model = make(rng)
    ids = rng.integers(0, 11, (3, 7))
    together = model(ids)
    for row, one in zip(ids, together, strict=True):
        np.testing.assert_allclose(model(row[None])[0], one, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(model(row), one, rtol=1e-11, atol=1e-12)


def test_attention_without_positions_is_permutation_equivariant(rng, attention):
    x = rng.standard_normal((2, 7, 12))
    order = rng.permutation(7)
    np.testing.assert_allclose(attention(x[:, order]), attention(x)[:, order], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "sinusoidal"])
def test_decoder_never_sees_the_future(rng, position):
    model = decoder(rng, position=position)
    ids = rng.integers(0, 11, (2, 9))
    changed = ids.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    a, b = model(ids), model(changed)
    assert np.array_equal(a[:, :5], b[:, :5])
    assert (a[:, 5:] != b[:, 5:]).any(axis=-1).all()


def test_encoder_padding_is_invisible(rng):
    model = nn.TransformerEncoder(11, 16, 4, 2, 24, 12, rng=rng, dtype=F8)
    ids = rng.integers(0, 11, (2, 7))
    y = model(ids, mask=masks.Padding([7, 4]))
    np.testing.assert_allclose(model(ids[1:, :4])[0], y[1, :4], rtol=1e-11, atol=1e-12)


def test_grouped_heads_equal_repeated_ones(rng):
    few = nn.MultiHeadAttention(12, 4, num_kv_heads=2, rng=rng, dtype=F8)
    many = nn.MultiHeadAttention(12, 4, rng=rng, dtype=F8)
    p = few.named_parameters()
    for which in ("key", "value"):
        heads = p[f"{which}.weight"].reshape(2, 3, 12)
        p[f"{which}.weight"] = np.repeat(heads, 2, axis=0).reshape(12, 12)
    many.load_parameters(p)
    x = rng.standard_normal((2, 5, 12))
    np.testing.assert_allclose(few(x), many(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("layer_options", "same"),
    [
        ({"window": 2}, masks.Window(2, 2)),
        ({"window": 2, "causal": True}, masks.Window(2, 0)),
        ({"window": (3, 1)}, masks.Window(3, 1)),
        ({"window": (None, 1)}, masks.Window(None, 1)),
        ({"window": (2, 2), "causal": True}, masks.Window(2, 0)),
        ({"causal": True}, masks.Causal()),
        ({"mask": masks.Prefix(2)}, masks.Prefix(2)),
    ],
)
def test_masking_options_mean_these_masks(rng, layer_options, same):
    x = rng.standard_normal((2, 6, 12))
    layer = nn.MultiHeadAttention(12, 4, **layer_options, rng=1, dtype=F8)
    plain = nn.MultiHeadAttention(12, 4, rng=1, dtype=F8)
    dense = same.to_dense(6, 6)[0, 0] if same.to_dense(6, 6).ndim == 4 else same.to_dense(6, 6)
    np.testing.assert_allclose(layer(x), plain(x, mask=dense), rtol=1e-12, atol=1e-13)
    weights = layer.weights(x)
    assert weights.shape == (2, 4, 6, 6)
    assert not weights[..., ~dense].any()
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0)


def test_weights_reproduce_the_output(rng, attention):
    x = rng.standard_normal((2, 5, 12))
    weights = attention.weights(x)
    v = attention.value(x).reshape(2, 5, 2, 3).swapaxes(1, 2).repeat(2, axis=1)
    y = attention.out((weights @ v).swapaxes(1, 2).reshape(2, 5, 12))
    np.testing.assert_allclose(attention(x), y, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(attention.weights(x, rows=[3, 0]), weights[..., [3, 0], :], rtol=1e-12)


def test_transformer_weights_and_statistics(rng):
    model = decoder(rng)
    ids = rng.integers(0, 11, (2, 6))
    weights = model.weights(ids)
    stats = model.attention_stats(ids, top_k=2)
    assert len(weights) == len(stats) == 2
    for w, s in zip(weights, stats, strict=True):
        assert w.shape == (2, 4, 6, 6)
        assert np.array_equal(np.triu(np.ones((6, 6)), 1) * w, np.zeros_like(w))
        np.testing.assert_allclose(s.max_weight, w.max(axis=-1), rtol=1e-6)
        np.testing.assert_allclose(s.received, w.sum(axis=-2), rtol=1e-6, atol=1e-9)
        assert s.top_keys.shape == (2, 4, 6, 2)


def test_checkpoint_gives_the_same_bits(rng):
    model = decoder(rng, dropout_p=0.1)
    ids = rng.integers(0, 11, (2, 9))
    results = [model.vjp(ids, seed=3, checkpoint=checkpoint) for checkpoint in (False, True)]
    (a, back_a), (b, back_b) = results
    assert np.array_equal(a, b)
    dlogits = rng.standard_normal(a.shape)
    grads_a, grads_b = back_a(dlogits)[1], back_b(dlogits)[1]
    assert all(np.array_equal(grads_a[name], grads_b[name]) for name in grads_a)


def test_checkpoint_keeps_far_less(rng):
    import tracemalloc

    model = nn.TransformerDecoder(11, 64, 4, 6, 256, 128, rng=rng)
    ids = rng.integers(0, 11, (2, 128))
    model.vjp(ids)  # plans and tables are cached by a first call
    kept = []
    for checkpoint in (False, True):
        tracemalloc.start()
        _result = model.vjp(ids, checkpoint=checkpoint)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del _result
    block_input = ids.size * 64 * 4
    assert kept[1] < (6 + 8) * block_input  # one for each block, and the ends of the model
    assert kept[0] > 6 * 8 * block_input


# --- dropout ------------------------------------------------------------------------------------------------


def test_dropout_keeps_what_the_published_generator_keeps(rng):
    x = rng.standard_normal((3, 4, 50))
    y = nn.Dropout(0.3)(x, seed=8)
    keep = keep_mask(8, x.shape, 0.3)
    np.testing.assert_allclose(y[keep], x[keep] / 0.7, rtol=1e-6)
    assert not y[~keep].any()


def test_without_a_seed_nothing_is_dropped(rng):
    x = rng.standard_normal((3, 4))
    assert nn.Dropout(0.9)(x) is x
    with_dropout, without = (decoder(np.random.default_rng(2), dropout_p=p) for p in (0.5, 0.0))
    ids = rng.integers(0, 11, (2, 9))
    assert np.array_equal(with_dropout(ids), without(ids))
    assert not np.array_equal(with_dropout(ids, seed=1), without(ids))
    assert np.array_equal(with_dropout(ids, seed=1), with_dropout(ids, seed=1))
    assert not np.array_equal(with_dropout(ids, seed=1), with_dropout(ids, seed=2))


def test_every_place_of_a_model_drops_by_a_seed_of_its_own(rng):
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    kept = model(np.ones(4000), seed=1) != 0
    assert kept.mean() == pytest.approx(0.25, abs=0.03)


# --- positions ----------------------------------------------------------------------------------------------


def test_rotary_scores_depend_on_distance_alone(rng):
    rotary = nn.Rotary(8)
    q, k = rng.standard_normal((2, 1, 5, 8))
    here = rotary(q) @ rotary(k).swapaxes(-1, -2)
    shifted = rotary(q, np.arange(5) + 100) @ rotary(k, np.arange(5) + 100).swapaxes(-1, -2)
    np.testing.assert_allclose(here, shifted, rtol=1e-9, atol=1e-10)


def test_rotary_pairs(rng):
    x = rng.standard_normal((2, 3, 6))
    by_halves = nn.Rotary(6)(x)
    order = [0, 3, 1, 4, 2, 5]  # neighbours of the interleaved form are the halves of the other
    np.testing.assert_allclose(
        nn.Rotary(6, interleaved=True)(x[..., order]), by_halves[..., order], rtol=1e-12
    )


def test_rotary_positions_equal_the_default(rng):
    x = rng.standard_normal((2, 4, 3, 6)).astype(np.float32)
    for scaling in (None, {"rope_type": "linear", "factor": 2.0}):
        rotary = nn.Rotary(6, scaling=scaling)
        assert np.array_equal(rotary(x), rotary(x, np.arange(3)))
        assert np.array_equal(rotary(x), rotary(x, np.tile(np.arange(3), (2, 1))))
    assert rotary(x).dtype == np.float32


def test_rotary_linear_scaling_stretches_positions(rng):
    x = rng.standard_normal((1, 3, 6))
    scaled = nn.Rotary(6, scaling={"type": "linear", "factor": 4})
    np.testing.assert_allclose(scaled(x, np.array([0, 4, 8])), nn.Rotary(6)(x), rtol=1e-12)


def test_rotary_llama3_scaling_keeps_high_and_slows_low_frequencies():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = nn.Rotary(128, base=500000.0).frequencies()
    scaled = nn.Rotary(128, base=500000.0, scaling=scaling).frequencies()
    ratio = plain / scaled
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8.0)
    assert (np.diff(ratio) >= -1e-12).all()


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_array_equal(nn.ALiBi(8).slopes, 2.0 ** -np.arange(1, 9))
    twelve = nn.ALiBi(12, dtype=F8).slopes  # as get_slopes(12) of the published code
    np.testing.assert_allclose(twelve[:8], 2.0 ** -np.arange(1.0, 9.0))
    np.testing.assert_allclose(twelve[8:], 2.0 ** -np.arange(0.5, 4.5, 1.0))


def test_alibi_follows_the_aligned_diagonal():
    bias = nn.ALiBi(2, dtype=F8)(2, 4)
    distance = np.array([[2, 1, 0, 1], [3, 2, 1, 0]])
    np.testing.assert_allclose(bias, -nn.ALiBi(2, dtype=F8).slopes[:, None, None] * distance)
    assert np.array_equal(nn.ALiBi(2)(2, 4, offset=2), nn.ALiBi(2)(2, 4))
    assert nn.ALiBi(2)(2, 4, offset=np.array([0, 1, 2])).shape == (3, 2, 2, 4)


def test_sinusoidal_formula(rng):
    layer = nn.SinusoidalPosition(5)
    table = layer(np.zeros((7, 5)))
    for p in range(7):
        for i in range(5):
            angle = p / 10000 ** ((i - i % 2) / 5)
            assert table[p, i] == pytest.approx(np.cos(angle) if i % 2 else np.sin(angle))
    np.testing.assert_allclose(layer(np.zeros((2, 5)), positions=np.array([6, 3])), table[[6, 3]])


# --- errors -------------------------------------------------------------------------------------------------

ERRORS = {
    "heads": (lambda r: nn.MultiHeadAttention(10, 4, rng=r), "embed_dim 10, num_heads 4"),
    "groups": (lambda r: nn.MultiHeadAttention(12, 4, num_kv_heads=3, rng=r), "num_heads 4, num_kv_heads 3"),
    "rotary size": (lambda r: nn.MultiHeadAttention(12, 4, rotary=nn.Rotary(4), rng=r), "head_dim"),
    "odd rotary": (lambda r: nn.Rotary(5), "even"),
    "long rotary": (lambda r: nn.Rotary(4, rotary_dim=6), "rotary_dim 6"),
    "scaling": (lambda r: nn.Rotary(4, scaling={"type": "yarn", "factor": 2}), "yarn"),
    "scaling values": (
        lambda r: nn.Rotary(4, scaling={"rope_type": "llama3", "factor": 2}),
        "low_freq_factor",
    ),
    "rotary factor 0": (lambda r: nn.Rotary(4, scaling={"type": "linear", "factor": 0}), "factor.*positive"),
    "rotary factor NaN": (lambda r: nn.Rotary(4, scaling={"type": "linear", "factor": np.nan}), "nan"),
    "rotary bands": (
        lambda r: nn.Rotary(
            4,
            scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "low_freq_factor 4.0 must be below high_freq_factor 4.0",
    ),
    "norm": (lambda r: nn.TransformerBlock(4, 2, 8, norm="batch", rng=r), "batch"),
    "mlp": (lambda r: nn.TransformerBlock(4, 2, 8, mlp="relu", rng=r), "relu"),
    "position": (lambda r: decoder(r, position="none"), "learned"),
    "gelu": (lambda r: nn.GELU("fast"), "fast"),
    "dropout": (lambda r: nn.Dropout(1.5), "1.5"),
    "attention dropout": (lambda r: nn.MultiHeadAttention(4, 2, dropout_p=-1, rng=r), "-1"),
    "linear input": (lambda r: nn.Linear(3, 2, rng=r)(np.ones((4, 2))), r"\(\.\.\., 3\).*\(4, 2\)"),
    "id too large": (lambda r: decoder(r)(np.array([[1, 11]])), "11"),
    "id negative": (lambda r: decoder(r)(np.array([[1, -1]])), "-1"),
    "too long": (lambda r: decoder(r)(np.zeros((1, 13), int)), "13 positions.*12"),
    "too long for sines": (lambda r: decoder(r, position="sinusoidal")(np.zeros((1, 13), int)), "13"),
    "ids 3-d": (lambda r: decoder(r)(np.zeros((1, 2, 3), int)), r"\(1, 2, 3\)"),
    "positions": (lambda r: nn.LearnedPosition(4, 2, rng=r)(np.ones((2, 2)), np.array([0, 4])), "4"),
    "rotary positions": (lambda r: nn.Rotary(2)(np.ones((1, 3, 2)), np.array([0, 1])), "length 3"),
    "cache of another batch": (
        lambda r: decoder(r)(np.zeros((3, 2), int), cache=decoder(r).new_cache(2, 4)),
        r"\(3, 2\).*cache of 2 sequences",
    ),
    "cache, not causal": (
        lambda r: nn.MultiHeadAttention(4, 2, rng=r)(np.ones((1, 2, 4)), cache=object()),
        "causal",
    ),
}


@pytest.mark.parametrize(("cause", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came(rng, cause, message):
    with pytest.raises(ValueError, match=message):
        cause(rng)


@pytest.mark.parametrize(
    "cause",
    [
        lambda r: nn.Linear(2, 2, rng=None),
        lambda r: decoder(r)(np.array([[1.0, 2.0]])),
        lambda r: nn.Rotary(2)(np.ones((1, 2, 2)), np.array([0.0, 1.0])),
        lambda r: nn.Sequential(np.tanh),
        lambda r: nn.Rotary(4, scaling="linear"),
        lambda r: nn.Rotary(4, scaling={"type": "linear", "factor": "2"}),
        lambda r: nn.Linear(2, 2, rng=r, dtype=int),
        lambda r: nn.Linear(2, 2, rng=nn.init.BLANK, dtype=np.longdouble),
        lambda r: nn.Embedding(2, 2, rng=r, dtype=bool),
        lambda r: nn.LayerNorm(2, dtype=int),
        lambda r: nn.RMSNorm(2, dtype=complex),
        lambda r: decoder(r, dtype=np.int8),
    ],
)
def test_wrong_types_are_type_errors(rng, cause):
    with pytest.raises(TypeError):
        cause(rng)


def test_longer_than_trained_is_fine_without_learned_positions(rng):
    for position in ("rotary", "alibi"):
        model = decoder(rng, position=position)
        assert model.max_length is None
        assert model(np.zeros((1, 20), int)).shape == (1, 20, 11)


def test_empty_sequences(rng):
    assert decoder(rng)(np.zeros((2, 0), int)).shape == (2, 0, 11)
    assert decoder(rng)(np.zeros((0, 3), int)).shape == (0, 3, 11)


# --- caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "rotary", "num_kv_heads": 2, "norm": "rms", "mlp": "swiglu"},
        {"position": "alibi"},
        {"position": "rotary", "window": 3},
    ],
)
def test_decoding_with_a_cache_gives_the_logits_without(rng, options):
    model = decoder(rng, **options)
    ids = rng.integers(0, 11, (2, 9))
    expected = model(ids)
    cache = model.new_cache(2, 12)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 7), (7, 9))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=1e-9, atol=1e-10)
    assert cache.lengths.tolist() == [9, 9]


def test_a_full_cache_is_left_as_it_was(rng):
    from npattn.cache import CacheFullError

    model = decoder(rng)
    ids = rng.integers(0, 11, (2, 9))
    cache = model.new_cache(2, 7)
    model(ids[:, :5], cache=cache)
    with pytest.raises(CacheFullError):
        model(ids[:, 5:], cache=cache)
    assert [layer.lengths.tolist() for layer in cache.layers] == [[5, 5], [5, 5]]
    np.testing.assert_allclose(
        model(ids[:, 5:7], cache=cache), model(ids[:, :7])[:, 5:], rtol=1e-9, atol=1e-10
    )


def test_ragged_prompts_with_a_cache(rng):
    model = decoder(rng, position="rotary")
    ids = rng.integers(0, 11, (2, 6))
    cache = model.new_cache(2, 12)
    logits = model(ids, cache=cache, lengths=np.array([6, 3]))
    np.testing.assert_allclose(logits[1, :3], model(ids[1:, :3])[0], rtol=1e-9, atol=1e-10)
    following = model(ids[:, :1], cache=cache)
    alone = model(np.concatenate([ids[1:, :3], ids[1:, :1]], axis=1))
    np.testing.assert_allclose(following[1, 0], alone[0, -1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", [nn.MultiHeadAttention, nn.LinearMultiHeadAttention])
def test_a_single_token_without_its_axis_is_named(make, rng):
    layer = make(8, 2, rng=rng)
    x = np.zeros((3, 8), np.float32)
    for call in (layer, layer.vjp):
        with pytest.raises(ValueError, match=r"x must have shape.*got \(8,\).*x\[None, :\]"):
            call(x[0])
        with pytest.raises(ValueError, match=r"context must have shape.*got \(8,\)"):
            call(x, x[0])


def test_a_cache_of_one_layer_is_not_that_of_a_model(rng):
    model = decoder(rng)
    cache = KVCache(1, 2, 8, 4, dtype=F8)
    for wrong in (cache, [cache, cache]):
        with pytest.raises(TypeError, match=r"cache must hold the caches of all layers.*new_cache"):
            model(np.zeros((1, 3), int), cache=wrong)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_layer_without_features_is_refused(sizes, rng):
    with pytest.raises(ValueError, match="in_dim and out_dim must be at least 1"):
        nn.Linear(*sizes, rng=rng)

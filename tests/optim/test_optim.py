"""Optimisers: resuming bit for bit, errors that change nothing, clipping, schedules."""

import itertools

import numpy as np
import pytest

from npattn import nn, optim
from npattn.functional import cross_entropy_vjp

MAKERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 0.01),
}


def parameters(rng, dtype=np.float32):
    return {name: rng.standard_normal(s).astype(dtype) for name, s in (("w", (200, 130)), ("b", (7,)))}


def gradients(p, rng):
    return {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in p.items()}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_resumed_run_is_the_same_bit_for_bit(rng, make):
    p = parameters(rng)
    whole = make(p)
    grads = [gradients(p, rng) for _ in range(6)]
    for g in grads[:3]:
        whole.step(g)
    state, q = whole.state(), {name: a.copy() for name, a in p.items()}
    for g in grads[3:]:
        whole.step(g)
    resumed = make(q)
    resumed.load_state(state)
    for g in grads[3:]:
        resumed.step(g)
    assert all(np.array_equal(p[name], q[name]) for name in p)
    assert all(
        np.array_equal(a, b) for a, b in zip(whole.state().values(), resumed.state().values(), strict=True)
    )


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_pieces_do_not_show(rng, make, monkeypatch):
    p = parameters(rng)
    q = {name: a.copy() for name, a in p.items()}
    g = gradients(p, rng)
    make(p).step(g)
    monkeypatch.setattr("npattn.kernels.pointwise.arrays.PIECE", 1 << 40)
    make(q).step(g)
    assert all(np.array_equal(p[name], q[name]) for name in p)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_steps_are_in_place_and_leave_gradients_alone(rng, make):
    p = parameters(rng)
    arrays = dict(p)
    g = gradients(p, rng)
    kept = {name: a.copy() for name, a in g.items()}
    before = {name: a.copy() for name, a in p.items()}
    make(p).step(g)
    for name in p:
        assert p[name] is arrays[name]
        assert p[name].dtype == np.float32
        assert (p[name] != before[name]).any()
        assert np.array_equal(g[name], kept[name])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_strided_parameters_and_halves_are_updated(rng, make):
    base = rng.standard_normal((300, 200))
    p = {"t": base.T, "h": np.ones((4, 4), np.float16)}
    before = base.copy()
    make(p).step({"t": rng.standard_normal((200, 300)), "h": np.ones((4, 4), np.float16)})
    assert (base != before).all()
    assert p["h"].dtype == np.float16
    assert (p["h"] < 1).all()


def test_large_gradients_of_halves_do_not_overflow():
    p = {"h": np.ones(4, np.float16)}
    optim.Adam(p, 0.25).step({"h": np.full(4, 3e4, np.float16)})
    np.testing.assert_allclose(p["h"], 0.75)


def test_state_is_a_copy(rng):
    p = parameters(rng)
    optimiser = optim.AdamW(p)
    optimiser.step(gradients(p, rng))
    state = optimiser.state()
    assert list(state) == ["steps", "m.w", "m.b", "v.w", "v.b"]
    kept = state["m.w"].copy()
    optimiser.step(gradients(p, rng))
    assert np.array_equal(state["m.w"], kept)


def test_wrong_gradients_change_nothing_and_are_all_listed(rng):
    p = parameters(rng)
    before = {name: a.copy() for name, a in p.items()}
    optimiser = optim.AdamW(p)
    with pytest.raises(ValueError, match="nothing was changed") as raised:
        optimiser.step({"w": np.ones((130, 200)), "c": np.ones(7)})
    for text in ("w: shape (130, 200), expected (200, 130)", "b: missing", "c: unknown"):
        assert text in str(raised.value)
    assert optimiser.steps == 0
    assert all(np.array_equal(p[name], before[name]) for name in p)


def test_wrong_state_changes_nothing(rng):
    p = parameters(rng)
    optimiser = optim.Adam(p)
    optimiser.step(gradients(p, rng))
    kept = optimiser.state()
    with pytest.raises(ValueError, match=r"v\.b: missing"):
        optimiser.load_state({name: a for name, a in kept.items() if name != "v.b"})
    assert all(np.array_equal(a, b) for a, b in zip(optimiser.state().values(), kept.values(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, -0.1),
        lambda p: optim.SGD(p, 0.1, momentum=1.0),
        lambda p: optim.Adam(p, betas=(1.0, 0.9)),
        lambda p: optim.Adam(p, eps=float("nan")),
        lambda p: optim.AdamW(p, decay=["x"]),
        lambda p: optim.SGD(p, 0.1).step(p, lr=float("inf")),
    ],
)
def test_bad_settings(rng, make):
    with pytest.raises(ValueError, match=r"must be|decay"):
        make(parameters(rng))


def test_adamw_decays_matrices_or_what_is_named(rng):
    for decay, shrunk in ((None, {"w"}), (["b"], {"b"}), ([], set())):
        p = {"w": np.ones((2, 2)), "b": np.ones(2)}
        zero = {name: np.zeros_like(a) for name, a in p.items()}
        optim.AdamW(p, lr=0.1, weight_decay=0.5, decay=decay).step(zero)
        assert {name for name, a in p.items() if (a < 1).all()} == shrunk


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [(np.float64, 1e300), (np.float64, 1e-300), (np.float32, 1e38), (np.float32, 1e-30), (np.float16, 6e4)],
)
def test_clipping_where_squares_leave_the_range(dtype, entry):
    """The norm was inf for 1e300, 0 for 1e-30; float16's scale kept a few bits beneath its range."""
    grads = {"a": np.full((10, 10), entry, dtype), "b": np.full(300, entry, dtype)}
    true = float(dtype(entry)) * 20
    clipped, norm = optim.clip_by_global_norm(grads, true / 1e7)
    assert norm == pytest.approx(true, rel=1e-5)
    scaled = [g.astype(np.float64) / (true / 1e7) for g in clipped.values()]
    assert np.sqrt(sum((g**2).sum() for g in scaled)) == pytest.approx(1, rel=2e-3)


def test_clipping(rng):
    grads = {"a": rng.standard_normal((4, 5)), "b": rng.standard_normal(3).astype(np.float32)}
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    clipped, found = optim.clip_by_global_norm(grads, 0.5)
    assert found == pytest.approx(norm, rel=1e-6)
    assert np.sqrt(sum((g**2).sum() for g in clipped.values())) == pytest.approx(0.5, rel=1e-6)
    assert {name: g.dtype for name, g in clipped.items()} == {name: g.dtype for name, g in grads.items()}
    same, _ = optim.clip_by_global_norm(grads, 1e9)
    assert all(same[name] is grads[name] for name in grads)
    huge, found = optim.clip_by_global_norm({"a": np.full(4, 1e30, np.float32)}, 1.0)
    assert found == pytest.approx(2e30)
    np.testing.assert_allclose(huge["a"], 0.5, rtol=1e-6)


def test_warmup_cosine():
    rates = [optim.warmup_cosine(s, lr=1.0, min_lr=0.1, warmup=10, total=50) for s in range(60)]
    assert rates[10] == 1.0
    assert rates[30] == pytest.approx(0.55)
    assert rates[50:] == [0.1] * 10
    assert all(a < b for a, b in itertools.pairwise(rates[:11]))
    assert all(a > b for a, b in itertools.pairwise(rates[10:51]))
    assert rates[0] > 0
    with pytest.raises(ValueError, match="warmup 5, total 4"):
        optim.warmup_cosine(0, lr=1, min_lr=0, warmup=5, total=4)


def test_keeping_freed_memory_takes_effect_or_says_no():
    assert nn.keep_freed_memory() in (True, False)
    assert nn.keep_freed_memory(1 << 40) in (True, False)


def test_a_small_model_learns(rng):
    model = nn.TransformerDecoder(5, 16, 2, 1, 32, 8, rng=rng)
    optimiser = optim.AdamW(model.named_parameters(), 0.01)
    ids = np.tile(np.arange(5), 3)[None, :9].repeat(4, axis=0)
    losses = []
    for _ in range(60):
        logits, pullback = model.vjp(ids[:, :-1])
        loss, back = cross_entropy_vjp(logits, ids[:, 1:])
        grads, _ = optim.clip_by_global_norm(pullback(back())[1], 1.0)
        optimiser.step(grads)
        losses.append(loss)
    assert losses[0] == pytest.approx(np.log(5), rel=0.1)
    assert losses[-1] < 0.05


def test_a_gradient_that_is_no_array_is_named():
    p = {"a": np.ones(3, np.float32)}
    optimiser = optim.SGD(p, lr=0.1)
    with pytest.raises(ValueError, match=r"a: NoneType, expected \(3,\)"):
        optimiser.step({"a": None})
    np.testing.assert_array_equal(p["a"], 1)

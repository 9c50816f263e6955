"""softmax, activations, norms, embedding, cross-entropy, rotary: values, gradients, dtypes, errors."""

import math

import numpy as np
import pytest

from npattn import functional as F
from npattn import nn
from npattn.testing import check_vjp

HALF = np.float16


# --- dtypes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex128, np.longdouble])
@pytest.mark.parametrize(
    "f",
    [
        F.softmax,
        F.log_softmax,
        F.gelu,
        F.silu,
        lambda x: F.swiglu(np.zeros((2, 4)), x),
        lambda x: F.layer_norm(x, np.ones(4)),
        lambda x: F.rms_norm(x, np.ones(4)),
        lambda x: F.rotary(x, np.ones((2, 2)), np.zeros((2, 2))),
        lambda x: F.cross_entropy(x, np.zeros(2, int)),
        lambda x: nn.Dropout(0.5)(x, seed=1),
        nn.SinusoidalPosition(4),
    ],
)
def test_only_the_four_float_dtypes_are_taken(f, dtype):
    """The softmax of an int array was all 0: the answer was cast back to the input's dtype."""
    with pytest.raises(TypeError, match="float32"):
        f(np.ones((2, 4), dtype))


# --- softmax ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("f", [F.softmax_vjp, F.log_softmax_vjp])
def test_softmax_gradients(rng, f, axis):
    check_vjp(lambda x: f(x, axis), [rng.standard_normal((3, 4, 5))])


def test_softmax_survives_large_and_missing_logits():
    x = np.array([[1e30, 1e30, -1e30], [-np.inf, 0.0, -np.inf], [-np.inf, -np.inf, -np.inf]])
    np.testing.assert_array_equal(F.softmax(x), [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(F.log_softmax(x)[1:], [[-np.inf, 0, -np.inf], [-np.inf] * 3])
    assert F.softmax(np.zeros((2, 0))).shape == (2, 0)


def test_softmax_of_halves_is_summed_wide():
    p = F.softmax(np.zeros(4096, HALF))
    assert p.dtype == HALF
    assert p.astype(np.float64).sum() == 1.0


@pytest.mark.parametrize("f", [F.softmax_vjp, F.log_softmax_vjp])
def test_softmax_gradients_of_halves_are_summed_wide(f):
    """The sum over a first axis stopped at 2,048 in float16; it goes into every gradient."""
    y, pullback = f(np.zeros((4096, 2), HALF), axis=0)
    dy = np.ones_like(y)
    assert pullback(dy).dtype == HALF
    np.testing.assert_allclose(pullback(dy), 0, atol=5e-3)  # exp of a rounded logarithm


# --- activations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f", [F.gelu_vjp, lambda x: F.gelu_vjp(x, "tanh"), F.silu_vjp], ids=["gelu", "gelu tanh", "silu"]
)
def test_activation_gradients(rng, f):
    check_vjp(f, [3 * rng.standard_normal((4, 7))])


def test_swiglu_gradients(rng):
    check_vjp(F.swiglu_vjp, list(3 * rng.standard_normal((2, 4, 7))))


def test_gelu_values():
    x = np.linspace(-6, 6, 41)
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    np.testing.assert_allclose(F.gelu(x), exact, rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(F.gelu(x, "tanh"), exact, atol=5e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("f", [F.gelu_vjp, F.silu_vjp])
def test_activations_keep_shape_and_dtype_and_read_any_strides(rng, f, dtype):
    x = rng.standard_normal((50, 120)).astype(dtype)
    y, pullback = f(x.T[::-2])
    y_2, pullback_2 = f(x.T[::-2].copy())
    assert (y.shape, y.dtype) == ((60, 50), dtype)
    assert np.array_equal(y, y_2)
    assert np.array_equal(pullback(x.T[::-2]), pullback_2(x.T[::-2].copy()))
    assert pullback(y).dtype == dtype


def test_unknown_gelu():
    with pytest.raises(ValueError, match="sigmoid"):
        F.gelu(np.ones(2), "sigmoid")


# --- norms --------------------------------------------------------------------------------------------------


def test_norm_gradients(rng):
    x, w, b = rng.standard_normal((2, 3, 5)), rng.standard_normal(5), rng.standard_normal(5)
    check_vjp(lambda *a: F.layer_norm_vjp(*a), [x, w, b], names=["x", "weight", "bias"])
    check_vjp(lambda *a: F.layer_norm_vjp(*a), [x, w, None], names=["x", "weight", "bias"])
    check_vjp(lambda *a: F.rms_norm_vjp(*a), [x, w], names=["x", "weight"])


def test_norm_values(rng):
    x = rng.standard_normal((2, 3, 5)) * 4 + 1
    y = F.layer_norm(x, np.ones(5), None, eps=0)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=-1), 1)
    y = F.rms_norm(x, np.full(5, 2.0), eps=0)
    np.testing.assert_allclose((y**2).mean(axis=-1), 4)


def test_layer_norm_of_a_constant_row_is_the_bias():
    for dtype in (np.float32, np.float64):
        y = F.layer_norm(np.full((3, 4), 1e4, dtype), np.ones(4, dtype), np.arange(4, dtype=dtype))
        np.testing.assert_array_equal(y, np.tile(np.arange(4.0), (3, 1)))


def test_norms_of_halves_do_not_overflow():
    x = np.array([[300.0, -300.0, 299.0, -301.0]], HALF)
    y = F.rms_norm(x, np.ones(4, HALF))
    assert y.dtype == HALF
    np.testing.assert_allclose(y, np.sign(x), atol=0.01)
    np.testing.assert_allclose(F.layer_norm(x, np.ones(4, HALF), np.zeros(4, HALF)), np.sign(x), atol=0.01)


def test_norm_shape_error():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4,\)"):
        F.layer_norm(np.ones((2, 3)), np.ones(4), np.ones(4))
    with pytest.raises(ValueError, match="bias"):
        F.layer_norm(np.ones((2, 3)), np.ones(3), np.ones(2))


# --- embedding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[[0, 3, 3], [1, 0, 3]], [], [[2]]])
def test_embedding_gradients(rng, ids):
    ids = np.array(ids, np.int64)
    check_vjp(lambda w: F.embedding_vjp(ids, w), [rng.standard_normal((5, 4))])


def test_embedding_gradient_is_the_sum_over_places(rng):
    ids = rng.integers(0, 9, (6, 50)).astype(np.uint8)
    dy = rng.standard_normal((6, 50, 3))
    expected = np.zeros((9, 3))
    np.add.at(expected, ids, dy)
    np.testing.assert_allclose(F.embedding_vjp(ids, np.zeros((9, 3)))[1](dy), expected)


def test_embedding_gradient_of_halves_is_summed_wide():
    dy = np.ones((4096, 2), HALF)
    dweight = F.embedding_vjp(np.zeros(4096, int), np.zeros((3, 2), HALF))[1](dy)
    assert dweight.dtype == HALF
    np.testing.assert_array_equal(dweight, [[4096, 4096], [0, 0], [0, 0]])


@pytest.mark.parametrize(("ids", "error"), [([0, 5], ValueError), ([-1], ValueError), ([0.5], TypeError)])
def test_embedding_errors(ids, error):
    with pytest.raises(error, match="ids"):
        F.embedding(np.array(ids), np.ones((5, 2)))


# --- cross-entropy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("shape", [(7,), (2, 3), ()])
def test_cross_entropy_gradients(rng, smoothing, shape):
    targets = rng.integers(0, 5, shape)
    if shape == (7,):
        targets[[1, 4]] = -100

    def f_vjp(logits):
        return F.cross_entropy_vjp(logits, targets, label_smoothing=smoothing)

    check_vjp(f_vjp, [rng.standard_normal((*shape, 5))])


def test_cross_entropy_is_the_mean_over_kept_targets(rng):
    logits, targets = rng.standard_normal((6, 5)), np.array([0, 4, 2, 9, 1, 9])
    loss = F.cross_entropy(logits, targets, ignore_index=9)
    kept = targets != 9
    expected = -F.log_softmax(logits)[kept, targets[kept]].mean()
    assert loss == pytest.approx(expected, rel=1e-12)
    assert loss.dtype == np.float64
    assert F.cross_entropy(logits.astype(np.float32), targets, ignore_index=9).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_never_reads_ignored_rows(rng, dtype, smoothing):
    """The float32 kernel multiplied an ignored row's gradient by 0, which keeps NaN."""
    logits = rng.standard_normal((60, 101)).astype(dtype)  # enough for the kernel, and not a multiple of it
    targets = rng.integers(101, size=60)
    targets[::7] = -100
    clean, pullback = F.cross_entropy_vjp(logits, targets, label_smoothing=smoothing)
    expected = pullback()
    logits = logits.copy()
    logits[::7] = np.nan
    logits[7, 3] = np.inf
    loss, pullback = F.cross_entropy_vjp(logits, targets, label_smoothing=smoothing)
    assert loss == clean
    np.testing.assert_array_equal(pullback(), expected)
    assert (expected[::7] == 0).all()


def test_cross_entropy_of_nothing_is_zero():
    logits = np.ones((3, 4))
    loss, pullback = F.cross_entropy_vjp(logits, np.full(3, -100))
    assert loss == 0.0
    assert not pullback().any()
    assert F.cross_entropy(np.ones((0, 4)), np.zeros(0, int)) == 0.0


def test_cross_entropy_makes_one_array_of_the_logits_size():
    import tracemalloc

    logits = np.zeros((64, 1 << 14))
    targets = np.zeros(64, int)
    F.cross_entropy_vjp(logits[:2], targets[:2])[1]()
    tracemalloc.start()
    _, pullback = F.cross_entropy_vjp(logits, targets)
    forward = tracemalloc.get_traced_memory()[1]
    dlogits = pullback()
    both = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dlogits.shape == logits.shape
    assert forward < 0.5 * logits.nbytes
    assert both < 1.5 * logits.nbytes


@pytest.mark.parametrize(
    ("logits", "targets", "options", "error", "message"),
    [
        (np.ones((3, 4)), np.array([0, 1]), {}, ValueError, r"\(3, 4\).*\(2,\)"),
        (np.ones((2, 4)), np.array([0, 4]), {}, ValueError, "4"),
        (np.ones((2, 4)), np.array([0, -1]), {}, ValueError, "-1"),
        (np.ones((2, 4)), np.array([0.0, 1.0]), {}, TypeError, "float64"),
        (np.ones((2, 4)), np.array([0, 1]), {"label_smoothing": 1.5}, ValueError, "1.5"),
    ],
)
def test_cross_entropy_errors(logits, targets, options, error, message):
    with pytest.raises(error, match=message):
        F.cross_entropy(logits, targets, **options)


# --- rotary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_gradients_and_length(rng, interleaved):
    angles = rng.standard_normal((3, 2))
    cos, sin = np.cos(angles), np.sin(angles)
    x = rng.standard_normal((2, 3, 5))
    check_vjp(lambda x: F.rotary_vjp(x, cos, sin, interleaved=interleaved), [x])
    y = F.rotary(x, cos, sin, interleaved=interleaved)
    np.testing.assert_allclose((y**2).sum(axis=-1), (x**2).sum(axis=-1))
    assert np.array_equal(y[..., 4:], x[..., 4:])


def test_rotary_of_halves_keeps_the_dtype(rng):
    x = rng.standard_normal((2, 3, 4)).astype(HALF)
    assert F.rotary(x, np.ones((3, 2)), np.zeros((3, 2))).dtype == HALF


def test_rotary_errors():
    with pytest.raises(ValueError, match="one shape"):
        F.rotary(np.ones((3, 4)), np.ones((3, 2)), np.ones((3, 1)))
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        F.rotary(np.ones((3, 4)), np.ones((3, 3)), np.ones((3, 3)))

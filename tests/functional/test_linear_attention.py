"""linear_attention against the formula written out with its whole matrix of weights."""

import numpy as np
import pytest

from npattn.functional import linear_attention, linear_attention_step, linear_attention_vjp
from npattn.testing import check_vjp

SHAPES = [(2, 3, 3, 7, 7, 4, 5), (1, 4, 2, 300, 300, 5, 3), (2, 2, 1, 129, 129, 3, 4), (1, 1, 1, 1, 1, 1, 1)]
PHI = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
}


def written_out(q, k, v, phi, causal, eps):
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat(group, axis=-3) for x in (k, v))
    weights = phi(q) @ phi(k).swapaxes(-1, -2)
    if causal:
        weights = np.tril(weights)
    return weights @ v / (weights.sum(-1, keepdims=True) + eps)


def arrays(rng, shape):
    batch, heads_q, heads_kv, len_q, len_k, dim, dim_v = shape
    return (
        rng.normal(size=(batch, heads_q, len_q, dim)),
        rng.normal(size=(batch, heads_kv, len_k, dim)),
        rng.normal(size=(batch, heads_kv, len_k, dim_v)),
    )


@pytest.mark.parametrize("name", ["elu1", "relu", "identity"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_formula(rng, shape, causal, name):
    q, k, v = arrays(rng, shape)
    if name == "identity":  # keep denominators away from zero
        q, k = np.abs(q) + 0.1, np.abs(k) + 0.1
    out = linear_attention(q, k, v, feature_map=name, causal=causal)
    np.testing.assert_allclose(out, written_out(q, k, v, PHI[name], causal, 1e-6), rtol=1e-9, atol=1e-12)


def test_other_length_of_keys(rng):
    q, k, v = rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 9, 4)), rng.normal(size=(2, 9, 3))
    np.testing.assert_allclose(linear_attention(q, k, v), written_out(q, k, v, PHI["elu1"], False, 1e-6))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu1", "identity", "pair"])
def test_gradients_by_differences(rng, causal, name):
    def function(x):
        return np.concatenate([np.exp(x), np.exp(-x)], axis=-1)

    def vjp(x):
        y = function(x)
        return y, lambda dy: np.split(dy * y, 2, axis=-1)[0] - np.split(dy * y, 2, axis=-1)[1]

    feature_map = (function, vjp) if name == "pair" else name
    q, k, v = arrays(rng, (2, 4, 2, 137, 137, 3, 2))
    if name == "identity":
        q, k = np.abs(q) + 0.1, np.abs(k) + 0.1

    def f_vjp(q, k, v):
        return linear_attention_vjp(q, k, v, feature_map=feature_map, causal=causal, eps=0.01)

    check_vjp(f_vjp, [q, k, v])


def test_pair_of_functions_is_used_as_given(rng):
    q, k, v = arrays(rng, SHAPES[0])
    pair = (lambda x: np.exp(x), lambda x: (np.exp(x), lambda dy: np.exp(x) * dy))
    np.testing.assert_allclose(
        linear_attention(q, k, v, feature_map=pair), written_out(q, k, v, np.exp, False, 1e-6)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_dtypes_sum_in_float32(rng, dtype):
    q, k, v = (x.astype(dtype) for x in arrays(rng, (1, 2, 2, 700, 700, 8, 8)))
    out, pullback = linear_attention_vjp(q, k, v, causal=True)
    exact = written_out(*(x.astype(np.float64) for x in (q, k, v)), PHI["elu1"], True, 1e-6)
    assert out.dtype == dtype
    np.testing.assert_allclose(out, exact, rtol=0, atol=5e-6 if dtype == np.float32 else 2e-3)
    assert {x.dtype for x in pullback(out)} == {np.dtype(dtype)}


def test_steps_continue_where_the_last_one_ended(rng):
    q, k, v = arrays(rng, (2, 4, 2, 300, 300, 5, 3))
    whole = linear_attention(q, k, v, causal=True)
    state, outs = None, []
    for cut in np.split(np.arange(300), [1, 2, 150, 151]):
        before = None if state is None else (state.kv.copy(), state.z.copy())
        old = state
        out, state = linear_attention_step(q[:, :, cut], k[:, :, cut], v[:, :, cut], state)
        if old is not None:
            np.testing.assert_array_equal(old.kv, before[0])
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=2), whole, rtol=1e-9, atol=1e-12)


def test_no_key_or_no_weight_gives_zero_not_nan(rng):
    q = rng.normal(size=(2, 3, 4))
    assert not linear_attention(q, q[:, :0], q[:, :0]).any()
    out, pullback = linear_attention_vjp(-np.abs(q), q, q, feature_map="relu", eps=0.0)
    assert not out.any()
    assert all(np.isfinite(x).all() for x in pullback(out + 1))


def test_gradients_of_shared_heads_have_their_own_shape(rng):
    q, k = rng.normal(size=(2, 3, 5, 4)), rng.normal(size=(5, 4))
    out, pullback = linear_attention_vjp(q, k, k, causal=True)
    assert [x.shape for x in pullback(out)] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("place", [3, 150, 260])
@pytest.mark.parametrize("name", ["key", "value"])
def test_what_comes_later_never_leaks(rng, garbage, place, name):
    q, k, v = rng.standard_normal((3, 2, 300, 4)).astype(np.float32)
    expected, expected_pullback = linear_attention_vjp(q, k, v, causal=True)
    dout = rng.standard_normal(v.shape).astype(np.float32)
    dout[:, place:] = 0
    changed = {"key": k.copy(), "value": v.copy()}
    changed[name][:, place] = garbage
    with np.errstate(invalid="ignore", over="ignore"):  # the queries from there on see it
        out, pullback = linear_attention_vjp(q, **changed, causal=True)
        dquery = pullback(dout).query
    np.testing.assert_array_equal(out[:, :place], expected[:, :place])
    np.testing.assert_array_equal(dquery[:, :place], expected_pullback(dout).query[:, :place])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal": True}, ValueError, "len_q = len_k, got 3 and 5"),
        ({"feature_map": "softmax"}, ValueError, "unknown feature_map 'softmax'.*'elu1'"),
        ({"feature_map": np.exp}, TypeError, "pair"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"eps": np.nan}, ValueError, "eps"),
        ({"eps": "0"}, TypeError, "eps must be one number"),
        ({"feature_map": (lambda x: x[..., :1, :], lambda x: x)}, ValueError, "features"),
    ],
)
def test_bad_arguments_are_refused(options, error, text):
    q, k = np.ones((2, 3, 4)), np.ones((2, 5, 4))
    with pytest.raises(error, match=text):
        linear_attention(q, k, k, **options)


def test_state_of_other_sizes_is_refused(rng):
    q = rng.normal(size=(2, 3, 4))
    _, state = linear_attention_step(q, q, q)
    with pytest.raises(ValueError, match="state"):
        linear_attention_step(q[:1], q[:1], q[:1], state)


def test_cost_grows_with_the_length_not_its_square(rng):
    import tracemalloc

    peaks = []
    for length in (4096, 16384):
        q = rng.normal(size=(1, length, 16)).astype(np.float32)
        tracemalloc.start()
        linear_attention_vjp(q, q, q, causal=True)[1](q)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 5 * peaks[0]

"""Linear attention's kernels: Numba against the array one and against float64, bits, widths."""

import os
import subprocess
import sys

import numpy as np
import pytest

import npattn
from npattn.functional import linear_attention, linear_attention_step, linear_attention_vjp
from npattn.kernels.linear_attention import _numba, arrays, implementation
from npattn.testing import check_vjp

numba_cpu = _numba()
pytestmark = pytest.mark.skipif(numba_cpu is None, reason="Numba's kernels do not run here")

#: batch, heads_q, heads_kv, len_q, len_k (where not causal), head_dim, head_dim_v
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 7, 11, 4, 5),
    (1, 4, 2, 300, 257, 5, 3),
    (2, 2, 1, 129, 64, 33, 40),
    (3, 6, 3, 97, 31, 17, 31),
    (1, 6, 2, 1100, 600, 16, 65),  # few pairs: several segments
    (1, 2, 2, 700, 300, 64, 64),
]
NAMES = ("elu1", "relu", "identity")


def _arrays(rng, shape, causal, name, dtype=np.float64):
    batch, heads_q, heads_kv, len_q, len_k, dim, dim_v = shape
    len_k = len_q if causal else len_k
    q = rng.standard_normal((batch, heads_q, len_q, dim))
    k = rng.standard_normal((batch, heads_kv, len_k, dim))
    v = rng.standard_normal((batch, heads_kv, len_k, dim_v))
    dout = rng.standard_normal((batch, heads_q, len_q, dim_v))
    if name != "elu1":  # denominators away from zero
        q, k = np.abs(q) + 0.1, np.abs(k) + 0.1
    return [x.astype(dtype) for x in (q, k, v, dout)]


def _everything(module, q, k, v, dout, name, causal):
    forward = module.forward(q, k, v, name, causal, 1e-3, None, causal)
    grads = module.backward(q, k, v, forward.out, forward.inverse, dout, name, causal)
    return [forward.out, forward.inverse, *grads, *(forward.state or ())]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_arrays_in_float64(rng, shape, causal, name, dtype):
    """Errors relative to the largest value: float32's come from sums of up to a thousand terms."""
    given = _arrays(rng, shape, causal, name, dtype)
    expected = _everything(arrays, *(x.astype(np.float64) for x in given), name, causal)
    got = _everything(numba_cpu, *given, name, causal)
    limit = 2e-5 if dtype == np.float32 else 1e-12
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        # a single key: gradients of q and k are what eps leaves of two equal terms
        floor = 1.0 if shape == SHAPES[0] else 0.0
        assert np.abs(x - y).max() <= limit * max(np.abs(y).max(), floor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 16])  # single numbers, whole vectors
@pytest.mark.parametrize("name", NAMES)
def test_features_at_the_edges(name, dim, dtype):
    """elu1 is computed without a branch: it must be x + 1 or exp(x) exactly, and keep NaN."""
    x = np.array([-np.inf, -80.0, -1.5, -0.0, 0.0, 1e-9, 0.3, 7.0, 1e30, np.inf, np.nan], dtype)
    q = np.repeat(x[None, None, :, None], dim, axis=3)
    k = np.full((1, 1, 1, dim), 0.0 if name == "elu1" else 1.0, dtype)  # features 1
    inverse = numba_cpu.forward(q, k, k[..., :1], name, False, 0.0).inverse[0, 0]
    phi = arrays.features(x, name) * dim
    with np.errstate(divide="ignore"):
        expected = np.where(phi == 0, 0, 1 / phi)
    np.testing.assert_allclose(inverse, expected, rtol=4 * np.finfo(dtype).eps)
    # the slope alone: of a numerator φ(q) · 1, with everything else 1
    ones, out = np.ones((1, 1, x.size, 1), dtype), np.zeros((1, 1, x.size, 1), dtype)
    dq = numba_cpu.backward(q, k, ones[:, :, :1], out, ones[..., 0], ones, name, False).q[0, 0, :, 0]
    slopes = arrays.slope(arrays.features(x, name), name) * np.ones_like(x)
    np.testing.assert_allclose(dq, slopes, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_differences(rng, causal, name):
    q, k, v, _ = _arrays(rng, (2, 4, 2, 75, 43, 9, 18), causal, name)

    def f_vjp(q, k, v):
        return linear_attention_vjp(q, k, v, feature_map=name, causal=causal, eps=0.01)

    check_vjp(f_vjp, [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 1100, 900, 16, 24), (2, 8, 4, 300, 300, 24, 16)])
def test_bits_are_equal_for_any_number_of_threads_and_on_repetition(rng, shape, causal):
    given = _arrays(rng, shape, causal, "elu1", np.float32)
    before = npattn.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 4, 4):
            npattn.set_num_threads(threads)
            runs.append(_everything(numba_cpu, *given, "elu1", causal))
    finally:
        npattn.set_num_threads(before)
    for run in runs[1:]:
        for x, y in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_forward_of_the_vjp_has_the_same_bits(rng):
    q, k, v, _ = _arrays(rng, SHAPES[3], True, "elu1", np.float32)
    out, _ = linear_attention_vjp(q, k, v, causal=True)
    np.testing.assert_array_equal(out, linear_attention(q, k, v, causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_strides_do_not_matter(rng, causal):
    """Heads beside each other in memory, rows read backwards, a shared key head, read-only arrays."""
    batch, length, heads, dim = 2, 83, 3, 16
    packed = rng.standard_normal((batch, length, 3, heads, dim)).astype(np.float32)
    packed.setflags(write=False)
    views = [packed[:, ::-1, n].swapaxes(1, 2) for n in range(3)]
    plain = [np.ascontiguousarray(x) for x in views]
    results = []
    for q, k, v in (views, plain):
        out, pullback = linear_attention_vjp(q, k, v, causal=causal)
        dout = np.broadcast_to(np.float32(0.5), out.shape) if q is views[0] else np.full_like(out, 0.5)
        results.append((out, *pullback(dout)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)
    shared = linear_attention(plain[0], plain[1][0, 0], plain[2][0, 0], causal=causal)
    k, v = (np.broadcast_to(x[0, 0], (batch, heads, length, dim)) for x in plain[1:])
    np.testing.assert_array_equal(shared, linear_attention(plain[0], k, v, causal=causal))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("length", [90, 1100])  # one segment, several
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_comes_later_never_leaks(rng, garbage, length, which):
    q, k, v, dout = _arrays(rng, (1, 2, 1, length, length, 20, 19), True, "elu1", np.float32)
    place = length - 47
    expected, pullback = linear_attention_vjp(q, k, v, causal=True)
    dout[:, :, place:] = 0
    dquery = pullback(dout).query
    changed = {"query": q.copy(), "key": k.copy(), "value": v.copy()}
    changed[which][:, 0, place] = garbage
    out, pullback = linear_attention_vjp(**changed, causal=True)
    np.testing.assert_array_equal(out[:, :, :place], expected[:, :, :place])
    np.testing.assert_array_equal(pullback(dout).query[:, :, :place], dquery[:, :, :place])


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_what_is_not_finite_reaches_what_the_array_one_says(rng, garbage, which):
    given = _arrays(rng, (1, 2, 1, 150, 150, 20, 19), True, "elu1")
    given[which][0, 0, 70, 3] = garbage
    with np.errstate(invalid="ignore"):
        expected = arrays.forward(*given[:3], "elu1", True, 1e-6).out
    got = numba_cpu.forward(*given[:3], "elu1", True, 1e-6).out
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_totals_beyond_what_has_a_reciprocal(rng):
    """1 / total would overflow; the quotient itself does not."""
    tiny = np.full((1, 1, 40, 16), 1e-21, np.float32)
    v = rng.standard_normal((1, 1, 40, 16)).astype(np.float32)
    for causal in (False, True):
        out = numba_cpu.forward(tiny, tiny, v, "identity", causal, 0.0).out
        mean = np.cumsum(v, axis=2) / np.arange(1, 41)[:, None] if causal else v.mean(2, keepdims=True)
        np.testing.assert_allclose(out, np.broadcast_to(mean, v.shape), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_weight_is_zero_and_has_no_gradient(rng, name):
    q, k, v, dout = _arrays(rng, (1, 2, 1, 50, 50, 20, 9), True, name, np.float32)
    q[:, :, 11] = -np.inf if name == "elu1" else 0.0  # features 0
    forward = numba_cpu.forward(q, k, v, name, True, 0.0)
    assert not forward.out[:, :, 11].any()
    assert not forward.inverse[:, :, 11].any()
    grads = numba_cpu.backward(q, k, v, forward.out, forward.inverse, dout, name, True)
    assert not grads.q[:, :, 11].any()
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_continue_where_the_last_one_ended(rng, dtype):
    q, k, v, _ = _arrays(rng, (2, 4, 2, 420, 420, 12, 33), True, "elu1", dtype)
    whole = linear_attention(q, k, v, causal=True)
    state, outs = None, []
    for cut in np.split(np.arange(420), [1, 2, 150, 151]):
        kept = None if state is None else [x.copy() for x in state]
        before = state
        out, state = linear_attention_step(q[:, :, cut], k[:, :, cut], v[:, :, cut], state)
        if kept is not None:
            for x, y in zip(before, kept, strict=True):
                np.testing.assert_array_equal(x, y)
        outs.append(out)
    limit = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(np.concatenate(outs, axis=2), whole, rtol=limit, atol=limit)
    phi = arrays.features(k, "elu1").astype(np.float64)
    np.testing.assert_allclose(state.z, phi.sum(2), rtol=limit * 10)
    np.testing.assert_allclose(state.kv, phi.swapaxes(-1, -2) @ v, rtol=0, atol=limit * 1000)


def test_own_features_of_another_number(rng):
    q, k, v, _ = _arrays(rng, (1, 2, 2, 60, 60, 7, 5), True, "elu1", np.float32)

    def both_signs(x):
        return np.concatenate([np.exp(x), np.exp(-x)], axis=-1)

    pair = (both_signs, lambda x: (both_signs(x), lambda dy: dy[..., :7] + dy[..., 7:]))
    out = linear_attention(q, k, v, feature_map=pair, causal=True)
    exact = arrays.forward(*(both_signs(x.astype(np.float64)) for x in (q, k)), v, "identity", True, 1e-6)
    np.testing.assert_allclose(out, exact.out, rtol=1e-4, atol=1e-5)
    assert linear_attention_vjp(q, k, v, feature_map=pair, causal=True)[1](out).query.shape == q.shape


def test_who_computes():
    x = np.ones((1, 1, 3, 4), np.float32)
    assert implementation(x, x, x) is numba_cpu
    assert implementation(x, x, x.astype(np.float64)) is arrays
    assert implementation(x, x[:, :, :0], x[:, :, :0]) is arrays
    assert implementation(x.astype(np.float16)) is arrays


_AGAINST_ARRAYS = """
import numpy as np
from npattn.kernels.linear_attention import arrays, numba_cpu
from npattn.kernels._simd import _host
import os
assert _host.WIDTH == int(os.environ["NPATTN_VECTOR_WIDTH"])
rng = np.random.default_rng(5)
for length, dim, dim_v in ((90, 20, 37), (600, 16, 16)):
    for causal in (False, True):
        q, k, v, dout = (rng.standard_normal((1, 2, length, n)) for n in (dim, dim, dim_v, dim_v))
        k, v = k[:, :1], v[:, :1]
        e = arrays.forward(q, k, v, "elu1", causal, 1e-3)
        g = numba_cpu.forward(q, k, v, "elu1", causal, 1e-3)
        pairs = [(g.out, e.out)]
        given = (q, k, v, e.out, e.inverse, dout, "elu1", causal)
        pairs += zip(numba_cpu.backward(*given), arrays.backward(*given))
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * abs(y).max())
        single = numba_cpu.forward(*(x.astype(np.float32) for x in (q, k, v)), "elu1", causal, 1e-3).out
        np.testing.assert_allclose(single, e.out, rtol=0, atol=1e-5)
print("ok")
"""


@pytest.mark.parametrize("width", [8, 4])
def test_narrower_vectors(width):
    if os.environ.get("NPATTN_VECTOR_WIDTH"):
        pytest.skip("a width is forced already")
    result = subprocess.run(
        [sys.executable, "-c", _AGAINST_ARRAYS],
        env={**os.environ, "NPATTN_VECTOR_WIDTH": str(width)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.stdout.strip() == "ok", result.stderr

"""Attention on inputs nobody thought of: shapes, layouts, dtypes, masks and features drawn at random.

Every drawn call is compared with the oracle on the same numbers in float64, within the error budget of the
oracle in the call's own precision. `pytest -m slow` draws many more, and others each time.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npattn
from npattn import masks
from npattn.testing import assert_within_budget

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=1500, derandomize=False)

DTYPES = ["float64", "float32", "float16", "bfloat16"]


def dtype_of(name):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


# Layouts: the same numbers, standing differently in memory. x is (batch, heads, length, features).


def interleaved(x):
    """Heads beside each other in a row, as a projection leaves them."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def backwards(x):
    return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


def padded(x):
    wide = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 5), np.nan, x.dtype)
    wide[:, :, 1 : x.shape[2] + 1, 2 : x.shape[3] + 2] = x
    return wide[:, :, 1 : x.shape[2] + 1, 2 : x.shape[3] + 2]


def columns(x):
    return np.asfortranarray(x)


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def strided_features(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


def unaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS = [lambda x: x, interleaved, backwards, padded, columns, frozen, strided_features, unaligned]


@st.composite
def mask_trees(draw, batch, len_q, len_k, depth=2):
    """A mask, simple or composed."""
    if depth and draw(st.booleans()):
        one = draw(mask_trees(batch, len_q, len_k, depth - 1))
        if draw(st.integers(0, 3)) == 0:
            return ~one
        other = draw(mask_trees(batch, len_q, len_k, depth - 1))
        return one & other if draw(st.booleans()) else one | other
    small = st.integers(0, 40)
    offset = st.one_of(st.none(), st.integers(-50, 50))
    longest = max(len_q, len_k)
    places = st.sets(st.integers(0, longest - 1), max_size=3) if longest else st.just(set())
    return draw(
        st.one_of(
            st.just(masks.Full()),
            st.builds(masks.Causal, offset),
            st.builds(masks.Window, st.one_of(st.none(), small), st.one_of(st.none(), small), offset),
            st.builds(masks.Prefix, small),
            st.builds(masks.Strided, st.integers(1, 9)),
            st.builds(masks.Dilated, st.integers(0, 5), st.integers(1, 4), offset),
            st.builds(lambda n: masks.Padding([n] * batch), st.integers(0, len_k)),
            st.builds(lambda g: masks.GlobalTokens(sorted(g)), places),
        )
    )


@st.composite
def calls(draw):
    """Arguments of one call of attention, in float64, and how they shall stand in memory."""
    batch, heads_kv, group = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lengths = st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 140))
    len_q, len_k = draw(lengths), draw(lengths)
    features = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 32, 64]))
    head_dim, head_dim_v = draw(features), draw(features)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads = heads_kv * group
    arrays = {
        "query": rng.standard_normal((batch, heads, len_q, head_dim)),
        "key": rng.standard_normal((batch, heads_kv, len_k, head_dim)),
        "value": rng.standard_normal((batch, heads_kv, len_k, head_dim_v)),
    }
    options = {"scale": draw(st.sampled_from([None, 1.0, 0.3, -0.5]))}
    kind = draw(st.sampled_from(["none", "mask", "mask", "array"]))
    if kind == "mask":
        options["mask"] = draw(mask_trees(batch, len_q, len_k))
    elif kind == "array":
        axes = [draw(st.sampled_from([1, size])) for size in (batch, heads, len_q, len_k)]
        options["mask"] = rng.random(axes[draw(st.integers(0, 3)) :]) < draw(st.sampled_from([0.1, 0.6]))
    if draw(st.integers(0, 3)) == 0:
        axes = [draw(st.sampled_from([1, size])) for size in (batch, heads, len_q, len_k)]
        bias = rng.standard_normal(axes[draw(st.integers(0, 3)) :])
        options["bias"] = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        options["sinks"] = rng.standard_normal(heads)
    if draw(st.integers(0, 5)) == 0:
        options.update(dropout_p=draw(st.sampled_from([0.3, 1.0])), seed=draw(st.integers(0, 2**64 - 1)))
    layouts = {name: draw(st.sampled_from(LAYOUTS)) for name in arrays}
    cotangents = (
        rng.standard_normal((batch, heads, len_q, head_dim_v)),
        rng.standard_normal((batch, heads, len_q)),
    )
    return arrays, options, layouts, cotangents


def rounded(options, dtype):
    """The options with their arrays in ``dtype``, and the same numbers in float64."""
    narrow, wide = dict(options), dict(options)
    for name in ("bias", "sinks"):
        if name in options:
            narrow[name] = options[name].astype(dtype)
            wide[name] = narrow[name].astype(np.float64)
    return narrow, wide


def run(arrays, options, cotangents, backend):
    (out, lse), pullback = npattn.attention_vjp(**arrays, **options, return_lse=True, backend=backend)
    grads = pullback(cotangents[0].astype(out.dtype), cotangents[1].astype(lse.dtype))
    return {"out": out, "lse": lse, **{name: g for name, g in grads._asdict().items() if g is not None}}


def check(call, dtype_name, backend):
    arrays, options, layouts, cotangents = call
    dtype = dtype_of(dtype_name)
    narrow, wide = rounded(options, dtype)
    values = {name: x.astype(dtype) for name, x in arrays.items()}
    exact_cotangents = cotangents[0].astype(dtype).astype(np.float64), cotangents[1].astype(np.float32)
    given = {name: layouts[name](x) for name, x in values.items()}
    before = {name: x.copy() for name, x in given.items()}
    actual = run(given, narrow, exact_cotangents, backend)
    plain = run(values, narrow, exact_cotangents, "oracle")
    exact = run({n: x.astype(np.float64) for n, x in values.items()}, wide, exact_cotangents, "oracle")
    for name, x in given.items():
        assert x.tobytes() == before[name].tobytes(), f"{name} was written to"
    eps = float(np.finfo(np.float64 if dtype_name == "float64" else np.float32).eps)
    # in float64 exact and plain are one computation: the rounding of the products is allowed by their size
    floor = 64 * eps * max(1.0, largest_logit(values, options["scale"]))
    for name, result in actual.items():
        assert_within_budget(
            result, exact[name], plain[name], factor=8.0, floor=floor * terms(actual, name), name=name
        )


def largest_logit(arrays, scale):
    """A bound of scale * q k, by the norms of the rows."""
    query, key = (arrays[name].astype(np.float64) for name in ("query", "key"))
    norms = [np.sqrt(np.square(x).sum(axis=-1)).max(initial=0.0) for x in (query, key)]
    return norms[0] * norms[1] * (query.shape[-1] ** -0.5 if scale is None else abs(scale))


def terms(results, name):
    """How many terms a gradient adds up that may cancel: the rounding of each is allowed."""
    if name in ("out", "lse"):
        return 1
    return max(results["out"].size, 1) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@QUICK
@given(call=calls())
def test_any_call_equals_the_oracle(dtype, call):
    check(call, dtype, "auto")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(QUICK, max_examples=40)
@given(call=calls())
def test_any_call_of_the_numpy_kernel_equals_the_oracle(dtype, call):
    check(call, dtype, "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "numpy"])
@pytest.mark.parametrize("dtype", DTYPES)
@LONG
@given(call=calls())
def test_many_calls_equal_the_oracle(dtype, backend, call):
    check(call, dtype, backend)


@settings(QUICK, max_examples=40)
@given(call=calls())
def test_any_layout_gives_the_same_bits(call):
    arrays, options, layouts, cotangents = call
    narrow, _ = rounded(options, np.float32)
    values = {name: x.astype(np.float32) for name, x in arrays.items()}
    given_ = {name: layouts[name](x) for name, x in values.items()}
    for name, result in run(given_, narrow, cotangents, "auto").items():
        again = run(values, narrow, cotangents, "auto")[name]
        np.testing.assert_array_equal(result, again, err_msg=name)


@settings(QUICK, max_examples=40)
@given(call=calls(), cut=st.floats(0, 1))
def test_keys_in_two_parts_merge_to_the_whole(call, cut):
    arrays, options, _, _ = call
    mask = options.get("mask")
    at = round(cut * arrays["key"].shape[2])
    options = {name: options[name] for name in ("scale", "softcap") if name in options}
    batch, heads, len_q, _ = arrays["query"].shape
    len_k = arrays["key"].shape[2]
    dense = mask.to_dense(len_q, len_k, batch=batch, heads=heads) if isinstance(mask, masks.Mask) else mask
    whole = np.broadcast_to(True if dense is None else dense, (batch, heads, len_q, len_k))
    parts = [
        npattn.attention(
            arrays["query"],
            arrays["key"][:, :, s],
            arrays["value"][:, :, s],
            mask=whole[..., s],
            return_lse=True,
            **options,
        )
        for s in (slice(0, at), slice(at, None))
    ]
    out, lse = npattn.merge_attention([part[0] for part in parts], [part[1] for part in parts])
    expected, expected_lse = npattn.attention(**arrays, mask=whole, return_lse=True, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-10, atol=1e-12)


@settings(QUICK, max_examples=30)
@given(call=calls())
def test_order_of_keys_does_not_matter(call):
    arrays, options, _, _ = call
    len_k = arrays["key"].shape[2]
    order = np.random.default_rng(0).permutation(len_k)
    options = {name: options[name] for name in ("scale", "softcap", "sinks") if name in options}
    shuffled = {**arrays, "key": arrays["key"][:, :, order], "value": arrays["value"][:, :, order]}
    np.testing.assert_allclose(
        npattn.attention(**shuffled, **options), npattn.attention(**arrays, **options), rtol=1e-10, atol=1e-12
    )

"""Shapes, strides, dtypes and empty axes: what goes in and what comes out."""

import numpy as np
import pytest

import npattn
from npattn import masks
from npattn.functional._canonical import canonical


def qkv(rng, dtype=np.float64, batch=2, heads=3, len_q=7, len_k=9, head_dim=5, head_dim_v=4):
    return (
        rng.standard_normal((batch, heads, len_q, head_dim)).astype(dtype),
        rng.standard_normal((batch, heads, len_k, head_dim)).astype(dtype),
        rng.standard_normal((batch, heads, len_k, head_dim_v)).astype(dtype),
    )


def everything(attend, q, k, v, dout, **options):
    (out, lse), pullback = attend.attention_vjp(q, k, v, return_lse=True, **options)
    return out, lse, *pullback(dout, np.ones_like(lse))


def assert_same(actual, expected, tolerance=1e-13):
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "transposed heads": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "transposed rows": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "F order": np.asfortranarray,
    "negative rows": lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    "negative everything": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "every second row": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "every second column": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "inside wider rows": lambda x: np.concatenate([x, x, x], axis=3)[..., x.shape[3] : 2 * x.shape[3]],
    "misaligned": lambda x: misaligned(x),
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "read-only": lambda x: read_only(x),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_sinks_in_another_byte_order(attend, rng, dtype):
    q, k, v = qkv(rng, dtype, head_dim=8, head_dim_v=8)
    sinks, dout = np.arange(3).astype(dtype), np.ones((2, 3, 7, 8), dtype)
    expected = everything(attend, q, k, v, dout, sinks=sinks)
    actual = everything(attend, q, k, v, dout, sinks=sinks.astype(sinks.dtype.newbyteorder(">")))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    y = np.frombuffer(raw, dtype=x.dtype).reshape(x.shape)
    y[...] = x
    assert not y.flags.aligned
    return y


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_any_layout_is_read_correctly(attend, rng, layout, dtype):
    q, k, v = qkv(rng, dtype, head_dim=8, head_dim_v=8)
    dout, bias = (
        rng.standard_normal((2, 3, 7, 8)).astype(dtype),
        rng.standard_normal((2, 3, 7, 9)).astype(dtype),
    )
    mask = rng.random((2, 3, 7, 9)) < 0.7
    expected = everything(attend, q, k, v, dout, bias=bias, mask=mask)
    change = LAYOUTS[layout]
    q, k, v, dout, bias = (change(x) for x in (q, k, v, dout, bias))
    if layout not in ("misaligned", "other byte order"):
        mask = change(mask)
    tolerance = {8: 1e-13, 4: 1e-5, 2: 2e-3}[np.dtype(dtype).itemsize]
    actual = everything(attend, q, k, v, dout, bias=bias, mask=mask)
    if layout == "other byte order":
        assert actual[0].dtype.isnative
        actual = [x if x is None else x.astype(x.dtype.newbyteorder("=")) for x in actual]
    assert_same(actual, expected, tolerance)


def test_zero_strides_are_read_correctly(attend, rng):
    q, k, v = qkv(rng)
    q = np.broadcast_to(q[:1, :, :1], q.shape)
    k = np.broadcast_to(k[:, :1], k.shape)
    v = np.broadcast_to(v[0, 0, 0, 0], v.shape)
    dout = np.broadcast_to(rng.standard_normal(4), (2, 3, 7, 4))
    assert_same(everything(attend, q, k, v, dout), everything(attend, *map(np.copy, (q, k, v, dout))))


def test_nothing_is_copied_where_the_last_axis_is_contiguous(rng):
    base = rng.standard_normal((2, 9, 3, 8))
    view = base.swapaxes(1, 2)[:, :, ::-1]
    inputs = canonical(view, view, base[0].swapaxes(0, 1), None, None, None, None, None)
    for x in (inputs.q, inputs.k, inputs.v):
        assert np.shares_memory(x, base)


def test_inputs_are_not_modified(attend, rng):
    q, k, v = qkv(rng, np.float32)
    bias, sinks = rng.standard_normal((3, 7, 9)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    mask, dout = rng.random((7, 9)) < 0.5, rng.standard_normal((2, 3, 7, 4)).astype(np.float32)
    given = (q, k, v, bias, sinks, mask, dout)
    kept = [x.copy() for x in given]
    everything(attend, q, k, v, dout, bias=bias, sinks=sinks, mask=mask, softcap=2.0, dropout_p=0.1, seed=1)
    for x, y in zip(given, kept, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_result_is_the_callers_own(attend, rng):
    """Writing into a result changes no input and no later result."""
    q, k, v = qkv(rng)
    kept = [x.copy() for x in (q, k, v)]
    first = attend.attention(q, k, v)
    expected = first.copy()
    first[...] = 7
    np.testing.assert_array_equal(attend.attention(q, k, v), expected)
    for x, y in zip((q, k, v), kept, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("query", "key", "value", "out", "lse"),
    [
        ((7, 5), (9, 5), (9, 4), (7, 4), (7,)),
        ((3, 7, 5), (3, 9, 5), (3, 9, 4), (3, 7, 4), (3, 7)),
        ((6, 7, 5), (3, 9, 5), (3, 9, 4), (6, 7, 4), (6, 7)),
        ((2, 3, 7, 5), (9, 5), (9, 4), (2, 3, 7, 4), (2, 3, 7)),
        ((7, 5), (2, 3, 9, 5), (2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7)),
        ((7, 5), (9, 5), (2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7)),
        ((7, 5), (3, 9, 5), (9, 4), (3, 7, 4), (3, 7)),
        ((2, 6, 7, 5), (3, 9, 5), (9, 4), (2, 6, 7, 4), (2, 6, 7)),
        ((2, 1, 3, 7, 5), (4, 3, 9, 5), (2, 4, 3, 9, 4), (2, 4, 3, 7, 4), (2, 4, 3, 7)),
        ((1, 3, 7, 5), (2, 3, 9, 5), (1, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7)),
        ((1, 1, 1, 1, 3, 7, 5), (3, 9, 5), (3, 9, 4), (1, 1, 1, 1, 3, 7, 4), (1, 1, 1, 1, 3, 7)),
    ],
    ids=lambda shape: str(shape),
)
def test_shapes_broadcast(attend, rng, query, key, value, out, lse):
    q, k, v = (rng.standard_normal(shape) for shape in (query, key, value))
    (actual, actual_lse), pullback = attend.attention_vjp(q, k, v, return_lse=True)
    assert actual.shape == out
    assert actual_lse.shape == lse
    heads_q = out[-3] if len(out) > 2 else 1
    heads_kv = max(shape[-3] for shape in (key, value, (1, 1, 1)) if len(shape) > 2)
    lead = out[:-3]
    full_q, full_k, full_v = (
        np.broadcast_to(x, (*lead, heads, *x.shape[-2:])).repeat(heads_q // heads, axis=-3)
        for x, heads in ((q, heads_q), (k, heads_kv), (v, heads_kv))
    )
    logits = full_q @ full_k.swapaxes(-1, -2) / np.sqrt(5)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(actual, (weights @ full_v).reshape(out), rtol=1e-12, atol=1e-12)
    grads = pullback(np.ones(out))
    assert [grad.shape for grad in grads[:3]] == [query, key, value]


@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 3, 7, 9),
        (2, 1, 3, 7, 9),
        (4, 1, 1, 9),
        (1, 3, 7, 1),
        (7, 9),
        (9,),
        (7, 1),
        (),
        (1, 1, 1, 1, 1, 7, 9),
    ],
)
def test_masks_and_biases_broadcast_right_aligned(attend, rng, shape):
    q, k, v = (
        rng.standard_normal((2, 4, 3, 7, 5)),
        rng.standard_normal((4, 3, 9, 5)),
        rng.standard_normal((2, 1, 3, 9, 4)),
    )
    full = (2, 4, 3, 7, 9)
    mask = rng.random(shape) < 0.7
    bias = np.where(mask, 0.0, -np.inf)
    whole = np.broadcast_to(mask.reshape(shape[-5:]), full)
    expected = attend.attention(q, k, v, mask=whole)
    np.testing.assert_allclose(attend.attention(q, k, v, mask=mask), expected, atol=1e-14)
    np.testing.assert_allclose(attend.attention(q, k, v, bias=bias), expected, atol=1e-14)
    bias = rng.standard_normal(shape)
    out, pullback = attend.attention_vjp(q, k, v, bias=bias)
    whole = np.broadcast_to(bias.reshape(shape[-5:]), full)
    expected, whole_pullback = attend.attention_vjp(q, k, v, bias=whole)
    np.testing.assert_allclose(out, expected, atol=1e-14)
    dout = rng.standard_normal(out.shape)
    summed = whole_pullback(dout).bias
    own = (1,) * (5 - min(5, len(shape))) + shape[-5:]
    axes = tuple(axis for axis in range(5) if own[axis] == 1)
    np.testing.assert_allclose(
        pullback(dout).bias, summed.sum(axes, keepdims=True).reshape(shape), atol=1e-13
    )


def test_a_mask_object_sees_the_product_of_the_leading_dimensions_as_its_batch(attend, rng):
    q, k, v = rng.standard_normal((3, 2, 3, 1, 8, 4))
    lengths = np.array([8, 1, 0, 5, 7, 3])
    out = attend.attention(q, k, v, mask=masks.Padding(lengths))
    flat = attend.attention(*(x.reshape(6, 1, 8, 4) for x in (q, k, v)), mask=masks.Padding(lengths))
    np.testing.assert_allclose(out, flat.reshape(out.shape), atol=1e-15)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("sizes", "out"),
    [
        ({"batch": 0}, (0, 3, 7, 4)),
        ({"heads": 0}, (2, 0, 7, 4)),
        ({"len_q": 0}, (2, 3, 0, 4)),
        ({"len_k": 0}, (2, 3, 7, 4)),
        ({"len_q": 0, "len_k": 0}, (2, 3, 0, 4)),
        ({"head_dim": 0}, (2, 3, 7, 4)),
        ({"head_dim_v": 0}, (2, 3, 7, 0)),
        ({"batch": 0, "heads": 0, "len_q": 0, "len_k": 0, "head_dim": 0, "head_dim_v": 0}, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_empty_axes_give_empty_or_zero_arrays(attend, rng, sizes, out, return_lse):
    q, k, v = qkv(rng, np.float32, **sizes)
    for options in (
        {},
        {"mask": masks.Causal()},
        {"bias": np.zeros((out[2], k.shape[2]))},
        {"mask": np.ones((out[2], k.shape[2]), bool), "sinks": np.zeros(out[1], np.float32)},
        {"dropout_p": 0.5, "seed": 1, "softcap": 1.0},
        {"dropout_p": 1.0, "seed": 1},
    ):
        result, pullback = attend.attention_vjp(q, k, v, return_lse=return_lse, **options)
        actual = result[0] if return_lse else result
        assert actual.shape == out
        assert actual.dtype == np.float32
        assert np.isfinite(actual).all()
        if return_lse:
            assert result[1].shape == out[:-1]
        if k.shape[2] == 0:
            assert not actual.any()
            if return_lse:
                assert (result[1] == (0.0 if "sinks" in options else -np.inf)).all()
        grads = pullback(np.ones(out, np.float32))
        assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]
        for grad in grads:
            assert grad is None or np.isfinite(grad).all()


def test_head_dim_0_has_equal_logits(attend, rng):
    q, k, v = qkv(rng, head_dim=0)
    np.testing.assert_allclose(attend.attention(q, k, v)[:, :, 0], v.mean(2), atol=1e-15)


ml_dtypes = pytest.importorskip("ml_dtypes")
H, S, D, BF = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((H, H, H), H),
        ((S, S, S), S),
        ((D, D, D), D),
        ((BF, BF, BF), BF),
        ((H, S, H), S),
        ((S, S, D), D),
        ((BF, S, BF), S),
        ((D, BF, BF), D),
    ],
    ids=str,
)
def test_mixed_dtypes_promote_as_numpy_does(attend, rng, dtypes, expected):
    q, k, v = (x.astype(dtype) for x, dtype in zip(qkv(rng), dtypes, strict=True))
    out, pullback = attend.attention_vjp(q, k, v)
    assert out.dtype == expected
    same = attend.attention(*(x.astype(expected) for x in (q, k, v)))
    np.testing.assert_array_equal(out, same)
    grads = pullback(np.ones_like(out))
    assert tuple(grad.dtype for grad in grads[:3]) == dtypes


def test_bias_and_sinks_do_not_promote(attend, rng):
    q, k, v = qkv(rng, np.float32)
    out, lse = attend.attention(q, k, v, bias=np.zeros((7, 9)), sinks=np.zeros(3), return_lse=True)
    assert out.dtype == lse.dtype == np.float32


def test_lists_are_read_as_arrays(attend):
    out = attend.attention([[1.0]], [[0.5], [0.5]], [[2.0], [4.0]])
    np.testing.assert_array_equal(out, [[3.0]])


def test_names_live_in_npattn_and_are_the_same_objects():
    for name in (
        "attention",
        "attention_vjp",
        "attention_weights",
        "scaled_dot_product_attention",
        "AttentionGrads",
    ):
        assert getattr(npattn, name) is getattr(npattn.functional, name)


def test_the_number_of_lists_of_a_mask_does_not_matter(attend, rng):
    """One list for all, one for each batch element, head, or both: four ways to say the same."""
    q, k, v = rng.standard_normal((3, 2, 4, 40, 6))
    pairs = rng.random((40, 40)) < 0.5
    outs = [
        attend.attention(q, k, v, mask=np.broadcast_to(pairs, shape))
        for shape in ((40, 40), (2, 1, 40, 40), (4, 40, 40), (2, 4, 40, 40))
    ]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=1e-14)


def test_gqa_reads_key_head_h_over_group(attend, rng):
    q, k, v = (
        rng.standard_normal((1, 6, 5, 4)),
        rng.standard_normal((1, 2, 8, 4)),
        rng.standard_normal((1, 2, 8, 3)),
    )
    out, lse = attend.attention(q, k, v, return_lse=True)
    for h in range(6):
        one, one_lse = attend.attention(q[0, h], k[0, h // 3], v[0, h // 3], return_lse=True)
        np.testing.assert_allclose(out[0, h], one, atol=1e-14)
        np.testing.assert_allclose(lse[0, h], one_lse, atol=1e-14)

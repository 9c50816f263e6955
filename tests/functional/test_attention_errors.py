"""Bad input: the message says the rule, what came and the likely fix; nothing is modified."""

import re

import numpy as np
import pytest

import npattn
from npattn import masks

Q, K, V = np.ones((2, 4, 7, 5)), np.ones((2, 2, 9, 5)), np.ones((2, 2, 9, 3))

BAD = {
    "1-D query": ({"query": np.ones(5)}, ValueError, ["query", "(5,)"]),
    "0-D value": ({"value": np.float64(1)}, ValueError, ["value", "()"]),
    "head_dim": (
        {"key": np.ones((2, 2, 9, 6))},
        ValueError,
        ["(2, 4, 7, 5)", "(2, 2, 9, 6)", "head_dim", "-1"],
    ),
    "len_k": ({"value": np.ones((2, 2, 8, 3))}, ValueError, ["(2, 2, 9, 5)", "(2, 2, 8, 3)", "len_k", "-2"]),
    "heads of key and value": (
        {"value": np.ones((2, 4, 9, 3))},
        ValueError,
        ["(2, 2, 9, 5)", "(2, 4, 9, 3)", "-3", "heads"],
    ),
    "heads not divisible": (
        {"query": np.ones((2, 5, 7, 5))},
        ValueError,
        ["heads_q=5", "heads_kv=2", "multiple"],
    ),
    "fewer query heads": ({"query": np.ones((2, 1, 7, 5))}, ValueError, ["heads_q=1", "heads_kv=2"]),
    "no key heads": (
        {"key": np.ones((2, 0, 9, 5)), "value": np.ones((2, 0, 9, 3))},
        ValueError,
        ["heads_q=4", "heads_kv=0"],
    ),
    "batch": (
        {"key": np.ones((3, 2, 9, 5))},
        ValueError,
        ["(2, 4, 7, 5)", "(3, 2, 9, 5)", "leading", "batch"],
    ),
    "integer query": (
        {"query": np.ones((2, 4, 7, 5), int)},
        TypeError,
        ["query", "int64", "float32", "astype"],
    ),
    "complex value": ({"value": np.ones((2, 2, 9, 3), complex)}, TypeError, ["value", "complex128"]),
    "longdouble key": ({"key": np.ones((2, 2, 9, 5), np.longdouble)}, TypeError, ["key", "float64"]),
    "object query": ({"query": np.ones((2, 4, 7, 5), object)}, TypeError, ["query", "object"]),
    "integer mask": ({"mask": np.ones((7, 9), int)}, TypeError, ["mask", "int64", "bool", "mask != 0"]),
    "uint8 mask": (
        {"mask": np.ones((7, 9), np.uint8)},
        TypeError,
        ["mask", "uint8", "padding in some libraries"],
    ),
    "float mask": ({"mask": np.ones((7, 9))}, TypeError, ["mask", "float64", "bias="]),
    "string mask": ({"mask": "causal"}, TypeError, ["mask", "bool", "Mask"]),
    "mask shape": (
        {"mask": np.ones((7, 8), bool)},
        ValueError,
        ["mask", "(7, 8)", "(2, 4, 7, 9)", "-1", "len_k"],
    ),
    "mask heads": (
        {"mask": np.ones((3, 7, 9), bool)},
        ValueError,
        ["mask", "(3, 7, 9)", "(2, 4, 7, 9)", "-3", "heads_q"],
    ),
    "mask batch": ({"mask": np.ones((3, 1, 7, 9), bool)}, ValueError, ["(3, 1, 7, 9)", "-4", "batch"]),
    "mask with too many axes": (
        {"mask": np.ones((2, 2, 4, 7, 9), bool)},
        ValueError,
        ["mask", "(2, 2, 4, 7, 9)"],
    ),
    "Dense of another size": (
        {"mask": masks.Dense(np.ones((3, 3), bool))},
        ValueError,
        ["3, 3)", "(2, 4, 7, 9)"],
    ),
    "integer bias": ({"bias": np.ones((7, 9), int)}, TypeError, ["bias", "int64"]),
    "bool bias": ({"bias": np.ones((7, 9), bool)}, TypeError, ["bias", "bool"]),
    "bias shape": ({"bias": np.ones((6, 9))}, ValueError, ["bias", "(6, 9)", "(2, 4, 7, 9)", "-2", "len_q"]),
    "sinks shape": ({"sinks": np.ones(2)}, ValueError, ["sinks", "(2,)", "(4,)", "heads_q"]),
    "sinks axes": ({"sinks": np.ones((1, 4))}, ValueError, ["sinks", "(1, 4)", "(4,)"]),
    "integer sinks": ({"sinks": np.ones(4, int)}, TypeError, ["sinks", "int64"]),
    "negative softcap": ({"softcap": -1.0}, ValueError, ["softcap", "-1.0", "0 or None"]),
    "NaN softcap": ({"softcap": np.nan}, ValueError, ["softcap", "nan"]),
    "infinite softcap": ({"softcap": np.inf}, ValueError, ["softcap", "inf"]),
    "NaN scale": ({"scale": np.nan}, ValueError, ["scale", "nan"]),
    "infinite scale": ({"scale": -np.inf}, ValueError, ["scale", "inf"]),
    "several scales": ({"scale": np.ones(4)}, TypeError, ["scale", "one number", "(4,)"]),
    "string scale": ({"scale": "0.5"}, TypeError, ["scale", "number", "str ('0.5')"]),
    "several softcaps": ({"softcap": np.ones((1, 4))}, TypeError, ["softcap", "one number", "(1, 4)"]),
    "string softcap": ({"softcap": "3"}, TypeError, ["softcap", "number", "str"]),
    "complex softcap": ({"softcap": 1j}, TypeError, ["softcap", "number", "complex"]),
    "dropout None": ({"dropout_p": None}, TypeError, ["dropout_p", "number", "NoneType"]),
    "string dropout": ({"dropout_p": "x"}, TypeError, ["dropout_p", "number", "str"]),
    "a mask as bias": ({"bias": masks.Causal()}, TypeError, ["bias", "Causal", "mask="]),
    "negative dropout": ({"dropout_p": -0.1, "seed": 1}, ValueError, ["dropout_p", "[0, 1]", "-0.1"]),
    "dropout above one": ({"dropout_p": 1.5, "seed": 1}, ValueError, ["dropout_p", "[0, 1]", "1.5"]),
    "NaN dropout": ({"dropout_p": np.nan, "seed": 1}, ValueError, ["dropout_p", "nan"]),
    "dropout without seed": ({"dropout_p": 0.1}, ValueError, ["dropout_p=0.1", "seed="]),
    "all dropped without seed": ({"dropout_p": 1.0}, ValueError, ["dropout_p=1.0", "seed="]),
    "float seed": ({"dropout_p": 0.1, "seed": 1.5}, TypeError, ["seed", "int", "float"]),
    "unknown backend": (
        {"backend": "torch"},
        ValueError,
        ["'torch'", "'auto'", "'numba'", "'numpy'", "'cupy'", "'oracle'"],
    ),
    "backend None": ({"backend": None}, TypeError, ["backend", "string"]),
    "cupy for NumPy arrays": ({"backend": "cupy"}, TypeError, ["'cupy'", "GPU", "NumPy", "cupy.asarray"]),
}


@pytest.mark.parametrize("function", ["attention", "attention_vjp"])
@pytest.mark.parametrize("name", BAD)
def test_the_message_says_rule_value_and_fix(name, function):
    options, error, words = BAD[name]
    arguments = {"query": Q, "key": K, "value": V} | options
    kept = {key: np.copy(x) for key, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error) as caught:
        getattr(npattn, function)(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    for key, x in kept.items():
        np.testing.assert_array_equal(arguments[key], x)


def test_bad_cotangents_are_refused():
    (out, lse), pullback = npattn.attention_vjp(Q, K, V, return_lse=True)
    assert out.shape == (2, 4, 7, 3)
    for dout, dlse, error, words in [
        (np.ones((2, 4, 7, 4)), None, ValueError, ["dout", "(2, 4, 7, 4)", "(2, 4, 7, 3)"]),
        (np.ones((4, 7, 3)), None, ValueError, ["dout", "(4, 7, 3)"]),
        (np.ones(()), None, ValueError, ["dout", "()"]),
        (np.ones(out.shape), np.ones((2, 4, 1)), ValueError, ["dlse", "(2, 4, 1)", "(2, 4, 7)"]),
        (np.ones(out.shape, int), None, TypeError, ["dout", "int64"]),
        (np.ones(out.shape), np.ones(lse.shape, bool), TypeError, ["dlse", "bool"]),
    ]:
        with pytest.raises(error) as caught:
            pullback(dout, dlse)
        for word in words:
            assert word in str(caught.value)


def test_numbers_may_be_any_single_number():
    plain = npattn.attention(Q, K, V, scale=0.5, softcap=3.0, dropout_p=0.25, seed=1)
    for kind in (np.float64, np.float32, np.array):
        options = {"scale": kind(0.5), "softcap": kind(3.0), "dropout_p": kind(0.25)}
        np.testing.assert_array_equal(npattn.attention(Q, K, V, seed=1, **options), plain)


def test_scaled_dot_product_attention_names_where_a_mask_object_goes():
    with pytest.raises(TypeError, match=r"attn_mask.*Causal.*npattn\.attention.*mask="):
        npattn.scaled_dot_product_attention(Q, Q, Q, masks.Causal())


@pytest.mark.parametrize("kind", [bool, np.float32])
def test_scaled_dot_product_attention_calls_its_mask_by_its_name(kind):
    with pytest.raises(ValueError, match=r"attn_mask must broadcast.*\(3, 3\)"):
        npattn.scaled_dot_product_attention(Q, Q, Q, np.ones((3, 3), kind))


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        npattn.attention(Q, K, V, np.ones((7, 9), bool))


def test_dropout_without_seed_is_fine_at_p_0():
    np.testing.assert_array_equal(npattn.attention(Q, K, V, dropout_p=0.0), npattn.attention(Q, K, V))


def test_softcap_0_and_none_are_off(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 2, 5, 4))
    free = attend.attention(q, k, v)
    for softcap in (None, 0, 0.0):
        np.testing.assert_array_equal(attend.attention(q, k, v, softcap=softcap), free)


def test_numpy_scalars_are_numbers(attend, rng):
    q, k, v = rng.standard_normal((3, 1, 2, 5, 4))
    plain = attend.attention(q, k, v, scale=0.5, softcap=2.0, dropout_p=0.25, seed=3)
    others = attend.attention(
        *(q, k, v), scale=np.float32(0.5), softcap=np.int64(2), dropout_p=np.float16(0.25), seed=np.uint8(3)
    )
    np.testing.assert_array_equal(plain, others)


def test_a_message_has_no_line_of_internals():
    """The last frame of the traceback may be ours, the text is the caller's: names and shapes they wrote."""
    with pytest.raises(ValueError, match=re.escape("must have the same head_dim")) as caught:
        npattn.attention(Q, np.ones((2, 2, 9, 6)), V)
    assert "canonical" not in str(caught.value)

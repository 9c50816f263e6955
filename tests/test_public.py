"""The public surface: what is promised is there, loads on first use, and is the same object everywhere."""

import ast
import inspect
from pathlib import Path

import pytest

import npattn


@pytest.mark.parametrize("name", npattn.__all__)
def test_every_public_name_loads(name):
    assert getattr(npattn, name) is not None


def test_functions_are_those_of_functional():
    for name in npattn._FUNCTIONS:
        assert getattr(npattn, name) is getattr(npattn.functional, name)


def test_type_checkers_see_the_names_that_load_at_run_time():
    tree = ast.parse(Path(npattn.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == set(npattn.__all__)


def test_unknown_name_is_an_attribute_error_naming_it():
    with pytest.raises(AttributeError, match="'npattn' has no attribute 'atention'"):
        npattn.atention  # noqa: B018


def test_dir_lists_names_before_they_are_loaded():
    assert set(npattn.__all__) <= set(dir(npattn))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "attention",
            "query key value mask bias scale softcap sinks dropout_p seed return_lse backend",
        ),
        (
            "attention_vjp",
            "query key value mask bias scale softcap sinks dropout_p seed return_lse backend",
        ),
        (
            "scaled_dot_product_attention",
            "query key value attn_mask dropout_p is_causal scale enable_gqa seed",
        ),
        ("attention_weights", "query key mask bias scale softcap sinks rows"),
        ("attention_stats", "query key mask bias scale softcap sinks top_k backend"),
        ("merge_attention", "outs lses"),
        (
            "graph_attention",
            "query key value adjacency edge_bias scale softcap dropout_p seed return_weights backend",
        ),
        ("edge_softmax", "logits adjacency"),
    ],
)
def test_signatures_are_the_contracts(name, parameters):
    assert " ".join(inspect.signature(getattr(npattn, name)).parameters) == parameters


def test_varlen_and_linear_attention_take_what_the_contract_lists():
    varlen = list(inspect.signature(npattn.varlen_attention).parameters)
    assert varlen[:7] == [
        *("query", "key", "value", "query_lengths", "key_lengths"),
        *("causal", "window"),
    ]
    linear = inspect.signature(npattn.linear_attention).parameters
    assert list(linear) == ["query", "key", "value", "feature_map", "causal", "eps"]
    assert (linear["feature_map"].default, linear["causal"].default, linear["eps"].default) == (
        *("elu1", False, 1e-6),
    )

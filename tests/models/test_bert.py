"""Bert against what Hugging Face's transformers computed on the same file (make_references.py)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import npattn.models.bert
from npattn.io import load_safetensors, save
from npattn.masks import Padding
from npattn.models import Bert


@pytest.fixture
def bert(load):
    return load("bert")


def test_states_are_those_of_transformers(bert):
    model, expected = bert
    np.testing.assert_allclose(model(expected["ids"]), expected["plain"], atol=1e-5)


@pytest.mark.parametrize("form", ["tokens", "keys", "padding"])
def test_padding_and_segments_are_those_of_transformers(bert, form):
    model, expected = bert
    real = expected["mask"]
    mask = {"tokens": real, "keys": real[:, None, None, :], "padding": Padding(real.sum(axis=1))}[form]
    states = model(expected["ids"], segments=expected["segments"], mask=mask)
    np.testing.assert_allclose(states[real], expected["hidden"][real], atol=1e-5)


@pytest.mark.parametrize("pack_tokens", [1, 20, 4096])
def test_embeddings_of_packed_texts_equal_each_text_alone(bert, pack_tokens, monkeypatch):
    monkeypatch.setattr(npattn.models.bert, "PACK_TOKENS", pack_tokens)
    model, _ = bert
    rng = np.random.default_rng(0)
    lengths = np.array([3, 12, 1, 7, 7, 12, 2])
    ids = rng.integers(0, 50, (7, 12))
    for pooling in ("mean", "cls"):
        vectors = model.embed(ids, lengths, pooling=pooling, normalize=False)
        for b, length in enumerate(lengths):
            states = model(ids[b : b + 1, :length])[0]
            expected = states.mean(axis=0) if pooling == "mean" else states[0]
            np.testing.assert_allclose(vectors[b], expected, atol=2e-6)
    unit = model.embed(ids, lengths)
    np.testing.assert_allclose((unit**2).sum(axis=1), 1, atol=1e-6)
    assert model.embed(ids[:0], lengths[:0]).shape == (0, 16)


def test_what_could_mean_two_things_or_nothing_is_refused(bert):
    model, _ = bert
    ids = np.zeros((3, 3), int)
    with pytest.raises(ValueError, match="could be"):
        model(ids, mask=np.ones((3, 3), bool))
    with pytest.raises(ValueError, match="20"):
        model(np.zeros((1, 21), int))
    with pytest.raises(ValueError, match="segments"):
        model(ids, segments=np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        model(ids, segments=np.full((3, 3), 2))
    with pytest.raises(ValueError, match=r"\[0, 50\)"):
        model(np.full((1, 2), 50))
    with pytest.raises(ValueError, match="pooling"):
        model.embed(ids, [3, 3, 3], pooling="max")
    for lengths in ([3, 3], [0, 1, 1], [4, 1, 1]):
        with pytest.raises(ValueError, match="lengths"):
            model.embed(ids, lengths)


def test_weights_of_every_layer(bert):
    model, expected = bert
    weights = model.weights(expected["ids"], expected["mask"])
    assert [array.shape for array in weights] == [(2, 4, 12, 12)] * 2
    assert (weights[0][1, :, :, 7:] == 0).all()
    np.testing.assert_allclose(weights[1].sum(axis=-1), 1, atol=1e-5)


def test_prefixed_files_with_gamma_and_beta_are_read(bert, tmp_path):
    """bert-base-uncased's own file names its norms so, behind ``bert.``, beside heads nobody asks for."""
    model, _ = bert
    source = Path(__file__).parent / "data" / "bert"
    tensors = {"cls.predictions.bias": np.zeros(50, np.float32)}
    for name, array in load_safetensors(source / "model.safetensors").items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[f"bert.{name}"] = array
    shutil.copy(source / "config.json", tmp_path)
    save(tmp_path / "model.safetensors", tensors)
    found = Bert.from_pretrained(tmp_path).named_parameters()
    for name, array in model.named_parameters().items():
        np.testing.assert_array_equal(found[name], array)

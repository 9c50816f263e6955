"""Damaged safetensors files: a ValueError that says what is wrong, or the arrays; never anything else."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npattn.io import load_safetensors, save_safetensors

QUICK = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def original(folder):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b.weight": rng.integers(0, 9, (5,)),
        "empty": np.zeros((0, 7), np.float16),
        "scalar": np.array(2.5),
    }
    path = folder / "original.safetensors"
    save_safetensors(path, tensors)
    return path.read_bytes()


def read(path, content):
    """What a reader gets: the arrays, read to the last byte, or a ValueError with a text."""
    path.write_bytes(content)
    tensors, refusal = None, ""
    try:
        tensors = load_safetensors(path)
    except ValueError as error:
        refusal = str(error)
    if tensors is None:
        assert len(refusal) > 20
        return None
    assert sum(array.nbytes for array in tensors.values()) <= 8 * len(content)  # bfloat16 may double
    for array in tensors.values():
        array.tobytes()
    return tensors


@QUICK
@given(data=st.data())
def test_changed_bytes_are_refused_or_read(folder, original, data):
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read(folder / "changed.safetensors", bytes(content))


@QUICK
@given(cut=st.integers(0, 2000))
def test_shortened_files_are_refused(folder, original, cut):
    if cut < len(original):
        assert read(folder / "short.safetensors", original[:cut]) is None


def test_longer_files_are_refused(folder, original):
    assert read(folder / "long.safetensors", original + b"\0") is None


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
sizes = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**63, 2**64, 10**30]), json_values)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(
            st.sampled_from(["F32", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "f32"]), json_values
        ),
        "shape": st.one_of(st.lists(sizes, max_size=4), json_values),
        "data_offsets": st.one_of(st.lists(sizes, min_size=2, max_size=2), json_values),
    },
    optional={"more": json_values},
)
headers = st.one_of(
    json_values,
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", ""]), st.one_of(entries, json_values), max_size=3
    ),
)


@settings(QUICK, max_examples=400)
@given(header=headers, body=st.binary(max_size=80))
def test_headers_that_claim_anything_are_refused_or_read(folder, header, body):
    text = json.dumps(header).encode()
    tensors = read(folder / "header.safetensors", struct.pack("<Q", len(text)) + text + body)
    for name, array in (tensors or {}).items():
        assert list(array.shape) == header[name]["shape"]


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(folder, content):
    read(folder / "bytes.safetensors", content)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**9])
def test_a_header_longer_than_the_file_takes_no_memory(folder, length):
    assert read(folder / "huge.safetensors", struct.pack("<Q", length) + b"{}") is None


def test_deeply_nested_headers_do_not_break_the_reader(folder):
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert read(folder / "deep.safetensors", struct.pack("<Q", len(text)) + text) is None

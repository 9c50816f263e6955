import json
import os
import struct

import numpy as np
import pytest

from npattn.io import load, load_metadata, load_safetensors, save, save_safetensors
from npattn.io.safetensors import DTYPES, read_header


def write(path, header, buffer=b"", *, claim=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(raw) if claim is None else claim
    path.write_bytes(struct.pack("<Q", length) + raw + buffer)
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(path, name):
    dtype = DTYPES[name]
    rng = np.random.default_rng(3)
    words = rng.integers(0, 256, 24 * dtype.itemsize, dtype=np.uint8)
    array = (
        (words & 1).astype(bool).reshape(2, 3, 4) if name == "BOOL" else words.view(dtype).reshape(2, 3, 4)
    )
    save(path, {"x": array})
    found = load(path)["x"]
    assert found.dtype == dtype
    assert found.tobytes() == array.tobytes()


def test_strides_byte_order_scalars_and_empty_arrays_are_stored_right(path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors = {
        "transposed": base.T,
        "reversed": base[::-1, ::-2],
        "broadcast": np.broadcast_to(base[:1], (3, 6)),
        "fortran": np.asfortranarray(base),
        "big_endian": base.astype(">f4"),
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 7), np.int16),
        "name with \u00fc": np.array([True, False]),
    }
    save(path, tensors)
    found = load(path)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].shape == np.shape(array)


def test_bfloat16_becomes_ml_dtypes_or_exact_float32(path, monkeypatch):
    words = np.arange(0, 65536, 7, dtype=np.uint16)
    write(path, {"x": entry("BF16", (len(words),), 0, 2 * len(words))}, words.tobytes())
    ml_dtypes = pytest.importorskip("ml_dtypes")
    typed = load(path)["x"]
    assert typed.dtype == ml_dtypes.bfloat16
    save(path.with_name("b.safetensors"), {"x": typed})
    assert load(path.with_name("b.safetensors"))["x"].tobytes() == words.tobytes()
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    plain = load(path)["x"]
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain.view(np.uint32) >> 16, words)


def test_tensors_are_read_only_views_of_the_mapped_file(path):
    save(path, {"x": np.ones((1000, 1000), np.float32)})
    x = load(path)["x"]
    base = x
    while base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    assert not x.flags.owndata
    assert not x.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0] = 2


def test_misaligned_tensors_are_read(path):
    values = np.array([1.5, -2.0])
    write(path, {"b": entry("U8", (3,), 0, 3), "x": entry("F64", (2,), 3, 19)}, b"abc" + values.tobytes())
    np.testing.assert_array_equal(load(path)["x"], values)
    assert load(path)["x"].flags.aligned


def test_metadata_and_bytes_depend_on_the_contents_alone(path):
    tensors = {"b": np.ones(3, np.float16), "a": np.arange(4.0)}
    save(path, tensors, metadata={"format": "pt", "step": "12"})
    first = path.read_bytes()
    save(path, dict(reversed(tensors.items())), metadata={"format": "pt", "step": "12"})
    assert path.read_bytes() == first
    assert load_metadata(path) == {"format": "pt", "step": "12"}
    entries, _, start = read_header(path)
    assert start % 8 == 0
    assert [*entries] == ["a", "b"]


HOSTILE = {
    "empty file": (b"", "too short"),
    "seven bytes": (b"\x01" * 7, "too short"),
    "length beyond the file": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "length of 2**63": (struct.pack("<Q", 2**63) + b"{}", "allows"),
    "length of 2**64 - 1": (b"\xff" * 8 + b"{}", "allows"),
    "not an object": (struct.pack("<Q", 2) + b"[]", "start with"),
    "empty header": (struct.pack("<Q", 0), "start with"),
    "broken JSON": (struct.pack("<Q", 5) + b'{"a":', "not JSON"),
    "not UTF-8": (struct.pack("<Q", 8) + b'{"\xff\xfe":1}', "not UTF-8"),
    "nested": (struct.pack("<Q", 60000) + b'{"a":' * 10000 + b" " * 10000, "nested|not JSON"),
    "endless number": (struct.pack("<Q", 5006) + b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
    "name twice": (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "twice.*'a'"),
    "field twice": (struct.pack("<Q", 35) + b'{"a":{"dtype":"F32","dtype":"F64"}}', "twice.*'dtype'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(path, case):
    raw, reason = HOSTILE[case]
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=reason):
        load_safetensors(path)


ENTRIES = {
    "unknown dtype": ({"x": entry(dtype="F33")}, "unknown dtype 'F33'"),
    "dtype not a string": ({"x": entry(dtype=["F32"])}, "unknown dtype"),
    "fields missing": ({"x": {"dtype": "F32"}}, "must have dtype"),
    "not an object": ({"x": 3}, "must have dtype"),
    "negative size": ({"x": entry(shape=(-2,))}, "shape"),
    "fractional size": ({"x": entry(shape=(2.0,))}, "shape"),
    "boolean size": ({"x": entry(shape=(True, 2))}, "shape"),
    "shape not a list": ({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "shape"),
    "too many axes": ({"x": entry(shape=(2,) + (1,) * 70)}, "shape"),
    "product beyond 64 bits": ({"x": entry(shape=(2**40, 2**40))}, "takes"),
    "bytes do not match": ({"x": entry(shape=(3,))}, "takes 12 bytes"),
    "offsets swapped": ({"x": entry(begin=8, end=0)}, "data_offsets"),
    "negative offset": ({"x": entry(begin=-8, end=0)}, "data_offsets"),
    "three offsets": ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, "data_offsets"),
    "beyond the buffer": ({"x": entry(shape=(2**33,), begin=0, end=2**35)}, "truncated"),
    "overlap": ({"x": entry(), "y": entry(begin=4, end=12)}, "overlaps"),
    "same bytes twice": ({"x": entry(), "y": entry()}, "overlaps"),
    "hole": ({"x": entry(), "y": entry(shape=(1,), begin=12, end=16)}, "hole"),
    "hole at the start": ({"x": entry(begin=8, end=16)}, "hole"),
    "bytes left over": ({"x": entry()}, "belong to nobody"),
    "metadata not strings": ({"x": entry(end=16, shape=(4,)), "__metadata__": {"a": 1}}, "__metadata__"),
    "metadata not an object": ({"x": entry(end=16, shape=(4,)), "__metadata__": []}, "__metadata__"),
    "empty but huge": (
        {"x": entry(shape=(0, 2**62, 2**62), end=0), "y": entry(shape=(4,), end=16)},
        "limits",
    ),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_impossible_claims_are_refused_with_a_reason(path, case):
    header, reason = ENTRIES[case]
    write(path, header, bytes(16))
    with pytest.raises(ValueError, match=reason):
        load_safetensors(path)


def test_truncation_at_any_byte_is_an_error_or_nothing(path):
    save(path, {"x": np.arange(5, dtype=np.float32), "y": np.ones((2, 2))})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            load_safetensors(path)


def test_flipped_header_bytes_never_crash_or_read_outside(path):
    save(path, {"x": np.arange(5, dtype=np.float32), "y": np.ones((2, 2))}, metadata={"a": "b"})
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(0, len(whole) - 52)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            for array in load_safetensors(path).values():
                assert array.nbytes <= len(whole)
        except ValueError:
            pass


def test_a_failed_save_leaves_the_old_file_and_no_other(path, monkeypatch):
    save(path, {"x": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"'y'.*complex128"):
        save(path, {"x": np.zeros(3), "y": np.zeros(3, np.complex128)})

    def interrupted(array):
        raise KeyboardInterrupt

    monkeypatch.setattr("npattn.io.safetensors._bytes_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, {"x": np.zeros(3)})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_mapped_file_survives_being_replaced(path):
    save(path, {"x": np.arange(1000.0)})
    old = load(path)["x"]
    save(path, {"x": np.zeros(3)})
    np.testing.assert_array_equal(old, np.arange(1000.0))
    np.testing.assert_array_equal(load(path)["x"], np.zeros(3))


def test_what_the_format_cannot_hold_is_refused(path):
    for array in (np.array(["a"]), np.array([None]), np.zeros(2, np.longdouble), np.zeros(2, "m8[s]")):
        with pytest.raises(TypeError, match="'x'"):
            save_safetensors(path, {"x": array})
    with pytest.raises(TypeError, match="must be an array"):
        save_safetensors(path, {"x": [1, 2]})
    with pytest.raises(TypeError, match="strings"):
        save_safetensors(path, {3: np.ones(2)})
    with pytest.raises(TypeError, match="strings"):
        save_safetensors(path, {"x": np.ones(2)}, metadata={"step": 3})
    with pytest.raises(ValueError, match="reserved"):
        save_safetensors(path, {"__metadata__": np.ones(2)})
    with pytest.raises(ValueError, match="ending"):
        save(path.with_suffix(".bin"), {"x": np.ones(2)})
    assert not path.exists()


def test_a_missing_file_is_file_not_found(path):
    with pytest.raises(FileNotFoundError):
        load(path)


def test_no_tensors_is_a_valid_file(path):
    save(path, {})
    assert load(path) == {}

import zipfile

import numpy as np
import pytest

from npattn.io import load, load_metadata, load_npz, save


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.npz"


def test_arrays_come_back_and_numpy_reads_them(path):
    rng = np.random.default_rng(1)
    tensors = {
        "file": rng.standard_normal((3, 4)).T,
        "a/b.weight": np.arange(6, dtype=np.int8)[::-2],
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 3), bool),
    }
    save(path, tensors)
    found = load(path)
    with np.load(path) as archive:
        for name, array in tensors.items():
            np.testing.assert_array_equal(found[name], array)
            np.testing.assert_array_equal(archive[name], array)
    assert load_metadata(path) == {}


def test_numpys_own_files_are_read(path):
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.savez_compressed(path, x=x, y=np.arange(3))
    found = load(path)
    np.testing.assert_array_equal(found["x"], x)
    found["y"][0] = 7  # in memory: the caller's own


def test_pickles_false_claims_and_damage_are_refused(path):
    np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="pickled"):
        load_npz(path)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    header += b" " * (10 + 118 - len(header) - 1) + b"\n"
    for shape in (b"(1000000000000,)", b"(-1,)           ", b"(2,)            "):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header.replace(b"(1000000000000,)", shape) + bytes(8))
        with pytest.raises(ValueError, match="claims"):
            load_npz(path)
    path.write_bytes(b"not a zip archive")
    with pytest.raises(ValueError, match="npz"):
        load_npz(path)
    save(path, {"x": np.arange(100.0)})
    whole = bytearray(path.read_bytes())
    whole[300] ^= 255
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="CRC"):
        load_npz(path)


def test_truncation_at_any_byte_is_a_value_error(path):
    save(path, {"x": np.arange(4.0)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="npz"):
            load_npz(path)


def test_what_npz_cannot_hold_is_refused(path):
    with pytest.raises(TypeError, match="cannot hold"):
        save(path, {"x": np.array([None])})
    with pytest.raises(ValueError, match="metadata"):
        save(path, {"x": np.ones(2)}, metadata={"a": "b"})
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(TypeError, match="safetensors"):
        save(path, {"x": np.ones(2, bfloat16)})
    assert not path.exists()

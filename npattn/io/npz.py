"""NumPy's npz: a zip archive of npy files. Written atomically, read without pickle and without trust."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from npattn._typing import Array
from npattn.io._atomic import replaced
from npattn.io.safetensors import _host

#: No deflate stream can grow more than this many times.
MAX_RATIO: Final = 1032


def load_npz(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read every array of an npz file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    arrays : dict of str to ndarray
        In the order of the archive, in memory.

    Raises
    ------
    ValueError
        When the file is not an npz of plain arrays: pickled objects, claims larger than their bytes, names
        given twice, a checksum that does not match.

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.npz")
    >>> save_npz(path, {"file": np.arange(3)})
    >>> load_npz(path)
    {'file': array([0, 1, 2])}
    """
    arrays: dict[str, Array] = {}
    size = os.path.getsize(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError(f"{Path(path)}: {name!r} is there twice")
                if info.compress_size > size or info.file_size > MAX_RATIO * (info.compress_size + 1):
                    raise ValueError(f"{Path(path)}: {name!r} claims more bytes than the file can hold")
                arrays[name] = _read_member(path, name, archive, info)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{Path(path)}: not a readable npz file: {error}") from None
    return arrays


def save_npz(path: str | os.PathLike[str], tensors: Mapping[str, Array]) -> None:
    """Write ``tensors`` to an uncompressed npz file, whole or not at all.

    Parameters
    ----------
    path : str or Path
        An existing file is replaced by a rename once the new one is complete.
    tensors : mapping of str to array
        Any strides; CuPy arrays are fetched.

    Raises
    ------
    TypeError
        For object arrays and for bfloat16, which npz cannot name (use safetensors).

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from npattn import io
    >>> path = os.path.join(tempfile.mkdtemp(), "arrays.npz")
    >>> io.save_npz(path, {"a": np.arange(3)})
    >>> io.load_npz(path)["a"]
    array([0, 1, 2])
    """
    arrays = {name: _host(name, array) for name, array in tensors.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject or array.dtype.kind == "V":
            raise TypeError(f"array {name!r} has dtype {array.dtype}, which npz cannot hold; try safetensors")
    with replaced(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            # a fixed date: the file depends on its contents alone
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_member(
    path: str | os.PathLike[str], name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> Array:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        readers: dict[tuple[int, int], Any] = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"{Path(path)}: {name!r} has the unknown npy version {version}")
        shape, fortran_order, dtype = readers[version](member)
        if dtype.hasobject:
            raise ValueError(f"{Path(path)}: {name!r} holds pickled objects, which are never read")
        count = 1
        for length in shape:
            count *= length
        rest = info.file_size - member.tell()
        if min(shape, default=0) < 0 or count * dtype.itemsize != rest:
            raise ValueError(
                f"{Path(path)}: {name!r} claims {dtype} of shape {shape}, {count * dtype.itemsize} bytes, "
                f"and has {rest}"
            )
        data = member.read()
    if len(data) != rest:
        raise ValueError(f"{Path(path)}: {name!r} has {len(data)} bytes of {rest}: truncated?")
    flat = np.frombuffer(bytearray(data), dtype) if rest else np.empty(count, dtype)
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)

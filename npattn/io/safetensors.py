"""The safetensors format: eight bytes of header length, a JSON header, then the bytes of the tensors.

::

    u64 little-endian N | N bytes of UTF-8 JSON, starting with '{' | the buffer
    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {"k": "v"}}

Offsets count from the start of the buffer; together the tensors cover it without overlap or hole. Every claim
of the header is checked against the size of the file before it is used.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._arrays import is_cupy
from npattn._typing import Array
from npattn.io._atomic import replaced

MAX_HEADER: Final = 100_000_000  # the format's own limit, in bytes
MAX_AXES: Final = 64  # NumPy's limit

#: Name in the file -> NumPy dtype. BF16 is absent: NumPy has none, see ``_bfloat16``.
DTYPES: Final = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
_NAMES: Final = {dtype.str.lstrip("<|>="): name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a header, checked."""

    dtype: str  # a key of DTYPES, or "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes, from the start of the buffer
    end: int


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read every tensor of a safetensors file as a read-only view of the memory-mapped file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    tensors : dict of str to ndarray
        In the order of the header. Read-only; nothing is read from disk before it is used. Tensors that do
        not stand at a multiple of their item size are copied. BF16 becomes ``ml_dtypes.bfloat16`` when
        ml_dtypes is installed, else float32, which holds every bfloat16 value exactly.

    Raises
    ------
    ValueError
        When the file is not a valid safetensors file: what is wrong and where.
    FileNotFoundError
        When there is no such file.

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
    >>> save_safetensors(path, {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T})
    >>> load_safetensors(path)["w"]
    array([[0., 3.],
           [1., 4.],
           [2., 5.]], dtype=float32)
    """
    entries, _, start = read_header(path)
    # mapped once, whole: the header's size is at least 8 + 2, so the map is never empty
    file = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
    return {name: _view(file, start, entry) for name, entry in entries.items()}


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The checked header of a safetensors file: (entries, metadata, offset of the buffer in the file)."""
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise _bad(path, f"{size} bytes is too short for the 8 bytes of header length")
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER:
            raise _bad(path, f"the header claims {length} bytes; the format allows {MAX_HEADER}")
        if length > size - 8:
            raise _bad(path, f"the header claims {length} bytes but only {size - 8} follow: truncated?")
        raw = stream.read(length)
    header = _parse(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _bad(path, "__metadata__ must map strings to strings")
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    _check_cover(path, entries, size - 8 - length)
    return entries, metadata, 8 + length


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors`` to a safetensors file, whole or not at all.

    Parameters
    ----------
    path : str or Path
        An existing file is replaced by a rename once the new one is complete.
    tensors : mapping of str to array
        Any strides; CuPy arrays are fetched. Written widest dtype first, then by name, so that every tensor
        is aligned and the file depends on the contents alone.
    metadata : mapping of str to str, optional

    Raises
    ------
    TypeError
        For a dtype the format has no name for, a name or metadata that is not a string.
    ValueError
        For a tensor named ``__metadata__``.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from npattn import io
    >>> path = os.path.join(tempfile.mkdtemp(), "arrays.safetensors")
    >>> io.save_safetensors(path, {"a": np.eye(2, dtype=np.float16)})
    >>> io.load_safetensors(path)["a"].dtype
    dtype('float16')
    """
    arrays = {name: _host(name, array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {}
    if metadata:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise TypeError("metadata must map strings to strings; convert numbers with str()")
        header["__metadata__"] = dict(metadata)
    position = 0
    for name in order:
        array = arrays[name]
        header[name] = {
            "dtype": _dtype_name(name, array.dtype),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header would take {len(text)} bytes; the format allows {MAX_HEADER}")
    with replaced(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(_bytes_of(arrays[name]))


def _parse(path: str | os.PathLike[str], raw: bytes) -> dict[str, Any]:
    repeated: set[str] = set()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated.update(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return found

    if not raw.startswith(b"{"):
        raise _bad(path, f"the header must start with '{{', found {raw[:1]!r}: not a safetensors file?")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise _bad(path, f"the header is not UTF-8: {error}") from None
    except RecursionError:
        raise _bad(path, "the header is nested too deeply") from None
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise _bad(path, f"the header is not JSON: {error}") from None
    if repeated:
        raise _bad(path, f"names given twice in the header: {sorted(repeated)}")
    assert isinstance(header, dict)  # it starts with '{'
    return header


def _entry(path: str | os.PathLike[str], name: str, fields: Any) -> Entry:
    """The claims about one tensor, each checked for itself and against the others."""
    where = f"tensor {name!r}"
    if not isinstance(fields, dict) or not fields.keys() >= {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"{where} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype != "BF16"):
        raise _bad(path, f"{where} has the unknown dtype {dtype!r}; known are {sorted([*DTYPES, 'BF16'])}")
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise _bad(path, f"{where} has the shape {shape!r}; at most {MAX_AXES} sizes from 0 to 2**63 - 1")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"{where} has data_offsets {offsets!r}; [begin, end] with 0 <= begin <= end wanted")
    nbytes = math.prod(shape) * (2 if dtype == "BF16" else DTYPES[dtype].itemsize)
    if nbytes != offsets[1] - offsets[0]:
        raise _bad(
            path,
            f"{where} of dtype {dtype} and shape {shape} takes {nbytes} bytes, "
            f"but its data_offsets {offsets} span {offsets[1] - offsets[0]}",
        )
    return Entry(dtype, tuple(shape), *offsets)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(path: str | os.PathLike[str], entries: dict[str, Entry], size: int) -> None:
    """The tensors must fill the buffer: an overlap shares bytes, a hole could hide them."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise _bad(path, f"tensor {name!r} ends at byte {entry.end} of a buffer of {size}: truncated?")
        if entry.begin != position:
            fault = "overlaps the one before it" if entry.begin < position else "leaves a hole before it"
            raise _bad(path, f"tensor {name!r} at byte {entry.begin} {fault}, which ends at {position}")
        position = entry.end
    if position != size:
        raise _bad(path, f"{size - position} bytes behind the last tensor belong to nobody")


def _view(file: Array, start: int, entry: Entry) -> Array:
    raw = file[start + entry.begin : start + entry.end]
    dtype = DTYPES.get(entry.dtype, np.dtype("<u2"))
    if entry.begin == entry.end:  # no bytes: the shape may hold huge sizes beside its zero
        try:
            array = np.empty(entry.shape, dtype)
        except ValueError:
            raise ValueError(f"an empty tensor of shape {entry.shape} is beyond NumPy's limits") from None
    else:
        if (start + entry.begin) % dtype.itemsize:
            raw = raw.copy()
        array = raw.view(dtype).reshape(entry.shape)
    if entry.dtype == "BF16":
        array = _bfloat16(array)
    array.flags.writeable = False
    return array


def _bfloat16(words: Array) -> Array:
    """Two-byte words as bfloat16; without ml_dtypes as float32, of which they are the upper half."""
    try:
        import ml_dtypes
    except ImportError:
        widened: Array = (words.astype(np.uint32) << 16).view(np.float32)
        return widened
    array: Array = words.view(ml_dtypes.bfloat16)
    return array


def _host(name: object, array: Any) -> Array:
    if not isinstance(name, str):
        raise TypeError(f"tensor names must be strings, got {name!r}")
    if name == "__metadata__":
        raise ValueError("'__metadata__' is reserved by the format; rename the tensor or pass metadata=")
    if not isinstance(array, np.ndarray | np.generic) and not is_cupy(array):
        raise TypeError(f"tensor {name!r} must be an array, got {type(array).__name__}")
    return array.get() if is_cupy(array) else np.asarray(array)


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name == "bfloat16":
        return "BF16"
    found = _NAMES.get(dtype.str.lstrip("<|>="))
    if found is None or dtype.kind == "V":
        raise TypeError(f"tensor {name!r} has dtype {dtype}; safetensors holds {sorted([*DTYPES, 'BF16'])}")
    return found


def _bytes_of(array: Array) -> memoryview:
    """The little-endian bytes in C order; no copy when the array already is that."""
    array = np.ascontiguousarray(array)
    if array.dtype.name != "bfloat16":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.reshape(-1).view(np.uint8).data


def _bad(path: str | os.PathLike[str], fault: str) -> ValueError:
    return ValueError(f"{Path(path)}: {fault}")

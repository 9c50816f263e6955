"""``load`` and ``save``: the format follows the file's ending."""

import os
from collections.abc import Mapping
from pathlib import Path

from npattn._typing import Array
from npattn.io.npz import load_npz, save_npz
from npattn.io.safetensors import load_safetensors, read_header, save_safetensors


def load(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read the arrays of a ``.safetensors`` or ``.npz`` file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    tensors : dict of str to ndarray
        See `load_safetensors` (memory-mapped, read-only) and `load_npz` (in memory).

    Raises
    ------
    ValueError
        For another ending, and for a damaged or hostile file.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
    >>> save(path, {"w": np.ones((2, 2), np.float16)}, metadata={"made": "by hand"})
    >>> load(path)["w"].dtype, load_metadata(path)
    (dtype('float16'), {'made': 'by hand'})
    """
    return load_npz(path) if _is_npz(path) else load_safetensors(path)


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to a ``.safetensors`` or ``.npz`` file through a temporary file and a rename.

    Parameters
    ----------
    path : str or Path
    tensors : mapping of str to array
    metadata : mapping of str to str, optional
        Only safetensors has room for it.

    Raises
    ------
    ValueError
        For another ending, or metadata with npz.
    TypeError
        For a dtype the format cannot hold.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from npattn import io
    >>> path = os.path.join(tempfile.mkdtemp(), "arrays.safetensors")
    >>> io.save(path, {"a": np.arange(3)}, {"made": "today"})
    >>> io.load(path)["a"], io.load_metadata(path)
    (array([0, 1, 2]), {'made': 'today'})
    """
    if not _is_npz(path):
        save_safetensors(path, tensors, metadata)
    elif metadata:
        raise ValueError("npz has no metadata; save to a .safetensors file instead")
    else:
        save_npz(path, tensors)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a file, reading its header only; npz has none.

    Parameters
    ----------
    path : str or Path
        A ``.safetensors`` or ``.npz`` file.

    Returns
    -------
    metadata : dict of str to str
        Empty where there is none.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from npattn import io
    >>> path = os.path.join(tempfile.mkdtemp(), "arrays.npz")
    >>> io.save(path, {"a": np.arange(3)})
    >>> io.load_metadata(path)
    {}
    """
    return {} if _is_npz(path) else read_header(path)[1]


def _is_npz(path: str | os.PathLike[str]) -> bool:
    suffix = Path(path).suffix
    if suffix not in (".npz", ".safetensors"):
        raise ValueError(f"the ending of {str(path)!r} must be .safetensors or .npz")
    return suffix == ".npz"

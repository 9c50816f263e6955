"""Arrays on disk: the safetensors format, read and written by our own short module, and NumPy's npz.

``load`` and ``save`` choose by the file's ending. What a file says about itself is never believed: a header
that is truncated, oversized, overlapping or otherwise impossible is a ValueError that says what is wrong, and
nothing is allocated from its claims.
"""

from npattn.io.files import load as load
from npattn.io.files import load_metadata as load_metadata
from npattn.io.files import save as save
from npattn.io.npz import load_npz as load_npz
from npattn.io.npz import save_npz as save_npz
from npattn.io.safetensors import load_safetensors as load_safetensors
from npattn.io.safetensors import save_safetensors as save_safetensors

__all__ = [
    "load",
    "load_metadata",
    "load_npz",
    "load_safetensors",
    "save",
    "save_npz",
    "save_safetensors",
]

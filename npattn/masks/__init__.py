"""Masks: which query may see which key. Compose them with ``&``, ``|`` and ``~``."""

from npattn.masks.base import Extent as Extent
from npattn.masks.base import Mask as Mask
from npattn.masks.blocks import BigBird as BigBird
from npattn.masks.blocks import Blocks as Blocks
from npattn.masks.explicit import Dense as Dense
from npattn.masks.explicit import Sparse as Sparse
from npattn.masks.interval import Causal as Causal
from npattn.masks.interval import Documents as Documents
from npattn.masks.interval import Full as Full
from npattn.masks.interval import Padding as Padding
from npattn.masks.interval import Prefix as Prefix
from npattn.masks.interval import Window as Window
from npattn.masks.pattern import Dilated as Dilated
from npattn.masks.pattern import GlobalTokens as GlobalTokens
from npattn.masks.pattern import Strided as Strided
from npattn.masks.predicate import Predicate as Predicate
from npattn.masks.recipes import bigbird as bigbird
from npattn.masks.recipes import local_strided as local_strided
from npattn.masks.recipes import longformer as longformer

__all__ = [
    "BigBird",
    "Blocks",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "Extent",
    "Full",
    "GlobalTokens",
    "Mask",
    "Padding",
    "Predicate",
    "Prefix",
    "Sparse",
    "Strided",
    "Window",
    "bigbird",
    "local_strided",
    "longformer",
]

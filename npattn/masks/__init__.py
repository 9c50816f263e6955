"""Masks: which query may see which key. Compose them with ``&``, ``|`` and ``~``."""

from npattn.masks.base import Extent as Extent
from npattn.masks.base import Mask as Mask
from npattn.masks.explicit import Dense as Dense
from npattn.masks.interval import Causal as Causal
from npattn.masks.interval import Documents as Documents
from npattn.masks.interval import Full as Full
from npattn.masks.interval import Padding as Padding
from npattn.masks.interval import Prefix as Prefix
from npattn.masks.interval import Window as Window

__all__ = ["Causal", "Dense", "Documents", "Extent", "Full", "Mask", "Padding", "Prefix", "Window"]

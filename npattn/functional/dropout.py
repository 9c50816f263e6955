"""Dropout of attention weights by counter: the published generator.

The hash itself, in words and in code, is in ``npattn._dropout``, beneath the kernels, which must not import
this package.
"""

from npattn._dropout import fold_seed, keep_mask, threshold

__all__ = ["fold_seed", "keep_mask", "threshold"]

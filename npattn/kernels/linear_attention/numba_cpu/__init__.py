"""Linear attention by explicit vectors, float32 and float64."""

from npattn.kernels.linear_attention.numba_cpu._launch import USABLE, backward, forward

__all__ = ["USABLE", "backward", "forward"]

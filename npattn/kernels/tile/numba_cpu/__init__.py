"""Tiled attention on the CPU: explicit vectors inside Numba, forward and backward.

======== ============================================================================================
_params  what a kernel knows about a call: one record of sizes, addresses and strides
_rows    rows in and out of scratch: widened, transposed, rounded
_tile    softcap, bias, mask, softmax and dropout on one tile of logits
_forward the forward kernel
_backward the backward kernels
_launch  work items, scratch, results: the protocol of `kernels.contract.Implementation`
======== ============================================================================================
"""

from npattn.kernels.tile.numba_cpu._launch import backward as backward
from npattn.kernels.tile.numba_cpu._launch import forward as forward
from npattn.kernels.tile.numba_cpu._launch import supports as supports
from npattn.kernels.tile.numba_cpu._launch import tile_shape as tile_shape

__all__ = ["backward", "forward", "supports", "tile_shape"]

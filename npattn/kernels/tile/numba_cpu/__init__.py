"""Tiled attention on the CPU: explicit vectors inside Numba, forward and backward.

======== ============================================================================================
_params  what a kernel knows about a call: one record of sizes, addresses and strides
_rows    rows in and out of scratch: widened, transposed, rounded
_tile    softcap, bias, mask, softmax and dropout on one tile of logits
_forward the forward kernel
_backward the backward kernels
_launch  work items, scratch, results: the protocol of `kernels.contract.Implementation`
_decode  the forward kernel for few queries, with its own record and launch (_decode_params, _decode_launch)
======== ============================================================================================
"""

from npattn.kernels.tile.numba_cpu._decode_launch import forward as forward
from npattn.kernels.tile.numba_cpu._decode_launch import paged_forward as paged_forward
from npattn.kernels.tile.numba_cpu._decode_launch import reads_pages as reads_pages
from npattn.kernels.tile.numba_cpu._launch import backward as backward
from npattn.kernels.tile.numba_cpu._launch import supports as supports
from npattn.kernels.tile.numba_cpu._launch import tile_shape as tile_shape

__all__ = ["backward", "forward", "paged_forward", "reads_pages", "supports", "tile_shape"]

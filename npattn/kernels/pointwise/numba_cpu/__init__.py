"""The formulas of ``arrays`` in one pass over memory, float32, with explicit vectors.

==========  ====================================================================
``_flat``   activations
``_norm``   layer norm, RMS norm
``_loss``   cross-entropy
``_heads``  heads side by side
``_rows``   rows added up by id
``_many``   all parameters at once: Adam's step, the clipping norm
``_call``   arguments, pieces and blocks
==========  ====================================================================

Flat work is cut into pieces of PIECE elements, row work into blocks of whole rows of about as many; each is
done by one thread, start to end. The cut depends on the shape alone: results are the same bit for bit for any
number of threads.

Tried, on nanoGPT's recipe and two cores of a Zen 4: pieces handed to the pool as Python calls, 143 us for the
GELU of 768 x 512 and 55 us for the layer norm of 768 x 128, half of it waking a helper; taken by a team
(`npattn.kernels._team`), 82 and 32. Adam for each of 26 parameters 0.9 ms a step, for all at once 0.5.
"""

from npattn.kernels import _jit
from npattn.kernels.pointwise.numba_cpu._flat import (
    gelu,
    gelu_backward,
    silu,
    silu_backward,
    swiglu,
    swiglu_backward,
)
from npattn.kernels.pointwise.numba_cpu._heads import merge_heads
from npattn.kernels.pointwise.numba_cpu._loss import cross_entropy, cross_entropy_backward
from npattn.kernels.pointwise.numba_cpu._many import adam, scaled, square_sum
from npattn.kernels.pointwise.numba_cpu._norm import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from npattn.kernels.pointwise.numba_cpu._rows import sum_of_rows

USABLE = not _jit.INTERPRETED

__all__ = [
    "USABLE",
    "adam",
    "cross_entropy",
    "cross_entropy_backward",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "merge_heads",
    "rms_norm",
    "rms_norm_backward",
    "scaled",
    "silu",
    "silu_backward",
    "square_sum",
    "sum_of_rows",
    "swiglu",
    "swiglu_backward",
]

"""A float32 training step gives the same bits for any number of threads, and every time."""

import numpy as np
import pytest

import npattn
from npattn import nn, optim
from npattn.functional import cross_entropy_vjp
from npattn.kernels import linear

pytestmark = pytest.mark.skipif(linear._module() is None, reason="BLAS's bits follow its own threads")


def trained(threads, **options):
    """Loss and parameters after two steps."""
    npattn.set_num_threads(threads)
    rng = np.random.default_rng(0)
    model = nn.TransformerDecoder(65, 96, 4, 2, 200, 64, rng=rng, **options)
    ids = rng.integers(0, 65, (5, 65))
    optimiser = optim.AdamW(model.named_parameters())
    for _ in range(2):
        logits, pullback = model.vjp(ids[:, :-1], seed=3)
        loss, back = cross_entropy_vjp(logits, ids[:, 1:])
        grads, norm = optim.clip_by_global_norm(pullback(back())[1], 0.5)
        optimiser.step(grads)
    return {"loss": loss, "norm": norm, **model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"mlp": "swiglu", "norm": "rms", "position": "rotary", "num_kv_heads": 2},
        {"norm_first": False, "mlp": "gelu_tanh", "tied": False, "dropout_p": 0.1},
    ],
)
def test_training_steps_have_the_same_bits_for_any_number_of_threads(options):
    if not linear._module().IS_FAST:
        pytest.skip("products go to BLAS here")
    before = npattn.get_num_threads()
    try:
        first, *others = (trained(threads, **options) for threads in (1, 2, 4, 2))
    finally:
        npattn.set_num_threads(before)
    for other in others:
        for name, value in first.items():
            assert np.array_equal(value, other[name]), name

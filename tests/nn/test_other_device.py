"""A model trains on another array module: CuPy's place is taken by a stand-in, the GPU's by the CPU model."""

import sys
from pathlib import Path

import numpy as np
import pytest

from npattn import nn, optim
from npattn.functional import cross_entropy_vjp

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_host import fake_cupy, host

pytestmark = pytest.mark.skipif(host.why_not() is not None, reason=str(host.why_not()))


class _Add:
    """The stand-in's add, with CuPy's ``add.at``."""

    def __call__(self, *args, **options):
        return fake_cupy._wrapped("add")(*args, **options)

    def at(self, array, ids, values):
        np.add.at(*map(fake_cupy._plain, (array, ids, values)))


def train(xp, position, norm, mlp):
    model = nn.TransformerDecoder(
        11,
        32,
        2,
        1,
        48,
        16,
        position=position,
        norm=norm,
        mlp=mlp,
        dropout_p=0.1,
        rng=np.random.default_rng(0),
    )
    model.move_to(xp)
    optimiser = optim.AdamW(model.named_parameters(), 0.01)
    ids = xp.asarray(np.random.default_rng(1).integers(0, 11, (2, 13)))
    losses = []
    for step in range(2):
        logits, back_model = model.vjp(ids[:, :-1], seed=step)
        assert isinstance(logits, xp.ndarray)
        loss, back_loss = cross_entropy_vjp(logits, ids[:, 1:], label_smoothing=0.1)
        grads, _ = optim.clip_by_global_norm(back_model(back_loss())[1], 0.5)
        optimiser.step(grads)
        losses.append(float(loss))
    model.move_to(np)
    assert all(type(p) is np.ndarray for p in model.named_parameters().values())
    return losses, model(np.asarray([[1, 2, 3]]))


@pytest.mark.parametrize(
    ("position", "norm", "mlp"),
    [
        ("rotary", "rms", "swiglu"),
        pytest.param("learned", "layer", "gelu", marks=pytest.mark.slow),
        pytest.param("alibi", "layer", "gelu_tanh", marks=pytest.mark.slow),
    ],
)
def test_training_gives_the_same_losses(monkeypatch, position, norm, mlp):
    losses, logits = train(np, position, norm, mlp)
    monkeypatch.setattr(fake_cupy.MODULE, "add", _Add(), raising=False)
    with fake_cupy.installed() as cupy:
        others, other_logits = train(cupy, position, norm, mlp)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    np.testing.assert_allclose(other_logits, logits, rtol=1e-3, atol=1e-4)

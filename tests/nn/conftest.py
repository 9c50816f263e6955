"""How layers are checked: by random directions in every input and every parameter."""

import numpy as np
import pytest

from npattn.testing import check_vjp


def randomise(layer, rng):
    """Random values everywhere: initial ones and zeros would hide mistakes."""
    for array in layer.named_parameters().values():
        array[...] = rng.standard_normal(array.shape) * 0.5
    return layer


@pytest.fixture
def check_layer(rng):
    """``check_layer(layer, *xs, fixed=(), **options)``: gradients of xs and of every parameter.

    ``fixed`` are leading arguments without a gradient, such as token ids.
    """

    def check(layer, *xs, fixed=(), **options):
        randomise(layer, rng)
        live = layer.named_parameters()
        names = list(live)

        def f_vjp(*args):
            layer.load_parameters(dict(zip(names, args[len(xs) :], strict=True)))
            y, back = layer.vjp(*fixed, *args[: len(xs)], **options)
            assert np.array_equal(y, layer(*fixed, *args[: len(xs)], **without_checkpoint(options)))

            def pullback(dy):
                dx, grads = back(dy)
                assert list(grads) == names, "grads have the names of named_parameters(), in their order"
                for name in names:
                    assert grads[name].shape == live[name].shape
                dxs = () if not xs else dx if len(xs) > 1 else (dx,)
                return (*dxs, *grads.values())

            return y, pullback

        args = [*xs, *(array.copy() for array in live.values())]
        check_vjp(f_vjp, args, names=[*(f"x{i}" for i in range(len(xs))), *names])

    return check


def without_checkpoint(options):
    return {name: value for name, value in options.items() if name != "checkpoint"}

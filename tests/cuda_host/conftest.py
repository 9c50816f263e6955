"""Fixtures that put the CPU model of a GPU behind ``backend="cupy"``."""

from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.kernels import select

from . import fake_cupy, host

WHY_NOT = host.why_not()

#: Of the suites taken over whole from tests/functional: what also runs by default.
QUICK = (
    "test_nan_that_is_visible_shows",
    "test_poison_under_a_bool_mask_is_silent[interleaved-float16-nan]",
    "test_poison_under_a_bias_of_minus_inf_is_silent[sorted-nan-float32]",
    "test_poisoned_empty_rows_are_silent_beside_sinks[float32]",
    "test_padding_of_a_batch_may_hold_anything",
    "test_a_key_seen_by_one_query_only_reaches_that_query_only",
    "test_dropped_weights_are_those_of_keep_mask[float32-0.5]",
    "test_values_at_the_end_of_the_range_come_out[float32]",
    "test_values_near_the_end_of_float32_do_not_overflow_on_the_way",
    "test_a_sum_of_4096_equal_weights_is_exact[float16]",
    "test_differences_of_exact_logits_are_exact",
)

#: What three tf32 products cannot do.
BEYOND = {
    "test_values_at_the_end_of_the_range_come_out[float32]": "22 bits: the largest float32 rounds up, to inf",
    "test_a_large_scale_comes_after_the_product": "below 2**-115 the low part of a float32 is lost",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        taken_over = item.path.name == "test_shared_suites.py" and "case" not in getattr(
            item, "fixturenames", ()
        )
        if taken_over and item.name not in QUICK:
            item.add_marker(pytest.mark.slow)
        if taken_over and item.name in BEYOND:
            item.add_marker(pytest.mark.xfail(reason=BEYOND[item.name], strict=True))


@pytest.fixture
def cupy():
    """The stand-in for CuPy; kernels run on the CPU."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with fake_cupy.installed() as module:
        yield module


def to_gpu(x):
    return x.view(fake_cupy.ndarray) if type(x) is np.ndarray else x


def to_cpu(x):
    if isinstance(x, fake_cupy.ndarray):
        return x.view(np.ndarray)
    if isinstance(x, tuple):
        moved = [to_cpu(y) for y in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def through(function):
    """A function of arrays called with GPU arrays, its results (a pullback among them) brought back."""

    def call(*args, **options):
        result = function(*map(to_gpu, args), **{name: to_gpu(x) for name, x in options.items()})
        if isinstance(result, tuple) and callable(result[-1]):
            return (*map(to_cpu, result[:-1]), through(result[-1]))
        return to_cpu(result)

    return call


@pytest.fixture
def attend(cupy):
    """What tests/conftest.py gives for the CPU: attention and attention_vjp, here by the CUDA kernels."""

    def asking(function):
        def call(*args, **options):
            try:
                return through(function)(*args, backend="cupy", **options)
            except select.BackendError as error:
                pytest.skip(str(error))

        return call

    return SimpleNamespace(
        backend="cupy",
        attention=asking(npattn.attention),
        attention_vjp=asking(npattn.attention_vjp),
    )

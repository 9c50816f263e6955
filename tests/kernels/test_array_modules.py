"""The oracle and the tiled NumPy implementation run on CuPy arrays: nothing crosses to the host unasked."""

import sys

import fake_cupy
import numpy as np
import pytest

import npattn
from npattn.kernels.tile import numpy_tiled
from npattn.testing import case

NAMES = (
    "plain",
    "causal, per batch",
    "holes",
    "bool, all axes",
    "all at once",
    "all at once, causal",
    "sinks, causal",
)


@pytest.fixture
def cupy(monkeypatch):
    module = fake_cupy.Module("cupy")
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(numpy_tiled, "tile_shape", lambda problem: (32, 32))
    return module


def run(arguments, dout, dlse, backend):
    (out, lse), pullback = npattn.attention_vjp(**arguments, return_lse=True, backend=backend)
    return out, lse, *pullback(dout, dlse)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("backend", ["numpy", "oracle"])
@pytest.mark.parametrize("name", NAMES)
def test_results_on_the_device_equal_those_on_the_host(cupy, rng, name, backend, dtype):
    arguments = case(name).arguments(dtype)
    out, lse = npattn.attention(**arguments, return_lse=True, backend=backend)
    dout, dlse = (
        rng.standard_normal(out.shape).astype(dtype),
        rng.standard_normal(lse.shape).astype(lse.dtype),
    )
    on_host = run(arguments, dout, dlse, backend)
    moved = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in arguments.items()}
    on_device = run(moved, cupy.asarray(dout), cupy.asarray(dlse), backend)
    for x, y in zip(on_device, on_host, strict=True):
        if y is None:
            assert x is None
        else:
            assert isinstance(x, cupy.ndarray)
            np.testing.assert_array_equal(x.get(), y)


def test_masked_nan_is_silent_on_the_device(cupy, rng):
    """The careful product of rows that are not finite, which ordinary input never reaches."""
    q, k, v = rng.standard_normal((3, 1, 2, 70, 8))
    k[0, 0, 40] = v[0, 1, 69] = np.nan
    mask = npattn.masks.Causal()
    for backend in ("numpy", "oracle"):
        on_device, pullback = npattn.attention_vjp(*map(cupy.asarray, (q, k, v)), mask=mask, backend=backend)
        on_host, host_pullback = npattn.attention_vjp(q, k, v, mask=mask, backend=backend)
        np.testing.assert_array_equal(on_device.get(), on_host)
        for x, y in zip(pullback(cupy.asarray(q))[:3], host_pullback(q)[:3], strict=True):
            np.testing.assert_array_equal(x.get(), y)


def test_broadcasting_and_weights_on_the_device(cupy, rng):
    q, k, v = rng.standard_normal((2, 4, 9, 5)), rng.standard_normal((7, 5)), rng.standard_normal((2, 7, 5))
    moved = [cupy.asarray(x) for x in (q, k, v)]
    out, pullback = npattn.attention_vjp(*moved, backend="numpy")
    expected, expected_pullback = npattn.attention_vjp(q, k, v, backend="numpy")
    np.testing.assert_array_equal(out.get(), expected)
    for x, y in zip(pullback(out)[:3], expected_pullback(expected)[:3], strict=True):
        np.testing.assert_array_equal(x.get(), y)
    weights = npattn.attention_weights(moved[0], moved[1], rows=[3, 1], mask=npattn.masks.Causal())
    np.testing.assert_array_equal(
        weights.get(), npattn.attention_weights(q, k, rows=[3, 1], mask=npattn.masks.Causal())
    )


def test_an_empty_axis_and_full_dropout_on_the_device(cupy):
    q, empty = cupy.asarray(np.ones((1, 2, 3, 4))), cupy.asarray(np.ones((1, 2, 0, 4)))
    out, pullback = npattn.attention_vjp(q, empty, empty, backend="numpy")
    assert not out.get().any()
    assert pullback(out).key.shape == (1, 2, 0, 4)
    out, pullback = npattn.attention_vjp(q, q, q, dropout_p=1.0, seed=1, backend="numpy")
    assert not out.get().any()
    assert not pullback(q).value.get().any()


def test_mixed_devices_are_refused(cupy):
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(TypeError, match=r"same device.*cupy.asarray"):
        npattn.attention(cupy.asarray(x), x, x)
    _, pullback = npattn.attention_vjp(*[cupy.asarray(x)] * 3, backend="numpy")
    with pytest.raises(TypeError):
        pullback(x)


def test_cpu_backends_refuse_device_arrays(cupy):
    x = cupy.asarray(np.ones((1, 2, 3, 4)))
    with pytest.raises(TypeError, match=r"numba.*CuPy arrays.*cupy.asnumpy"):
        npattn.attention(x, x, x, backend="numba")

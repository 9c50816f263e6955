import numpy as np
import pytest

import npattn
from npattn.functional import linear
from npattn.kernels.linear import LEAST_SIZE, MOST_ROWS, few_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 3, MOST_ROWS, MOST_ROWS + 1, 40])
@pytest.mark.parametrize(("n", "width"), [(576, 193), (257, 131), (1031, 64), (3, 5), (1, 40000), (40000, 1)])
def test_every_number_of_rows_gives_the_product(rows, n, width):
    rng = np.random.default_rng(rows)
    x, bias = rng.standard_normal((rows, n)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    weight = rng.standard_normal((width, n)).astype(np.float32)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    size = np.abs(x).astype(np.float64) @ np.abs(weight.T) + np.abs(bias)
    np.testing.assert_array_less(np.abs(linear(x, weight, bias) - exact), 1e-6 * size + 1e-30)


def test_a_row_does_not_depend_on_the_others_or_on_the_threads():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((MOST_ROWS, 577)).astype(np.float32)
    weight = rng.standard_normal((1200, 577)).astype(np.float32)
    if few_rows(x, [weight]) is None:
        pytest.skip("needs compiled Numba kernels")
    whole = linear(x, weight)
    before = npattn.get_num_threads()
    try:
        for threads in (1, 3):
            npattn.set_num_threads(threads)
            np.testing.assert_array_equal(linear(x, weight), whole)
            np.testing.assert_array_equal(linear(x[2:3], weight), whole[2:3])
    finally:
        npattn.set_num_threads(before)


def test_non_finite_values_stay_where_they_belong():
    x = np.ones((2, 600), np.float32)
    weight = np.ones((100, 600), np.float32)
    weight[7, 599], weight[8, 0], x[1, 3] = np.nan, np.inf, np.nan
    y = linear(x, weight)
    assert np.isnan(y[0]).nonzero()[0].tolist() == [7]
    assert np.isinf(y[0]).nonzero()[0].tolist() == [8]
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes_strides_and_shapes_work(dtype):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((2, 3, 8)).astype(dtype), rng.standard_normal((5, 8)).astype(dtype)
    y = linear(x, weight)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 5)
    assert linear(x[0, 0], weight).shape == (5,)
    single = weight.astype(np.float32)
    big = np.asfortranarray(rng.standard_normal((LEAST_SIZE // 8, 8)).astype(np.float32))
    assert few_rows(np.ones((1, 8), np.float32), [big]) is None
    np.testing.assert_allclose(
        linear(x.astype(np.float32)[..., ::-1], single[:, ::-1]), linear(x, weight), rtol=2e-2, atol=2e-2
    )

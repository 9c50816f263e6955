"""Products of float32 matrices: right for every shape and layout, the same bits whoever computes them."""

import numpy as np
import pytest

import npattn
from npattn.functional._products import matmul, products
from npattn.functional.activation import ACTIVATIONS
from npattn.kernels import linear
from npattn.kernels.linear import Sum

module = linear._module()
needs_kernel = pytest.mark.skipif(module is None, reason="Numba is missing or interpreted")

SHAPES = [
    (64, 64, 64),
    (97, 131, 65),
    (1, 5000, 77),
    (401, 3, 300),
    (385, 513, 17),
    (30, 1100, 3),
    (770, 9, 130),
]


def product(a, b, bias=None):
    (c,) = module.products([Sum(((a, b),), bias)])
    return c


def chosen(a, b, bias=None):
    return linear.products([Sum(((a, b),), bias)])


def matrices(rng, m, k, n):
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)


def layouts(x):
    """x in C order, in Fortran order, and as a part of something larger."""
    wide = np.zeros((x.shape[0] + 2, x.shape[1] + 5), np.float32)
    wide[1:-1, 2:-3] = x
    return {
        "C": x,
        "F": np.asfortranarray(x),
        "part": wide[1:-1, 2:-3],
        "part T": wide.T.copy().T[1:-1, 2:-3],
    }


def assert_right(c, a, b):
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b)
    np.testing.assert_array_less(np.abs(c - exact), 1e-6 * size + 1e-30)


@needs_kernel
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_every_shape_and_layout(rng, poisoned_empty, m, k, n):
    a, b = matrices(rng, m, k, n)
    first = product(a, b)
    assert_right(first, a, b)
    for x in layouts(a).values():
        for y in layouts(b).values():
            assert np.array_equal(product(x, y), first)
    assert np.array_equal(product(a[:, ::-1], b[::-1]), product(a[:, ::-1].copy(), b[::-1].copy()))
    bias = rng.standard_normal(n).astype(np.float32)
    assert np.array_equal(product(a, b, bias), first + bias)


@needs_kernel
def test_threads_and_other_rows_and_columns_do_not_change_a_bit(rng):
    a, b = matrices(rng, 900, 700, 200)
    before = npattn.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            npattn.set_num_threads(threads)
            results.append(product(a, b))
        assert all(np.array_equal(results[0], other) for other in results[1:])
        assert np.array_equal(product(a[333:340], b[:, 70:97]), results[0][333:340, 70:97])
    finally:
        npattn.set_num_threads(before)


@needs_kernel
def test_several_sums_of_products_at_once(rng, poisoned_empty):
    pairs = [matrices(rng, 300, k, 130) for k in (5, 600, 64)]
    bias = rng.standard_normal(130).astype(np.float32)
    more = matrices(rng, 70, 1030, 1)
    total, transposed, other = module.products(
        [Sum(pairs, bias), Sum([(pairs[1][1].T, pairs[1][0].T)]), Sum([more])]
    )
    a, b = np.concatenate([a for a, _ in pairs], axis=1), np.concatenate([b for _, b in pairs])
    assert_right(total - bias, a, b)
    assert np.array_equal(transposed, product(*pairs[1]).T)
    assert np.array_equal(other, product(*more))
    assert np.array_equal(module.products([Sum(pairs, bias)])[0], total)


@needs_kernel
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_what_follows_a_product(rng, poisoned_empty, activation):
    a, b = matrices(rng, 391, 70, 96)
    added, h = rng.standard_normal((2, 391, 96)).astype(np.float32)
    bias = rng.standard_normal(96).astype(np.float32)
    forward, backward = ACTIVATIONS[activation]
    plain = product(a, b)
    sums = (
        Sum(((a, b),), bias, added),
        Sum(((a, b),), None, added),
        Sum(((a, b),), bias, None, activation, True),
    )
    both, one, (c, acted) = module.products(sums)
    assert np.array_equal(module.products([sums[-1]._replace(keep=False)])[0], acted)
    assert np.array_equal(both, plain + bias + added)
    assert np.array_equal(one, plain + added)
    assert np.array_equal(c, plain + bias)
    np.testing.assert_allclose(acted, forward(c.astype(np.float64)), rtol=3e-6, atol=3e-6)
    ((dc, acted),) = module.products([Sum(((a, b),), activation=activation, slope_at=h)])
    np.testing.assert_allclose(acted, forward(h), rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(dc, backward(plain, h), rtol=3e-6, atol=3e-6)
    ragged = np.ascontiguousarray(b[:, :90])
    assert linear.products([Sum(((a, ragged),), None, None, activation)]) is None
    result, acted = products(Sum(((a, ragged),), bias[:90], None, activation, True))[0]
    np.testing.assert_allclose(result, (plain + bias)[:, :90], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(acted, forward(result), rtol=1e-6)


@needs_kernel
def test_non_finite_values_stay_in_their_row_and_column(rng):
    a, b = matrices(rng, 70, 80, 67)
    a[3, 5], b[7, 66] = np.nan, np.inf
    c = product(a, b)
    assert np.isnan(c[3]).all()
    bad = ~np.isfinite(np.delete(c, 3, axis=0))
    assert bad[:, 66].all()
    assert not bad[:, :66].any()


def test_matmul_takes_what_it_always_took(rng):
    a, b = matrices(rng, 80, 90, 100)
    for x, y in ((a.astype(np.float64), b), (a[:, ::2], b[::2]), (a[None], b[None]), (a[0], b), (a, b[:, 0])):
        np.testing.assert_allclose(matmul(x, y), x.astype(np.float64) @ y, rtol=1e-4, atol=1e-4)
    assert matmul(a[:0], b).shape == (0, 100)
    assert not matmul(a[:, :0], b[:0]).any()
    with pytest.raises(ValueError, match="mismatch"):
        matmul(a, b[:-1])


@needs_kernel
def test_who_multiplies(rng):
    a, b = matrices(rng, 80, 90, 100)
    fast = module.products if module.IS_FAST else None
    assert chosen(a, b) is fast
    assert chosen(a, b.T.copy().T) is fast
    assert chosen(a[:5], b) is None  # little work
    assert chosen(a, np.repeat(b, 2, axis=1)[:, ::2]) is None
    assert chosen(a.astype(np.float64), b) is None
    assert chosen(a, b, np.zeros(100)) is None
    assert chosen(a, b, np.zeros(100, np.float32)) is fast

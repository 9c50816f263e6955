"""The Numba tile kernels against the oracle: every feature, both directions, every storage dtype."""

from typing import Any

import numpy as np
import pytest

import npattn
from npattn import _threads
from npattn._dropout import keep_mask
from npattn.kernels import oracle
from npattn.kernels.contract import Problem
from npattn.masks import Causal, Dense, Documents, Full, Padding, Strided, Window
from npattn.masks.base import Extent
from npattn.plans.build import tile_plan

numba_cpu = pytest.importorskip("npattn.kernels.tile.numba_cpu")

if numba_cpu.supports(Problem(np.dtype("f4"), 1, 1, 1, 1, 1, 1, 1, 1.0, 0.0, False, False, 0.0, 0)):
    pytest.skip("explicit vectors do not run interpreted", allow_module_level=True)

# relative to the largest entry: a few roundings of sums of some hundred terms
TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}


class Case:
    """One random problem, its plan, and both implementations' answers."""

    def __init__(
        self,
        dtype: Any,
        sizes: tuple[int, ...],
        *,
        mask: Any = None,
        bias: Any = None,
        softcap: float = 0.0,
        sinks: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        batch, heads_q, heads_kv, len_q, len_k, dim, dim_v = sizes
        self.dtype = np.dtype(dtype)
        self.accumulation = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        self.q = rng.standard_normal((batch, heads_q, len_q, dim)).astype(self.dtype)
        self.k = rng.standard_normal((batch, heads_kv, len_k, dim)).astype(self.dtype)
        self.v = rng.standard_normal((batch, heads_kv, len_k, dim_v)).astype(self.dtype)
        self.dout = rng.standard_normal((batch, heads_q, len_q, dim_v)).astype(self.dtype)
        self.dlse = rng.standard_normal((batch, heads_q, len_q)).astype(self.accumulation)
        if isinstance(bias, tuple):
            bias = rng.standard_normal(bias)
            bias[rng.random(bias.shape) < 0.1] = -np.inf
        self.bias = None if bias is None else bias.astype(self.accumulation)
        self.sinks = rng.standard_normal(heads_q).astype(self.accumulation) if sinks else None
        scale = dim**-0.5 if scale is None else scale
        self.problem = Problem(
            self.dtype, *sizes, scale, softcap, bias is not None, sinks, dropout_p, 0x123456789ABCDEF
        )
        extent = Extent(batch, heads_q, len_q, len_k)
        self.plan = tile_plan(mask, extent, *numba_cpu.tile_shape(self.problem))
        dense = (Full() if mask is None else mask).to_dense(len_q, len_k, batch, heads_q)
        self.dense = np.broadcast_to(dense, (batch, heads_q, len_q, len_k))

    def forward(self) -> Any:
        return numba_cpu.forward(self.problem, self.plan, self.q, self.k, self.v, self.bias, self.sinks)

    def backward(self, result: Any) -> Any:
        return numba_cpu.backward(
            self.problem,
            self.plan,
            self.dout,
            self.dlse,
            self.q,
            self.k,
            self.v,
            *result[:3],
            self.bias,
            self.sinks,
            result.rest,
        )

    def expected(self) -> tuple[Any, Any]:
        wide = [
            None if array is None else array.astype(np.float64)
            for array in (self.q, self.k, self.v, self.bias, self.sinks, self.dout, self.dlse)
        ]
        q, k, v, bias, sinks, dout, dlse = wide
        problem = self.problem._replace(dtype=np.dtype(np.float64))
        result = oracle.forward(problem, self.dense, q, k, v, bias, sinks)
        return result, oracle.backward(problem, self.dense, dout, dlse, q, k, v, *result[:3], bias, sinks)

    def check(self) -> None:
        result = self.forward()
        grads = self.backward(result)
        result_64, grads_64 = self.expected()
        tolerance = TOLERANCE[self.dtype.name]
        for name, ours, exact in zip(("out", "m", "l"), result, result_64, strict=False):
            assert_close(name, ours, exact, tolerance)
        assert result.out.dtype == self.dtype
        for name, ours, exact in zip(grads._fields, grads, grads_64, strict=True):
            if exact is None:
                assert ours is None
                continue
            assert_close(name, ours, exact, 4 * tolerance)


def assert_close(name: str, ours: Any, exact: Any, tolerance: float) -> None:
    assert ours.shape == exact.shape, name
    ours = np.asarray(ours, np.float64)
    assert np.isfinite(ours).all(), name
    error = np.abs(ours - exact).max(initial=0.0) / max(1.0, np.abs(exact).max(initial=0.0))
    assert error < tolerance, (name, error)


SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 1, 5, 7, 3, 1),
    (2, 4, 2, 70, 130, 64, 64),
    (1, 3, 1, 100, 61, 80, 33),
    (2, 6, 2, 3, 90, 16, 17),
    (1, 2, 2, 97, 150, 96, 256),
]


def features(sizes: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    batch, heads_q, _, len_q, len_k, _, _ = sizes
    rng = np.random.default_rng(1)
    dense = rng.random((batch, heads_q, len_q, len_k)) < 0.4
    return {
        "plain": {},
        "causal": {"mask": Causal()},
        "top_left": {"mask": Causal(0), "sinks": True},
        "window": {"mask": Window(10, 3)},
        "padding": {"mask": Padding(np.arange(batch) * 20)},
        "strided": {"mask": Strided(5)},
        "dense": {"mask": Dense(dense)},
        "softcap": {"softcap": 2.0, "scale": 3.0},
        "dropout": {"dropout_p": 0.3},
        "bias": {"bias": (batch, heads_q, len_q, len_k)},
        "bias_of_keys": {"bias": (1, 1, 1, len_k)},
        "bias_of_queries": {"bias": (batch, 1, len_q, 1)},
        "bias_of_heads": {"bias": (1, heads_q, 1, 1)},
        "all": {
            "bias": (1, heads_q, len_q, len_k),
            "mask": Causal() | Window(5, 5),
            "softcap": 3.0,
            "sinks": True,
            "dropout_p": 0.2,
        },
    }


@pytest.mark.parametrize("feature", list(features(SIZES[0])))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_agrees_with_the_oracle(dtype: str, sizes: tuple[int, ...], feature: str) -> None:
    Case(dtype, sizes, **features(sizes)[feature]).check()


@pytest.mark.parametrize("feature", ["plain", "causal", "dense", "all"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_storage_agrees_with_the_oracle(dtype: str, feature: str) -> None:
    kind: Any = np.float16 if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    for sizes in SIZES[1:5]:
        Case(kind, sizes, **features(sizes)[feature]).check()


def test_documents_agree_with_the_oracle() -> None:
    Case("f4", (1, 2, 2, 150, 150, 32, 32), mask=Documents([30, 0, 70, 50], causal=True)).check()


@pytest.mark.parametrize("feature", ["plain", "causal", "padding", "strided", "bias_of_keys", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_few_queries_meet_many_keys_in_splits(dtype: str, feature: str) -> None:
    """Decoding: the keys are cut into splits of a fixed size, joined in order."""
    for sizes in ((1, 4, 2, 1, 2500, 16, 20), (2, 2, 2, 5, 3000, 32, 16)):
        options = features(sizes)[feature]
        if feature == "padding":
            options = {"mask": Padding(np.array([1100, 0])[: sizes[0]])}
        case = Case(dtype, sizes, **options)
        result, (exact, _) = case.forward(), case.expected()
        for name, ours, right in zip(("out", "m", "l"), result, exact, strict=False):
            assert_close(name, ours, right, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splits_are_joined_where_heads_stand_side_by_side(dtype: str, queries: int) -> None:
    """The output has the layout of q: its rows are no neighbours."""
    kind: Any = np.float32 if dtype == "float32" else pytest.importorskip("ml_dtypes").bfloat16
    case = Case(kind, (2, 4, 2, queries, 3000, 16, 20), mask=Causal())
    case.q = np.ascontiguousarray(case.q.swapaxes(1, 2)).swapaxes(1, 2)
    case.problem = case.problem._replace(keeps_rest=dtype == "bfloat16")
    result, (exact, exact_grads) = case.forward(), case.expected()
    for name, ours, right in zip(("out", "m", "l"), result, exact, strict=False):
        assert_close(name, ours, right, 2 * TOLERANCE[dtype])
    for name, ours, right in zip(("q", "k", "v"), case.backward(result), exact_grads, strict=False):
        assert_close(name, ours, right, 4 * TOLERANCE[dtype])


def _bits(arrays: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays if array is not None]


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 700, 1100, 32, 32), (2, 4, 2, 130, 200, 40, 24), (1, 4, 2, 1, 9000, 32, 32)], ids=str
)
@pytest.mark.parametrize("feature", ["causal", "bias_of_keys", "all"])
def test_bits_do_not_depend_on_the_number_of_threads(sizes: tuple[int, ...], feature: str) -> None:
    case = Case("f4", sizes, **features(sizes)[feature])
    before = _threads.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 4, 4):
            _threads.set_num_threads(threads)
            result = case.forward()
            seen.append(_bits(result) + _bits(case.backward(result)))
    finally:
        _threads.set_num_threads(before)
    assert all(bits == seen[0] for bits in seen[1:])


def test_strided_inputs_are_read_in_place() -> None:
    """Transposed, reversed, broadcast and read-only arrays give the bits of their contiguous copies."""
    case = Case("f4", (2, 4, 2, 70, 130, 32, 16), mask=Causal(), sinks=True, bias=(2, 4, 70, 130))
    plain = case.forward()
    grads = case.backward(plain)

    def awkward(array: Any) -> Any:
        stored = np.ascontiguousarray(array[:, :, ::-1].transpose(0, 2, 1, 3))
        view = stored.transpose(0, 2, 1, 3)[:, :, ::-1]
        view.flags.writeable = False
        assert view.strides[2] < 0
        assert (view == array).all()
        return view

    for name in ("q", "k", "v", "dout"):
        setattr(case, name, awkward(getattr(case, name)))
    case.bias = np.asfortranarray(case.bias)
    case.dlse = np.asfortranarray(case.dlse)
    result = case.forward()
    assert _bits(result) == _bits(plain)
    assert _bits(case.backward(result)) == _bits(grads)

    case.k = np.broadcast_to(case.k[:, :, :1], case.k.shape)  # stride 0 along the keys
    case.check()


@pytest.mark.parametrize("length", [1, 7, 64, 65, 99])
def test_keys_behind_an_odd_length_never_leak_into_pairs(length: int) -> None:
    """bfloat16 dot products take keys two at a time: the second may be a masked NaN, or not there at all."""
    kind: Any = pytest.importorskip("ml_dtypes").bfloat16
    clean = Case(kind, (1, 2, 1, 51, 100, 24, 24), mask=Padding(np.array([length])))
    dirty = Case(kind, (1, 2, 1, 51, 100, 24, 24), mask=Padding(np.array([length])))
    dirty.k[:, :, length:], dirty.v[:, :, length:] = np.nan, np.inf
    result, dirty_result = clean.forward(), dirty.forward()
    assert dirty_result.out.tobytes() == result.out.tobytes()
    grads, dirty_grads = clean.backward(result), dirty.backward(dirty_result)
    assert (dirty_grads.key[:, :, length:] == 0).all()
    for name in ("query", "key", "value"):
        assert getattr(dirty_grads, name).tobytes() == getattr(grads, name).tobytes(), name


@pytest.mark.parametrize("sizes", [SIZES[2], (1, 4, 2, 1, 2500, 16, 20)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_rounding_takes_from_out_is_kept_where_asked(dtype: str, sizes: tuple[int, ...]) -> None:
    kind: Any = np.float16 if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    case = Case(kind, sizes)
    assert case.forward().rest is None
    case.problem = case.problem._replace(keeps_rest=True)
    result, (exact, _) = case.forward(), case.expected()
    assert result.rest.dtype == case.dtype
    out = result.out.astype(np.float64)
    weights_alone = 2.0**-9 if dtype == "bfloat16" else 1e-6  # rounded before the product, where it is paired
    assert np.abs(out + result.rest.astype(np.float64) - exact.out).max() < weights_alone
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    lost = np.abs(result.rest.astype(np.float64))
    assert (lost <= unit * np.abs(out) * 1.01).all()
    assert lost.max() > 0.2 * unit * np.abs(out).max()


def test_what_rounding_takes_from_an_overflowing_out_is_zero() -> None:
    case = Case(np.float16, (1, 1, 1, 40, 2, 8, 40))
    case.v[...] = 65504
    case.problem = case.problem._replace(keeps_rest=True, dropout_p=0.3)
    result = case.forward()
    assert np.isinf(result.out).any()
    assert np.isfinite(result.rest).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_masked_never_leaks(dtype: str, bias: bool) -> None:
    """NaN and inf in keys, values, queries and cotangents that no visible pair touches change nothing."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    sizes = (1, 2, 1, 70, 140, 16, 24)
    rng = np.random.default_rng(3)
    dense = rng.random((1, 1, 70, 140)) < 0.5
    dense[..., 40:90] = False  # keys that nobody sees
    dense[..., 10:15, :] = False  # queries that see nothing
    kwargs: dict[str, Any] = {"mask": Dense(dense)}
    if bias:
        kwargs = {"bias": np.where(dense, 0.5, -np.inf)}
    clean = Case(dtype, sizes, **kwargs)
    result = clean.forward()
    grads = clean.backward(result)
    dirty = Case(dtype, sizes, **kwargs)
    dirty.k[:, :, 40:90] = np.nan
    dirty.v[:, :, 40:65] = np.inf
    dirty.v[:, :, 65:90] = np.nan
    dirty.q[:, :, 10:15] = np.nan
    dirty.dout[:, :, 10:15] = np.inf
    dirty.dlse[:, :, 10:15] = np.nan
    dirty_result = dirty.forward()
    dirty_grads = dirty.backward(dirty_result)
    for name, a, b in zip(("out", "m", "l"), dirty_result, result, strict=False):
        assert a.tobytes() == b.tobytes(), name
    for name, a, b in zip(grads._fields, dirty_grads, grads, strict=True):
        if a is not None:
            assert a.tobytes() == b.tobytes(), name
    assert (dirty_grads.key[:, :, 40:90] == 0).all()
    assert (dirty_grads.value[:, :, 40:90] == 0).all()
    assert (dirty_grads.query[:, :, 10:15] == 0).all()
    assert (dirty_result.out[:, :, 10:15] == 0).all()
    assert (dirty_result.l[:, :, 10:15] == 0).all()


@pytest.mark.parametrize("value", [np.finfo(np.float32).min, 1e5, -1e5])
def test_equal_logits_however_large_give_the_mean(value: float) -> None:
    """At 1e5 float32 has no room for log(l) beside m: the weights must still sum to one, both ways."""
    bias = np.full((1, 1, 1, 200), value)
    case = Case("f4", (1, 1, 1, 60, 200, 8, 8), bias=bias)
    case.q[...] = 0
    case.dlse[...] = 0
    result = case.forward()
    np.testing.assert_allclose(
        result.out, np.broadcast_to(case.v.mean(2, keepdims=True), result.out.shape), atol=1e-6
    )
    grads = case.backward(result)
    np.testing.assert_allclose(
        grads.value, np.broadcast_to(case.dout.sum(2, keepdims=True) / 200, grads.value.shape), atol=1e-6
    )


def test_differences_of_representable_logits_are_exact() -> None:
    """Logits 4096 and 4096 + 2**-11 differ by exactly 2**-11: multiplied by log2(e) first they would not."""
    case = Case("f4", (1, 1, 1, 1, 2, 1, 2), scale=1.0)
    case.q[...] = 1.0
    case.k[0, 0, :, 0] = (4096.0, 4096.0 + 2.0**-11)
    case.v[0, 0] = np.eye(2)
    out = case.forward().out[0, 0, 0].astype(np.float64)
    assert abs(np.log(out[1] / out[0]) - 2.0**-11) < 2e-7


def test_a_sum_of_4096_equal_weights_is_exact() -> None:
    case = Case(np.float16, (1, 1, 1, 1, 4096, 4, 4))
    case.q[...] = 0
    case.v[...] = 1
    result = case.forward()
    assert (result.out == 1).all()
    assert (result.l == 4096).all()


def test_dropout_keeps_what_keep_mask_says() -> None:
    """With v the identity the output is the dropped weights themselves."""
    case = Case("f4", (2, 2, 1, 50, 70, 4, 70), dropout_p=0.4)
    case.v[...] = np.eye(70, dtype=np.float32)
    weights = case.forward().out
    keep = keep_mask(case.problem.seed, (2, 2, 50, 70), 0.4)
    assert ((weights != 0) == keep).all()


def test_nothing_given_is_modified() -> None:
    case = Case("f4", (1, 2, 1, 50, 70, 16, 16), mask=Causal(), sinks=True, bias=(1, 1, 50, 70))
    names = ("q", "k", "v", "dout", "dlse", "bias", "sinks")
    before = {name: getattr(case, name).tobytes() for name in names}
    result = case.forward()
    kept = _bits(result)
    case.backward(result)
    assert _bits(result) == kept
    assert all(getattr(case, name).tobytes() == before[name] for name in names)


@pytest.mark.parametrize(
    "sizes", [(0, 2, 1, 3, 4, 5, 6), (2, 2, 1, 0, 4, 5, 6), (2, 2, 1, 3, 0, 5, 6)], ids=str
)
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_axes_give_empty_or_zero_arrays(sizes: tuple[int, ...], sinks: bool) -> None:
    Case("f4", sizes, sinks=sinks).check()


def test_layouts_do_not_compile_another_kernel() -> None:
    from npattn.kernels.tile.numba_cpu import _backward, _forward

    test_strided_inputs_are_read_in_place()
    for kernel in (_forward.forward_units, _backward.key_units, _backward.row_units):
        assert len(kernel.origins) <= 2  # float32 and float64


def test_results_are_finite_when_the_largest_values_are_averaged() -> None:
    """Values near the largest float: their unnormalised sum would overflow, their mean does not."""
    case = Case("f4", (1, 1, 1, 3, 100, 8, 8))
    case.v[...] = 3e38
    np.testing.assert_allclose(case.forward().out, 3e38, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
@pytest.mark.parametrize("kind", ["padding", "causal padding", "bits"])
def test_garbage_in_masked_rows_changes_no_bit(dtype, garbage, kind):
    """Tiles with garbage take a slow road; it must sum in the order of the fast one."""
    rng = np.random.default_rng(0)
    mask = {
        "padding": Padding([100, 90]),
        "causal padding": Causal() & Padding([100, 90]),
        "bits": Dense((rng.random((2, 4, 150, 150)) < 0.5) & (np.arange(150) < 90)),
    }[kind]
    query, dout = (rng.standard_normal((2, 4, 150, 24)).astype(dtype) for _ in range(2))
    key, value = (rng.standard_normal((2, 2, 150, 24)).astype(dtype) for _ in range(2))

    def everything(key, value):
        (out, lse), pullback = npattn.attention_vjp(
            query, key, value, mask=mask, return_lse=True, backend="numba"
        )
        return out, lse, *pullback(dout)[:3]

    clean = everything(key, value)
    dirty = everything(*(np.where(np.arange(150)[:, None] < 100, x, dtype(garbage)) for x in (key, value)))
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)

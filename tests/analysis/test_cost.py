"""Costs: operations beside those that an instrumented NumPy run performs, memory beside what is allocated."""

import gc
import tracemalloc

import numpy as np
import pytest

import npattn
from npattn import masks, nn
from npattn.analysis import attention_cost, layer_cost, linear_attention_cost


class Counting(np.ndarray):
    """An array that counts what is done to it: two operations a multiply-add, and exponentials."""

    flops = 0
    exps = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        plain = [x.view(np.ndarray) if isinstance(x, Counting) else x for x in inputs]
        if out is not None:
            options["out"] = tuple(x.view(np.ndarray) if isinstance(x, Counting) else x for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        if ufunc is np.matmul:
            Counting.flops += 2 * plain[0].shape[-1] * result.size
        if ufunc is np.exp:
            Counting.exps += result.size
        return result.view(Counting) if isinstance(result, np.ndarray) else result


def counted(function, *arrays):
    Counting.flops = Counting.exps = 0
    function(*(x.view(Counting) for x in arrays))
    return Counting.flops, Counting.exps


def allocated(function):
    """The most bytes that a call holds at once, its results included."""
    function()  # compiled code and plans are there already
    gc.collect()
    tracemalloc.start()
    result = function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak


def dense_forward(q, k, v):
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    logits -= logits.max(axis=-1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, p


def dense_step(q, k, v, dout):
    _, p = dense_forward(q, k, v)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def tiled_step(q, k, v, dout, mask=None, tile=16):
    """Forward and backward tile by tile, one head, visiting the tiles in which something is visible."""
    scale = 1 / np.sqrt(q.shape[-1])
    visible = np.ones((len(q), len(k)), bool) if mask is None else mask
    tiles = [
        (slice(r, r + tile), slice(c, c + tile))
        for r in range(0, len(q), tile)
        for c in range(0, len(k), tile)
        if visible[r : r + tile, c : c + tile].any()
    ]
    m, l, acc = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), v.shape[-1]))
    for r, c in tiles:
        s = np.asarray(q[r] @ k[c].T) * scale
        new = np.maximum(m[r], s.max(axis=-1))
        p = np.exp((s - new[:, None]).view(Counting))
        shrink = np.exp(np.where(np.isneginf(m[r]), -np.inf, m[r] - new))
        l[r] = l[r] * shrink + np.asarray(p).sum(axis=-1)
        acc[r] = acc[r] * shrink[:, None] + np.asarray(p @ v[c])
        m[r] = new
    out = acc / l[:, None]
    delta = (np.asarray(dout) * out).sum(axis=-1)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for r, c in tiles:
        s = np.asarray(q[r] @ k[c].T) * scale
        p = np.exp((s - m[r, None]).view(Counting)) / l[r, None]
        dp = dout[r] @ v[c].T
        ds = p * (dp - delta[r, None])
        dv[c] += p.T @ dout[r]
        dq[r] += ds @ k[c] * scale
        dk[c] += ds.T @ q[r] * scale
    return out, dq, dk, dv


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 3, n, d)) for n, d in ((20, 8), (30, 8), (30, 12), (20, 12))]


SIZES = {"batch": 2, "heads": 3, "head_dim": 8, "head_dim_v": 12}


def test_dense_operations_are_those_of_an_instrumented_run(arrays):
    forward = attention_cost(20, 30, **SIZES, algorithm="dense")
    assert counted(dense_forward, *arrays[:3]) == (forward.flops, forward.exps)
    step = attention_cost(20, 30, **SIZES, algorithm="dense", backward=True)
    assert counted(dense_step, *arrays) == (step.flops, step.exps)


@pytest.mark.parametrize("visible", [None, masks.Blocks(np.tri(4, dtype=bool), 16)])
def test_tiled_operations_are_those_of_an_instrumented_run(visible):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((64, d)) for d in (8, 8, 12, 12))
    mask = None if visible is None else visible.to_dense(64, 64).reshape(64, 64)
    cost = attention_cost(64, head_dim=8, head_dim_v=12, mask=visible, backward=True)
    assert counted(lambda *args: tiled_step(*args, mask=mask), q, k, v, dout) == (cost.flops, cost.exps)
    # and the instrumented run computes attention
    ours, pullback = npattn.attention_vjp(q, k, v, mask=visible)
    grads = pullback(dout)
    for actual, expected in zip(tiled_step(q, k, v, dout, mask), (ours, *grads[:3]), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.Window(5, 2), masks.Strided(3), masks.Padding([30, 7])]
)
def test_masked_pairs_are_not_counted(mask):
    cost = attention_cost(20, 30, **SIZES, mask=mask)
    pairs = np.broadcast_to(mask.to_dense(20, 30, batch=2, heads=3), (2, 3, 20, 30)).sum()
    assert cost.exps == pairs
    assert cost.flops == 2 * pairs * (8 + 12)


def test_flops_of_the_benchmark_cases_are_counted_alike():
    case = npattn.testing.case("gqa")
    cost = attention_cost(
        *(case.len_q, case.len_k),
        batch=case.batch,
        heads=case.heads_q,
        heads_kv=case.heads_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        mask=case.mask,
    )
    assert cost.flops == pytest.approx(case.flops)


def big_arrays(length):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 4, length, 64)).astype(np.float32) for _ in range(3)]


def test_peak_memory_of_the_formula_is_what_it_allocates():
    arrays = big_arrays(512)
    cost = attention_cost(512, batch=2, heads=4, algorithm="dense")

    def in_place(q, k, v):
        p = q @ k.swapaxes(-1, -2)
        p *= q.shape[-1] ** -0.5
        p -= p.max(axis=-1, keepdims=True)
        weights = np.exp(p)
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights @ v

    assert allocated(lambda: in_place(*arrays)) == pytest.approx(cost.peak_bytes, rel=0.05)


def test_peak_memory_of_a_call_is_what_it_allocates():
    pytest.importorskip("numba")
    arrays = big_arrays(1024)
    cost = attention_cost(1024, batch=2, heads=4)
    assert allocated(lambda: npattn.attention(*arrays)) == pytest.approx(cost.peak_bytes, rel=0.2)


def test_peak_memory_of_linear_attention_is_what_it_allocates():
    arrays = big_arrays(1024)
    cost = linear_attention_cost(1024, batch=2, heads=4)
    assert allocated(lambda: npattn.linear_attention(*arrays)) == pytest.approx(cost.peak_bytes, rel=0.2)


def test_linear_operations_are_those_of_an_instrumented_run():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, d)) for n, d in ((20, 8), (30, 8), (30, 12)))

    def linear(q, k, v):
        q, k = np.exp(q), np.exp(k)  # one exponential an element, as elu(x) + 1 has
        both = q @ (k.swapaxes(-1, -2) @ np.concatenate([v, np.ones((2, 3, 30, 1))], axis=-1).view(Counting))
        return both[..., :-1] / both[..., -1:]

    cost = linear_attention_cost(20, 30, **SIZES)
    assert counted(linear, q, k, v) == (cost.flops, cost.exps)


def test_bytes_moved_are_the_arrays_of_the_call():
    q, k, v = big_arrays(64)
    out, lse = npattn.attention(q, k, v, return_lse=True)
    cost = attention_cost(64, batch=2, heads=4)
    assert cost.bytes_moved == q.nbytes + k.nbytes + v.nbytes + out.nbytes + 2 * lse.nbytes


def test_grouped_heads_and_half_precision_move_fewer_bytes():
    full = attention_cost(1024, heads=8)
    grouped = attention_cost(1024, heads=8, heads_kv=2)
    half = attention_cost(1024, heads=8, dtype=np.float16)
    assert grouped.flops == half.flops == full.flops
    assert grouped.bytes_moved < full.bytes_moved
    assert half.bytes_moved < 0.55 * full.bytes_moved
    assert full.intensity == full.flops / full.bytes_moved


def test_unknown_algorithm_is_an_error():
    with pytest.raises(ValueError, match='"tiled" or "dense"'):
        attention_cost(8, algorithm="sparse")


def attention_flops(layer, length, batch, **options):
    mask = masks.Causal() if layer.causal else None
    sizes = {"heads": layer.num_heads, "heads_kv": layer.num_kv_heads, "head_dim": layer.head_dim}
    return attention_cost(length, batch=batch, mask=mask, **sizes, **options).flops


def layers():
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((2, 24, 32)).astype(np.float32), rng.integers(0, 50, (2, 24))
    yield "linear", nn.Linear(32, 48, rng=rng), x, []
    yield "mlp", nn.MLP(32, 64, rng=rng), x, []
    yield "gated", nn.GatedMLP(32, 64, rng=rng), x, []
    attention = nn.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True, rng=rng)
    yield "attention", attention, x, [attention]
    block = nn.TransformerBlock(32, 4, 64, norm="rms", mlp="swiglu", rng=rng)
    yield "block", block, x, [block.attention]
    encoder = nn.TransformerEncoder(50, 32, 4, 2, 64, 32, rng=rng)
    yield "encoder", encoder, ids, [each.attention for each in encoder.blocks]
    for tied in (True, False):
        decoder = nn.TransformerDecoder(50, 32, 4, 2, 64, 32, tied=tied, rng=rng)
        yield f"decoder, tied={tied}", decoder, ids, [each.attention for each in decoder.blocks]
    yield "sequential", nn.Sequential(nn.Linear(32, 16, rng=rng), nn.GELU(), nn.Linear(16, 8, rng=rng)), x, []


CASES = list(layers())


def count_parameters(layer):
    """Make the layer's matrices count the products they take part in."""
    for child in [value for value in vars(layer).values() if hasattr(value, "named_parameters")]:
        count_parameters(child)
    for value in vars(layer).values():
        for child in value if isinstance(value, tuple) else ():
            count_parameters(child)
    if isinstance(getattr(layer, "weight", None), np.ndarray) and layer.weight.ndim == 2:
        layer.weight = layer.weight.view(Counting)


@pytest.mark.parametrize(("name", "layer", "x", "attentions"), CASES, ids=[case[0] for case in CASES])
def test_operations_of_layers_are_those_of_an_instrumented_run(name, layer, x, attentions):
    count_parameters(layer)
    Counting.flops = 0
    layer(x)
    between = sum(attention_flops(each, 24, 2) for each in attentions)
    assert layer_cost(layer, 24, batch=2).flops == Counting.flops + between

    # backward: two products for each of forward's, one for dx and one for dweight
    step = sum(attention_flops(each, 24, 2, backward=True) for each in attentions)
    expected = 3 * Counting.flops + step
    assert layer_cost(layer, 24, batch=2, backward=True).flops == expected


def test_operations_of_a_training_step_of_linear_are_those_of_an_instrumented_run():
    layer = nn.Linear(32, 48, rng=np.random.default_rng(0))
    count_parameters(layer)
    Counting.flops = 0
    y, pullback = layer.vjp(np.ones((2, 24, 32), np.float32))
    pullback(np.ones(y.shape, np.float32).view(Counting))
    assert layer_cost(layer, 24, batch=2, backward=True).flops == Counting.flops


def memory_cases():
    """Layers large enough for the arrays to outweigh everything else."""
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((2, 512, 128)).astype(np.float32), rng.integers(0, 100, (2, 512))
    yield "mlp", nn.MLP(128, 512, rng=rng), x
    yield "gated", nn.GatedMLP(128, 512, rng=rng), x
    yield "block", nn.TransformerBlock(128, 4, 512, causal=True, rng=rng), x
    yield "encoder", nn.TransformerEncoder(100, 128, 4, 3, 512, 512, rng=rng), ids
    yield "decoder", nn.TransformerDecoder(1000, 128, 4, 3, 512, 512, rng=rng), ids


@pytest.mark.parametrize(
    ("name", "layer", "x"), list(memory_cases()), ids=lambda case: case if isinstance(case, str) else ""
)
def test_peak_memory_of_layers_is_what_they_allocate(name, layer, x):
    pytest.importorskip("numba")
    forward = layer_cost(layer, 512, batch=2)
    assert allocated(lambda: layer(x)) == pytest.approx(forward.peak_bytes, rel=0.05)

    dy = np.ones_like(layer(x))

    def step():
        _, pullback = layer.vjp(x)
        return pullback(dy)

    training = layer_cost(layer, 512, batch=2, backward=True)
    assert allocated(step) == pytest.approx(training.peak_bytes, rel=0.12)


def test_cost_of_something_else_is_a_type_error():
    with pytest.raises(TypeError, match=r"a layer of npattn\.nn or a model, got list"):
        layer_cost([1, 2], 10)


def test_cost_of_a_windowed_layer_grows_with_the_length_alone():
    layer = nn.MultiHeadAttention(32, 4, causal=True, window=15, rng=np.random.default_rng(0))
    one, two = layer_cost(layer, 512), layer_cost(layer, 1024)
    assert two.flops == pytest.approx(2 * one.flops, rel=0.01)

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""The formulas of ``arrays`` in one pass over memory, float32, with explicit vectors.

Flat work is cut into pieces of PIECE elements, row work into blocks of whole rows of about ROWS; each is
done by one thread, start to end. The cut depends on the shape alone, and partial sums over rows (dweight,
dbias) are added in the order of the blocks: results are the same bit for bit for any number of threads.

Within a row, sums run over vector lanes first, then over the lanes, then over the few last elements that fill
no vector. Flat work has no such rest: its last vector is moved back over elements already done, which gives
them the same values again (results never share memory with arguments).
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba.extending import intrinsic
from numba.types import float32

from npattn import _threads
from npattn._typing import Array
from npattn.kernels import _jit
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.exp import exp, exp_scalar, tanh
from npattn.kernels._simd.vectors import (
    add,
    call_same,
    div,
    fma,
    hmax,
    hsum,
    lesser,
    load,
    load_int64,
    load_scalar,
    maximum,
    mul,
    splat,
    store,
    store_scalar,
    sub,
)
from npattn.kernels.pointwise.arrays import CUBIC, FLAT, SQRT_2_OVER_PI, SQRT_HALF
from npattn.kernels.pointwise.arrays import adam as in_arrays
from npattn.kernels.pointwise.erf import P32, Q32

USABLE: Final = not _jit.INTERPRETED

PIECE: Final = 1 << 16
#: Rows are taken in blocks of about this many elements.
ROWS: Final = 1 << 14
#: Work of fewer elements than this stays on the calling thread: waking another costs more than it saves.
ALONE: Final = 1 << 17

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)

_CUBIC, _SLOPE, _HALF_ROOT = F(CUBIC), F(3.0 * CUBIC), F(SQRT_HALF)
_ROOT, _DENSITY = F(SQRT_2_OVER_PI), F(0.5 * SQRT_2_OVER_PI)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (F(c) for c in P32)
_Q0, _Q1, _Q2, _Q3, _Q4 = (F(c) for c in Q32)
_LOWEST = F(-np.inf)


# --- flat: pieces [start, stop) of arrays at addresses ------------------------------------------------------


@part("one")
def _clamp(most, x):
    """X between −most and most; NaN stays."""
    x = maximum(splat(-most), x)
    return sub(splat(F(0)), maximum(splat(-most), sub(splat(F(0)), x)))


@part("one")
def _erf(x):
    x = _clamp(F(4), x)
    z = mul(x, x)
    p = fma(fma(splat(_P0), z, splat(_P1)), z, splat(_P2))
    p = fma(fma(fma(fma(p, z, splat(_P3)), z, splat(_P4)), z, splat(_P5)), z, splat(_P6))
    q = fma(fma(splat(_Q0), z, splat(_Q1)), z, splat(_Q2))
    q = fma(fma(q, z, splat(_Q3)), z, splat(_Q4))
    return div(mul(x, p), q)


@part("one")
def _sigmoid(x):
    return fma(tanh(mul(x, splat(F(0.5)))), splat(F(0.5)), splat(F(0.5)))


@part("one")
def _gelu(approximate, x):
    if approximate:
        u = mul(mul(fma(mul(x, x), splat(_CUBIC), splat(F(1))), x), splat(_ROOT))
        t = tanh(u)
    else:
        t = _erf(mul(x, splat(_HALF_ROOT)))
    half = mul(x, splat(F(0.5)))
    return fma(half, t, half)


@part("one")
def _gelu_slope(approximate, x):
    half = splat(F(0.5))
    x = _clamp(F(FLAT), x)
    z = mul(x, x)
    if approximate:
        t = tanh(mul(mul(fma(z, splat(_CUBIC), splat(F(1))), x), splat(_ROOT)))
        du = mul(fma(z, splat(_SLOPE), splat(F(1))), splat(_ROOT))
        dt = mul(sub(splat(F(1)), mul(t, t)), du)
        return mul(half, add(fma(x, dt, t), splat(F(1))))
    density = mul(exp(mul(z, splat(F(-0.5)))), splat(_DENSITY))
    return fma(x, density, fma(half, _erf(mul(x, splat(_HALF_ROOT))), half))


@part()
def _gelu_part(x, y, start, stop, approximate):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        store(y + 4 * i, _gelu(approximate, load(x + 4 * i, ONE)))


@jit
def _gelu_piece(x, y, start, stop, approximate):
    _gelu_part(x, y, start, stop, approximate)


@part()
def _gelu_backward_part(dy, x, dx, start, stop, approximate):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        store(dx + 4 * i, mul(load(dy + 4 * i, ONE), _gelu_slope(approximate, load(x + 4 * i, ONE))))


@jit
def _gelu_backward_piece(dy, x, dx, start, stop, approximate):
    _gelu_backward_part(dy, x, dx, start, stop, approximate)


@part()
def _silu_part(x, y, start, stop):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        xi = load(x + 4 * i, ONE)
        store(y + 4 * i, mul(xi, _sigmoid(xi)))


@jit
def _silu_piece(x, y, start, stop):
    _silu_part(x, y, start, stop)


@part("one")
def _silu_slope(x, s):
    return mul(s, fma(x, sub(splat(F(1)), s), splat(F(1))))


@part()
def _silu_backward_part(dy, x, dx, start, stop):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        xi = load(x + 4 * i, ONE)
        store(dx + 4 * i, mul(load(dy + 4 * i, ONE), _silu_slope(xi, _sigmoid(xi))))


@jit
def _silu_backward_piece(dy, x, dx, start, stop):
    _silu_backward_part(dy, x, dx, start, stop)


@part()
def _swiglu_part(gate, up, y, start, stop):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        g = load(gate + 4 * i, ONE)
        store(y + 4 * i, mul(mul(g, _sigmoid(g)), load(up + 4 * i, ONE)))


@jit
def _swiglu_piece(gate, up, y, start, stop):
    _swiglu_part(gate, up, y, start, stop)


@part()
def _swiglu_backward_part(dy, gate, up, dgate, dup, start, stop):
    for place in range(start, stop, LANES):
        i = lesser(place, stop - LANES)
        g = load(gate + 4 * i, ONE)
        d = load(dy + 4 * i, ONE)
        s = _sigmoid(g)
        store(dup + 4 * i, mul(d, mul(g, s)))
        store(dgate + 4 * i, mul(mul(d, load(up + 4 * i, ONE)), _silu_slope(g, s)))


@jit
def _swiglu_backward_piece(dy, gate, up, dgate, dup, start, stop):
    _swiglu_backward_part(dy, gate, up, dgate, dup, start, stop)


@intrinsic
def _sqrt(typingctx, vector):
    """The square root of each lane."""

    def codegen(context, builder, signature, arguments):
        return call_same(builder, "llvm.sqrt", arguments[0])

    return vector(vector), codegen


def _scalar_function(name):
    @intrinsic
    def function(typingctx, x):
        def codegen(context, builder, signature, arguments):
            return builder.call(builder.module.declare_intrinsic(name, [arguments[0].type]), arguments)

        return x(x), codegen

    return function


_sqrt_scalar, _log_scalar = _scalar_function("llvm.sqrt"), _scalar_function("llvm.log")


@part()
def _adam_part(parameter, grad, m, v, start, stop, beta_1, beta_2, step_size, root, eps, shrink):
    i = start
    rest_1, rest_2 = F(1) - beta_1, F(1) - beta_2
    while i + LANES <= stop:
        g = load(grad + 4 * i, ONE)
        mi = fma(load(m + 4 * i, ONE), splat(beta_1), mul(g, splat(rest_1)))
        vi = fma(load(v + 4 * i, ONE), splat(beta_2), mul(mul(g, g), splat(rest_2)))
        store(m + 4 * i, mi)
        store(v + 4 * i, vi)
        step = mul(div(mi, fma(_sqrt(vi), splat(root), splat(eps))), splat(step_size))
        store(parameter + 4 * i, sub(mul(load(parameter + 4 * i, ONE), splat(shrink)), step))
        i += LANES
    while i < stop:
        e = load_scalar(grad + 4 * i, ONE)
        me = load_scalar(m + 4 * i, ONE) * beta_1 + e * rest_1
        ve = load_scalar(v + 4 * i, ONE) * beta_2 + e * e * rest_2
        store_scalar(m + 4 * i, me)
        store_scalar(v + 4 * i, ve)
        step_e = me / (_sqrt_scalar(ve) * root + eps) * step_size
        store_scalar(parameter + 4 * i, load_scalar(parameter + 4 * i, ONE) * shrink - step_e)
        i += 1


@jit
def _adam_piece(parameter, grad, m, v, start, stop, beta_1, beta_2, step_size, root, eps, shrink):
    """In place, so the elements behind the last whole vector are done one by one, not twice."""
    _adam_part(parameter, grad, m, v, start, stop, beta_1, beta_2, step_size, root, eps, shrink)


# --- by rows: rows [start, stop) of n features --------------------------------------------------------------


@part(float32)
def _row_sum(x, n):
    acc = splat(F(0))
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        acc = add(acc, load(x + 4 * i, ONE))
    total = hsum(acc)
    for i in range(whole, n):
        total += load_scalar(x + 4 * i, ONE)
    return total


@part(float32)
def _row_square_sum(x, n, mean):
    acc = splat(F(0))
    shift = splat(mean)
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        d = sub(load(x + 4 * i, ONE), shift)
        acc = fma(d, d, acc)
    total = hsum(acc)
    for i in range(whole, n):
        e = load_scalar(x + 4 * i, ONE) - mean
        total += e * e
    return total


@part()
def _layer_norm_part(x, weight, bias, y, mean, rstd, start, stop, n, eps):
    whole = n - n % LANES
    for row in range(start, stop):
        xr, yr = x + 4 * n * row, y + 4 * n * row
        mu = _row_sum(xr, n) / F(n)
        r = F(1) / _sqrt_scalar(_row_square_sum(xr, n, mu) / F(n) + eps)
        store_scalar(mean + 4 * row, mu)
        store_scalar(rstd + 4 * row, r)
        shift, scale = splat(mu), splat(r)
        for i in range(0, whole, LANES):
            out = mul(mul(sub(load(xr + 4 * i, ONE), shift), scale), load(weight + 4 * i, ONE))
            if bias:
                out = add(out, load(bias + 4 * i, ONE))
            store(yr + 4 * i, out)
        for i in range(whole, n):
            value = (load_scalar(xr + 4 * i, ONE) - mu) * r * load_scalar(weight + 4 * i, ONE)
            if bias:
                value += load_scalar(bias + 4 * i, ONE)
            store_scalar(yr + 4 * i, value)


@jit
def _layer_norm_rows(x, weight, bias, y, mean, rstd, start, stop, n, eps):
    """Without a bias its address is 0."""
    _layer_norm_part(x, weight, bias, y, mean, rstd, start, stop, n, eps)


@part()
def _norm_backward_part(dy, x, weight, mean, rstd, dx, dweight, dbias, start, stop, n):
    whole = n - n % LANES
    for row in range(start, stop):
        dyr, xr, dxr = dy + 4 * n * row, x + 4 * n * row, dx + 4 * n * row
        mu = load_scalar(mean + 4 * row, ONE) if mean else F(0)
        r = load_scalar(rstd + 4 * row, ONE)
        shift, scale = splat(mu), splat(r)
        sum_d, sum_dx = splat(F(0)), splat(F(0))
        for i in range(0, whole, LANES):
            d = load(dyr + 4 * i, ONE)
            xhat = mul(sub(load(xr + 4 * i, ONE), shift), scale)
            store(dweight + 4 * i, fma(d, xhat, load(dweight + 4 * i, ONE)))
            if mean:
                store(dbias + 4 * i, add(d, load(dbias + 4 * i, ONE)))
            d = mul(d, load(weight + 4 * i, ONE))
            sum_d = add(sum_d, d)
            sum_dx = fma(d, xhat, sum_dx)
        along, across = hsum(sum_dx), hsum(sum_d)
        for i in range(whole, n):
            e = load_scalar(dyr + 4 * i, ONE)
            h = (load_scalar(xr + 4 * i, ONE) - mu) * r
            store_scalar(dweight + 4 * i, load_scalar(dweight + 4 * i, ONE) + e * h)
            if mean:
                store_scalar(dbias + 4 * i, load_scalar(dbias + 4 * i, ONE) + e)
            e *= load_scalar(weight + 4 * i, ONE)
            across += e
            along += e * h
        along /= F(n)
        across = across / F(n) if mean else F(0)
        minus_along, minus_across = splat(-along), splat(-across)
        for i in range(0, whole, LANES):
            xhat = mul(sub(load(xr + 4 * i, ONE), shift), scale)
            d = fma(load(dyr + 4 * i, ONE), load(weight + 4 * i, ONE), minus_across)
            store(dxr + 4 * i, mul(fma(xhat, minus_along, d), scale))
        for i in range(whole, n):
            h = (load_scalar(xr + 4 * i, ONE) - mu) * r
            e = load_scalar(dyr + 4 * i, ONE) * load_scalar(weight + 4 * i, ONE) - across
            store_scalar(dxr + 4 * i, (e - h * along) * r)


@jit
def _norm_backward_rows(dy, x, weight, mean, rstd, dx, dweight, dbias, start, stop, n):
    """Layer norm's pullback, or with mean = 0 (an address) that of RMS norm, which subtracts no means.

    dweight and dbias are this block's own partial sums, zeroed by the caller.
    """
    _norm_backward_part(dy, x, weight, mean, rstd, dx, dweight, dbias, start, stop, n)


@part()
def _rms_norm_part(x, weight, y, rstd, start, stop, n, eps):
    whole = n - n % LANES
    for row in range(start, stop):
        xr, yr = x + 4 * n * row, y + 4 * n * row
        r = F(1) / _sqrt_scalar(_row_square_sum(xr, n, F(0)) / F(n) + eps)
        store_scalar(rstd + 4 * row, r)
        scale = splat(r)
        for i in range(0, whole, LANES):
            store(yr + 4 * i, mul(mul(load(xr + 4 * i, ONE), scale), load(weight + 4 * i, ONE)))
        for i in range(whole, n):
            store_scalar(yr + 4 * i, load_scalar(xr + 4 * i, ONE) * r * load_scalar(weight + 4 * i, ONE))


@jit
def _rms_norm_rows(x, weight, y, rstd, start, stop, n, eps):
    _rms_norm_part(x, weight, y, rstd, start, stop, n, eps)


@part()
def _cross_entropy_part(logits, targets, loss, lse, start, stop, n, ignore_index, smoothing):
    whole = n - n % LANES
    for row in range(start, stop):
        xr = logits + 4 * n * row
        top = splat(_LOWEST)
        for i in range(0, whole, LANES):
            top = maximum(load(xr + 4 * i, ONE), top)
        m = hmax(top)
        for i in range(whole, n):
            e = load_scalar(xr + 4 * i, ONE)
            if e > m:
                m = e
        if not (m > _LOWEST and m < -_LOWEST):
            m = F(0)
        acc, shift = splat(F(0)), splat(m)
        for i in range(0, whole, LANES):
            acc = add(acc, exp(sub(load(xr + 4 * i, ONE), shift)))
        total = hsum(acc)
        for i in range(whole, n):
            total += exp_scalar(load_scalar(xr + 4 * i, ONE) - m)
        value = m + _log_scalar(total)
        store_scalar(lse + 4 * row, value)
        target = load_int64(targets + 8 * row)
        if target == ignore_index:
            value = F(0)
        else:
            value -= (F(1) - smoothing) * load_scalar(xr + 4 * target, ONE)
            if smoothing > F(0):
                value -= smoothing * _row_sum(xr, n) / F(n)
        store_scalar(loss + 4 * row, value)


@jit
def _cross_entropy_rows(logits, targets, loss, lse, start, stop, n, ignore_index, smoothing):
    _cross_entropy_part(logits, targets, loss, lse, start, stop, n, ignore_index, smoothing)


@part()
def _cross_entropy_backward_part(
    scale, logits, targets, lse, dlogits, start, stop, n, ignore_index, smoothing
):
    whole = n - n % LANES
    share = smoothing / F(n)
    for row in range(start, stop):
        xr, dxr = logits + 4 * n * row, dlogits + 4 * n * row
        target = load_int64(targets + 8 * row)
        if target == ignore_index:  # not a product with 0: the row may hold NaN
            for i in range(0, whole, LANES):
                store(dxr + 4 * i, splat(F(0)))
            for i in range(whole, n):
                store_scalar(dxr + 4 * i, F(0))
        else:
            total = load_scalar(lse + 4 * row, ONE)
            for i in range(0, whole, LANES):
                p = exp(sub(load(xr + 4 * i, ONE), splat(total)))
                store(dxr + 4 * i, mul(sub(p, splat(share)), splat(scale)))
            for i in range(whole, n):
                p1 = exp_scalar(load_scalar(xr + 4 * i, ONE) - total)
                store_scalar(dxr + 4 * i, (p1 - share) * scale)
            at = dxr + 4 * target
            store_scalar(at, load_scalar(at, ONE) - scale * (F(1) - smoothing))


@jit
def _cross_entropy_backward_rows(
    scale, logits, targets, lse, dlogits, start, stop, n, ignore_index, smoothing
):
    _cross_entropy_backward_part(
        scale, logits, targets, lse, dlogits, start, stop, n, ignore_index, smoothing
    )


# --- the contract's functions -------------------------------------------------------------------------------


def gelu(x: Array, tanh: bool) -> Array:
    """See ``arrays.gelu``."""
    y = np.empty_like(x)
    _flat(x.size, _gelu_piece, (address(x), address(y)), (tanh,))
    return y


def gelu_backward(dy: Array, x: Array, tanh: bool) -> Array:
    """See ``arrays.gelu_backward``."""
    dx = np.empty_like(x)
    _flat(x.size, _gelu_backward_piece, (address(dy), address(x), address(dx)), (tanh,))
    return dx


def silu(x: Array) -> Array:
    """See ``arrays.silu``."""
    y = np.empty_like(x)
    _flat(x.size, _silu_piece, (address(x), address(y)), ())
    return y


def silu_backward(dy: Array, x: Array) -> Array:
    """See ``arrays.silu_backward``."""
    dx = np.empty_like(x)
    _flat(x.size, _silu_backward_piece, (address(dy), address(x), address(dx)), ())
    return dx


def swiglu(gate: Array, up: Array) -> Array:
    """See ``arrays.swiglu``."""
    y = np.empty_like(gate)
    _flat(gate.size, _swiglu_piece, (address(gate), address(up), address(y)), ())
    return y


def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """See ``arrays.swiglu_backward``."""
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    where = (address(dy), address(gate), address(up), address(dgate), address(dup))
    _flat(gate.size, _swiglu_backward_piece, where, ())
    return dgate, dup


def adam(
    parameter: Array,
    grad: Array,
    m: Array,
    v: Array,
    betas: tuple[float, float],
    step_size: float,
    root: float,
    eps: float,
    shrink: float,
) -> None:
    """See ``arrays.adam``."""
    arrays = (parameter, grad, m, v)
    if not all(array.flags.c_contiguous for array in arrays):
        return in_arrays(*arrays, betas, step_size, root, eps, shrink)
    numbers = (F(betas[0]), F(betas[1]), F(step_size), F(root), F(eps), F(shrink))
    _flat(parameter.size, _adam_piece, tuple(map(address, arrays)), numbers)
    return None


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """See ``arrays.layer_norm``."""
    rows, n = x.shape
    weight, bias = _contiguous(weight), None if bias is None else _contiguous(bias)
    y, mean, rstd = np.empty_like(x), np.empty(rows, F), np.empty(rows, F)
    where = (address(x), address(weight), 0 if bias is None else address(bias))
    out = (address(y), address(mean), address(rstd))
    _rows(rows, n, lambda a, b, _: _layer_norm_rows(*where, *out, a, b, n, F(eps)))
    return y, mean, rstd


def layer_norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """See ``arrays.layer_norm_backward``."""
    dx, sums = _norm_backward(dy, x, _contiguous(weight), mean, rstd, 2)
    return dx, sums[0], sums[1]


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See ``arrays.rms_norm``."""
    rows, n = x.shape
    weight = _contiguous(weight)
    y, rstd = np.empty_like(x), np.empty(rows, F)
    where = (address(x), address(weight), address(y), address(rstd))
    _rows(rows, n, lambda a, b, _: _rms_norm_rows(*where, a, b, n, F(eps)))
    return y, rstd


def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
    """See ``arrays.rms_norm_backward``."""
    dx, sums = _norm_backward(dy, x, _contiguous(weight), None, rstd, 1)
    return dx, sums[0]


def cross_entropy(logits: Array, targets: Array, ignore_index: int, smoothing: float) -> tuple[Array, Array]:
    """See ``arrays.cross_entropy``."""
    rows, n = logits.shape
    loss, lse = np.empty(rows, F), np.empty(rows, F)
    where = (address(logits), address(targets), address(loss), address(lse))
    _rows(rows, n, lambda a, b, _: _cross_entropy_rows(*where, a, b, n, ignore_index, F(smoothing)))
    return loss, lse


def cross_entropy_backward(
    scale: float, logits: Array, targets: Array, lse: Array, ignore_index: int, smoothing: float
) -> Array:
    """See ``arrays.cross_entropy_backward``."""
    rows, n = logits.shape
    dlogits = np.empty_like(logits)
    where = (address(logits), address(targets), address(lse), address(dlogits))
    run = _cross_entropy_backward_rows
    _rows(rows, n, lambda a, b, _: run(F(scale), *where, a, b, n, ignore_index, F(smoothing)))
    return dlogits


def _norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array | None, rstd: Array, sums: int
) -> tuple[Array, Array]:
    """Gradient of x, and the sums over rows (dweight, and dbias when ``sums`` is 2)."""
    rows, n = x.shape
    dx = np.empty_like(x)
    partial = np.zeros((sums, -(-rows // _block(n)), n), F)
    where = (address(dy), address(x), address(weight), 0 if mean is None else address(mean), address(rstd))

    def run(start: int, stop: int, block: int) -> None:
        dweight = address(partial) + 4 * n * block
        dbias = dweight + 4 * n * partial.shape[1]
        _norm_backward_rows(*where, address(dx), dweight, dbias, start, stop, n)

    _rows(rows, n, run)
    return dx, partial.sum(axis=1)


def _flat(size: int, kernel: Any, where: tuple[int, ...], options: tuple[Any, ...]) -> None:
    """Run ``kernel`` over [0, size) in pieces. A last piece shorter than a vector joins the one before."""
    if size <= ALONE:
        kernel(*where, 0, size, *options)
        return
    starts = list(range(0, size - LANES, PIECE))
    items = list(zip(starts, [*starts[1:], size], strict=True))
    _threads.run(lambda item: kernel(*where, *item, *options), items)


def _rows(rows: int, n: int, run: Callable[[int, int, int], None]) -> None:
    """Call ``run(start, stop, index)`` for blocks of rows."""
    step = _block(n)
    items = [(start, min(start + step, rows), index) for index, start in enumerate(range(0, rows, step))]
    if rows * n <= ALONE:
        for item in items:
            run(*item)
    else:
        _threads.run(lambda item: run(*item), items)


def _block(n: int) -> int:
    """How many rows of n features make a block."""
    return max(1, ROWS // max(n, 1))


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array)

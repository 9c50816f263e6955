"""From arrays to kernels and back: see ``kernels.linear_attention.contract``."""

import ctypes
import struct
from typing import Any, Final

import numpy as np

from npattn._typing import Array
from npattn.kernels import _team
from npattn.kernels._jit import INTERPRETED, address
from npattn.kernels._simd import _host
from npattn.kernels.linear_attention.contract import Forward, Grads, State
from npattn.kernels.linear_attention.numba_cpu import _units
from npattn.kernels.linear_attention.numba_cpu._params import (
    BLOCK,
    BOTH,
    CHUNK,
    ELU1,
    LAYOUT,
    ONE,
    PLAIN,
    RELU,
    Call,
)

USABLE: Final = not INTERPRETED

_KINDS: Final = {"identity": PLAIN, "elu1": ELU1, "relu": RELU}

_PAIRS: Final = 8  # so many (batch element, key head) pairs are units enough
_SHORTEST: Final = 256  # rows of a segment
_SERIAL: Final = 200_000  # multiply-adds below which waking a helper costs more than it brings


def forward(
    q: Array,
    k: Array,
    v: Array,
    name: str,
    causal: bool,
    eps: float,
    state: State | None = None,
    keeps_state: bool = False,
) -> Forward:
    """See ``contract.Implementation``."""
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    inverse = np.empty(q.shape[:3], q.dtype)
    kind = _KINDS[name]
    after = _product(
        (q, kind), (k, kind), (v, PLAIN), out, causal, inverse=inverse, eps=eps, state=state,
        keeps_state=keeps_state,
    )  # fmt: skip
    return Forward(out, inverse, after)


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    inverse: Array,
    dout: Array,
    name: str,
    causal: bool,
) -> Grads:
    """See ``contract.Implementation``."""
    grads = Grads(*(np.empty(x.shape, x.dtype) for x in (q, k, v)))
    kind = _KINDS[name]
    _product((dout, BOTH), (v, ONE), (k, kind), grads.q, causal, slope=(q, kind), read=(out, inverse))
    dk, dv = grads.k, grads.v
    if causal:  # what comes later, read backwards, comes before
        q, k, v, out, inverse, dout, dk, dv = (x[:, :, ::-1] for x in (q, k, v, out, inverse, dout, dk, dv))
    _product((v, ONE), (dout, BOTH), (q, kind), dk, causal, slope=(k, kind), read=(out, inverse))
    _product((k, kind), (q, kind), (dout, PLAIN), dv, causal, read=(out, inverse))
    return grads


def _product(
    a: tuple[Array, int],
    b: tuple[Array, int],
    c: tuple[Array, int],
    out: Array,
    causal: bool,
    *,
    slope: tuple[Array, int] | None = None,
    read: tuple[Array, Array] | None = None,
    inverse: Array | None = None,
    eps: float = 0.0,
    state: State | None = None,
    keeps_state: bool = False,
) -> State | None:
    """``below(a, b, c)`` into ``out``, or without causality ``a @ (b.T @ c)``.

    Summed over the query heads that share a key head where b and c are theirs. a, b and c come with what
    happens to them while loaded. The result is divided by its total, and ``inverse`` written, where that is
    given. ``read`` is (out, inverse) of the forward pass, for BOTH; where neither a nor b is that, the rows
    of b are multiplied by inverse.
    """
    dtype, (batch, heads_a, rows, a_dim) = a[0].dtype, a[0].shape
    heads_c, length, c_dim = c[0].shape[1:]
    heads = min(heads_a, heads_c)
    pairs, dim = batch * heads, a_dim + (a[1] in (ONE, BOTH))
    segments = 1 if pairs >= _PAIRS else max(1, min(-(-_PAIRS // pairs), length // _SHORTEST))
    segment_rows = -(-length // (segments * CHUNK)) * CHUNK
    segments = max(1, -(-length // segment_rows))
    columns = _padded(c_dim, dtype)
    states = np.zeros((pairs, segments, dim * columns + _padded(dim, dtype)), dtype)
    shares = inverse if read is None else read[1]
    call = Call(
        *_at(a[0]), a[1], a_dim, heads_a // heads, *_at(b[0]), b[1], b[0].shape[3], *_at(c[0]), c[1], c_dim,
        heads_c // heads, *(_NONE if read is None else _at(read[0])), *_at(out),
        *(_NONE if slope is None else _at(slope[0])), PLAIN if slope is None else slope[1],
        *(_NONE if shares is None else _at(shares)), inverse is not None,
        read is not None and BOTH not in (a[1], b[1]), dim, pairs, heads, rows, length, segments,
        segment_rows, address(states), states.strides[1], False, eps,
    )  # fmt: skip

    vector, size = 4 * _host.WIDTH, dtype.itemsize
    row, c_row = _padded(dim, dtype) * size, columns * size
    work = batch * max(heads_a, heads_c) * max(rows, length) * dim * c_dim
    if not causal:
        _run(_units.sum_units, call, segments * pairs, work, CHUNK * (row + c_row), dtype)
        call = call._replace(segments=1)
        if segments > 1:
            total = np.ascontiguousarray(states.sum(1))
            call = call._replace(states=address(total), state_bytes=total.strides[0])
        units = batch * heads_a * -(-rows // BLOCK)
        _run(_units.apply_units, call, units, work, CHUNK * (row + c_row + vector), dtype)
        return None

    if segments > 1:  # the state at each segment's beginning
        _run(_units.sum_units, call, segments * pairs, work, CHUNK * (row + c_row), dtype)
        states[:, 1:] = np.cumsum(states[:, :-1], axis=1)
        states[:, 0] = 0
    if state is not None:
        kv, z = _views(states, batch, heads, dim, c_dim, columns)
        kv += state.kv[:, :, None]
        z += state.z[:, :, None]
    scratch = (dim + 3 * CHUNK + 1) * c_row + CHUNK * row + dim * CHUNK * size
    scratch += (CHUNK + 1) * (row + CHUNK * size + vector) + CHUNK * vector
    _run(_units.walk_units, call._replace(keeps_state=keeps_state), segments * pairs, work, scratch, dtype)
    if not keeps_state:
        return None
    kv, z = _views(states, batch, heads, dim, c_dim, columns)
    return State(kv[:, :, -1].copy(), z[:, :, -1].copy())


def _views(states: Array, batch: int, heads: int, dim: int, c_dim: int, columns: int) -> tuple[Array, Array]:
    """Views of (kv, z), (batch, heads, segments, dim, c_dim) and (batch, heads, segments, dim)."""
    states = states.reshape(batch, heads, *states.shape[1:])
    kv, z = states[..., : dim * columns], states[..., dim * columns : dim * columns + dim]
    return kv.reshape(*kv.shape[:-1], dim, columns)[..., :c_dim], z


def _run(kernel: Any, call: Call, units: int, work: int, scratch: int, dtype: np.dtype[Any]) -> None:
    record = struct.pack(LAYOUT, *call)
    buffer = ctypes.create_string_buffer(record, len(record))
    items = 1 if work < _SERIAL else units
    _team.run(kernel, ctypes.addressof(buffer), units, items, scratch, dtype.type(1))


_NONE: Final = (0, 0, 0, 0)


def _at(x: Array) -> tuple[int, int, int, int]:
    """Address and strides of the first three axes."""
    return address(x), *x.strides[:3]  # type: ignore[return-value]


def _padded(count: int, dtype: np.dtype[Any]) -> int:
    """``count`` elements rounded up to whole vectors."""
    lanes = 4 * _host.WIDTH // dtype.itemsize
    return -(-count // lanes) * lanes


__all__ = ["USABLE", "backward", "forward"]

"""Random masks for property tests, with the definition of each in plain Python beside it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from npattn.masks import (
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Extent,
    Full,
    GlobalTokens,
    Padding,
    Predicate,
    Prefix,
    Sparse,
    Strided,
    Window,
    bigbird,
    local_strided,
    longformer,
)


def one_mask(kind: str, extent: Extent, rng: np.random.Generator):
    """A random mask of ``kind`` and its definition ``visible(b, h, i, j)`` on Python ints."""
    batch, heads, len_q, len_k = extent
    offset = [None, 0, int(rng.integers(-len_k - 2, len_k + 3)), rng.integers(-len_q, len_k + 1, batch)][
        rng.integers(4)
    ]

    def at(b):
        if offset is None:
            return len_k - len_q
        return int(offset) if np.ndim(offset) == 0 else int(offset[b])

    if kind == "Full":
        return Full(), lambda b, h, i, j: True
    if kind == "Causal":
        return Causal(offset), lambda b, h, i, j: j <= i + at(b)
    if kind == "Window":
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(0, 40)) for _ in range(2))
        return (
            Window(left, right, offset),
            lambda b, h, i, j: (
                (left is None or i + at(b) - left <= j) and (right is None or j <= i + at(b) + right)
            ),
        )
    if kind == "Padding":
        keys = rng.integers(0, len_k + 2, batch)
        queries = rng.integers(0, len_q + 2, batch) if rng.integers(2) else None
        return Padding(keys, queries), lambda b, h, i, j: j < keys[b] and (queries is None or i < queries[b])
    if kind == "Prefix":
        length = int(rng.integers(0, len_k + 2))
        return Prefix(length), lambda b, h, i, j: j < length
    if kind == "Documents":
        return _documents(extent, rng)
    if kind == "GlobalTokens":
        chosen = rng.integers(0, max(len_q, len_k), rng.integers(0, 4)).tolist() if max(len_q, len_k) else []
        return GlobalTokens(chosen), lambda b, h, i, j: i in chosen or j in chosen
    if kind == "Strided":
        stride = int(rng.choice([1, 2, 3, 7, 16, 50, 64]))
        return Strided(stride), lambda b, h, i, j: i % stride == 0 or j % stride == 0
    if kind == "Dilated":
        radius, dilation = int(rng.integers(0, 12)), int(rng.choice([1, 2, 3, 8, 16, 33]))
        return Dilated(
            radius, dilation, offset
        ), lambda b, h, i, j: abs(i + at(b) - j) <= radius * dilation and (i + at(b) - j) % dilation == 0
    if kind == "Blocks":
        size = int(rng.choice([1, 3, 16, 40]))
        shape = (*[(), (heads,), (batch, heads)][rng.integers(3)], -(-len_q // size) + 1, -(-len_k // size))
        layout = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
        full = np.broadcast_to(layout, (batch, heads, *shape[-2:]))
        return Blocks(layout, size), lambda b, h, i, j: full[b, h, i // size, j // size]
    if kind == "Dense":
        shapes = [
            (batch, heads, len_q, len_k),
            (batch, 1, 1, len_k),
            (heads, len_q, 1),
            (len_q, len_k),
            (1,),
            (),
        ]
        array = rng.random(shapes[rng.integers(len(shapes))]) < rng.choice([0.02, 0.5, 0.98])
        full = np.broadcast_to(array, (batch, heads, len_q, len_k))
        return Dense(array), lambda b, h, i, j: full[b, h, i, j]
    if kind == "Sparse":
        array = rng.random((len_q, len_k)) < rng.choice([0.0, 0.02, 0.5])
        indptr = np.concatenate([[0], np.cumsum(array.sum(axis=1))])
        csr = SimpleNamespace(indptr=indptr, indices=np.nonzero(array)[1], shape=array.shape)
        return Sparse(csr), lambda b, h, i, j: array[i, j]
    if kind == "Predicate":
        factor = int(rng.integers(1, 9))
        rules = [
            lambda b, h, i, j: (i * factor + j) % 5 < 2,
            lambda b, h, i, j: (i + b * factor + h) % 3 != j % 3,
            lambda b, h, i, j: (j + h) % 2 == 0,
        ]
        rule = rules[rng.integers(3)]
        return Predicate(rule, cache=bool(rng.integers(2))), rule
    if kind == "longformer":
        radius, chosen = int(rng.integers(0, 30)), [0] if max(len_q, len_k) else []
        return longformer(radius, chosen), lambda b, h, i, j: abs(i - j) <= radius or i == 0 or j == 0
    if kind == "local_strided":
        width, stride = int(rng.integers(0, 60)), int(rng.choice([1, 8, 33]))
        return local_strided(
            width, stride
        ), lambda b, h, i, j: abs(i - j) <= width // 2 or i % stride == 0 or j % stride == 0
    assert kind == "bigbird"
    size = int(rng.choice([4, 16, 40]))
    mask = bigbird(size, int(rng.choice([0, 1, 3])), int(rng.integers(0, 3)), int(rng.integers(0, 3)), 5)
    layout = mask._layout(extent)[0, 0]
    return mask, lambda b, h, i, j: layout[i // size, j // size]


def _documents(extent: Extent, rng: np.random.Generator):
    count = int(rng.integers(1, 6))
    queries, keys = (
        np.diff(np.concatenate([[0], np.sort(rng.integers(0, total + 1, count - 1)), [total]]))
        for total in (extent.len_q, extent.len_k)
    )
    causal = bool(rng.integers(2))
    window = [None, int(rng.integers(0, 9)), (int(rng.integers(0, 9)), None), (None, 2)][rng.integers(4)]
    left, right = (window, 0 if causal else window) if isinstance(window, int) else window or (None, None)
    segment_q, segment_k = np.repeat(np.arange(count), queries), np.repeat(np.arange(count), keys)
    start_q, start_k = np.cumsum(queries) - queries, np.cumsum(keys) - keys

    def visible(b, h, i, j):
        s = segment_q[i]
        if segment_k[j] != s:
            return False
        own = i - start_q[s] + keys[s] - queries[s]
        at = j - start_k[s]
        return (
            (not causal or at <= own)
            and (left is None or at >= own - left)
            and (right is None or at <= own + right)
        )

    return Documents(queries, keys, causal=causal, window=window), visible


KINDS = [
    "Full",
    "Causal",
    "Window",
    "Padding",
    "Prefix",
    "Documents",
    "GlobalTokens",
    "Strided",
    "Dilated",
    "Blocks",
    "Dense",
    "Sparse",
    "Predicate",
    "longformer",
    "local_strided",
    "bigbird",
]


def composition(extent: Extent, rng: np.random.Generator, depth: int = 3, *, define: bool = True):
    """A random composition and its definition as a dense array (empty unless ``define``)."""
    if depth == 0 or rng.random() < 0.25:
        mask, visible = one_mask(KINDS[rng.integers(len(KINDS))], extent, rng)
        return mask, by_definition(visible, extent) if define else np.zeros(0, bool)
    left, dense = composition(extent, rng, depth - 1, define=define)
    operator = rng.integers(5)
    if operator == 0:
        return ~left, ~dense
    right, other = composition(extent, rng, depth - 1, define=define)
    return (left & right, dense & other) if operator < 3 else (left | right, dense | other)


def by_definition(visible, extent: Extent) -> np.ndarray:
    """Ask ``visible`` about every pair, one by one."""
    dense = np.zeros(extent, bool)
    for place in np.ndindex(*extent):
        dense[place] = visible(*place)
    return dense

"""The table of cases: shapes, masks and features, shared by tests, gradient checks and benchmarks.

Groups: "shapes", "masks" and "features" are small, for correctness; "long", "small", "tiny", "decode" and
"window" are the shapes that speed is measured on. A case is data; ``arguments`` makes its arrays.

>>> from npattn.testing.cases import case, cases
>>> case("gqa").arguments()["query"].shape
(2, 6, 37, 12)
>>> sorted({entry.group for entry in cases()})
['decode', 'features', 'long', 'masks', 'shapes', 'small', 'tiny', 'window']
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from npattn import masks
from npattn._typing import Array
from npattn.masks.base import Mask


@dataclass(frozen=True)
class Case:
    """One call of attention.

    Parameters
    ----------
    name, group : str
    batch, heads_q, len_q, len_k, head_dim : int
    heads_kv, head_dim_v : int, optional
        None: as many as heads_q, as large as head_dim.
    mask : Mask, optional
    bool_mask, bias : str, optional
        Axes of a bool array and of a bias: a letter each, "b" batch, "h" query heads, "q", "k", or "1". They
        may be shorter than four and are then right-aligned, as NumPy broadcasts.
    sinks : bool
    options : dict
        scale, softcap, dropout_p, seed.

    Examples
    --------
    >>> from npattn.testing import Case
    >>> entry = Case("mine", "tiny", batch=1, heads_q=2, len_q=3, len_k=4, head_dim=5)
    >>> entry.arguments()["key"].shape, entry.flops
    ((1, 2, 4, 5), 480.0)
    """

    name: str
    group: str
    batch: int = 2
    heads_q: int = 3
    len_q: int = 37
    len_k: int = 53
    head_dim: int = 12
    heads_kv: int | None = None  # None: heads_q
    head_dim_v: int | None = None  # None: head_dim
    mask: Mask | None = None
    bool_mask: str | None = None
    bias: str | None = None
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # scale, softcap, dropout_p, seed

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass, counting visible pairs only."""
        density = 1.0
        if self.mask is not None:
            density = self.mask.density(self.len_q, self.len_k, self.batch, self.heads_q)
        pairs = float(self.batch * self.heads_q) * self.len_q * self.len_k * density
        return 2 * pairs * (self.head_dim + (self.head_dim_v or self.head_dim))

    def shape(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes given as letters."""
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.len_q, "k": self.len_k, "1": 1}
        return tuple(sizes[axis] for axis in axes)

    def arguments(self, dtype: Any = np.float64, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments for ``npattn.attention``, random and the same for the same seed.

        Values are rounded to ``dtype`` last, so that two dtypes hold nearly the same numbers.
        """
        rng = np.random.default_rng([seed, *self.name.encode()])

        def normal(*shape: int) -> Array:
            if dtype == np.float32:  # benchmarks: no second array of twice the size
                return rng.standard_normal(shape, np.float32)
            return rng.standard_normal(shape).astype(dtype)

        heads_kv = self.heads_q if self.heads_kv is None else self.heads_kv
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        result: dict[str, Any] = {
            "query": normal(self.batch, self.heads_q, self.len_q, self.head_dim),
            "key": normal(self.batch, heads_kv, self.len_k, self.head_dim),
            "value": normal(self.batch, heads_kv, self.len_k, head_dim_v),
            **self.options,
        }
        if self.mask is not None:
            result["mask"] = self.mask
        if self.bool_mask is not None:
            result["mask"] = rng.random(self.shape(self.bool_mask)) < 0.6
        if self.bias is not None:
            bias = normal(*self.shape(self.bias))
            bias[rng.random(bias.shape) < 0.05] = -np.inf
            result["bias"] = bias
        if self.sinks:
            result["sinks"] = normal(self.heads_q)
        return result


def cases(*groups: str) -> list[Case]:
    """All cases, or those of the named groups, in the order of the table.

    Parameters
    ----------
    *groups : str
        Names of groups, see above; none for all.

    Returns
    -------
    found : list of Case

    Examples
    --------
    >>> from npattn.testing import cases
    >>> len(cases("tiny")) < len(cases())
    True
    """
    unknown = set(groups) - {entry.group for entry in _TABLE}
    if unknown:
        raise ValueError(f"unknown group {sorted(unknown)}; there are {sorted({e.group for e in _TABLE})}")
    return [entry for entry in _TABLE if not groups or entry.group in groups]


def case(name: str) -> Case:
    """The case of that name.

    Parameters
    ----------
    name : str

    Returns
    -------
    found : Case
        What ``arguments`` then makes arrays of.

    Examples
    --------
    >>> from npattn.testing import case
    >>> case("gqa").heads_q, case("gqa").heads_kv
    (6, 2)
    """
    for entry in _TABLE:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown case {name!r}; there are {[entry.name for entry in _TABLE]}")


def _shape(name: str, b: int, hq: int, hk: int, lq: int, lk: int, d: int, dv: int, **more: Any) -> Case:
    return Case(name, more.pop("group", "shapes"), b, hq, lq, lk, d, hk, dv, **more)


def _speed(group: str, b: int, h: int, length: int, d: int, kind: str = "full") -> Case:
    mask = masks.Causal() if kind == "causal" else None
    return Case(f"{b},{h},{length},{d} {kind}", group, b, h, length, length, d, mask=mask)


_TABLE: Final = [
    # sizes: primes and all different, ones, beside and beyond a tile, long and thin
    _shape("plain", 2, 3, 3, 37, 53, 12, 12),
    _shape("primes", 2, 5, 5, 31, 67, 11, 13),
    _shape("one of everything", 1, 1, 1, 1, 1, 1, 1),
    _shape("one query", 2, 4, 2, 1, 97, 16, 16),
    _shape("one key", 2, 4, 2, 97, 1, 16, 16),
    _shape("exact tiles", 1, 2, 2, 128, 128, 64, 64),
    _shape("one beyond a tile", 1, 2, 2, 129, 257, 32, 32),
    _shape("one short of a tile", 1, 2, 1, 127, 191, 32, 32),
    _shape("many keys", 1, 1, 1, 5, 1031, 8, 8),
    _shape("many queries", 1, 1, 1, 1031, 5, 8, 8),
    _shape("wide heads", 1, 1, 1, 33, 65, 160, 96),
    _shape("very wide heads", 1, 1, 1, 17, 40, 256, 264),
    _shape("narrow heads", 1, 2, 2, 65, 70, 1, 3),
    _shape("values wider than keys", 1, 2, 2, 70, 65, 8, 40),
    _shape("many small heads", 9, 8, 8, 6, 7, 16, 16),
    # masks
    Case("causal", "masks", mask=masks.Causal()),
    Case("causal, top left", "masks", mask=masks.Causal(offset=0)),
    Case("causal, per batch", "masks", mask=masks.Causal(offset=np.array([3, -5]))),
    Case("causal, some rows empty", "masks", len_q=150, len_k=70, mask=masks.Causal()),
    Case("causal, long", "masks", 1, 2, 300, 300, 16, mask=masks.Causal()),
    Case("window", "masks", 1, 2, 300, 300, 16, mask=masks.Window(20, 3)),
    Case("window, unbounded left", "masks", mask=masks.Window(None, 4, offset=0)),
    Case("padding", "masks", 3, 2, 70, 90, mask=masks.Padding(np.array([90, 0, 41]), np.array([70, 70, 13]))),
    Case("documents", "masks", 1, 2, 96, 96, mask=masks.Documents(np.array([40, 0, 7, 49]), causal=True)),
    Case("prefix", "masks", mask=masks.Prefix(11) | masks.Causal(offset=0)),
    Case("holes", "masks", 1, 2, 260, 260, 16, mask=masks.Causal() & ~masks.Window(9, 0)),
    Case(
        "causal and padding", "masks", 2, 2, 140, 140, mask=masks.Causal() & masks.Padding(np.array([100, 9]))
    ),
    Case("bool, all axes", "masks", bool_mask="bhqk"),
    Case("bool, pairs", "masks", bool_mask="qk"),
    Case("bool, keys of each batch", "masks", bool_mask="b11k"),
    Case("bool, queries of each head", "masks", bool_mask="hq1"),
    Case("bool, long", "masks", 1, 2, 290, 310, 8, bool_mask="bhqk"),
    # features
    _shape("gqa", 2, 6, 2, 37, 53, 12, 12, group="features"),
    _shape("mqa", 2, 5, 1, 37, 53, 12, 20, group="features"),
    Case("scale", "features", options={"scale": -0.7}),
    Case("scale above one", "features", options={"scale": 1.7}),
    Case("softcap", "features", options={"softcap": 1.5}),
    Case("sinks", "features", sinks=True),
    Case("sinks, causal", "features", len_q=90, len_k=40, sinks=True, mask=masks.Causal()),
    Case("bias, all axes", "features", bias="bhqk"),
    Case("bias, pairs", "features", bias="qk"),
    Case("bias, keys", "features", bias="k"),
    Case("bias, queries of each head", "features", bias="hq1"),
    Case("bias, batch", "features", bias="b111"),
    Case("dropout", "features", options={"dropout_p": 0.3, "seed": 7}),
    Case("gqa, causal", "features", 2, 6, 140, 140, 12, 3, mask=masks.Causal()),
    Case("gqa, mask of each head", "features", 2, 6, 37, 53, 12, 3, bool_mask="hqk"),
    Case("gqa, bias of each head", "features", 2, 6, 37, 53, 12, 3, bias="hqk"),
    Case(
        *("all at once", "features", 2, 6, 70, 83, 12, 2, 20),
        bool_mask="b1qk",
        bias="hqk",
        sinks=True,
        options={"scale": 0.4, "softcap": 2.0, "dropout_p": 0.2, "seed": 2**40 + 5},
    ),
    Case(
        *("all at once, causal", "features", 2, 4, 150, 140, 16, 2),
        mask=masks.Causal(),
        bias="b1qk",
        sinks=True,
        options={"softcap": 3.0, "dropout_p": 0.5, "seed": 3},
    ),
    # speed: (batch, heads, length, head_dim)
    *(_speed("long", 1, 8, 1024, 64, kind) for kind in ("full", "causal")),
    *(_speed("long", 1, 8, 4096, 64, kind) for kind in ("full", "causal")),
    *(_speed("long", 1, 8, 4096, 128, kind) for kind in ("full", "causal")),
    *(_speed("small", 8, 12, 128, 64, kind) for kind in ("full", "causal")),
    *(_speed("small", 8, 12, 128, 32, kind) for kind in ("full", "causal")),
    _speed("small", 32, 12, 64, 32),
    _speed("tiny", 1, 1, 16, 64),
    _speed("tiny", 1, 1, 1, 16),
    Case("decode", "decode", 1, 32, 1, 8192, 128, 8),
    Case("decode, batch 8", "decode", 8, 32, 1, 2048, 128, 8),
    Case("window 512", "window", 1, 2, 65536, 65536, 64, mask=masks.Window(511)),
    Case("window 128", "window", 1, 2, 65536, 65536, 64, mask=masks.Window(127)),
]
assert len({entry.name for entry in _TABLE}) == len(_TABLE), "names of cases must differ"

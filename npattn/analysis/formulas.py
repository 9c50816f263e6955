"""What attention, layers and models cost, by length: operations, memory traffic and peak memory."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npattn._arrays import accumulation_dtype

if TYPE_CHECKING:
    from npattn.masks import Mask


class Cost(NamedTuple):
    """The cost of one call.

    Attributes
    ----------
    flops : int
        Multiplications and additions of the matrix products, two per multiply-add. Softmax, norms and
        activations are left out: they grow with the inputs, or as ``exps``.
    exps : int
        Exponentials of the softmax: one per visible pair and recomputation.
    bytes_moved : int
        Bytes that must pass between memory and processor: inputs and parameters read once, results written
        once, and whatever does not fit a cache by construction (the logits of the dense algorithm).
    peak_bytes : int
        Memory held at once beyond inputs and parameters: the results and the working space.
    """

    flops: int
    exps: int
    bytes_moved: int
    peak_bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte moved: below the machine's own ratio, memory is the limit."""
        return self.flops / max(self.bytes_moved, 1)


def attention_cost(
    len_q: int,
    len_k: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    mask: "Mask | None" = None,
    algorithm: str = "tiled",
    backward: bool = False,
    dtype: Any = np.float32,
    tile: tuple[int, int] = (64, 64),
) -> Cost:
    """Operations, traffic and memory of one attention call.

    For P visible pairs, head_dim D and head_dim_v E, summed over batch and query heads::

        forward   2 P (D + E)                 q k^T and p v
        backward  2 P (3 D + 2 E)             q k^T again, then dv, dp, dq, dk        (tiled)
                  2 P (2 D + 2 E)             the weights were kept                   (dense)

    Parameters
    ----------
    len_q, len_k : int
        Lengths; ``len_k`` None means ``len_q``.
    batch, heads, heads_kv : int
        Batch elements, query heads, and key and value heads (None: as many as query heads).
    head_dim, head_dim_v : int
        Sizes of a head's query and key, and of its value (None: ``head_dim``).
    mask : Mask, optional
        Its density scales the pairs of the tiled algorithm. The dense one computes every pair and throws
        the masked ones away.
    algorithm : {"tiled", "dense"}, default "tiled"
        ``npattn.attention``, or the formula written with whole matrices.
    backward : bool, default False
        Count the backward pass as well.
    dtype : dtype, default float32
        Of the arrays; logits and sums take the accumulation dtype.
    tile : tuple of int, default (64, 64)
        Tile of queries and keys whose logits the tiled algorithm holds at once.

    Returns
    -------
    cost : Cost
        Operations, exponentials, bytes moved, peak bytes.

    Raises
    ------
    ValueError
        For another algorithm.

    Notes
    -----
    Pairs are counted exactly; the tiles that a mask's boundary cuts through are computed whole, which the
    count leaves out (about half a tile for each query and boundary).

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, theorem 2; T. Dao, "FlashAttention-2", 2023, section 4.1
    for this way of counting operations.

    Examples
    --------
    >>> from npattn.analysis import attention_cost
    >>> dense = attention_cost(4096, heads=8, head_dim=64, algorithm="dense")
    >>> tiled = attention_cost(4096, heads=8, head_dim=64)
    >>> dense.flops == tiled.flops, dense.peak_bytes // tiled.peak_bytes
    (True, 124)
    """
    if algorithm not in ("tiled", "dense"):
        raise ValueError(f'algorithm must be "tiled" or "dense", got {algorithm!r}')
    len_k = len_q if len_k is None else len_k
    heads_kv = heads if heads_kv is None else heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    item = np.dtype(dtype).itemsize
    acc = accumulation_dtype(np.dtype(dtype)).itemsize

    every_pair = batch * heads * len_q * len_k
    pairs = every_pair
    if mask is not None and algorithm == "tiled":
        pairs = round(mask.density(len_q, len_k, batch=batch, heads=heads) * every_pair)

    q_bytes = batch * heads * len_q * head_dim * item
    k_bytes = batch * heads_kv * len_k * head_dim * item
    v_bytes = batch * heads_kv * len_k * head_dim_v * item
    out_bytes = batch * heads * len_q * head_dim_v * item
    statistic_bytes = 2 * batch * heads * len_q * acc  # m and l
    inputs = q_bytes + k_bytes + v_bytes

    flops = 2 * pairs * (head_dim + head_dim_v)
    exps = pairs
    if algorithm == "dense":
        matrix = every_pair * acc
        moved = inputs + out_bytes + 4 * matrix  # logits and weights, each written and read
        peak = out_bytes + 2 * matrix
        if backward:
            flops += 2 * pairs * (2 * head_dim + 2 * head_dim_v)
            moved += 2 * inputs + out_bytes + 5 * matrix  # weights read twice, dp and ds
            peak = out_bytes + inputs + 3 * matrix
    else:
        rows, columns = min(tile[0], len_q), min(tile[1], len_k)
        # logits and weights of a tile, its unnormalised output and scaled queries
        workspace = acc * (2 * rows * columns + rows * (head_dim + head_dim_v))
        moved = inputs + out_bytes + statistic_bytes
        peak = out_bytes + statistic_bytes + workspace
        if backward:
            flops += 2 * pairs * (3 * head_dim + 2 * head_dim_v)
            exps += pairs
            moved += 2 * inputs + 2 * out_bytes + statistic_bytes
            peak += inputs + statistic_bytes // 2 + workspace  # gradients and delta
    return Cost(flops, exps, moved, peak)


def linear_attention_cost(
    len_q: int,
    len_k: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: Any = np.float32,
) -> Cost:
    """Operations, traffic and memory of ``linear_attention`` (not causal), which grow with the length alone.

    Parameters
    ----------
    len_q, len_k : int
        Lengths; ``len_k`` None means ``len_q``.
    batch, heads : int
        Batch elements and heads.
    head_dim, head_dim_v : int
        Sizes of a head's features, and of its value (None: ``head_dim``).
    dtype : dtype, default float32
        Of the arrays.

    Returns
    -------
    cost : Cost
        ``exps`` counts the feature map elu(x) + 1: one per element of query and key.

    Notes
    -----
    The state of a head is a (head_dim, head_dim_v + 1) matrix: a product for each key to build it and one
    for each query to read it.

    References
    ----------
    A. Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.2.

    Examples
    --------
    >>> from npattn.analysis import attention_cost, linear_attention_cost
    >>> linear_attention_cost(8192).flops / linear_attention_cost(4096).flops
    2.0
    >>> attention_cost(8192).flops / attention_cost(4096).flops
    4.0
    """
    len_k = len_q if len_k is None else len_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    item = np.dtype(dtype).itemsize
    acc = accumulation_dtype(np.dtype(dtype)).itemsize
    per_head = batch * heads
    state = head_dim * (head_dim_v + 1)  # (features, values and their sum)
    features = per_head * (len_q + len_k) * head_dim
    out_bytes = per_head * len_q * head_dim_v * item
    inputs = features * item + per_head * len_k * head_dim_v * item
    return Cost(
        flops=2 * per_head * (len_q + len_k) * state,
        exps=features,
        bytes_moved=inputs + out_bytes,
        # out, its denominators and the states; what is in tiles counts for nothing
        peak_bytes=out_bytes + per_head * (len_q + state) * acc,
    )

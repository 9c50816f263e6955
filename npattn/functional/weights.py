"""The weights themselves, of all queries or of chosen ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._arrays import array_module, to_numpy
from npattn._typing import Array
from npattn.functional._canonical import canonical, visible_pairs
from npattn.kernels.select import TILE, load
from npattn.masks.base import Mask


def attention_weights(
    query: Array,
    key: Array,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    rows: Sequence[int] | Array | None = None,
) -> Array:
    """The softmax weights of ``attention``, of all queries or of chosen ones.

    Parameters
    ----------
    query, key, mask, bias, scale, softcap, sinks
        As in ``attention``.
    rows : sequence of int, optional
        Query indices, in any order, repeats allowed, negative ones counted from the end. None: all.

    Returns
    -------
    weights : (..., heads_q, len_q or len(rows), len_k) array
        In the promoted input dtype. A row sums to 1; to less with a sink; to 0 where no key is seen.

    Raises
    ------
    IndexError
        ``rows`` holds something that is not the index of a query.
    ValueError, TypeError
        As ``attention``.

    Notes
    -----
    Time and memory are O(heads_q · rows · len_k): ask for the rows to look at, and see ``attention_stats``
    for what can be known of all of them without the matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_weights
    >>> q = np.array([[[0.0], [1.0]]])
    >>> attention_weights(q, np.log([[[1.0], [3.0]]]), rows=[1, 0]).tolist()
    [[[0.25, 0.75], [0.5, 0.5]]]
    """
    inputs = canonical(query, key, key, mask, bias, scale, softcap, sinks)
    layout, problem, mask, q, k, _, bias, sinks = inputs
    xp = array_module(q)
    index = None if rows is None else _row_index(rows, layout.len_q)
    if index is not None:
        q = q[:, :, index]
        problem = problem._replace(len_q=len(index))
        if bias is not None and bias.shape[2] != 1:
            bias = bias[:, :, index]
    visible = xp.asarray(visible_pairs(mask, layout.extent, index))
    oracle, _ = load(TILE["oracle"])
    weights: Array = oracle.weights(problem, visible, q, k, bias, sinks)
    shape = (*layout.rows_shape[:-1], problem.len_q, problem.len_k)
    return weights.reshape(shape).astype(problem.dtype, copy=False)


def _row_index(rows: Any, len_q: int) -> Array:
    """``rows`` as indices 0 <= i < len_q."""
    index = to_numpy(rows)
    if index.size == 0 and index.ndim == 1:
        return np.zeros(0, np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise IndexError(f"rows must be a list of query indices, got {index.ndim}-D {index.dtype}")
    outside = index[(index < -len_q) | (index >= len_q)]
    if outside.size:
        raise IndexError(f"row {outside[0]} is out of range for len_q = {len_q}")
    index = index.astype(np.int64)
    return np.where(index < 0, index + len_q, index)

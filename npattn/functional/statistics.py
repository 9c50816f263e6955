"""What attention weights look like, without ever holding them."""

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import array_module, is_cupy
from npattn._typing import Array
from npattn.functional._canonical import canonical
from npattn.kernels.select import STATS, load, select
from npattn.masks.base import Mask
from npattn.plans.build import tile_plan


class AttentionStats(NamedTuple):
    """What ``attention_stats`` returns; floats in accumulation dtype, keys int64."""

    entropy: Array  # (..., heads_q, len_q), in nats
    max_weight: Array  # (..., heads_q, len_q)
    argmax_key: Array  # (..., heads_q, len_q), −1 where no key is seen
    self_weight: Array  # (..., heads_q, len_q)
    lse: Array  # (..., heads_q, len_q)
    top_weights: Array  # (..., heads_q, len_q, top_k), largest first
    top_keys: Array  # (..., heads_q, len_q, top_k), −1 beyond the visible keys
    received: Array  # (..., heads_q, len_k)


def attention_stats(
    query: Array,
    key: Array,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    top_k: int = 0,
    backend: str = "auto",
) -> AttentionStats:
    """Entropy, maxima, top keys and received mass of the attention weights, in memory O(length).

    With the weights p that ``attention`` would use, before dropout: how spread each query's attention is,
    where it goes, and how much of it every key gets.

    Parameters
    ----------
    query, key, mask, bias, scale, softcap, sinks
        As in ``attention``.
    top_k : int
        How many of each query's largest weights to keep, with their keys.
    backend : str
        "auto" takes the fastest that supports the call; "numba" or "numpy" that one or an error with the
        reason.

    Returns
    -------
    AttentionStats
        Named fields. Per query, (..., heads_q, len_q):

        ``entropy``
            −Σ p log p over the keys, in nats: 0 for a query that attends to one key, log n for one that
            attends evenly to n. A sink's own weight does not count.
        ``max_weight``, ``argmax_key``
            The largest weight and the first key that has it.
        ``self_weight``
            The weight of key i + len_k − len_q: the query's own position when the last query stands at the
            last key.
        ``lse``
            Natural logarithm of the softmax denominator.
        ``top_weights``, ``top_keys``
            (..., heads_q, len_q, top_k): the largest weights, largest first, of equal ones the smaller key
            first.

        Per key, (..., heads_q, len_k):

        ``received``
            The sum over queries of the weight on it: Σ received is the number of queries that see a key,
            less what sinks took.

        A query without keys has entropy and weights 0 and keys −1; places of the top beyond its number of
        visible keys likewise.

    Raises
    ------
    ValueError, TypeError
        As ``attention``; a negative top_k.

    See Also
    --------
    attention_weights : the weights themselves, of chosen queries.
    npattn.analysis.head_summary : what these numbers say about each head.

    Notes
    -----
    Time O(visible tiles · head_dim), memory O(length · (1 + top_k)): no array of len_q × len_k is made. The
    entropy is summed as Σ p (log l + m − logit), terms of one sign, so that it is accurate also when nearly
    0. Numba's results are the same bits for any number of threads. CuPy arrays are served by the array-code
    implementation, one head at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_stats
    >>> from npattn.masks import Causal
    >>> q = np.zeros((1, 4, 2))
    >>> stats = attention_stats(q, q, mask=Causal(), top_k=2)
    >>> np.exp(stats.entropy).round(6).tolist()  # how many keys each query attends to, in effect
    [[1.0, 2.0, 3.0, 4.0]]
    >>> stats.received.round(4).tolist()
    [[2.0833, 1.0833, 0.5833, 0.25]]
    >>> stats.top_keys.tolist()
    [[[0, -1], [0, 1], [0, 1], [0, 1]]]
    """
    if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)):
        raise TypeError(f"top_k must be an int, got {type(top_k).__name__}")
    if top_k < 0:
        raise ValueError(f"top_k must not be negative, got {top_k}")
    top_k = int(top_k)
    # The keys stand in for the values, which statistics do not need.
    layout, problem, mask, q, k, _, bias, sinks = canonical(
        query, key, key, mask, bias, scale, softcap, sinks
    )
    implementation = select(STATS, problem, is_cupy(q), backend)
    if 0 in (layout.batch, layout.heads_q, layout.len_q, layout.len_k, layout.head_dim):
        implementation, _ = load(STATS["numpy"])
    plan = tile_plan(mask, layout.extent, *implementation.tile_shape(problem))
    found: Any = implementation.statistics(problem, plan, q, k, bias, sinks, top_k)
    with np.errstate(divide="ignore"):  # log 0 = −inf: the row sees nothing
        lse = found.m + array_module(found.l).log(found.l)
    rows = layout.rows_shape
    return AttentionStats(
        entropy=found.entropy.reshape(rows),
        max_weight=found.max_weight.reshape(rows),
        argmax_key=found.argmax_key.reshape(rows),
        self_weight=found.self_weight.reshape(rows),
        lse=lse.reshape(rows),
        top_weights=found.top_weights.reshape(*rows, top_k),
        top_keys=found.top_keys.reshape(*rows, top_k),
        received=found.received.reshape(*rows[:-1], layout.len_k),
    )


__all__ = ["AttentionStats", "attention_stats"]

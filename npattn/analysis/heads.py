"""What the heads of an attention layer do: how focused each is, and which of them do the same."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array

if TYPE_CHECKING:
    from npattn.functional.statistics import AttentionStats


class HeadSummary(NamedTuple):
    """One number per head and question; every array has shape (heads,), float64.

    Attributes
    ----------
    entropy : ndarray
        Mean entropy of a query's weights, in nats: 0 when every query looks at one key, log(n) when all of
        them spread evenly over n keys.
    max_weight : ndarray
        Mean of the largest weight of each query.
    spread : ndarray
        Mean effective number of keys, exp(entropy) of each query: between 1 and the number of keys.
    self_weight : ndarray
        Mean weight on the aligned diagonal, j = i + len_k - len_q: a token attending to itself.
    most_focused, least_focused : int
        The heads of lowest and highest mean entropy.
    """

    entropy: Array
    max_weight: Array
    spread: Array
    self_weight: Array
    most_focused: int
    least_focused: int


def head_summary(source: "Array | AttentionStats") -> HeadSummary:
    """Entropy, largest weight, spread and self-attention of every head, averaged over batch and queries.

    Parameters
    ----------
    source : ndarray or AttentionStats
        Attention weights (..., heads, len_q, len_k), as ``attention_weights`` or ``layer.weights`` returns
        them; a 2-D array is one head. For sequences too long for the weights: what ``attention_stats``
        returns, which gives the same numbers.

    Returns
    -------
    summary : HeadSummary
        Arrays of shape (heads,) and the numbers of the most and least focused head.

    Raises
    ------
    ValueError
        When the weights have fewer than two axes or no head.

    Notes
    -----
    Queries that see no key are left out of every mean; a head whose queries all see nothing gets 0
    everywhere. Entropy is -sum(p log p) of the weights as they are: with a sink they add up to less than 1.
    Cost: one pass over the weights, one temporary of their size.

    References
    ----------
    K. Clark et al., "What Does BERT Look At?", BlackboxNLP 2019: the entropy of heads in section 3.3.

    Examples
    --------
    Head 0 looks at one key, head 1 at all four alike:

    >>> import numpy as np
    >>> from npattn.analysis import head_summary
    >>> weights = np.stack([np.eye(4), np.full((4, 4), 0.25)])
    >>> summary = head_summary(weights)
    >>> summary.entropy.round(3), summary.spread.round(3), summary.self_weight
    (array([0.   , 1.386]), array([1., 4.]), array([1.  , 0.25]))
    >>> summary.most_focused, summary.least_focused
    (0, 1)
    """
    if hasattr(source, "entropy"):
        stats: Any = source
        entropy, largest, self_weight = stats.entropy, stats.max_weight, stats.self_weight
        seen = stats.argmax_key >= 0
    else:
        weights = check_weights(source)
        xp = array_module(weights)
        entropy = row_entropy(weights)
        largest = weights.max(axis=-1) if weights.shape[-1] else xp.zeros(weights.shape[:-1])
        self_weight = aligned_diagonal(weights)
        seen = weights.sum(axis=-1) > 0
    if entropy.ndim == 1:  # one head
        entropy, largest, self_weight, seen = (part[None] for part in (entropy, largest, self_weight, seen))
    if entropy.shape[-2] == 0:
        raise ValueError(f"a summary needs at least one head, got per-query numbers of shape {entropy.shape}")
    xp = array_module(entropy)
    spread = xp.exp(entropy.astype(np.float64))
    mean = _mean_per_head(entropy, seen)
    return HeadSummary(
        entropy=mean,
        max_weight=_mean_per_head(largest, seen),
        spread=_mean_per_head(spread, seen),
        self_weight=_mean_per_head(self_weight, seen),
        most_focused=int(mean.argmin()),
        least_focused=int(mean.argmax()),
    )


def head_agreement(weights: Array) -> Array:
    """How alike the heads' weights are: 1 for heads that look at the same keys, 0 for disjoint ones.

    One minus the Jensen-Shannon divergence of two heads' weights, in bits, averaged over batch and queries::

        agreement(a, b) = 1 - mean( H((p_a + p_b) / 2) - (H(p_a) + H(p_b)) / 2 ) / log 2

    Parameters
    ----------
    weights : ndarray
        Attention weights (..., heads, len_q, len_k).

    Returns
    -------
    agreement : ndarray
        (heads, heads), float64, symmetric, 1 on the diagonal.

    Raises
    ------
    ValueError
        When there are fewer than two axes.

    Notes
    -----
    Queries that see no key in either head are left out. Cost: heads * (heads - 1) / 2 passes over one head's
    weights; memory of one head's weights.

    References
    ----------
    K. Clark et al., "What Does BERT Look At?", BlackboxNLP 2019: heads clustered by this divergence in
    section 6.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.analysis import head_agreement
    >>> same, other = np.eye(3), np.roll(np.eye(3), 1, axis=1)
    >>> head_agreement(np.stack([same, same, other]))
    array([[1., 1., 0.],
           [1., 1., 0.],
           [0., 0., 1.]])
    """
    weights = check_weights(weights)
    if weights.ndim == 2:
        weights = weights[None]
    xp = array_module(weights)
    heads = weights.shape[-3]
    entropy = row_entropy(weights)  # (..., heads, len_q)
    seen = weights.sum(axis=-1) > 0
    agreement: Array = xp.eye(heads)
    for a in range(heads):
        for b in range(a + 1, heads):
            p, q = (weights[..., h, :, :].astype(np.float64) for h in (a, b))
            divergence = row_entropy((p + q) / 2) - (entropy[..., a, :] + entropy[..., b, :]) / 2
            both = seen[..., a, :] & seen[..., b, :]
            mean = (divergence * both).sum() / max(int(both.sum()), 1)
            agreement[a, b] = agreement[b, a] = 1.0 - mean / np.log(2.0) if bool(both.any()) else 0.0
    return agreement


def check_weights(weights: Any) -> Array:
    """``weights`` as an array of at least two axes; the text of the error when it is not."""
    if not hasattr(weights, "__array_interface__") and not hasattr(weights, "__cuda_array_interface__"):
        weights = np.asarray(weights)
    if weights.ndim < 2 or weights.dtype.kind not in "fV":
        raise ValueError(
            "weights must be a float array (..., heads, len_q, len_k), as attention_weights returns it; "
            f"got {weights.dtype} of shape {weights.shape}"
        )
    result: Array = weights
    return result


def row_entropy(weights: Array) -> Array:
    """-sum(p log p) over the last axis, float64; 0 log 0 = 0."""
    xp = array_module(weights)
    p = weights.astype(np.float64)
    logs = xp.log(xp.where(p > 0, p, 1.0))
    entropy: Array = -(p * logs).sum(axis=-1)
    return entropy + 0.0  # no negative zeros


def aligned_diagonal(weights: Array) -> Array:
    """The weight of key i + len_k - len_q for each query i, (..., len_q); 0 where there is no such key."""
    xp = array_module(weights)
    len_q, len_k = weights.shape[-2:]
    queries = xp.arange(max(len_q - len_k, 0), len_q)
    diagonal: Array = xp.zeros(weights.shape[:-1], weights.dtype)
    diagonal[..., queries] = weights[..., queries, queries + (len_k - len_q)]
    return diagonal


def _mean_per_head(values: Array, seen: Array) -> Array:
    """Mean of (..., heads, len_q) over everything but heads, over the rows marked in ``seen`` alone."""
    axes = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
    total = (values.astype(np.float64) * seen).sum(axis=axes)
    mean: Array = total / array_module(values).maximum(seen.sum(axis=axes), 1)
    return mean

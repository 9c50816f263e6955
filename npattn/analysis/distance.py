"""How far a head looks: the attention weights, by distance between query and key."""

from typing import NamedTuple

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.analysis.heads import check_weights


class DistanceProfile(NamedTuple):
    """Where, relative to the query, the weights of each head lie.

    Attributes
    ----------
    distance : ndarray
        (len_q + len_k - 1,) int64, ascending: key position minus the query's aligned position. 0 is the
        token itself, -1 the one before it.
    weight : ndarray
        (heads, len_q + len_k - 1) float64: the share of a query's weight at that distance, averaged over
        batch and queries.
    mean : ndarray
        (heads,) float64: mean absolute distance, in tokens, of the weight given.
    """

    distance: Array
    weight: Array
    mean: Array


def distance_profile(
    weights: Array, *, rows: Array | None = None, len_q: int | None = None
) -> DistanceProfile:
    """How the weights of each head are spread over the distance from query to key.

    Parameters
    ----------
    weights : ndarray
        Attention weights (..., heads, len_q, len_k), or only some of the rows. A 2-D array is one head.
    rows : array_like of int, optional
        Which queries the rows of ``weights`` are, as given to ``attention_weights(rows=...)``: a sample of
        the rows is enough for a long sequence. None means all of them, in order.
    len_q : int, optional
        With ``rows``: how many queries there were altogether. None means len_k.

    Returns
    -------
    profile : DistanceProfile
        Distances, weight per head and distance, and the mean absolute distance per head.

    Raises
    ------
    ValueError
        When ``rows`` does not have one entry for each row of ``weights``.

    Notes
    -----
    Query i stands at key position i + len_k - len_q, so that the last query stands at the last key. Queries
    that see no key count as looking nowhere: they lower ``weight`` but not ``mean``. Cost: one pass over
    the weights.

    References
    ----------
    J. Vig and Y. Belinkov, "Analyzing the Structure of Attention in a Transformer Language Model",
    BlackboxNLP 2019: mean attention distance, equation 3.

    Examples
    --------
    A head that always looks at the token before (the first token, at itself):

    >>> import numpy as np
    >>> from npattn.analysis import distance_profile
    >>> before = np.eye(4)[[0, 0, 1, 2]]
    >>> profile = distance_profile(before)
    >>> dict(zip(profile.distance.tolist(), profile.weight[0].tolist()))[-1]
    0.75
    >>> profile.mean
    array([0.75])
    """
    weights = check_weights(weights)
    if weights.ndim == 2:
        weights = weights[None]
    xp = array_module(weights)
    num_rows, len_k = weights.shape[-2:]
    if rows is None:
        len_q = num_rows
        positions = xp.arange(num_rows)
    else:
        positions = xp.asarray(rows, np.int64)
        len_q = len_k if len_q is None else len_q
        if positions.shape != (num_rows,):
            raise ValueError(
                f"rows must name each of the {num_rows} rows of weights, got shape {positions.shape}"
            )
        positions = xp.where(positions < 0, positions + len_q, positions)
    heads = weights.shape[-3]
    size = max(len_q + len_k - 1, 0)
    distance = xp.arange(size) - (len_k - 1)
    place = xp.arange(len_k) - positions[:, None] + (len_q - 1)  # (rows, len_k): index into distance
    per_element = weights.astype(np.float64).reshape(-1, heads, num_rows, len_k)
    mass = per_element.sum(axis=0)  # (heads, rows, len_k)
    total = xp.stack([xp.bincount(place.ravel(), mass[h].ravel(), size) for h in range(heads)])
    given = xp.maximum(total.sum(axis=-1), np.finfo(np.float64).tiny)
    mean = (total * abs(distance)).sum(axis=-1) / given
    return DistanceProfile(distance, total / max(per_element.shape[0] * num_rows, 1), mean)

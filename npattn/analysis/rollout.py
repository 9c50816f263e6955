"""Attention rollout: what a token of the last layer has gathered from the input, through all layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array
from npattn.analysis.heads import check_weights

_FUSIONS = ("mean", "max", "min")


def rollout(
    weights: Sequence[Array],
    *,
    residual: float = 0.5,
    heads: str | Array = "mean",
    rows: Array | None = None,
) -> Array:
    """Multiply the layers' attention into one map from the last layer's queries to the input tokens.

    Each layer hands on a mixture of the token itself (the residual path) and of what it attended to::

        A_l     = normalise( (1 - residual) * fuse(weights[l] over heads) + residual * I )   by rows
        rollout = A_last @ ... @ A_1 @ A_0

    Parameters
    ----------
    weights : sequence of ndarray
        Self-attention weights of each layer, first layer first, each (..., heads, length, length) with the
        same leading axes: what ``model.weights(ids)`` returns. A 2-D array is one head.
    residual : float, default 0.5
        The share of the residual path, in [0, 1). Abnar and Zuidema use a half.
    heads : {"mean", "max", "min"} or array_like of float, default "mean"
        How the heads of a layer become one matrix: their mean, maximum or minimum, or a weighted mean with
        one number per head (0 leaves a head out).
    rows : array_like of int, optional
        Only these queries of the last layer; None means all.

    Returns
    -------
    attribution : ndarray
        (..., length or len(rows), length), float64: row i says which share of token i of the last layer
        stems from each input token. Rows add up to 1.

    Raises
    ------
    ValueError
        No layers, weights that are not square, different shapes, or ``residual`` outside [0, 1).

    Notes
    -----
    Cost: one (length, length) product per layer and batch element; with ``rows`` the product starts from
    those rows, O(layers * len(rows) * length**2). A query that sees no key keeps only itself.

    References
    ----------
    S. Abnar and W. Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, section 4
    (arXiv:2005.00928). H. Chefer et al., CVPR 2021, for the other ways to fuse heads.

    Examples
    --------
    Two layers in which every token attends to the one before it:

    >>> import numpy as np
    >>> from npattn.analysis import rollout
    >>> before = np.eye(4)[[0, 0, 1, 2]]
    >>> rollout([before, before], rows=[3])
    array([[0.  , 0.25, 0.5 , 0.25]])
    """
    if not len(weights):
        raise ValueError("rollout needs the weights of at least one layer, got none")
    if not 0.0 <= residual < 1.0:
        raise ValueError(f"residual must be in [0, 1), got {residual}")
    layers = [check_weights(layer) for layer in weights]
    for number, layer in enumerate(layers):
        if layer.shape[-1] != layer.shape[-2] or layer.shape[-1] != layers[0].shape[-1]:
            raise ValueError(
                "rollout is defined for self-attention over one sequence: every layer's weights must be "
                f"(..., heads, length, length); layer {number} has {layer.shape}, layer 0 {layers[0].shape}"
            )
    product: Any = None
    for layer in reversed(layers):
        step = _layer_step(layer, residual, heads)
        if product is None:
            product = step if rows is None else step[..., np.asarray(rows, np.int64), :]
        else:
            product = product @ step
    result: Array = product
    return result


def _layer_step(weights: Array, residual: float, heads: str | Array) -> Array:
    """The matrix (..., length, length) by which one layer mixes its tokens; rows add up to 1."""
    xp = array_module(weights)
    fused: Array = weights.astype(np.float64) if weights.ndim == 2 else _fuse(weights, heads)
    mixed = (1.0 - residual) * fused + residual * xp.eye(weights.shape[-1])
    total = mixed.sum(axis=-1, keepdims=True)
    mixed = xp.where(total > 0, mixed, xp.eye(weights.shape[-1]))
    normalised: Array = mixed / xp.where(total > 0, total, 1.0)
    return normalised


def _fuse(weights: Array, heads: str | Array) -> Array:
    xp = array_module(weights)
    fused: Array
    if isinstance(heads, str):
        if heads not in _FUSIONS:
            raise ValueError(f"heads must be one of {_FUSIONS} or one number per head, got {heads!r}")
        fused = getattr(weights.astype(np.float64), heads)(axis=-3)
        return fused
    share = xp.asarray(heads, np.float64)
    if share.shape != (weights.shape[-3],) or not float(share.sum()) > 0:
        raise ValueError(
            f"heads must be {weights.shape[-3]} numbers with a positive sum, one per head; got {share}"
        )
    fused = xp.einsum("h,...hij->...ij", share / share.sum(), weights.astype(np.float64))
    return fused

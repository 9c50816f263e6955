"""Learning rates as functions of the step."""

import math


def warmup_cosine(step: int, *, lr: float, min_lr: float, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to ``min_lr``, which stays.

    Parameters
    ----------
    step : int
        From 0.
    lr, min_lr : float
        Reached at step ``warmup``, and from step ``total`` on.
    warmup, total : int
        0 ≤ warmup ≤ total. During the warm-up, step s gets ``lr · (s + 1) / (warmup + 1)``.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        When warmup is negative or beyond total.

    Examples
    --------
    >>> from npattn import optim
    >>> [optim.warmup_cosine(s, lr=1.0, min_lr=0.0, warmup=1, total=3) for s in range(4)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup must be between 0 and total, got warmup {warmup}, total {total}")
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if step >= total:
        return min_lr
    progress = (step - warmup) / (total - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - min_lr)


__all__ = ["warmup_cosine"]

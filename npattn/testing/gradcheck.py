"""A gradient check: whether a pullback is the transpose of the derivative.

For one random direction ``t`` per argument and one random cotangent ``c``::

    <c, f(x + h t) - f(x - h t)> / 2 h   =   <pullback(c), t>

in float64. The cotangent is random, never that of a sum or a mean: the sum of softmax weights is constant,
so a pullback returning zeros would pass. Beside it: the pullback is pure (a second call gives the same bits
and nothing it was given has changed), linear, and its results have the arguments' shapes and dtypes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from npattn._typing import Array


def check_vjp(
    f_vjp: Callable[..., tuple[Any, Callable[..., Any]]],
    args: Sequence[Array | None],
    *,
    names: Sequence[str] | None = None,
    rtol: float = 1e-6,
    step: float = 1e-5,
    seed: int = 0,
) -> None:
    """Check ``f_vjp`` at ``args``, argument by argument.

    Parameters
    ----------
    f_vjp : callable
        ``f_vjp(*args) -> (outputs, pullback)``: outputs an array or a tuple of arrays,
        ``pullback(*cotangents)`` the gradients, one per argument in their order (None for None), or the
        single array where there is one argument.
    args : sequence of float64 arrays
        None entries are passed on and must get None back.
    names : sequence of str, optional
        For the messages.
    rtol : float, default 1e-6
        Relative tolerance. To it the rounding error of the difference quotient is added (a few
        ``eps · |c| · |f| / step``), so that gradients that are exactly 0 can be checked too.
    step : float, default 1e-5
        h above.
    seed : int, default 0
        Of directions and cotangents.

    Raises
    ------
    AssertionError
        Naming the argument and both numbers.

    Notes
    -----
    Output entries that are infinite (lse of a row that sees nothing) do not count in the difference; their
    cotangents are random all the same.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.testing import check_vjp
    >>> def square_vjp(x):
    ...     return x * x, lambda dy: 2 * x * dy
    >>> check_vjp(square_vjp, [np.array([1.0, -2.0, 3.0])])
    >>> def wrong_vjp(x):
    ...     return x * x, lambda dy: 2.001 * x * dy
    >>> try:
    ...     check_vjp(wrong_vjp, [np.array([1.0, -2.0, 3.0])])
    ... except AssertionError as error:
    ...     print(error)
    argument 0: <cotangent, difference> = -1.875767, but <gradient, direction> = -1.876705 (tolerance 1.9e-06)
    """
    names = names or [f"argument {n}" for n in range(len(args))]
    for name, x in zip(names, args, strict=True):
        is_float64 = x is None or x.dtype == np.float64
        require(is_float64, f"{name} must be float64 to be checked")
    rng = np.random.default_rng(seed)
    before = [None if x is None else x.copy() for x in args]

    outputs, pullback = f_vjp(*args)
    outputs = _as_tuple(outputs)
    kept = [y.copy() for y in outputs]
    cotangents = [rng.standard_normal(y.shape) for y in outputs]
    given = [c.copy() for c in cotangents]
    grads = _as_tuple(pullback(*cotangents))
    require(len(grads) == len(args), f"{len(args)} arguments, but {len(grads)} gradients")

    for name, x, grad in zip(names, args, grads, strict=True):
        if x is None:
            require(grad is None, f"{name} is None, but its gradient is not")
            continue
        require(grad is not None, f"{name}: its gradient is None")
        require(grad.shape == x.shape, f"{name} has shape {x.shape}, but its gradient {grad.shape}")
        require(grad.dtype == x.dtype, f"{name} is {x.dtype}, but its gradient {grad.dtype}")

    for what, now, then in [
        ("argument", args, before),
        ("output", outputs, kept),
        ("cotangent", cotangents, given),
    ]:
        for n, (a, b) in enumerate(zip(now, then, strict=True)):
            require(a is None or np.array_equal(a, b, equal_nan=True), f"{what} {n} was written to")
    _check_purity(pullback, cotangents, grads, names)
    _check_linearity(pullback, cotangents, grads, names, rng)

    for n, (name, x, grad) in enumerate(zip(names, args, grads, strict=True)):
        if x is None:
            continue
        direction = rng.standard_normal(x.shape)
        numeric, rounding = 0.0, 0.0
        ends = []
        for sign in (1.0, -1.0):
            moved = list(args)
            moved[n] = x + sign * step * direction
            ends.append(_as_tuple(f_vjp(*moved)[0]))
        for c, up, down in zip(cotangents, *ends, strict=True):
            finite = np.isfinite(up) & np.isfinite(down)
            require(np.array_equal(up[~finite], down[~finite], equal_nan=True), f"{name}: outputs jump")
            c, up, down = c[finite], up[finite], down[finite]
            numeric += float((c * (up - down)).sum()) / (2 * step)
            rounding += float((np.abs(c) * (np.abs(up) + np.abs(down))).sum()) / (2 * step)
        analytic = float((grad * direction).sum())
        tolerance = rtol * max(abs(numeric), abs(analytic)) + 8 * np.finfo(np.float64).eps * rounding
        require(
            abs(numeric - analytic) <= tolerance,
            f"{name}: <cotangent, difference> = {numeric:.7g}, but <gradient, direction> = {analytic:.7g} "
            f"(tolerance {tolerance:.1e})",
        )


def _check_purity(pullback: Any, cotangents: list[Array], grads: Any, names: Sequence[str]) -> None:
    again = _as_tuple(pullback(*cotangents))
    for name, first, second in zip(names, grads, again, strict=True):
        same = first is second is None or np.array_equal(first, second, equal_nan=True)
        require(same, f"{name}: a second call of the pullback gives another gradient")


def _check_linearity(
    pullback: Any, cotangents: list[Array], grads: Any, names: Sequence[str], rng: np.random.Generator
) -> None:
    others = [rng.standard_normal(c.shape) for c in cotangents]
    other_grads = _as_tuple(pullback(*others))
    mixed = _as_tuple(pullback(*(2.5 * a - 0.75 * b for a, b in zip(cotangents, others, strict=True))))
    for name, a, b, ab in zip(names, grads, other_grads, mixed, strict=True):
        if a is not None:
            error = np.abs(2.5 * a - 0.75 * b - ab).max(initial=0.0)
            size = np.abs(a).max(initial=0.0) + np.abs(b).max(initial=0.0)
            require(error <= 1e-10 * size + 1e-13, f"{name}: the pullback is not linear, off by {error:.1e}")


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def require(condition: Any, message: str) -> None:
    """An assertion that ``python -O`` keeps."""
    if not condition:
        raise AssertionError(message)

"""Comparison by error budget: as accurate as a plain computation in the same precision, within a factor.

A hand-tuned tolerance says what somebody once saw. Here three results stand beside each other: the one under
test, an exact one (the oracle in float64 on the same inputs) and a plain one (the oracle in the precision
under test). The error of the first must not exceed ``factor`` times the error of the plain one, plus a few
roundings of the result itself.
"""

from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.testing.gradcheck import require


def assert_within_budget(
    actual: Array,
    exact: Array,
    plain: Array,
    *,
    factor: float = 2.0,
    floor: float = 0.0,
    name: str = "result",
) -> None:
    """Assert that ``actual`` is about as close to ``exact`` as ``plain`` is.

    Parameters
    ----------
    actual, exact, plain : arrays of one shape
        Under test; in float64; the same formula in the dtype of ``actual``.
    factor : float, default 2.0
        How many times the plain error is allowed, for the maximum and for the root mean square.
    floor : float, default 0.0
        An error allowed in any case: where exact is a sum that cancels (a gradient that is exactly 0), the
        rounding of its terms.
    name : str
        For the message.

    Raises
    ------
    AssertionError
        With both errors; also for another shape or dtype than plain's, or when NaN and inf are not where
        exact has them.

    Examples
    --------
    >>> import numpy as np
    >>> exact = np.array([1.0, 2.0, 1 / 3])
    >>> assert_within_budget(np.float32(exact), exact, np.float32(exact))
    >>> try:
    ...     assert_within_budget(np.float32(exact) * np.float32(1.00001), exact, np.float32(exact))
    ... except AssertionError as error:
    ...     print(error)
    result: maximum error 2.0e-05 exceeds the budget 2.6e-07 (plain error 9.9e-09)
    """
    require(actual.shape == exact.shape, f"{name}: shape {actual.shape} instead of {exact.shape}")
    require(actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype} instead of {plain.dtype}")
    eps = _eps(actual.dtype)
    actual, exact, plain = (x.astype(np.float64) for x in (actual, exact, plain))
    finite = np.isfinite(exact)
    require(np.array_equal(actual[~finite], exact[~finite], equal_nan=True), f"{name}: inf or NaN elsewhere")
    if not finite.any():
        return
    error = np.abs(actual[finite] - exact[finite])
    plain_error = np.abs(plain[finite] - exact[finite])
    size = np.abs(exact[finite])
    for measure, of in (("maximum", np.max), ("root mean square", _rms)):
        budget = factor * float(of(plain_error)) + eps * float(of(size)) + floor
        require(
            of(error) <= budget,  # a NaN fails this too
            f"{name}: {measure} error {of(error):.1e} exceeds the budget {budget:.1e} "
            f"(plain error {of(plain_error):.1e})",
        )


def _rms(x: Array) -> Any:
    return np.sqrt(np.mean(np.square(x)))


def _eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    one = np.ones((), dtype)
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.spacing(one))

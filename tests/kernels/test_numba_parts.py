"""Parts of kernels: what `_parts` lowers does what Python does with the same text."""

import itertools
from typing import Any

import numpy as np
import pytest

jit_module = pytest.importorskip("npattn.kernels._jit")
if jit_module.INTERPRETED:
    pytest.skip("parts exist only in compiled code", allow_module_level=True)

from numba import njit, types  # noqa: E402

from npattn.kernels._jit import jit  # noqa: E402
from npattn.kernels._parts import part  # noqa: E402
from npattn.kernels.edge.numba_cpu._lanes import padded_heads  # noqa: E402

LIMIT = 7
F = np.float32
TENTH = F(0.1)


@part(types.intp)
def rounding_down(a: int, b: int) -> int:
    return (a // b) * 1000 + a % b


@part(types.intp)
def early(a: int, b: int) -> int:
    if a < b:
        return -a
    elif a == b:
        return 0
    total = 0
    for n in range(a):
        if n > LIMIT:
            return total
        total += n
    return total


@part(types.intp)
def loops(a: int, b: int) -> int:
    total = 0
    for n in range(a, b, -1):
        total = total * 3 % 101 + n
    for n in range(b, a + 20, 6):
        total += n
    while total > 10:
        total -= LIMIT
    x = a
    y = b
    x, y = y, x
    return total * 10000 + x * 100 + y


@part(types.boolean)
def refuses_zero(a: int) -> bool:
    return 100 // a > 3


@part(types.intp)
def logic(a: int, b: int) -> int:
    known = a != 0 and refuses_zero(a)
    either = not known or a > b or b == 3
    return (1 if known else 0) + (2 if either else 0) + (4 if b else 8)


@part(types.float64)
def mixed(a: int, b: int) -> float:
    x = 0.5
    x += a
    x = -x * 2.0 + b / 1.0
    return x if x <= 3.0 else 3.0


@part(types.float32)
def single(a: int, b: int) -> np.float32:
    return (TENTH * F(a) - F(0.3)) / F(b * b + 3)


@part(types.intp, static=("twice",))
def versions(a: int, twice: bool) -> int:
    if twice:
        a = a * 2
    return a


@part(types.intp)
def both_versions(a: int, b: int) -> int:
    return versions(a, True) * 100 + versions(b, False)


@njit(error_model="numpy")
def compiled(a, b):
    """Parts are Numba intrinsics too: a function of one's own may call them."""
    return (
        rounding_down(a, b if b != 0 else 1),
        early(a, b),
        loops(a, b),
        logic(a, b),
        mixed(a, b),
        single(a, b),
        both_versions(a, b),
    )


def test_parts_compute_what_python_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(1, 1)  # before the names below mean Python functions
    for called in (refuses_zero, versions):  # run the calls inside as Python, too
        monkeypatch.setitem(globals(), called.function.__name__, called.function)
    for a, b in itertools.product((-9, -1, 0, 1, 3, 8, 20), repeat=2):
        expected = (
            rounding_down.function(a, b if b != 0 else 1),
            early.function(a, b),
            loops.function(a, b),
            logic.function(a, b),
            mixed.function(a, b),
            single.function(a, b),
            both_versions.function(a, b),
        )
        assert compiled(a, b) == expected, (a, b)


@part(types.intp)
def times_length(a: int, lanes: Any) -> int:
    return a * padded_heads(lanes)


@part(types.intp)
def passes_the_tuple_on(a: int, lanes: Any) -> int:
    return times_length(a, lanes) + 1


@njit
def measures_a_tuple(a: Any, lanes: Any) -> Any:
    return passes_the_tuple_on(a, lanes)


@jit(returns=types.intp, length_of="lanes")
def kernel_of_a_tuple(a: Any, lanes: Any, one: Any) -> Any:
    return passes_the_tuple_on(a, lanes)


def test_of_a_tuple_the_length_is_known() -> None:
    for length, expected in ((4, 21), (1, 6)):
        assert measures_a_tuple(5, (False,) * length) == expected
        assert kernel_of_a_tuple(5, (True,) * length, F(1)) == expected


@jit(returns=types.intp)
def quotients(a: int, b: int) -> int:
    return rounding_down(a, b)


def test_kernels_take_the_integers_of_numpy() -> None:
    assert quotients(np.int64(7), np.int32(2)) == 3001
    assert quotients(np.uint8(7), True) == 7000


def test_kernels_refuse_what_is_no_integer() -> None:
    with pytest.raises(TypeError):
        quotients("7", 2)


@part(types.intp)
def with_a_list(a: int) -> int:
    return [a][0]


@jit(returns=types.intp)
def calls_the_list(a: Any) -> Any:
    return with_a_list(a)


def test_what_a_part_cannot_hold_is_named() -> None:
    with pytest.raises(Exception, match=r"with_a_list.*cannot hold Subscript: \[a\]\[0\]"):
        calls_the_list(3)

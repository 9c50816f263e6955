"""Which implementation computes a call, and what is said when one cannot."""

import inspect
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import npattn
from npattn.functional._canonical import canonical
from npattn.kernels import contract, select
from npattn.testing import cases

PROBLEM = canonical(*np.ones((3, 1, 1, 4, 8), np.float32), None, None, None, None, None).problem


def tile_modules():
    """(name, module) of each tile implementation that can be imported here."""
    loaded = ((name, *select.load(path)) for name, path in select.TILE.items())
    return [(name, module) for name, module, reason in loaded if reason is None]


def fake(monkeypatch, **modules):
    """Replace the table by modules with these refusals (None: supported; a str: why not; an Exception)."""

    class Fake:
        def __init__(self, name, refusal):
            self.name, self.refusal = name, refusal

        def supports(self, problem):
            return self.refusal

    def load(path):
        refusal = modules[path]
        return (None, str(refusal)) if isinstance(refusal, Exception) else (Fake(path, refusal), None)

    monkeypatch.setattr(select, "load", load)
    return {name: name for name in modules}


def test_auto_takes_the_first_that_supports_the_problem(monkeypatch):
    family = fake(monkeypatch, cupy=None, numba="not this", numpy=None, oracle=None)
    assert select.select(family, PROBLEM, False, "auto").name == "numpy"
    family = fake(monkeypatch, cupy=None, numba=None, numpy=None)
    assert select.select(family, PROBLEM, False, "auto").name == "numba"
    assert select.select(family, PROBLEM, True, "auto").name == "cupy"
    family = fake(monkeypatch, cupy="too wide", numba=None, numpy=None)
    assert select.select(family, PROBLEM, True, "auto").name == "numpy"
    family = fake(monkeypatch, numba=ImportError("gone"), numpy=None)
    assert select.select(family, PROBLEM, False, "auto").name == "numpy"


def test_auto_collects_every_reason_when_nothing_is_left(monkeypatch):
    family = fake(monkeypatch, numba=ImportError("gone"), numpy="too wide")
    with pytest.raises(select.BackendError, match="numba: gone; numpy: too wide"):
        select.select(family, PROBLEM, False, "auto")


def test_a_named_backend_raises_with_its_reason(monkeypatch):
    family = fake(monkeypatch, numba="head_dim must be even", numpy=None)
    with pytest.raises(ValueError, match="backend='numba' cannot compute this call: head_dim must be even"):
        select.select(family, PROBLEM, False, "numba")


def test_gpu_backends_refuse_cpu_arrays_and_the_other_way_round(monkeypatch):
    family = fake(monkeypatch, cupy="no CUDA device", numba=None, numpy=None)
    with pytest.raises(TypeError, match=r"cupy.asarray.*no CUDA device"):
        select.select(family, PROBLEM, False, "cupy")
    with pytest.raises(TypeError, match=r"cupy.asnumpy"):
        select.select(family, PROBLEM, True, "numba")


def test_an_unknown_backend_lists_those_there_are():
    for backend in ("torch", "NUMPY", ""):
        with pytest.raises(ValueError, match=r"'auto', 'cupy', 'numba', 'numpy', 'oracle'"):
            select.select(select.TILE, PROBLEM, False, backend)


def test_a_broken_module_is_a_reason_not_a_crash(tmp_path, monkeypatch):
    (tmp_path / "npattn_broken.py").write_text("raise RuntimeError('numba wants another NumPy')")
    (tmp_path / "npattn_missing.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert select.load("npattn_broken") == (
        None,
        "importing it failed with RuntimeError: numba wants another NumPy",
    )
    module, reason = select.load("npattn_missing")
    assert module is None
    assert reason == "a_package_that_is_not_there is not installed (pip install a_package_that_is_not_there)"


def test_signatures_of_all_implementations_are_equal():
    """One Problem, the same names in the same order: no implementation grows a parameter of its own."""
    for name, module in tile_modules():
        for function in ("supports", "tile_shape", "forward", "backward"):
            expected = list(inspect.signature(getattr(contract.Implementation, function)).parameters)[1:]
            assert list(inspect.signature(getattr(module, function)).parameters) == expected, (name, function)


def test_tile_shapes_are_multiples_of_a_word():
    for _, module in tile_modules():
        for case in cases("shapes", "masks", "features"):
            shape = module.tile_shape(canonical_problem(case))
            assert shape is None or (shape[0] >= 1 and shape[1] % 32 == 0)


def canonical_problem(case):
    arguments = case.arguments(np.float32)
    options = [
        arguments.get(name) for name in ("query", "key", "value", "mask", "bias", "scale", "softcap", "sinks")
    ]
    return canonical(*options).problem


def test_numba_supports_every_case_of_the_table():
    """Otherwise the shared suite would skip it and nobody would notice."""
    module, reason = select.load(select.TILE["numba"])
    if reason is not None or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        pytest.skip(f"numba: {reason or 'NUMBA_DISABLE_JIT is set'}")
    for case in cases("shapes", "masks", "features"):
        for dtype in (np.float64, np.float32):
            problem = canonical_problem(case)._replace(dtype=np.dtype(dtype))
            assert module.supports(problem) is None, case.name


@pytest.mark.parametrize("blocked", ["numba", "llvmlite"])
def test_without_numba_auto_is_numpy_and_numba_says_why(blocked):
    program = f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
        import numpy as np
        import npattn

        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 1, 2, 40, 8))
        out, pullback = npattn.attention_vjp(q, k, v, mask=npattn.masks.Causal())
        expected = npattn.attention(q, k, v, mask=npattn.masks.Causal(), backend="numpy")
        assert (out == expected).all()
        assert np.isfinite(pullback(v).query).all()
        try:
            npattn.attention(q, k, v, backend="numba")
        except ValueError as error:
            assert {blocked!r} in str(error) and "not installed" in str(error), error
            assert "pip install" in str(error), error
        else:
            raise SystemExit("backend='numba' worked without numba")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_an_empty_axis_never_reaches_a_tile_kernel(monkeypatch):
    """There is nothing to tile; the oracle answers, whatever backend is named."""
    from npattn.kernels.tile import numpy_tiled

    monkeypatch.setattr(numpy_tiled, "forward", None)
    empty = np.ones((1, 1, 0, 4))
    assert not npattn.attention(np.ones((1, 1, 3, 4)), empty, empty, backend="numpy").any()

"""Every example in a docstring of the package runs, and gives what it says."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import npattn


def modules():
    """All modules of the package but the command line; also private ones may carry examples."""
    found = pkgutil.walk_packages(npattn.__path__, "npattn.")
    return ["npattn", *sorted(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_examples_of(name):
    if name.startswith("npattn.plots"):
        pytest.importorskip("matplotlib").use("Agg")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs a package that is not installed: {error}")
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failures = []
    for test in finder.find(module, name, extraglobs={"np": np}):
        report = []
        runner.run(test, out=report.append)
        failures += report
    assert not runner.failures, "".join(failures)
    if name.startswith("npattn.plots"):
        importlib.import_module("matplotlib.pyplot").close("all")

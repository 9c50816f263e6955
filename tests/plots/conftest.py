import matplotlib
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")

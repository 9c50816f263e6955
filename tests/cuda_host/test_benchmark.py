"""benchmarks/gpu.py, which will be run once on a card and must then be right, on the CPU model."""

import subprocess
import sys
from pathlib import Path

import pytest

from npattn.kernels import _cuda

ROOT = Path(__file__).parents[2]


def test_the_probe_of_each_wrapper_passes_on_the_model(cupy, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    found = gpu.probes(cupy, _cuda.run) + gpu.hopper_probes(cupy, _cuda.run) + gpu.tma_probe(cupy, _cuda.run)
    assert len(found) == 13
    assert [name for name, error, limit in found if not error <= limit] == []


def test_a_wrong_result_is_called_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    assert gpu.relative([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert gpu.relative([1.0, 2.1], [1.0, 2.0]) > 0.04
    assert gpu.relative([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert gpu.relative([1.0, 2.0], [1.0, float("-inf")]) == float("inf")


def test_without_a_gpu_it_says_what_is_missing():
    if _cuda.why_unavailable() is None:
        pytest.skip("there is a GPU here")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU to run on: ")


@pytest.mark.slow
def test_the_whole_program_runs_on_the_model(cupy):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert "| graph, forward + backward |" in done.stdout
    assert "\nwgmma: right in every check, " in done.stdout
    assert "\nwgmma with TMA: right in every check, " in done.stdout
    assert "\natomics: right in every check, " in done.stdout

"""The graph examples run as a reader would run them and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

ROOT = Path(__file__).resolve().parents[2]


def run(name, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_karate_club_finds_the_sides():
    text = run("karate_club")
    assert int(re.search(r"right for (\d+) of 34", text)[1]) >= 28
    assert "node 33 attends most to" in text


def test_dictionary_lookup_needs_dynamic_attention():
    text = run("dictionary_lookup", "--k", "5", "--steps", "200")
    gat, gatv2 = (float(value) for value in re.findall(r"answers +([\d.]+)%", text))
    assert gat < 45
    assert gatv2 > 90


@pytest.fixture
def citations(tmp_path):
    """Two communities of 60 whose words and links mostly stay inside."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 60)
    x = sp.csr_array(
        (rng.random((120, 40)) < np.where((np.arange(40) < 20) == y[:, None], 0.3, 0.1)).astype(np.float32)
    )
    pairs = np.argwhere(np.triu(rng.random((120, 120)) < np.where(y == y[:, None], 0.06, 0.01), 1)).T
    order = rng.permutation(120)
    path = tmp_path / "citations.npz"
    np.savez(
        path,
        x_data=x.data,
        x_indices=x.indices,
        x_indptr=x.indptr,
        x_shape=x.shape,
        edge_index=np.concatenate([pairs, pairs[::-1]], axis=1),
        y=y,
        train=order[:20],
        val=order[20:60],
        test=order[60:],
    )
    return path


def test_gat_cora_trains_on_a_file_of_its_format(citations):
    text = run("gat_cora", str(citations), "--seeds", "2", "--epochs", "60")
    assert float(re.search(r"mean of 2 seeds: ([\d.]+)%", text)[1]) > 80

"""The training examples: resuming is exact, Ctrl-C saves, wrong checkpoints are refused, digits are read."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = "the quick brown fox jumps over the lazy dog. " * 80
SMALL = ["--layers", "1", "--heads", "2", "--dim", "32", "--context", "16", "--batch", "4", "--warmup", "2"]


@pytest.fixture
def example(monkeypatch):
    """``example(name, *arguments)``: the example's module, with the command line set."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return __import__(name)

    return load


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("extra", [[], ["--dropout", "0.2", "--gradient-checkpointing"]])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(example, text, tmp_path, extra):
    arguments = [text, *SMALL, *extra, "--steps", "8"]
    module = example("train_char_gpt", *arguments, "--checkpoint", tmp_path / "a.safetensors")
    whole = module.Run(module.options(), TEXT)
    losses = [whole.advance() for _ in range(8)]

    first = module.Run(module.options(), TEXT)
    assert [first.advance() for _ in range(3)] == losses[:3]
    first.save()
    resumed = module.Run(module.options(), TEXT)
    resumed.load()
    assert resumed.step == 3
    assert [resumed.advance() for _ in range(5)] == losses[3:]
    for a, b in zip(whole.optimiser.state().values(), resumed.optimiser.state().values(), strict=True):
        assert np.array_equal(a, b)
    parameters = resumed.model.named_parameters()
    for name, p in whole.model.named_parameters().items():
        assert np.array_equal(p, parameters[name]), name


def test_the_program_trains_validates_and_writes(example, text, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    example("train_char_gpt", text, *SMALL, "--steps", 60, "--eval-every", 30, "--checkpoint", path).main()
    printed = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"val (\d\.\d+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < np.log(30)
    assert path.exists()


def test_a_checkpoint_of_another_run_is_refused(example, text, tmp_path):
    path = tmp_path / "model.safetensors"
    example("train_char_gpt", text, *SMALL, "--steps", 2, "--checkpoint", path).main()
    with pytest.raises(SystemExit, match=r"another run: .*seed 0 \(now 1\)"):
        example(
            "train_char_gpt", text, *SMALL, "--steps", 2, "--checkpoint", path, "--seed", 1, "--resume"
        ).main()
    with pytest.raises(SystemExit, match="no checkpoint"):
        example("train_char_gpt", text, *SMALL, "--checkpoint", tmp_path / "none", "--resume").main()


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_saves_a_whole_step(example, text, tmp_path):
    path = tmp_path / "model.safetensors"
    command = [sys.executable, "-u", EXAMPLES / "train_char_gpt.py", text, *SMALL, "--steps", "100000"]
    command += ["--eval-every", "5", "--checkpoint", path]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as process:
        assert any(line.startswith("step 5 ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0
    step = int(re.search(r"stopped at step (\d+)", rest).group(1))
    module = example("train_char_gpt", text, *SMALL, "--steps", 100000, "--checkpoint", path)
    resumed = module.Run(module.options(), TEXT)
    resumed.load()
    assert resumed.step == step >= 5


def test_digits_are_read(example, capsys):
    pytest.importorskip("sklearn")
    example("image_classifier").main()
    right = float(re.search(r"([\d.]+)% of the held-out digits", capsys.readouterr().out).group(1))
    assert right > 95.0


def test_the_short_run_of_the_demo():
    from npattn._cli.char_model import train_char_model

    seen = []
    start = time.perf_counter()
    run = train_char_model(TEXT, 0.5, sample_length=20, report=lambda *step: seen.append(step))
    assert time.perf_counter() - start < 120
    assert len(run.losses) == len(seen) >= 1
    assert len(run.sample) == 21
    assert set(run.sample) <= set(TEXT)
    assert np.isfinite(run.val_loss)

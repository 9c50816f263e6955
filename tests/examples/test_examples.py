"""Every example runs as a reader would run it, says what it promises, and complains about nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Arguments that make an example small enough for the tests, and a pattern in what it must print.
EXAMPLES = {
    "quickstart": ([], r"window of 256 and the first token: 11\.\d% of the pairs"),
    "attention_four_ways": ([], r"npattn, numba +\d\.\de-1[4-9]"),
    "grouped_heads": ([], r"multi-query +9,280 +64 +\d\.\de-1[4-9]"),
    "positional_encodings": (["--save", "{tmp}"], r"there are only 48"),
    "causal_and_windows": (["--length", "512"], r"packed texts:\n█·······\n"),
    "sparse_patterns": (["--save", "{tmp}"], r"longformer\(256, \[0\]\) +8\.5"),
    "linear_attention": (["--length", "512"], r"agree with npattn\.linear_attention"),
    "encoder_patterns": (
        ["--steps", "220", "--save", "{tmp}"],
        r"two places back: \w+ \w+ the big cat sat on a mat and\n",
    ),
    "kv_cache": ([], r"the fork takes 0 more, 1 when it writes"),
    "find_key_tokens": (["--length", "2048"], r"where the most focused words look:\n  \S+ → "),
    "cost_of_length": (["--length", "512", "--save", "{tmp}"], r"whole matrices +\d+\.\d\d"),
}

PICTURES = {
    "positional_encodings": 3,
    "sparse_patterns": 6,
    "encoder_patterns": 6,
    "cost_of_length": 1,
}

#: Examples that have tests of their own, beside what they show.
ELSEWHERE = {
    "gat_cora",
    "karate_club",
    "dictionary_lookup",
    "train_char_gpt",
    "image_classifier",
    "sentence_similarity",
    "chat_completion",
    "gguf_to_safetensors",
}


def run(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT.parent,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_says_what_it_promises(name, tmp_path):
    arguments, promise = EXAMPLES[name]
    result = run(name, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert re.search(promise, result.stdout), result.stdout
    pictures = [path for path in tmp_path.iterdir() if path.stat().st_size > 1000]
    assert len(pictures) == PICTURES.get(name, 0)


def test_every_example_is_tested():
    files = {path.stem for path in (ROOT / "examples").glob("[!_]*.py")}
    assert files - ELSEWHERE == set(EXAMPLES)


def has_gpu():
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU: nothing is missing")
def test_without_a_gpu_one_line_says_what_is_missing():
    result = run("quickstart", "--device", "gpu")
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"--device gpu needs .*\n", result.stderr), result.stderr


@pytest.mark.skipif(not has_gpu(), reason="no GPU on this machine")
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_on_the_gpu(name, tmp_path):
    arguments, _ = EXAMPLES[name]
    result = run(name, "--device", "gpu", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["quickstart", *sorted(EXAMPLES)[:1]])
def test_help_has_the_first_line_of_the_docstring(name):
    result = run(name, "--help")
    first = (ROOT / "examples" / f"{name}.py").read_text().splitlines()[0].strip('"')
    assert " ".join(first.split()) in " ".join(result.stdout.split())

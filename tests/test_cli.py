"""The command line: what it prints, and how it refuses."""

import re

import pytest

from npattn.__main__ import main
from npattn._cli import corpus


def test_info_names_every_backend_and_the_reason_of_those_that_cannot_run(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in ("cupy", "numba", "numpy", "oracle"):
        assert re.search(rf"^ +{name} +\S+", printed, re.MULTILINE)
    assert re.search(r"^vectors    \d+ float32", printed, re.MULTILINE)


def test_demo_attends_over_the_language_reference_and_agrees_with_the_definition(capsys):
    assert main(["demo", "--tokens", "512", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    errors = [float(error) for error in re.findall(r"^checked +(\S+) relative", printed, re.MULTILINE)]
    assert len(errors) == 2
    assert max(errors) < 1e-4
    assert "GFLOP/s" in printed
    accuracy = re.search(r"(\d+) % of the other members", printed)
    assert accuracy is not None
    assert int(accuracy[1]) >= 85


def test_demo_refuses_too_few_tokens_in_one_line(capsys):
    assert main(["demo", "--tokens", "3"]) == 2
    assert "--tokens must be at least 64" in capsys.readouterr().err


def test_bench_states_each_case_beside_the_machines_limits(capsys, monkeypatch):
    monkeypatch.setattr("npattn.testing.bench.QUICK", ("1,1,16,64 full", "8,12,128,64 full"))
    assert main(["bench", "--seconds", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^limits: \d+ GFLOP/s of float32 multiply-adds, [\d.]+ GB/s copied$", printed, re.MULTILINE
    )
    rows = re.findall(
        r"^8,12,128,64 full +(forward|forward \+ backward) +[\d.]+ +\d+ +\d+%$", printed, re.MULTILINE
    )
    assert rows == ["forward", "forward + backward"]
    assert "wrong" not in printed


def test_unknown_command_is_refused():
    with pytest.raises(SystemExit, match="2"):
        main(["dance"])


def test_words_that_are_used_alike_point_alike():
    ids, vocabulary = corpus.number(corpus.words(corpus.language_reference()))
    vectors = corpus.word_vectors(ids, len(vocabulary), 64)
    nearest = [vocabulary[i] for i in (-vectors @ vectors[vocabulary.index("list")]).argsort()[:4]]
    assert nearest[0] == "list"
    assert "tuple" in nearest

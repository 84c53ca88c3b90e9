"""Benchmarks run; what they measure is asserted nowhere."""

import json
import runpy
import sys

import pytest


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Runs a script of `benchmarks/` with arguments, where it may write."""
    directory = __file__.rpartition("tests")[0] + "benchmarks"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(directory)

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(f"{directory}/{name}", run_name="__main__")

    return run


def test_every_part_of_an_optimizer_step(benchmark, capsys):
    benchmark("step.py", "--size", "tiny", "--repeats", "1", "--prompt_tokens", "16", "--output", "found.json")
    rows = json.load(open("found.json"))
    assert {row["title"] for row in rows} == {
        "One update per generation",
        "Prompts of 16 tokens, 16 completions each",
        "Each saving alone (uniform fraction 0.5)",
        "Four updates per generation",
        "group memory",
    }
    assert all(row["peak_memory"] > 0 for row in rows)
    assert "model FLOP utilization" in capsys.readouterr().out

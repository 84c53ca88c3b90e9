"""`pacs-trl audit`: files it reads, counts it prints, disagreements it finds."""

import json
from pathlib import Path

import pandas as pd
import pytest

from pacs_trl.evaluation.audit import main
from pacs_trl.evaluation.benchmarks import load_benchmark


DATA = Path(__file__).parents[1] / "data"
ROWS = [
    {"completion": r"so \boxed{\frac{1}{2}}", "solution": "0.5"},  # equal for a grader that can calculate
    {"completion": "The final answer is 42", "solution": "42"},  # no box: TRL and the text comparison find nothing
    {"completion": r"\boxed{7}", "solution": "7"},
    {"completion": r"\boxed{8}", "solution": "7"},
    {"completion": r"\boxed{p - q}", "solution": "p - q"},  # a gold that TRL cannot read without $
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(file)


def counts(output):
    """Printed table as {outcome: numbers}."""
    lines = [line.split() for line in output.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) == 4 and line[1].isdigit()}


def test_three_protocols_side_by_side(path, capsys):
    assert main(["--completions", path, "--num-workers", "1", "--examples", "2"]) == 0
    output = capsys.readouterr().out
    assert output.count("  row ") == 6
    assert counts(output) == {
        "correct": ["4", "2", "2"],
        "wrong": ["1", "1", "2"],
        "no_answer": ["0", "1", "1"],
        "gold_unparseable": ["0", "1", "0"],
    }
    assert "authors and trl disagree on the label of 2 of 5 completions" in output
    assert "row 1: authors correct, trl no_answer" in output
    assert "row 4: authors correct, trl gold_unparseable" in output
    assert "authors and text disagree on the label of 2 of 5" in output
    assert "accuracy              0.8000    0.5000    0.4000" in output


def test_golds_that_zero_is_graded_correct_for(tmp_path, capsys):
    golds = [r"6.63 \times 10^{-34}", "0.0000004", "0.0000006", "0", "0.0", "0.5", ["7", r"10^{-9}"], None]
    golds += golds[:1]  # counted once
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps({"completion": r"\boxed{0.0}", "solution": gold}) + "\n" for gold in golds))
    main(["--completions", str(file), "--num-workers", "1", "--protocols", "authors", "text", "--examples", "0"])
    output = capsys.readouterr().out
    assert counts(output.replace("correct ", "correct 0 "))["correct"] == ["0", "6", "1"]  # it is graded as it is said
    assert "authors: 3 gold answers are so small that 0.0 is graded correct" in output
    assert r"'6.63 \\times 10^{-34}', '0.0000004', " in output
    assert "text:" not in output


def test_parquet_table_of_the_trainer(tmp_path, capsys):
    """TRL writes conversational completions as lists of messages."""
    rows = [
        {"completion": [{"role": "assistant", "content": row["completion"]}], "gold": row["solution"]} for row in ROWS
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "completions_00001.parquet")
    main(
        ["--completions", str(tmp_path / "completions_00001.parquet"), "--solution-column", "gold"]
        + ["--protocols", "text"]
    )
    assert "correct                    2" in capsys.readouterr().out


def test_groups_are_unrolled(tmp_path, capsys):
    file = tmp_path / "groups.jsonl"
    file.write_text(json.dumps({"completions": [r"\boxed{1}", r"\boxed{2}", None], "solution": 1}), encoding="utf-8")
    main(["--completions", str(file), "--completion-column", "completions", "--protocols", "text"])
    output = capsys.readouterr().out
    assert "3 completions" in output and "correct                    1" in output


def test_sample_file_takes_its_golds_from_the_benchmark(tmp_path, capsys):
    problem = load_benchmark("miniature/addition").problems[0]
    file = tmp_path / "samples.jsonl"
    lines = [
        {"settings": "first line"},
        {"problem": problem.id, "sample": 0, "completion": f"\\boxed{{{problem.solution}}}"},
        {"problem": problem.id, "sample": 1, "completion": r"\boxed{-1}"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    main(["--completions", str(file), "--benchmark", "miniature/addition", "--protocols", "text"])
    output = capsys.readouterr().out
    assert "2 completions" in output and "correct                    1" in output


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["--solution-column", "gold"], "solution_column"),
        (["--completion-column", "text"], "completion_column"),
        (["--true-column", "hand"], "true_column"),
        (["--true-column", "solution"], "true_column"),
        (["--completions", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--completions", __file__], ".jsonl, .json"),
    ],
)
def test_errors(path, changes, key):
    with pytest.raises(ValueError, match=key):
        main(["--completions", path, *changes])


class TestPrograms:
    """`--programs`: the reference solutions of a set against its tests."""

    def test_those_that_fail_are_listed(self, capsys, confined):
        assert main(["--programs", f"verifiable_coding={DATA / 'verifiable_coding.jsonl'}", "--num_workers", "2"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("5 problems of verifiable_coding=") and "seccomp" in printed
        listed = [line.strip() for line in printed.splitlines() if line.startswith("  row ")]
        assert listed[0] == "row 2 (wrong_test): wrong: passes 50% of the tests up to the first that fails"
        assert listed[1].startswith("row 3 (no_tests): gold_unparseable: tests missing or malformed: ")
        assert listed[2:] == ["row 4 (slow): timeout: timeout"]

    def test_a_file_of_ones_own(self, tmp_path, capsys, confined):
        tests = {"type": "function", "name": "f", "cases": [{"input": [1], "output": 2}]}
        rows = [
            {"answer": tests, "code": "def f(x): return x + 1"},
            {"answer": {**tests, "language": "cpp"}, "code": "int f;"},
        ]
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        main(["--programs", str(file), "--reference_column", "code", "--num_workers", "1"])
        assert "row 1 (1): gold_unparseable: These tests are for 'cpp'" in capsys.readouterr().out
        with pytest.raises(ValueError, match="reference_column"):
            main(["--programs", str(file)])
        with pytest.raises(ValueError, match="programs.*verifiable_coding"):
            main(["--programs", "codes"])


def test_how_often_a_grader_errs(tmp_path, capsys):
    """By labels from hand, null where nobody has judged, and by another protocol."""
    truths = [1, "true", False, 0.0, None]  # 7 in a box beside a gold of 7 is called wrong by hand
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row | {"by_hand": t}) + "\n" for row, t in zip(ROWS, truths)))
    common = ["--completions", str(file), "--num-workers", "1", "--examples", "0"]
    main([*common, "--protocols", "text", "--true-column", "by_hand"])
    output = capsys.readouterr().out
    assert "text against by_hand, 4 completions with both labels\n  false_positive 0.5000 (95 % interval" in output
    assert "1 of 2 wrong completions\n  false_negative 1.0000" in output
    assert "2 of 2 correct completions\n  this protocol is no better" in output  # the text comparison misses both
    main([*common, "--protocols", "authors", "--truth", "text"])
    output = capsys.readouterr().out
    assert "authors against text, 5 completions" in output and "2 of 3 wrong completions" in output

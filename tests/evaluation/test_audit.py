"""`pacs-trl audit`: files it reads, counts it prints, disagreements it finds."""

import json
from pathlib import Path

import pandas as pd
import pytest
from support.problems import held_out

from pacs_trl.evaluation.audit import main


DATA = Path(__file__).parents[1] / "data"
ROWS = [
    {"completion": r"so \boxed{\frac{1}{2}}", "solution": "0.5"},  # equal for a grader that can calculate
    {"completion": "The final answer is 42", "solution": "42"},  # no box: TRL finds nothing
    {"completion": r"\boxed{7}", "solution": "7"},
    {"completion": r"\boxed{8}", "solution": "7"},
    {"completion": r"\boxed{p - q}", "solution": "p - q"},  # a gold that TRL cannot read without $
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(file)


@pytest.mark.slow
def test_protocols_are_compared_row_by_row(path, capsys):
    assert main(["--completions", path, "--protocols", "authors", "trl"]) == 0
    output = capsys.readouterr().out
    assert output.count("  row ") == 2
    lines = [line.split() for line in output.splitlines()]
    assert {line[0]: line[1:] for line in lines if len(line) == 3 and line[1].isdigit()} == {
        "correct": ["4", "2"],
        "wrong": ["1", "1"],
        "no_answer": ["0", "1"],
        "gold_unparseable": ["0", "1"],
    }
    assert "authors and trl disagree on the label of 2 of 5 completions" in output
    assert "gold that some protocols do not read         1\n" in output
    assert "row 1: authors correct, trl no_answer" in output
    assert "row 4: authors correct, trl gold_unparseable" in output
    assert "accuracy              0.8000    0.5000" in output


@pytest.mark.parametrize(
    ("name", "rows", "settings", "counted"),
    [
        (  # TRL writes conversational completions as lists of messages
            "table.parquet",
            [{"completion": [{"role": "assistant", "content": r["completion"]}], "gold": r["solution"]} for r in ROWS],
            ["--solution-column", "gold"],
            (5, 4),
        ),
        (
            "groups.jsonl",
            [{"completions": [r"\boxed{1}", r"\boxed{2}", None], "solution": 1}],
            ["--completion-column", "completions"],
            (3, 1),
        ),
    ],
)
def test_completions_are_read_from_every_form_of_file(tmp_path, capsys, name, rows, settings, counted):
    file = tmp_path / name
    if file.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    main(["--completions", str(file), "--protocols", "authors", *settings])
    output = capsys.readouterr().out
    assert f"{counted[0]} completions" in output and f"correct                    {counted[1]}" in output


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["--solution-column", "gold"], "solution_column"),
        (["--completion-column", "text"], "completion_column"),
        (["--true-column", "hand"], "true_column"),
        (["--true-column", "solution"], "true_column"),
    ],
)
def test_columns_that_cannot_be_used_are_refused(path, changes, key):
    with pytest.raises(ValueError, match=key):
        main(["--completions", path, *changes])


FORMS = [
    {"completion": "54 + 3 =", "solution": "57"},
    {"completion": r"<think>\boxed{57}</think> It is 58.", "solution": "57"},
    {"completion": r"It is 57, so \boxed{}", "solution": "57"},
    {"completion": "1000", "solution": "1e3"},
    {"completion": "57", "solution": "$$"},
    {"completion": r"\boxed{p}", "solution": "p"},
    *({"completion": f"It is {i}.", "solution": i} for i in range(4)),
]
COUNTS = {
    "protocols disagree": 4,
    "gold that no protocol reads": 1,
    "gold that some protocols do not read": 0,  # `number` reads no `p`
    "box in a think block": 1,
    "empty box": 1,
    "gold in e-notation": 1,
}


def counts_by_kind(output):
    """The lines that end in a number, by their text."""
    lines = [line.strip().rsplit(maxsplit=1) for line in output.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def test_completions_are_counted_by_kind_and_shown(tmp_path, capsys):
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in FORMS), encoding="utf-8")
    assert main(["--completions", str(file), "--max-share", "0.5"]) == 0
    output = capsys.readouterr().out
    assert "5 of 10 completions are listed" in output
    assert {kind: counts_by_kind(output)[kind] for kind in COUNTS} == COUNTS
    assert "row 0: authors correct, robust no_answer, number wrong\n    kinds      protocols disagree\n" in output
    assert "    kinds      protocols disagree, empty box\n" in output
    assert output.count("  row ") == 5
    assert main(["--completions", str(file), "--max-share", "0.4"]) == 1
    assert capsys.readouterr().out.endswith("5 of 10 are listed: 0.5000 is above --max_share 0.4.\n")


@pytest.mark.slow
def test_twenty_examples_of_all_kinds_are_shown(tmp_path, capsys):
    rows = [{"completion": r"\boxed{}", "solution": "1"}] * 30 + [{"completion": "1", "solution": None}]
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    main(["--completions", str(file)])
    output = capsys.readouterr().out
    assert output.count("  row ") == 20
    assert "row 30: " in output and "row 18: " in output and "row 19: " not in output


class TestGolds:
    """`--golds`: the answers of a data set alone."""

    ROWS = [{"problem": "?", "answer": gold} for gold in ("57", "1e3", "$$", None, "It is fifty seven.", "p - q", 2.5)]

    @pytest.fixture
    def golds(self, tmp_path):
        file = tmp_path / "problems.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.ROWS), encoding="utf-8")
        return str(file)

    def test_they_are_counted_by_kind_and_shown(self, golds, capsys):
        assert main(["--golds", golds, "--max_share", "0.4"]) == 1
        output = capsys.readouterr().out
        counts = {"missing": 1, "e-notation": 1, "words": 1, "no protocol reads it": 1}
        counts |= {"not read by robust": 1, "not read by number": 3}
        assert {kind: counts_by_kind(output)[kind] for kind in counts} == counts
        assert "  row 1 (e-notation): '1e3'\n" in output and "row 2 (no protocol reads it): '$$'" in output
        assert output.endswith("4 of 7 are listed: 0.5714 is above --max_share 0.4.\n")

    @pytest.mark.parametrize("name", [held_out(), f"math_500={DATA / 'math_500.jsonl'}"])
    def test_golds_of_training_and_evaluation_data_are_readable(self, capsys, name):
        assert main(["--golds", name, "--max_problems", "50", "--protocols", "robust", "--max_share", "0"]) == 0
        assert "0 of 50 gold answers are listed" in capsys.readouterr().out

    def test_programs_and_missing_columns_are_refused(self, golds):
        with pytest.raises(ValueError, match="Use `--programs`"):
            main(["--golds", f"verifiable_coding={DATA / 'verifiable_coding.jsonl'}"])
        with pytest.raises(ValueError, match="Use `--programs`"):
            main(["--golds", held_out("programs")])
        with pytest.raises(ValueError, match="solution_column"):
            main(["--golds", golds, "--solution_column", "gold"])


@pytest.mark.parametrize("number", ["0", "-1", "1.5"])
def test_numbers_of_problems_that_would_leave_some_out_silently_are_refused(number, capsys):
    with pytest.raises(SystemExit):
        main(["--golds", "gsm8k", "--max_problems", number])
    assert "--max_problems" in capsys.readouterr().err.splitlines()[-1]


class TestPrograms:
    """`--programs`: the reference solutions of a set against its tests."""

    def test_those_that_fail_are_listed(self, capsys, confined):
        assert main(["--programs", f"verifiable_coding={DATA / 'verifiable_coding.jsonl'}"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("5 problems of verifiable_coding=") and "seccomp" in printed
        listed = [line.strip() for line in printed.splitlines() if line.startswith("  row ")]
        assert listed[0] == "row 2 (wrong_test): wrong: passes 50% of the tests up to the first that fails"
        assert listed[1].startswith("row 3 (no_tests): gold_unparseable: tests missing or malformed: ")
        assert listed[2:] == ["row 4 (slow): timeout: timeout"]

    def test_reference_programs_of_a_users_file_are_run(self, tmp_path, capsys, confined):
        tests = {"type": "function", "name": "f", "cases": [{"input": [1], "output": 2}]}
        rows = [
            {"answer": tests, "code": "def f(x): return x + 1"},
            {"answer": {**tests, "language": "cpp"}, "code": "int f;"},
        ]
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        main(["--programs", str(file), "--reference_column", "code"])
        assert "row 1 (1): gold_unparseable: These tests are for 'cpp'" in capsys.readouterr().out
        with pytest.raises(ValueError, match="reference_column"):
            main(["--programs", str(file)])
        with pytest.raises(ValueError, match="solution_column.*'tests'"):
            main(["--programs", str(file), "--reference_column", "code", "--solution_column", "tests"])
        with pytest.raises(ValueError, match="programs.*verifiable_coding"):
            main(["--programs", "codes"])

    @pytest.mark.parametrize(("column", "settings"), [("solution", []), ("tests", ["--solution_column", "tests"])])
    def test_columns_of_tests_are_those_of_training(self, tmp_path, capsys, confined, column, settings):
        tests = {"type": "stdin_stdout", "cases": [{"input": "1", "output": "1"}]}
        file = tmp_path / "own.jsonl"
        file.write_text(json.dumps({"prompt": "?", column: tests, "gold_standard_solution": "print(input())"}))
        main(["--programs", str(file), *settings])
        assert "correct                    1" in capsys.readouterr().out


def test_errors_of_a_grader_are_counted_against_true_labels(tmp_path, capsys):
    """By labels from hand, null where nobody has judged, and by another protocol."""
    truths = [1, "true", False, 0.0, None]  # 7 in a box beside a gold of 7 is called wrong by hand
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row | {"by_hand": t}) + "\n" for row, t in zip(ROWS, truths)))
    main(["--completions", str(file), "--protocols", "authors", "trl", "--true-column", "by_hand"])
    output = capsys.readouterr().out
    assert "trl accepts 1 of 2 that by_hand rejects, and rejects 1 of 2 that it accepts" in output
    assert "authors accepts 1 of 2 that trl rejects, and rejects 0 of 2 that it accepts" in output


def test_labels_in_a_column_with_the_name_of_a_protocol_are_compared_with_it(tmp_path, capsys):
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row | {"authors": 0}) + "\n" for row in ROWS))
    main(["--completions", str(file), "--protocols", "authors", "--true-column", "authors"])
    output = capsys.readouterr().out
    assert "authors and authors (by hand) disagree" in output
    assert counts_by_kind(output)["label by hand differs"] > 0

"""Benchmarks: real rows read through the shipped entries, and every way a file can be wrong."""

import base64
import json
import pickle
import zlib
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from pacs_trl.evaluation.benchmarks import BENCHMARKS, load_benchmark
from pacs_trl.verification import Verifier
from pacs_trl.verification.cases import read_tests
from pacs_trl.verification.code import CodeVerifier


DATA = Path(__file__).parents[1] / "data"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "file", "size", "first_answer"),
    [
        ("math_500", "math_500.jsonl", 500, r"\left( 3, \frac{\pi}{2} \right)"),
        ("amc_23", "amc23.jsonl", 40, "27"),
        ("aime_2024", "aime_2024.jsonl", 30, "204"),
        ("aime_2025", "aime_2025.jsonl", 30, "70"),
        ("gsm8k", "gsm8k_test_200.jsonl", 200, "18"),
    ],
)
def test_files_of_known_benchmarks_are_read(name, file, size, first_answer):
    benchmark = load_benchmark(f"{name}={DATA / file}")
    assert benchmark.name == name and benchmark.title == BENCHMARKS[name].title
    assert len(benchmark.problems) == size == benchmark.source["num_problems"]
    assert benchmark.problems[0].solution == first_answer
    assert benchmark.source["file"] == file


def test_livecodebench_is_filtered_by_date_and_graded_by_its_tests(confined):
    benchmark = load_benchmark(f"livecodebench={DATA / 'livecodebench.jsonl'}")
    ids = [problem.id for problem in benchmark.problems]
    assert ids == ["difference", "pair_sum", "mean"]  # its first and last day too
    assert benchmark.is_code and "```python" in benchmark.instruction
    stdin, function, _ = (read_tests(problem.solution) for problem in benchmark.problems)
    assert stdin.cases == (("5 3\n", "2\n"), ("3 5\n", "-2\n"), ("0 0\n", "0\n")) and stdin.compare == "lines"
    assert function.function == "pairSum" and function.cases[0] == ("[[1, 2, 3], 5]", True)
    assert "def pairSum(self, numbers: List[int]" in benchmark.problems[1].problem
    right = [
        "a, b = map(int, input().split())\nprint(a - b)",
        "class Solution:\n    def pairSum(self, n: List[int], t: int) -> bool:\n"
        "        return any(a + b == t for a, b in combinations(n, 2))",
        "input()\nprint(mean(map(Fraction, input().split())))\n".replace("Fraction", "int"),
    ]
    with CodeVerifier(num_workers=1, isolation="rlimits") as verifier:
        solutions = [problem.solution for problem in benchmark.problems]
        assert verifier.grade([f"```python\n{program}\n```" for program in right], solutions) == [1.0] * 3
        assert verifier.grade(["```python\nprint(2)\n```"] * 3, solutions) == [0.0] * 3


def test_a_pickle_is_unpacked_in_the_sandbox(tmp_path, confined):
    """It may run any program, and this one writes a file where it can."""

    class Evil:
        def __reduce__(self):
            return (eval, (f"[open({str(tmp_path / 'escaped')!r}, 'w').write('x'), '[]'][1]",))

    row = json.loads((DATA / "livecodebench.jsonl").read_text().splitlines()[1])
    row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match="cannot be unpacked: .*(PermissionError|Operation not permitted)"):
        load_benchmark(f"livecodebench={write(tmp_path / 'evil.jsonl', [row])}")
    assert not (tmp_path / "escaped").exists()


def test_gpqa_shuffles_options_by_seed_and_the_letter_follows():
    benchmark = load_benchmark(f"gpqa_diamond={DATA / 'gpqa_diamond.jsonl'}")
    assert benchmark == load_benchmark(f"gpqa_diamond={DATA / 'gpqa_diamond.jsonl'}") and not benchmark.is_code
    assert benchmark.source["version"] == 2
    for problem, right in zip(benchmark.problems, ("neutron", "23", "argon"), strict=True):
        counts = Counter()
        for seed in range(400):
            text, letter = problem.for_seed(seed)
            options = dict(line.split(") ") for line in text.splitlines()[-4:])
            assert list(options) == list("ABCD") and options[letter] == right
            assert (text, letter) == problem.for_seed(seed)
            counts[letter] += 1
        assert all(80 < counts[letter] < 120 for letter in "ABCD")
    # on paper: seed 1 shows the stored options B, C, A, D, of which A is the right one
    text, letter = benchmark.problems[0].for_seed(1)
    assert text.splitlines()[-4:] == ["A) proton", "B) electron", "C) neutron", "D) alpha particle"] and letter == "C"


def test_letters_are_read_by_math_verify():
    answers = {
        1.0: [r"\boxed{B}", r"the answer is \boxed{\text{B}}.", r"\boxed{\mathrm{B}}", r"\boxed{(B)}"],
        0.0: [r"\boxed{C}", r"first \boxed{B}, then \boxed{C}", "no idea"],
    }
    with Verifier(num_workers=1, cpu_seconds=2.0) as verifier:
        for label, texts in answers.items():
            assert verifier.grade(texts, ["B"] * len(texts)) == [label] * len(texts)


def test_the_digest_changes_with_any_character(tmp_path):
    rows = [{"problem": "1+1", "answer": "2", "unique_id": "a"}, {"problem": "1+2", "answer": 3.0, "unique_id": "b"}]
    digests = set()
    for change in ({}, {"problem": "1+1 "}, {"answer": "3"}, {"unique_id": "c"}):
        path = write(tmp_path / "rows.jsonl", [{**rows[0], **change}, rows[1]])
        digests.add(load_benchmark(f"math_500={path}").source["digest"])
    assert len(digests) == 4


@pytest.mark.parametrize("answers", [["1", "2", "3"], [1.0, 2.0, 3.0], [["0.5", "1/2"], ["2"], ["3"]]])
def test_jsonl_json_and_parquet_give_the_same_benchmark(tmp_path, answers):
    rows = [{"question": f"{i}+1", "answer": answer, "id": i} for i, answer in enumerate(answers)]
    write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    loaded = [load_benchmark(f"amc_23={tmp_path}/rows.{kind}") for kind in ("jsonl", "json", "parquet")]
    assert loaded[0].problems == loaded[1].problems == loaded[2].problems
    assert len({benchmark.source["digest"] for benchmark in loaded}) == 1
    assert loaded[0].problems[1].solution == "2"


def test_a_users_file_is_a_benchmark(tmp_path):
    path = write(tmp_path / "sums.jsonl", [{"problem": "1+1", "answer": 2}, {"problem": "2+2", "answer": "4"}])
    benchmark = load_benchmark(str(path))
    assert (benchmark.name, benchmark.title, benchmark.source["file"]) == ("sums", "sums", "sums.jsonl")
    assert [(p.id, p.problem, p.solution) for p in benchmark.problems] == [("0", "1+1", "2"), ("1", "2+2", "4")]
    named = load_benchmark(f"held_out={path}")
    assert (named.name, named.problems) == ("held_out", benchmark.problems)
    write(path, [{"question": "1+1", "gold": 2}])
    columns = {"problem_column": "question", "solution_column": "gold"}
    other = load_benchmark(str(path), columns=columns)
    assert [(p.problem, p.solution) for p in other.problems] == [("1+1", "2")]
    assert columns.items() <= other.source.items()
    assert (
        load_benchmark(f"math_500={DATA / 'math_500.jsonl'}", max_problems=1, columns=columns)
        .source.keys()
        .isdisjoint(columns)
    )
    with pytest.raises(ValueError, match="problem_column"):
        load_benchmark(str(path))


ROW = {"problem": "1+1", "answer": "2", "unique_id": "a"}


@pytest.mark.parametrize(
    ("name", "rows", "key"),
    [
        ("math_500", [], "r.json"),
        ("math_500", [{"problem": "1+1", "answer": "2"}], "unique_id"),
        ("math_500", [ROW | {"answer": None}], "answer"),
        ("math_500", [ROW | {"problem": " "}], "problem"),
        ("math_500", [ROW, ROW], "id 'a'"),
        ("livecodebench", [{"question_id": "a"}], "contest_date"),
        ("livecodebench", [{"contest_date": "2020-01-01", "private_test_cases": "[]"}], "2024-07-01"),
        ("gpqa_diamond", [{"Question": "?"}], "Correct Answer"),
    ],
)
def test_a_file_that_cannot_be_used(name, rows, key, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=key):
        load_benchmark(f"{name}={tmp_path / 'r.json'}")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    def no_connection(*args, **kwargs):
        raise ConnectionError("offline mode")

    monkeypatch.setattr("datasets.load_dataset", no_connection)
    with pytest.raises(ValueError, match="AIME 2024.*offline mode"):
        load_benchmark("aime_2024")


def test_humaneval_grades_functions_by_their_tests(confined, tmp_path):
    """Imports and helpers of the problem are there; what a program prints does not pass its tests."""
    row = {
        "task_id": "Test/0",
        "prompt": 'import math\n\n\ndef area(r):\n    """Area of a circle."""\n',
        "entry_point": "area",
        "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
    }
    benchmark = load_benchmark(f"humaneval={write(tmp_path / 'rows.jsonl', [row])}")
    (problem,) = benchmark.problems
    assert benchmark.is_code and problem.id == "Test/0" and "def area(r):" in problem.problem
    bodies = ["return math.pi * r**2", "print('passed')", "raise SystemExit", "print(1)\n    return math.pi * r * r"]
    completions = [f"```python\ndef area(r):\n    {body}\n```" for body in bodies] + ["no program"]
    with CodeVerifier(num_workers=1) as verifier:
        assert verifier.grade(completions, [problem.solution] * 5) == [1.0, 0.0, 0.0, 1.0, 0.0]

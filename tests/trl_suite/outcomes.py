"""Outcomes of TRL's tests: those of a run, and those that are expected."""

import json
import re
from pathlib import Path

import yaml


EXPECTED = Path(__file__).parent / "expected.yaml"


def last_outcomes(results: Path) -> dict[str, dict]:
    """The last record of each test."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {record["test"]: record for record in map(json.loads, lines)}


def expected_outcomes(trainers: str) -> dict[str, str]:
    """`passed` or `failed` for each test that passes with TRL's trainers; with `pacs`, of those that apply to it."""
    expected = yaml.safe_load(EXPECTED.read_text())
    tests = [test for area in expected["areas"].values() for test in area]
    if trainers == "trl":
        return dict.fromkeys(tests, "passed")
    exceptions = [difference for kind in ("differs", "refused") for difference in expected[kind]]
    if trainers == "pacs":
        other = {test for reason in expected["not for PACS"] for test in reason["tests"]}
        tests = [test for test in tests if test.startswith("GRPO ") and test not in other]
        exceptions = expected["PACS"]
    failed = {test for exception in exceptions for test in exception["tests"]}
    return {test: "failed" if test in failed else "passed" for test in tests}


def short_name(nodeid: str) -> str:
    """Return `GRPO test_b[tiny-X]` for `.../test_grpo_trainer.py::TestA::test_b[trl-internal-testing/tiny-X]`."""
    file, _, test = re.search(r"test_(\w+)_trainer\.py::(\w+)::(.*)", nodeid).groups()
    return f"{file.upper()} {test.replace('trl-internal-testing/', '')}"


def unexpected(trainers: str, outcomes: dict[str, dict]) -> list[str]:
    """A line for each test whose outcome is not the expected one."""
    expected = expected_outcomes(trainers)
    lines = []
    for test, record in outcomes.items():
        if record["outcome"] in ("passed", "failed") and record["outcome"] != expected.get(test, record["outcome"]):
            lines.append(f"{record['outcome']}, expected {expected[test]}: {test} {record.get('error', '')[:300]}")
        if test not in expected and record["outcome"] == "passed" and trainers == "trl":
            lines.append(f"passed, not in expected.yaml: {test}")
    return lines

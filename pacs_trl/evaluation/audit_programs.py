"""Reference solutions of a set of programming problems against its tests: a problem whose own solution fails teaches
nothing.

    pacs-trl audit --programs verifiable_coding

Lists the problems whose reference solution fails, with the outcome and the class of the error, and those whose tests
cannot be read.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import TRAINING_SETS
from ..data.sets import FILE_FORMATS, ProblemSet, gold_answer, load_rows
from ..verification import Outcome
from ..verification.cases import last_program
from ..verification.code import CodeVerifier


def audit_programs(args: argparse.Namespace) -> int:
    """Run what `args.programs` names; returns the exit status."""
    name, _, path = args.programs.partition("=")
    if not path and Path(name).suffix in FILE_FORMATS:
        name, path = Path(name).stem, name
    if name not in TRAINING_SETS and not path:
        raise ValueError(
            f"`--programs` {args.programs!r} is no set of programs: name one of "
            f"{', '.join(name for name, entry in TRAINING_SETS.items() if entry.answer_in == 'tests')}, NAME=FILE or "
            "FILE."
        )
    if args.max_problems is not None and args.max_problems < 1:
        raise ValueError(
            f"`--max_problems` must be at least 1, got {args.max_problems}. Leave it out for all problems."
        )
    entry = TRAINING_SETS.get(name) or replace(ProblemSet(""), answer_in="tests")
    rows = load_rows(name, entry, path or None)[: args.max_problems]
    columns = sorted({column for row in rows for column in row})
    for column in (entry.solution_column, args.reference_column):
        if column not in columns:
            raise ValueError(f"{args.programs} has no column {column!r}. Columns found: {', '.join(columns)}.")
    tests, reasons = zip(*(_read(row.get(entry.solution_column)) for row in rows), strict=True)
    references = [_fenced(row.get(args.reference_column)) for row in rows]
    with CodeVerifier(num_workers=args.num_workers) as verifier:
        print(f"{len(rows)} problems of {args.programs}, run with {verifier.level.text if verifier.level else ''}\n")
        grades = verifier.grade_detailed(references, tests)
    for outcome, count in Counter(grade.outcome for grade in grades).most_common():
        print(f"{outcome.name.lower():18}{count:10}")
    print(f"{'seconds per program':18}{sum(grade.seconds for grade in grades) / len(grades):10.3f}\n")
    for index, (row, grade, reason) in enumerate(zip(rows, grades, reasons, strict=True)):
        if grade.outcome is not Outcome.CORRECT:
            why = reason or grade.error or f"passes {grade.share:.0%} of the tests up to the first that fails"
            print(f"  row {index} ({row.get('problem_id', index)}): {grade.outcome.name.lower()}: {why}")
    return 0


def _read(cell: Any) -> tuple[str | None, str]:
    try:
        tests = gold_answer(cell, "tests")
    except ValueError as error:
        return None, str(error)
    assert not isinstance(tests, list)
    return tests, "" if tests else f"tests missing or malformed: {json.dumps(cell, default=str)[:80]}"


def _fenced(reference: Any) -> str | None:
    """A solution as a completion, whether or not it stands in a block."""
    if not isinstance(reference, str) or last_program(reference) is not None:
        return reference
    return f"```python\n{reference}\n```"

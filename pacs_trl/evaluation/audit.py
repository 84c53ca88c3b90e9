"""Grade a file of completions with several protocols and show where they disagree.

    pacs-trl audit --completions outputs/run/completions/completions_00010.parquet
    pacs-trl audit --programs verifiable_coding

The first form grades saved completions (tables of TRL's `log_completions`, or any JSON lines or Parquet file) with the
authors' protocol and with TRL's `accuracy_reward`, and prints the outcomes side by side, beside labels by hand
(`--true_column`). The second form runs the reference solutions of a set of programming problems against its tests and
lists those that fail.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from ..data import TRAINING_SETS
from ..data.sets import ProblemSet, gold_answer, load_rows, read_rows, require_columns
from ..rewards import VerificationArguments
from ..settings import Parser
from ..verification import Outcome, completion_text
from ..verification.cases import last_program
from ..verification.code import CodeVerifier
from .benchmarks import name_and_path


EXAMPLES = 5  # disagreements that are printed for each pair of protocols
_LABELS = dict.fromkeys(("1", "1.0", "true"), Outcome.CORRECT) | dict.fromkeys(("0", "0.0", "false"), Outcome.WRONG)
_LABELS |= dict.fromkeys(("none", "nan"), Outcome.GOLD_UNPARSEABLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl audit`; return the exit status."""
    parser = Parser("audit", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--completions", help=".jsonl, .json or .parquet file with one row per completion or group")
    subject.add_argument("--programs", help="set of programming problems (name, NAME=FILE or FILE)")
    parser.add_argument("--completion_column", default="completion", help="text, messages, or a list of completions")
    parser.add_argument("--solution_column", default="solution", help="gold answer")
    parser.add_argument("--true_column", help="labels by hand: 1 or true, 0 or false; null if unknown")
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=("authors", "trl", "number", "robust"),
        default=["authors", "trl"],
        help="protocols to compare",
    )
    parser.add_argument("--reference_column", default="gold_standard_solution", help="--programs: solutions")
    parser.add_argument("--max_problems", type=int, help="--programs: number of problems to run")
    args = parser.parse_args(argv)
    if args.programs:
        _audit_programs(args)
    else:
        _audit_completions(args)
    return 0


def _audit_completions(args: argparse.Namespace) -> None:
    rows, column = read_rows(Path(args.completions)), args.completion_column
    named = {name: getattr(args, name) for name in ("completion_column", "solution_column", "true_column")}
    require_columns(args.completions, rows, named)
    # a cell with a list of completions, but not a conversation, becomes several rows
    cells = [(row, row.get(column)) for row in rows]
    cells = [(row, c if isinstance(c, list) and not (c and isinstance(c[0], dict)) else [c]) for row, c in cells]
    rows, texts = [row for row, cell in cells for _ in cell], [completion_text(c) for _, cell in cells for c in cell]
    golds = [row.get(args.solution_column) for row in rows]
    labels = [str(row.get(args.true_column)).lower() for row in rows] if args.true_column else []
    if unknown := [label for label in labels if label not in _LABELS]:
        raise ValueError(f"true_column contains {unknown[0]!r}. Labels are 1 or true, 0 or false, or null.")
    print(f"{len(texts)} completions of {args.completions}\n")
    graded = {}
    for protocol in args.protocols:
        with VerificationArguments(verification_protocol=protocol).build() as verifier:
            graded[protocol] = [result.outcome for result in verifier.grade_detailed(texts, golds)]
    if labels:
        graded[args.true_column] = [_LABELS[label] for label in labels]
    _print_outcomes(graded)
    for first, second in combinations(graded, 2):
        pairs = [(one.label, other.label) for one, other in zip(graded[first], graded[second], strict=True)]
        differing = [i for i, (one, other) in enumerate(pairs) if one != other]
        print(f"\n{first} and {second} disagree on the label of {len(differing)} of {len(texts)} completions")
        of_wrong, of_correct = (
            [one for one, other in pairs if other == truth and one is not None] for truth in (0.0, 1.0)
        )
        print(
            f"  {first} accepts {of_wrong.count(1.0)} of {len(of_wrong)} that {second} rejects, and rejects "
            f"{of_correct.count(0.0)} of {len(of_correct)} that it accepts"
        )
        for i in differing[:EXAMPLES]:
            print(f"  row {i}: " + ", ".join(f"{name} {graded[name][i].name.lower()}" for name in (first, second)))
            print(f"    gold       {str(golds[i])[:200]!r}")
            print(f"    completion ...{(texts[i] or '')[-200:]!r}")


def _print_outcomes(graded: dict[str, list[Outcome]]) -> None:
    print(f"{'outcome':18}" + "".join(f"{protocol:>10}" for protocol in graded))
    counts = [Counter(outcomes) for outcomes in graded.values()]
    for outcome in Outcome:
        if any(count[outcome] for count in counts):
            print(f"{outcome.name.lower():18}" + "".join(f"{count[outcome]:10}" for count in counts))
    readable = [max(1, count.total() - count[Outcome.GOLD_UNPARSEABLE]) for count in counts]
    shares = [f"{count[Outcome.CORRECT] / total:10.4f}" for count, total in zip(counts, readable, strict=True)]
    print(f"{'accuracy':18}" + "".join(shares) + "   (of completions with a readable gold)")


def _audit_programs(args: argparse.Namespace) -> None:
    name, path = name_and_path(args.programs)
    if name not in TRAINING_SETS and not path:
        known = ", ".join(name for name, entry in TRAINING_SETS.items() if entry.answer_in == "tests")
        raise ValueError(f"`--programs` {args.programs!r} is not a set of programs. Name one of {known}, or a file.")
    entry = TRAINING_SETS.get(name) or replace(ProblemSet(""), answer_in="tests")
    rows = load_rows(name, entry, path or None)[: args.max_problems or None]
    columns = {"solution_column": entry.solution_column, "reference_column": args.reference_column}
    require_columns(args.programs, rows, columns)
    tests, problems = [], []  # `None` and the reason, where tests cannot be read
    for cell in (row.get(entry.solution_column) for row in rows):
        try:
            tests.append(gold_answer(cell, "tests"))
            problems.append(f"tests missing or malformed: {json.dumps(cell, default=str)[:80]}" * (not tests[-1]))
        except ValueError as error:
            tests.append(None)
            problems.append(str(error))
    solutions = [row.get(args.reference_column) for row in rows]
    fenced = [f"```python\n{s}\n```" if isinstance(s, str) and last_program(s) is None else s for s in solutions]
    with CodeVerifier() as verifier:
        print(f"{len(rows)} problems of {args.programs}, run with {verifier.level}\n")
        grades = verifier.grade_detailed(fenced, tests)
    for outcome, count in Counter(grade.outcome for grade in grades).most_common():
        print(f"{outcome.name.lower():18}{count:10}")
    print(f"{'seconds per program':18}{sum(grade.seconds for grade in grades) / len(grades):10.3f}\n")
    for index, (row, grade, problem) in enumerate(zip(rows, grades, problems, strict=True)):
        if grade.outcome is not Outcome.CORRECT:
            why = problem or grade.error or f"passes {grade.share:.0%} of the tests up to the first that fails"
            print(f"  row {index} ({row.get('problem_id', index)}): {grade.outcome.name.lower()}: {why}")

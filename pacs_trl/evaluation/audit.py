"""Grade one file of completions with several protocols and show where they disagree.

    pacs-trl audit --completions outputs/run/completions/completions_00010.parquet

A score is a claim about a grader as much as about a model. This command takes saved rollouts (the tables that TRL's
`log_completions` writes, the sample files of `pacs-trl evaluate` together with `--benchmark`, or any JSON lines or Parquet
file), grades each completion with the authors' protocol, with TRL's `accuracy_reward` and by comparing the text of the last
box, and prints the verdicts side by side. Golds so small that a grader takes 0.0 for them are named. It changes nothing.
With --programs it runs the reference solutions of a set of programming problems instead (`audit_programs.py`).
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from ..data.sets import read_rows
from ..rewards import completion_text
from ..settings.command_line import Parser
from ..verification import MAX_CHARACTERS, Outcome, VerificationArguments, gold_texts, last_boxed
from .audit_programs import audit_programs


PROTOCOLS = ("authors", "trl", "text")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `pacs-trl audit`; returns the exit status."""
    parser = Parser("audit", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--completions", help=".jsonl, .json or .parquet file with one row per completion or group")
    subject.add_argument(
        "--programs", help="set of programming problems (name, NAME=FILE or FILE): run its reference solutions"
    )
    parser.add_argument("--completion_column", default="completion", help="text, messages, or a list of completions")
    parser.add_argument("--solution_column", default="solution", help="gold answer")
    parser.add_argument("--benchmark", help="take the gold answers of this benchmark, by the row's `problem` id")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--num_workers", type=int, help="grading processes (default: one per processor)")
    parser.add_argument("--examples", type=int, default=5, help="disagreements to print for each pair of protocols")
    parser.add_argument("--reference_column", default="gold_standard_solution", help="of --programs: the solutions")
    parser.add_argument("--max_problems", type=int, help="of --programs: only the first so many")
    args = parser.parse_args(argv)
    if args.programs:
        return audit_programs(args)

    texts, golds = read_completions(args)
    graded = {protocol: grade_with_zeros(texts, golds, protocol, args.num_workers) for protocol in args.protocols}
    verdicts = {protocol: outcomes for protocol, (outcomes, _) in graded.items()}
    print(f"{len(texts)} completions of {args.completions}\n")
    print_outcomes(verdicts)
    print_tiny_golds({protocol: tiny for protocol, (_, tiny) in graded.items() if protocol != "text"})
    for first, second in combinations(args.protocols, 2):
        print_disagreements(first, second, verdicts, texts, golds, args.examples)
    return 0


def read_completions(args: argparse.Namespace) -> tuple[list[str | None], list[Any]]:
    """Completion texts and gold answers, groups unrolled."""
    rows = read_rows(Path(args.completions))
    columns = sorted({column for row in rows for column in row})
    rows = [row for row in rows if args.completion_column in row]  # a sample file begins with a line of settings
    if not rows:
        raise ValueError(
            f"`--completion_column` {args.completion_column!r} is not a column of {args.completions}. Columns found: "
            f"{', '.join(columns)}."
        )
    gold_of = _gold_lookup(args, columns)
    texts, golds = [], []
    for row in rows:
        value = row[args.completion_column]
        is_group = isinstance(value, list) and not (value and isinstance(value[0], dict))
        for completion in value if is_group else [value]:
            texts.append(completion_text(completion))
            golds.append(gold_of(row))
    return texts, golds


def _gold_lookup(args: argparse.Namespace, columns: list[str]):
    if args.benchmark is not None:
        from .benchmarks import load_benchmark

        solutions = {problem.id: problem.solution for problem in load_benchmark(args.benchmark).problems}
        return lambda row: solutions.get(row.get("problem"))
    if args.solution_column not in columns:
        raise ValueError(
            f"`--solution_column` {args.solution_column!r} is not a column of {args.completions}. Columns found: "
            f"{', '.join(columns)}. Name the column of gold answers, or the `--benchmark` that has them."
        )
    return lambda row: row.get(args.solution_column)


def grade(texts: list[str | None], golds: list[Any], protocol: str, num_workers: int | None) -> list[Outcome]:
    """Outcome of each completion under one protocol."""
    if protocol == "text":
        return [_compare_text(text, gold) for text, gold in zip(texts, golds, strict=True)]
    arguments = VerificationArguments(verification_protocol=protocol, verification_num_workers=num_workers)
    with arguments.build() as verifier:
        return [result.outcome for result in verifier.grade_detailed(texts, golds)]


def _compare_text(text: str | None, gold: Any) -> Outcome:
    """The strictest grader: the last box against the gold, character by character but for white space and dollar signs."""
    expected = {_bare(last_boxed(alternative) or alternative) for alternative in gold_texts(gold)}
    if not expected:
        return Outcome.GOLD_UNPARSEABLE
    if len(text or "") > MAX_CHARACTERS:
        return Outcome.TOO_LONG
    answer = last_boxed(text or "")
    if answer is None:
        return Outcome.NO_ANSWER
    return Outcome.CORRECT if _bare(answer) in expected else Outcome.WRONG


def _bare(text: str) -> str:
    return "".join(text.replace("$", "").split())


def print_outcomes(verdicts: dict[str, list[Outcome]]) -> None:
    print(f"{'outcome':18}" + "".join(f"{protocol:>10}" for protocol in verdicts))
    counts = {protocol: Counter(outcomes) for protocol, outcomes in verdicts.items()}
    for outcome in Outcome:
        if any(count[outcome] for count in counts.values()):
            print(f"{outcome.name.lower():18}" + "".join(f"{count[outcome]:10}" for count in counts.values()))
    accuracies = []
    for count in counts.values():
        judged = count.total() - count[Outcome.GOLD_UNPARSEABLE]
        accuracies.append(f"{count[Outcome.CORRECT] / judged:10.4f}" if judged else f"{'-':>10}")
    print(f"{'accuracy':18}" + "".join(accuracies) + "   (of those with a readable gold)")


# math-verify rounds only where one of the two is a decimal number; 0 is exact and equals nothing but 0.
_ZEROS = (r"\boxed{0.0}", r"\boxed{0}")


def grade_with_zeros(
    texts: list[str | None], golds: list[Any], protocol: str, num_workers: int | None
) -> tuple[list[Outcome], list[Any]]:
    """As [`grade`]; and the golds, each once, that are so small that the protocol takes 0.0 for them, though they are not 0."""
    distinct = list({gold_texts(gold): gold for gold in golds}.values())
    zeros = [zero for zero in _ZEROS for _ in distinct]
    outcomes = grade([*texts, *zeros], [*golds, *distinct, *distinct], protocol, num_workers)
    is_right = [outcome is Outcome.CORRECT for outcome in outcomes[len(texts) :]]
    decimal, exact = is_right[: len(distinct)], is_right[len(distinct) :]
    tiny = [gold for gold, by_rounding, is_zero in zip(distinct, decimal, exact, strict=True) if by_rounding > is_zero]
    return outcomes[: len(texts)], tiny


def print_tiny_golds(tiny: dict[str, list[Any]]) -> None:
    """A line for each protocol that has some."""
    for protocol, golds in tiny.items():
        if golds:
            print(
                f"\n{protocol}: {len(golds)} gold answers are so small that 0.0 is graded correct (decimal numbers are "
                f"compared after rounding to 6 places), for example {', '.join(repr(str(gold)) for gold in golds[:3])}"
            )


def print_disagreements(
    first: str,
    second: str,
    verdicts: dict[str, list[Outcome]],
    texts: list[str | None],
    golds: list[Any],
    num_examples: int,
) -> None:
    """The completions whose labels differ between two protocols, the first few of them in full."""
    pairs = list(zip(verdicts[first], verdicts[second], strict=True))
    differing = [index for index, (one, other) in enumerate(pairs) if one.label != other.label]
    print(f"\n{first} and {second} disagree on the label of {len(differing)} of {len(pairs)} completions")
    for index in differing[:num_examples]:
        one, other = pairs[index]
        print(f"  row {index}: {first} {one.name.lower()}, {second} {other.name.lower()}")
        print(f"    gold       {str(golds[index])[:200]!r}")
        print(f"    completion ...{(texts[index] or '')[-200:]!r}")

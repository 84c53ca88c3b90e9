"""Grade one file of completions with several protocols and show where they disagree.

    pacs-trl audit --completions outputs/run/completions/completions_00010.parquet

A score is a claim about a grader as much as about a model. This command takes saved rollouts (the tables that TRL's
`log_completions` writes, the sample files of `pacs-trl evaluate` together with `--benchmark`, or any JSON lines or
Parquet file), grades each completion with the authors' protocol, with TRL's `accuracy_reward` and by comparing the
text of the last box, and prints the verdicts side by side. Golds so small that a grader takes 0.0 for them are named.
It changes nothing. Where the truth is known, from a column of labels by hand (--true_column) or a protocol that is
taken for it (--truth), it says how often the others err. With --programs it runs the reference solutions of a set of
programming problems instead (`audit_programs.py`).
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from ..data.sets import read_rows
from ..settings.command_line import Parser
from ..verification import MAX_CHARACTERS, Outcome, VerificationArguments, completion_text, gold_texts, last_boxed
from .audit_programs import audit_programs
from .pass_at_k import pass_interval


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
    truth = parser.add_mutually_exclusive_group()
    truth.add_argument("--true_column", help="labels by hand: 1 or true, 0 or false; null where nobody has judged")
    truth.add_argument("--truth", choices=PROTOCOLS, help="the protocol that is declared true")
    parser.add_argument("--benchmark", help="take the gold answers of this benchmark, by the row's `problem` id")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--num_workers", type=int, help="grading processes (default: one per processor)")
    parser.add_argument("--examples", type=int, default=5, help="disagreements to print for each pair of protocols")
    parser.add_argument("--reference_column", default="gold_standard_solution", help="of --programs: the solutions")
    parser.add_argument("--max_problems", type=int, help="of --programs: only the first so many")
    args = parser.parse_args(argv)
    if args.programs:
        return audit_programs(args)

    texts, golds, truths = read_completions(args)
    protocols = list(dict.fromkeys([*args.protocols, *([args.truth] if args.truth else [])]))
    graded = {protocol: grade_with_zeros(texts, golds, protocol, args.num_workers) for protocol in protocols}
    verdicts = {protocol: outcomes for protocol, (outcomes, _) in graded.items()}
    print(f"{len(texts)} completions of {args.completions}\n")
    print_outcomes(verdicts)
    print_tiny_golds({protocol: tiny for protocol, (_, tiny) in graded.items() if protocol != "text"})
    for first, second in combinations(protocols, 2):
        print_disagreements(first, second, verdicts, texts, golds, args.examples)
    if args.truth:
        truths = [outcome.label for outcome in verdicts.pop(args.truth)]
    if args.truth or args.true_column:
        for protocol, outcomes in verdicts.items():
            print_noise(protocol, args.truth or args.true_column, [outcome.label for outcome in outcomes], truths)
    return 0


def read_completions(args: argparse.Namespace) -> tuple[list[str | None], list[Any], list[float | None]]:
    """Completion texts, gold answers and labels by hand, groups unrolled."""
    rows = read_rows(Path(args.completions))
    columns = sorted({column for row in rows for column in row})
    rows = [row for row in rows if args.completion_column in row]  # a sample file begins with a line of settings
    if not rows:
        raise ValueError(
            f"`--completion_column` {args.completion_column!r} is not a column of {args.completions}. Columns found: "
            f"{', '.join(columns)}."
        )
    gold_of = _gold_lookup(args, columns)
    if args.true_column and args.true_column not in columns:
        raise ValueError(
            f"`--true_column` {args.true_column!r} is not a column of {args.completions}. Columns found: "
            f"{', '.join(columns)}."
        )
    texts, golds, truths = [], [], []
    for row in rows:
        value = row[args.completion_column]
        is_group = isinstance(value, list) and not (value and isinstance(value[0], dict))
        completions = value if is_group else [value]
        by_hand = row.get(args.true_column) if args.true_column else None
        by_hand = by_hand if isinstance(by_hand, list) else [by_hand] * len(completions)
        if len(by_hand) != len(completions):
            raise ValueError(
                f"`--true_column`: {len(by_hand)} labels stand beside {len(completions)} completions in a row."
            )
        for completion, label in zip(completions, by_hand, strict=True):
            texts.append(completion_text(completion))
            golds.append(gold_of(row))
            truths.append(_label_by_hand(label))
    return texts, golds, truths


def _label_by_hand(value: Any) -> float | None:
    if value is None or value != value:  # pandas makes NaN of null
        return None
    label = {"1": 1.0, "1.0": 1.0, "true": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0}.get(str(value).lower())
    if label is None:
        raise ValueError(f"`--true_column`: a label must be 1 or true, 0 or false, or null, got {value!r}.")
    return label


def _gold_lookup(args: argparse.Namespace, columns: list[str]):
    if args.benchmark is not None:
        from .benchmarks import load_benchmark

        problems = {problem.id: problem for problem in load_benchmark(args.benchmark).problems}
        return lambda row: (
            problems[row["problem"]].of_sample(row.get("seed", 0))[1] if row.get("problem") in problems else None
        )
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
    """The strictest grader: the last box against the gold, character by character but for white space and dollar
    signs."""
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
    """As [`grade`]; and the golds, each once, that are so small that the protocol takes 0.0 for them, though they are
    not 0."""
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
                f"\n{protocol}: {len(golds)} gold answers are so small that 0.0 is graded correct (decimal numbers "
                "are "
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


def print_noise(protocol: str, truth: str, labels: Sequence[float | None], truths: Sequence[float | None]) -> None:
    """How often a protocol errs, among the completions that it and the truth both judge."""
    pairs = [(label, true) for label, true in zip(labels, truths, strict=True) if None not in (label, true)]
    print(f"\n{protocol} against {truth}, {len(pairs)} completions that both judge")
    rates = {}
    for name, true, word in (("false_positive", 0.0, "wrong"), ("false_negative", 1.0, "right")):
        errors = [float(label != true) for label, of_truth in pairs if of_truth == true]
        if not errors:
            print(f"  {name} is not known: no completion is {word}")
            continue
        found = pass_interval(errors)
        rates[name] = found.mean
        print(
            f"  {name} {found.mean:.4f} (95 % interval {found.lower:.4f} to {found.upper:.4f}): {sum(errors):.0f} of "
            f"{len(errors)} {word} ones"
        )
    if len(rates) == 2 and sum(rates.values()) >= 1:
        print("  the verdicts say nothing about the truth, or the opposite")

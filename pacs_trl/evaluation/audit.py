"""Grade completions with several protocols, check gold answers or programs, and list those in doubt.

    pacs-trl audit --completions outputs/run/completions/completions_00010.parquet
    pacs-trl audit --golds deepscaler --max_share 0.01
    pacs-trl audit --programs verifiable_coding

The first form grades saved completions (tables of TRL's `log_completions`, or any JSON lines or Parquet file) and
prints the outcomes of the protocols side by side, beside labels by hand (`--true_column`). It lists completions on
which protocols disagree, or whose answer or gold has a form that protocols read differently: counts, and twenty
examples. The second form lists such gold answers of a data set, before a run. The third form runs the reference
solutions of a set of programming problems against its tests and lists those that fail.

The exit status is 1 if a larger share than `--max_share` is listed.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from ..data import TRAINING_SETS
from ..data.golds import golds_by_kind, is_in_e_notation
from ..data.sets import ProblemSet, choose_columns, gold_answer, load_rows, read_rows, require_columns
from ..errors import UserError
from ..rewards import VerificationArguments
from ..settings import Parser
from ..verification import Outcome, completion_text, gold_texts
from ..verification.cases import json_of_tests, last_program
from ..verification.code import CodeVerifier
from .benchmarks import BENCHMARKS, name_and_path


NUM_EXAMPLES = 20
# Labels by hand as they are written in files, in lower case.
_OUTCOME_OF_LABEL = {
    "1": Outcome.CORRECT,
    "1.0": Outcome.CORRECT,
    "true": Outcome.CORRECT,
    "0": Outcome.WRONG,
    "0.0": Outcome.WRONG,
    "false": Outcome.WRONG,
    "none": Outcome.GOLD_UNPARSEABLE,  # unknown
    "nan": Outcome.GOLD_UNPARSEABLE,
}
_HAS_TESTS = "`--golds` {!r} is a set of programs, which has tests. Use `--programs`."
# Options that each of the three forms reads.
_USED_OPTIONS = {
    "completions": {"completion_column", "solution_column", "true_column", "protocols"},
    "golds": {"solution_column", "protocols", "max_problems"},
    "programs": {"solution_column", "reference_column", "max_problems"},
}

# Forms of completions that graders read differently.
_THOUGHT = re.compile(r"(?:<think>|\A)(?:(?!<think>).)*?</think>", re.DOTALL)
_BOX = re.compile(r"\\(?:f?boxed|fbox|framebox)(?![A-Za-z])")
_EMPTY_BOX = re.compile(r"\\(?:f?boxed|fbox|framebox)\s*\{\s*\}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl audit`; return the exit status."""
    parser = Parser("audit", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--completions", help=".jsonl, .json or .parquet file with one row per completion or group")
    subject.add_argument("--golds", help="data set whose gold answers are checked (name, NAME=FILE, FILE or Hub id)")
    subject.add_argument("--programs", help="set of programming problems (name, NAME=FILE or FILE)")
    parser.add_argument("--completion_column", default="completion", help="text, messages, or a list of completions")
    parser.add_argument(
        "--solution_column", help="gold answer or tests; with --completions by default `solution`, else as in training"
    )
    parser.add_argument("--true_column", help="labels by hand: 1 or true, 0 or false; null if unknown")
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=("robust", "authors", "trl", "number"),
        default=["authors", "robust", "number"],
        help="protocols that are compared: authors, robust, and number by default",
    )
    parser.add_argument(
        "--max_share",
        type=share,
        default=1.0,
        help="exit status 1 if a larger share of completions, golds, or programs is listed; 1.0, the default, never",
    )
    parser.add_argument("--reference_column", default="gold_standard_solution", help="--programs: solutions")
    parser.add_argument("--max_problems", type=at_least_one, help="--golds and --programs: number of problems")
    args = parser.parse_args(argv)
    _refuse_ignored_options(parser, args)
    if args.programs:
        num_listed, num_rows = _audit_programs(args)
    elif args.golds:
        num_listed, num_rows = _audit_golds(args)
    else:
        num_listed, num_rows = _audit_completions(args)
    if num_listed <= args.max_share * num_rows:
        return 0
    share_listed = num_listed / num_rows
    print(f"\n{num_listed} of {num_rows} are listed: {share_listed:.4f} is above --max_share {args.max_share:g}.")
    return 1


def _refuse_ignored_options(parser: Parser, args: argparse.Namespace) -> None:
    """Raise a `ValueError` for an option that the chosen form does not read and that has not its default."""
    form = next(name for name in _USED_OPTIONS if getattr(args, name))
    all_options = set().union(*_USED_OPTIONS.values())
    for name in sorted(all_options - _USED_OPTIONS[form]):
        if getattr(args, name) != parser.get_default(name):
            raise UserError(f"`--{name}` would be ignored with `--{form}`. Remove it.")


def at_least_one(text: str) -> int:
    """Parse an option that is an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1.")
    return int(text)


def share(text: str) -> float:
    """Parse an option that is a number in [0, 1]."""
    if not 0.0 <= float(text) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1.")
    return float(text)


def _audit_completions(args: argparse.Namespace) -> tuple[int, int]:
    """Print outcomes, disagreements, kinds, and examples; return the number of listed completions, and of all."""
    rows = read_rows(Path(args.completions))
    solution_column = args.solution_column or "solution"
    columns_of_settings = {
        "completion_column": args.completion_column,
        "solution_column": solution_column,
        "true_column": args.true_column,
    }
    require_columns(args.completions, rows, columns_of_settings)
    texts, golds, labels_by_hand = [], [], []  # one per completion
    for row in rows:
        for completion in _completions(row.get(args.completion_column)):
            texts.append(completion_text(completion))
            golds.append(row.get(solution_column))
            if args.true_column:
                labels_by_hand.append(str(row.get(args.true_column)).lower())
    for label in labels_by_hand:
        if label not in _OUTCOME_OF_LABEL:
            raise UserError(f"true_column contains {label!r}. Labels are 1 or true, 0 or false, or null.")
    print(f"{len(texts)} completions of {args.completions}\n")

    graded = {}  # outcomes of all completions, by protocol, and last those of the labels by hand
    for protocol in args.protocols:
        with VerificationArguments(verification_protocol=protocol).build() as verifier:
            graded[protocol] = [result.outcome for result in verifier.grade_detailed(texts, golds)]
    kinds = _completions_by_kind(texts, golds, graded)
    if args.true_column:
        name_by_hand = args.true_column
        if name_by_hand in args.protocols:
            name_by_hand += " (by hand)"
        graded[name_by_hand] = [_OUTCOME_OF_LABEL[label] for label in labels_by_hand]
        kinds["label by hand differs"] = _differing(graded, args.protocols, name_by_hand)
    _print_outcomes(graded)
    for first, second in combinations(graded, 2):
        _print_disagreement(first, second, graded)
    _print_counts(kinds, "completions", len(texts))
    for i in _examples(kinds):
        outcomes_of_completion = [f"{name} {outcomes[i].name.lower()}" for name, outcomes in graded.items()]
        print(f"  row {i}: {', '.join(outcomes_of_completion)}")
        print(f"    kinds      {', '.join(_kinds_of(i, kinds))}")
        print(f"    gold       {str(golds[i])[:200]!r}")
        print(f"    completion ...{(texts[i] or '')[-200:]!r}")
    return _num_listed(kinds), len(texts)


def _completions(cell: Any) -> list[Any]:
    """Return the completions in a cell: a list of them, or one, which is text or a conversation."""
    if not isinstance(cell, list):
        return [cell]
    is_conversation = bool(cell) and isinstance(cell[0], dict)
    return [cell] if is_conversation else cell


def _completions_by_kind(
    texts: Sequence[str | None], golds: Sequence[Any], graded: dict[str, list[Outcome]]
) -> dict[str, list[int]]:
    """Return the indices of completions of each kind that is listed. A completion may be of several kinds."""
    kinds: dict[str, list[int]] = {
        "protocols disagree": [],
        "gold that no protocol reads": [],
        "gold that some protocols do not read": [],
        "box in a think block": [],
        "empty box": [],
        "gold in e-notation": [],
    }
    for i, (text, gold) in enumerate(zip(texts, golds, strict=True)):
        labels = [outcomes[i].label for outcomes in graded.values()]
        if 0.0 in labels and 1.0 in labels:
            kinds["protocols disagree"].append(i)
        # Of golds that are no numbers, `number` reads few.
        labels_of_others = [outcomes[i].label for protocol, outcomes in graded.items() if protocol != "number"]
        if set(labels) == {None}:
            kinds["gold that no protocol reads"].append(i)
        elif None in labels_of_others:
            kinds["gold that some protocols do not read"].append(i)
        if any(_BOX.search(thought) for thought in _THOUGHT.findall(text or "")):
            kinds["box in a think block"].append(i)
        if _EMPTY_BOX.search(text or ""):
            kinds["empty box"].append(i)
        if is_in_e_notation(gold):
            kinds["gold in e-notation"].append(i)
    return kinds


def _differing(graded: dict[str, list[Outcome]], protocols: Sequence[str], by_hand: str) -> list[int]:
    """Return the indices of completions that a protocol labels otherwise than the label by hand, where that is
    known."""
    differing = []
    for i, outcome_by_hand in enumerate(graded[by_hand]):
        labels = {graded[protocol][i].label for protocol in protocols}
        if outcome_by_hand.label is not None and labels != {outcome_by_hand.label}:
            differing.append(i)
    return differing


def _print_disagreement(first: str, second: str, graded: dict[str, list[Outcome]]) -> None:
    """Print how two protocols differ; completions that one of them cannot grade differ, and are neither accepted nor
    rejected."""
    label_pairs = [(one.label, other.label) for one, other in zip(graded[first], graded[second], strict=True)]
    num_differing = sum(label != other_label for label, other_label in label_pairs)
    # Labels of the first protocol, of completions that the second one rejects, and accepts.
    labels_of_rejected, labels_of_accepted = [], []
    for label, other_label in label_pairs:
        if label is not None and other_label == 0.0:
            labels_of_rejected.append(label)
        if label is not None and other_label == 1.0:
            labels_of_accepted.append(label)
    print(f"\n{first} and {second} disagree on the label of {num_differing} of {len(label_pairs)} completions")
    print(
        f"  {first} accepts {labels_of_rejected.count(1.0)} of {len(labels_of_rejected)} that {second} rejects, and "
        f"rejects {labels_of_accepted.count(0.0)} of {len(labels_of_accepted)} that it accepts"
    )


def _num_listed(kinds: dict[str, list[int]]) -> int:
    """Return the number of rows that are of a kind; `kinds` has their indices."""
    return len({i for indices in kinds.values() for i in indices})


def _kinds_of(index: int, kinds: dict[str, list[int]]) -> list[str]:
    """Return the kinds of one row."""
    return [kind for kind, indices in kinds.items() if index in indices]


def _print_counts(kinds: dict[str, list[int]], noun: str, num_rows: int) -> None:
    """Print the number of listed rows, which `noun` names, and that of each kind."""
    print(f"\n{_num_listed(kinds)} of {num_rows} {noun} are listed")
    for kind, indices in kinds.items():
        print(f"  {kind:36}{len(indices):10}")
    if any(kinds.values()):
        print("\nExamples:")


def _examples(kinds: dict[str, list[int]]) -> list[int]:
    """Return the indices of examples, sorted: the first of each kind, then the second of each, up to
    `NUM_EXAMPLES`."""
    in_turn: dict[int, None] = {}  # a set in order
    for one_of_each_kind in zip_longest(*kinds.values()):
        for i in one_of_each_kind:
            if i is not None:
                in_turn[i] = None
    return sorted(list(in_turn)[:NUM_EXAMPLES])


def _audit_golds(args: argparse.Namespace) -> tuple[int, int]:
    """Print counts and examples of golds by kind; return the number of listed golds, and of all."""
    name, path = name_and_path(args.golds)
    entry = (TRAINING_SETS | BENCHMARKS).get(name)
    if entry is not None and entry.answer_in == "tests":
        raise UserError(_HAS_TESTS.format(args.golds))
    rows = load_rows(name, entry or ProblemSet(name, title=name), path or None)[: args.max_problems]
    if entry is None:
        columns = require_columns(args.golds, rows, {"solution_column": args.solution_column})
        entry = choose_columns(ProblemSet(name, title=name), columns, None, args.solution_column)
    elif args.solution_column:
        entry = replace(entry, solution_column=args.solution_column, answer_in="column")
    require_columns(args.golds, rows, {"solution_column": entry.solution_column})
    golds = [gold_answer(row.get(entry.solution_column), entry.answer_in) for row in rows]
    if any(json_of_tests(gold) is not None for gold in golds):
        raise UserError(_HAS_TESTS.format(args.golds))
    print(f"{len(golds)} gold answers of {args.golds}\n")

    read_by_none = set(range(len(golds)))
    for protocol in args.protocols:
        with VerificationArguments(verification_protocol=protocol).build() as verifier:
            unreadable = verifier.unreadable_golds(golds)
        read_by_none &= set(unreadable)
        num_unreadable = sum(bool(gold_texts(golds[i])) for i in unreadable)  # empty golds are a kind of their own
        print(f"{'not read by ' + protocol:38}{num_unreadable:10}")
    kinds = golds_by_kind(golds, sorted(read_by_none))
    kinds["no protocol reads it"] = kinds.pop("unreadable")
    _print_counts(kinds, "gold answers", len(golds))
    for i in _examples(kinds):
        print(f"  row {i} ({', '.join(_kinds_of(i, kinds))}): {golds[i]!r:.200}")
    return _num_listed(kinds), len(golds)


def _print_outcomes(graded: dict[str, list[Outcome]]) -> None:
    """Print a table with the number of each outcome by protocol, and the accuracy."""
    print(f"{'outcome':18}" + "".join(f"{protocol:>10}" for protocol in graded))
    counts = [Counter(outcomes) for outcomes in graded.values()]
    for outcome in Outcome:
        if any(count[outcome] for count in counts):
            print(f"{outcome.name.lower():18}" + "".join(f"{count[outcome]:10}" for count in counts))
    accuracies = ""
    for count in counts:
        num_readable = count.total() - count[Outcome.GOLD_UNPARSEABLE]
        accuracies += f"{count[Outcome.CORRECT] / max(1, num_readable):10.4f}"
    print(f"{'accuracy':18}{accuracies}   (of completions with a readable gold)")


def _audit_programs(args: argparse.Namespace) -> tuple[int, int]:
    """Print the outcomes of the reference solutions; return the number of those that fail, and of all."""
    name, path = name_and_path(args.programs)
    if name not in TRAINING_SETS and not path:
        known = ", ".join(name for name, entry in TRAINING_SETS.items() if entry.answer_in == "tests")
        raise UserError(f"`--programs` {args.programs!r} is not a set of programs. Name one of {known}, or a file.")
    entry = TRAINING_SETS.get(name)
    rows = load_rows(name, entry or ProblemSet(name), path or None)[: args.max_problems]
    columns = require_columns(args.programs, rows, {"reference_column": args.reference_column})
    if entry is None:
        entry = choose_columns(ProblemSet(name, title=name), columns, None, args.solution_column)
    elif args.solution_column:
        entry = replace(entry, solution_column=args.solution_column)
    require_columns(args.programs, rows, {"solution_column": entry.solution_column})
    tests, problems_of_tests = [], []  # tests are `None` where they cannot be read, for the reason in the other list
    for row in rows:
        cell = row.get(entry.solution_column)
        problem = ""
        try:
            row_tests = gold_answer(cell, "tests")
            if not row_tests:
                problem = f"tests missing or malformed: {json.dumps(cell, default=str)[:80]}"
        except ValueError as error:
            row_tests = None
            problem = str(error)
        tests.append(row_tests)
        problems_of_tests.append(problem)
    solutions = [_as_completion(row.get(args.reference_column)) for row in rows]
    with CodeVerifier() as verifier:
        print(f"{len(rows)} problems of {args.programs}, run with {verifier.level}\n")
        grades = verifier.grade_detailed(solutions, tests)
    for outcome, count in Counter(grade.outcome for grade in grades).most_common():
        print(f"{outcome.name.lower():18}{count:10}")
    print(f"{'seconds per program':18}{sum(grade.seconds for grade in grades) / len(grades):10.3f}\n")
    num_failed = 0
    for index, (row, grade, problem) in enumerate(zip(rows, grades, problems_of_tests, strict=True)):
        if grade.outcome is Outcome.CORRECT:
            continue
        num_failed += 1
        reason = problem or grade.error or f"passes {grade.share:.0%} of the tests up to the first that fails"
        print(f"  row {index} ({row.get('problem_id', index)}): {grade.outcome.name.lower()}: {reason}")
    return num_failed, len(grades)


def _as_completion(solution: Any) -> Any:
    """Return a reference solution as a completion: code alone in a code block."""
    if isinstance(solution, str) and last_program(solution) is None:
        return f"```python\n{solution}\n```"
    return solution

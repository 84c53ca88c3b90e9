"""Helpers of comparisons over seeds: command line, intervals, Markdown tables."""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.paper.cells import Options


def arms_parser(description: str, name: str, arms: Collection[str]) -> ArgumentParser:
    """Build a parser with seeds, arms, and directories, by default in `outputs/NAME`."""
    names = f"all by default, of {'; '.join(arms)}".replace("%", "%%")
    parser = ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(arms), default=list(arms), metavar="ARM", help=names)
    parser.add_argument("--results_dir", type=Path, default=Path(f"outputs/{name}/results"))
    parser.add_argument("--work_dir", type=Path, default=Path(f"outputs/{name}/runs"))
    parser.add_argument("--max_steps", type=int, help="of every arm, to try things out")
    return parser


def options_of(args: Namespace, **sizes: Any) -> Options:
    """Return the options of the runs, of these sizes or, with `max_steps`, of the smallest."""
    if args.max_steps is not None:
        sizes |= {"num_samples": 8, "max_problems": 4, "warm_start_steps": 2}
    places = {"results_dir": args.results_dir, "work_dir": args.work_dir}
    return Options(tuple(args.seeds), args.max_steps, **places, **sizes)


def run_name(arm: str) -> str:
    """Return the name of an arm as part of a path."""
    return arm.lower().replace(" %", "").replace("'s", "").replace(", ", "_").replace(" ", "_")


def publish(file: Path, lines: Sequence[str]) -> None:
    """Write and print a page of Markdown."""
    file.write_text("\n".join(lines).strip() + "\n")
    print("\n".join(["", *lines]), flush=True)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]], num_texts: int = 1) -> list[str]:
    """Return the lines of a table with text columns first and number columns after."""
    sides = "| --- " * num_texts + "| ---: " * (len(heads) - num_texts)
    head = f"| {' | '.join(heads)} |".replace("|  |", "| |")
    return [head, f"{sides}|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


# 97.5 % of Student's t by the number of seeds
_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values, one per seed, and half the width of its 95 % interval."""
    return mean(values), _STUDENT[min(len(values), 10)] * stdev(values) / len(values) ** 0.5


def mean_difference(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean of differences by seed and half of its 95 % interval, or their number if there are fewer than
    three."""
    if not values:
        return ""
    spread = f"± {over_seeds(values)[1]:.{digits}f}" if len(values) > 2 else f"({len(values)})"
    return f"{mean(values):+.{digits}f} {spread}"

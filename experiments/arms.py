"""What experiments with arms and seeds share: the command line, and intervals over seeds."""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.paper.cells import Options


def arms_parser(description: str, name: str, arms: Collection[str]) -> ArgumentParser:
    """Seeds, arms, and where their runs are: by default in `outputs/NAME`."""
    names = f"all by default, of {'; '.join(arms)}".replace("%", "%%")
    parser = ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(arms), default=list(arms), metavar="ARM", help=names)
    parser.add_argument("--results_dir", type=Path, default=Path(f"outputs/{name}/results"))
    parser.add_argument("--work_dir", type=Path, default=Path(f"outputs/{name}/runs"))
    parser.add_argument("--max_steps", type=int, help="of every arm, to try things out")
    return parser


def options_of(args: Namespace, **sizes: Any) -> Options:
    """Options of the runs, of the given sizes or, with `max_steps`, of the smallest."""
    if args.max_steps is not None:
        sizes |= {"num_samples": 8, "max_problems": 4, "warm_start_steps": 2}
    places = {"results_dir": args.results_dir, "work_dir": args.work_dir}
    return Options(tuple(args.seeds), args.max_steps, **places, **sizes)


# 97.5 % of Student's t by the number of seeds
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean of at least two values, one for each seed, and half the width of its 95 % interval."""
    return mean(values), STUDENT[min(len(values), 10)] * stdev(values) / len(values) ** 0.5


def mean_difference(values: Sequence[float]) -> str:
    """Differences by seed: their mean and half of its 95 % interval; of less than three seeds, the mean and their
    number."""
    if not values:
        return ""
    return f"{mean(values):+.1f} " + (f"± {over_seeds(values)[1]:.1f}" if len(values) > 2 else f"({len(values)})")

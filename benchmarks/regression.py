"""Speed beside TRL in this run, and beside a recorded run: `make bench-check`.

    python -m benchmarks.regression                   # runs benchmarks.optimizer_step, then compares
    python -m benchmarks.regression --run RUN.json    # a run that was written with its --output
    python -m benchmarks.regression --record          # also makes the run the recorded one of this machine
    python -m benchmarks.regression --parts aligned updates --processor_time   # options of benchmarks.optimizer_step

Only ratios to TRL of one run are compared, because all variants of a run take turns: a slower machine or other load
slows both sides of a ratio. The ratio of a round is TRL's seconds over the variant's; the table has the geometric mean
of the rounds with a 95 % interval (Student's t on logarithms), and the change since the record with Welch's interval.
A variant is flagged if its interval excludes every change of at most 5 %: `slower` (exit code 1) or `faster`. Ratios
depend on the machine, too, so each has a separate record (--record_file).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import table_of


RECORD = Path("outputs/benchmarks/recorded.json")
BASELINE = "TRL GRPO, best"  # of benchmarks.optimizer_step
LIMIT = 0.05
# 97.5 % quantiles of Student's t by degrees of freedom, rounded down to a key.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}


class LogRatio(NamedTuple):
    """Mean logarithm of a ratio over `n` rounds, and the variance of that mean."""

    mean: float
    variance: float
    n: int


class Ratio(NamedTuple):
    """A ratio and the ends of its 95 % interval."""

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.lower:.2f} - {self.upper:.2f})"


def log_ratios(rows: list[dict[str, Any]]) -> dict[tuple[str, str], LogRatio]:
    """Return the logarithm of TRL's seconds over those of each other variant, by title and variant.

    Raises:
        `ValueError`: if a comparison has no rounds of TRL, or fewer than two rounds.
    """
    ratios = {}
    titles = dict.fromkeys(row["title"] for row in rows if "rounds" in row)
    for title in titles:
        rounds = {row["variant"]: row["rounds"] for row in rows if row["title"] == title}
        if BASELINE not in rounds or len(rounds[BASELINE]) < 2:
            raise ValueError(f"{title!r} has fewer than two rounds of {BASELINE!r}. Run it with --repeats 3 or more.")
        for variant, seconds in rounds.items():
            if variant != BASELINE:
                logs = [math.log(trl / ours) for trl, ours in zip(rounds[BASELINE], seconds, strict=True)]
                variance = statistics.variance(logs) / len(logs)
                ratios[title, variant] = LogRatio(statistics.mean(logs), variance, len(logs))
    return ratios


def interval(mean: float, variance: float, degrees: float) -> Ratio:
    quantile = STUDENT[max(key for key in STUDENT if key <= max(degrees, 1))]
    half = quantile * math.sqrt(variance)
    return Ratio(*(math.exp(end) for end in (mean, mean - half, mean + half)))


def change(now: LogRatio, before: LogRatio) -> Ratio:
    """Return the factor by which a ratio to TRL has changed, with Welch's interval."""
    parts = [(now.variance, now.n - 1), (before.variance, before.n - 1)]
    variance = sum(part for part, _ in parts)
    # Welch and Satterthwaite; without spread in either run the interval is a point
    degrees = variance**2 / sum(part**2 / number for part, number in parts) if variance else 1
    return interval(now.mean - before.mean, variance, degrees)


def flag(changed: Ratio) -> str:
    if changed.upper < 1 - LIMIT:
        return "slower"
    return "faster" if changed.lower > 1 + LIMIT else ""


def compare(run: list[dict], record: list[dict] | None) -> list[dict[str, str]]:
    """Return the rows of the table, in the order of the run."""
    before = log_ratios(record) if record else {}
    table = []
    for key, now in log_ratios(run).items():
        row = {"measured": key[0], "variant": key[1]}
        row["times as fast as TRL"] = str(interval(now.mean, now.variance, now.n - 1))
        if key in before:
            changed = change(now, before[key])
            row |= {"change since the record": str(changed), "flag": flag(changed)}
        table.append(row)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="JSON file of benchmarks.optimizer_step; by default it is run")
    parser.add_argument("--record_file", type=Path, default=RECORD)
    parser.add_argument("--record", action="store_true", help="write the run to the record file")
    parser.add_argument("--repeats", type=int, default=6, help="rounds of a run")
    args, other_options = parser.parse_known_args()
    if args.run and other_options:
        parser.error(f"{' '.join(other_options)} would be ignored, because --run is measured already. Remove one.")
    file = args.run
    if file is None:
        file = args.record_file.with_name("run.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        measure = [sys.executable, "-m", "benchmarks.optimizer_step", "--repeats", str(args.repeats), *other_options]
        subprocess.run([*measure, "--output", str(file)], check=True)
    run = json.loads(file.read_text())
    record = json.loads(args.record_file.read_text()) if args.record_file.is_file() else None
    table = compare(run, record)
    print(table_of(table))
    if record is None:
        print(f"\n{args.record_file} does not exist. Write it with --record, then later runs are compared with it.")
    if args.record:
        args.record_file.parent.mkdir(parents=True, exist_ok=True)
        args.record_file.write_text(json.dumps(run, indent=1))
    return int(any(row.get("flag") == "slower" for row in table))


if __name__ == "__main__":
    sys.exit(main())

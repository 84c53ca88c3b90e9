"""Tables and figures of the runs on problems with many correct answers.

`python -m experiments.right_answers.analysis` prints the tables, and writes a figure for each task and one of the runs
of 100 updates beside the records.

Arms are compared at equal pass@1, at the first crossing of a level that is fixed for each task (another one: `--level
0.8`), and after the last update. Differences are paired by seed, with 95 % intervals by Student's t over seeds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.right_answers.runs import (
    ARMS,
    FIRST,
    LEVELS,
    LONG_RECORDS,
    LONG_UPDATES,
    PILOT_SEED,
    RATES,
    RECORDS,
    Point,
    at_level,
    best_rate,
    read_records,
)
from experiments.right_answers.tasks import TASKS
from experiments.studies import markdown, mean_difference
from pacs_trl.report import plots


METRICS = {
    "pass@8": (100, 1),
    "pass@64": (100, 1),
    "distinct": (1, 2),
    "kl": (1, 2),
    "update": (1, 0),
}  # factor, digits
LONG_LEVEL = 0.05  # pass@1 at which the runs of 100 updates are compared
BASES = ("GRPO", "PACS, rollout", "GRPO, KL 0.1")


def lost_and_gained(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the shares of problems that 64 samples solve with a probability of at least one half only before, and
    only after training, from the success rates of the problems."""
    solved = [[1 - (1 - min(rate, 1.0)) ** 64 >= 0.5 for rate in rates] for rates in (before, after)]
    pairs = list(zip(*solved, strict=True))
    return pairs.count((True, False)) / len(pairs), pairs.count((False, True)) / len(pairs)


def differences(ours: dict[int, Point], theirs: dict[int, Point], name: str) -> str:
    """Return the mean difference of a metric over common seeds, ± half of its 95 % interval with three or more."""
    factor = METRICS[name][0]
    return mean_difference([factor * (ours[seed][name] - theirs[seed][name]) for seed in ours if seed in theirs])


def cells(points: Sequence[Point]) -> list[str]:
    return [f"{factor * mean(p[name] for p in points):.{digits}f}" for name, (factor, digits) in METRICS.items()]


def rows_of(runs: dict[str, dict[int, dict[str, Any]]], points: dict[str, dict[int, Point]]) -> list[list[str]]:
    """Return a row of cells per arm that has a point: seeds, metrics, and differences from `BASES`."""
    rows = []
    for arm, by_seed in points.items():
        if by_seed:
            compared = [
                "" if arm == base else differences(by_seed, points.get(base, {}), name)
                for name in ("pass@64", "distinct")
                for base in BASES
            ]
            rows.append([arm, f"{len(by_seed)} of {len(runs[arm])}", *cells(list(by_seed.values())), *compared])
    return rows


def task_tables(task: str, records: Sequence[dict[str, Any]], level: float) -> list[str]:
    """Return the lines of the tables of a task: pilot, at pass@1 = `level`, after the last update, and support."""
    lines = [f"## {task}", ""]
    pilot = {(r["arm"], r["rate"]): at_level(r["points"], LEVELS[task]) for r in records if r["seed"] == PILOT_SEED}
    if pilot:
        rates = sorted(RATES)
        rows = []
        for arm in [arm for arm in ARMS if any((arm, rate) in pilot for rate in rates)]:
            texts = []
            for rate in rates:
                point = pilot.get((arm, rate))
                text = f"{point['distinct']:.2f} ({point['update']:.0f})" if point else "not reached"
                texts.append(text if (arm, rate) in pilot else "")
            best = best_rate(list(records), task, arm)
            rows.append([arm, *texts, "" if best is None else f"{best:g}"])
        lines += [f"Pilot, distinct correct answers (updates) at pass@1 = {100 * LEVELS[task]:.0f} %:", ""]
        lines += [*markdown(["arm", *(f"{rate:g}" for rate in rates), "best"], rows), ""]
    runs: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in ARMS}
    for record in records:
        if record["seed"] != PILOT_SEED:
            runs[record["arm"]][record["seed"]] = record
    runs = {arm: by_seed for arm, by_seed in runs.items() if by_seed}
    if not runs:
        return [*lines, "No run with a reported seed yet.", ""]
    heads = ["arm", "seeds", *METRICS, *(f"{name} minus {base}" for name in ("pass@64", "distinct") for base in BASES)]
    crossings = {arm: {s: at_level(r["points"], level) for s, r in by_seed.items()} for arm, by_seed in runs.items()}
    reached = {arm: {s: point for s, point in by_seed.items() if point} for arm, by_seed in crossings.items()}
    lines += [f"At pass@1 = {100 * level:.0f} %:", "", *markdown(heads, rows_of(runs, reached), 2), ""]
    ends = {arm: {s: r["points"][-1] for s, r in by_seed.items()} for arm, by_seed in runs.items()}
    lines += ["After the last update:", "", *markdown(heads, rows_of(runs, ends), 2), ""]
    rows = []
    for arm, by_seed in runs.items():
        shares = [lost_and_gained(r["before"], r["after"]) for r in by_seed.values()]
        seconds = mean(r["cpu_seconds"] / r["updates"] for r in by_seed.values())
        columns = [100 * mean(column) for column in zip(*shares, strict=True)]
        pass_1 = 100 * mean(point["pass@1"] for point in ends[arm].values())
        entropy = mean(mean(r["entropy"][-10:]) for r in by_seed.values())
        rows.append([arm, f"{pass_1:.1f}", *(f"{x:.0f}" for x in columns), f"{entropy:.2f}", f"{seconds:.1f}"])
    heads = [
        "arm",
        "pass@1 at the end, %",
        "problems lost, %",
        "gained, %",
        "entropy, nats per token",
        "CPU s / update",
    ]
    return [*lines, *markdown(heads, rows), ""]


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw pass@64 and distinct correct answers against pass@1 along the runs of a task, means over the reported seeds
    of each leading arm; ten arms would repeat colors."""
    curves: dict[str, list[list[Point]]] = {}
    for record in records:
        if record["seed"] != PILOT_SEED:
            curves.setdefault(record["arm"], []).append(record["points"])
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, 1.3 * plots.PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2)
        for arm, look in plots.looks(arm for arm in FIRST if arm in curves).items():
            for panel, name in zip(panels, ("pass@64", "distinct"), strict=True):
                columns = [[mean(p[key] for p in point) for point in zip(*curves[arm])] for key in ("pass@1", name)]
                panel.plot(*columns, label=arm, **look)
        panels[0].set(xlabel="pass@1", ylabel="pass@64")
        panels[1].set(xlabel="pass@1", ylabel="distinct correct answers of 64")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=float, help="pass@1 at which arms are compared, instead of that of the plan")
    args = parser.parse_args()
    records = read_records()
    for task in TASKS:
        task_records = [record for record in records if record["task"] == task]
        if task_records:
            print("\n".join(task_tables(task, task_records, args.level or LEVELS[task])))
        if any(record["seed"] != PILOT_SEED for record in task_records):
            draw(task_records, RECORDS.parent / f"{task}.png")
    if long_records := read_records(LONG_RECORDS):
        print(f"# Runs of {LONG_UPDATES} updates at one rate\n")
        print("\n".join(task_tables("sums", long_records, args.level or LONG_LEVEL)))
        draw(long_records, RECORDS.parent / "sums_long.png")


if __name__ == "__main__":
    main()

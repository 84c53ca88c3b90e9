"""Tables and figures of the runs on problems with many correct answers.

`python -m experiments.right_answers.analysis` prints the tables of the page, and writes a figure for each task and for
the runs of 100 updates.

Arms are compared at equal pass@1, at the first crossing of a level that is fixed for each task (another one: `--level
0.8`), and after the last update. Differences are paired by seed, over the seeds that both arms have, with 95 %
intervals by Student's t over seeds.
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
    FIRST_LONG_ARMS,
    LEADING_ARMS,
    LEVELS,
    LONG_RECORDS,
    LONG_TASKS,
    LONG_UPDATES,
    PILOT_SEED,
    RATES,
    RECORDS,
    Point,
    at_level,
    best_rate,
    crossing,
    read_records,
)
from experiments.right_answers.tasks import TASKS
from experiments.studies import markdown, mean_difference
from pacs_trl.report import plots


LONG_LEVELS = {"sums": 0.05, "multiples": 0.2}  # pass@1 at which the runs of 100 updates are compared
SCALES = {
    "pass@1": (100, 1),
    "pass@64": (100, 1),
    "distinct": (1, 2),
    "kl": (1, 2),
    "update": (1, 0),
}  # factor, digits
PAIRS = (  # of the hypotheses: the first arm minus the second
    ("PACS, kept, beta 0.1", "PACS, rollout"),
    ("GRPO, KL 0.1", "GRPO"),
    ("GRPO, KL 0.1", "PACS, kept, beta 0.1"),
    ("PACS, rollout", "GRPO"),
    ("UCPO", "GRPO"),
    ("PACS, kept, beta 1", "PACS, kept, beta 0.1"),
    ("GRPO, KL 0.1", "PACS, kept, beta 1"),
    ("PACS, kept, beta 0.3", "PACS, kept, beta 0.1"),
)

Record = dict[str, Any]
Runs = dict[str, dict[int, Record]]  # by arm and seed
Points = dict[str, dict[int, Point]]  # by arm and seed


def lost_and_gained(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the shares of problems that 64 samples solve with a probability of at least one half only before, and
    only after training, from the success rates of the problems."""
    solved = [[1 - (1 - min(rate, 1.0)) ** 64 >= 0.5 for rate in rates] for rates in (before, after)]
    pairs = list(zip(*solved, strict=True))
    return pairs.count((True, False)) / len(pairs), pairs.count((False, True)) / len(pairs)


def pass_at(k: int, success_rates: Sequence[float]) -> float:
    """Return pass@k from the success rates of the problems."""
    return mean(1 - (1 - min(rate, 1.0)) ** k for rate in success_rates)


def average(points: dict[int, Point], metric: str) -> str:
    """Return the mean of a metric over seeds, as a cell of a table."""
    factor, digits = SCALES[metric]
    return f"{factor * mean(point[metric] for point in points.values()):.{digits}f}"


def difference(points: Points, arm: str, base: str, metric: str) -> str:
    """Return the mean difference of two arms in a metric over common seeds, ± half of its 95 % interval with three or
    more; an empty cell for an arm and itself, or without common seeds."""
    factor, digits = SCALES[metric]
    ours, theirs = points.get(arm, {}), points.get(base, {})
    common = [] if arm == base else [seed for seed in ours if seed in theirs]
    return mean_difference([factor * (ours[seed][metric] - theirs[seed][metric]) for seed in common], digits)


def learning_rate(runs: dict[int, Record]) -> str:
    """Return the learning rate of the runs of an arm, `2e-5` for example."""
    (rate,) = {record["rate"] for record in runs.values()}
    return short(rate)


def short(rate: float) -> str:
    return f"{rate:g}".replace("e-0", "e-")


def reported_runs(records: Sequence[Record]) -> Runs:
    """Return the runs of each arm, in the order of the plan, without those of the pilot."""
    runs: Runs = {arm: {} for arm in ARMS}
    for record in records:
        if record["seed"] != PILOT_SEED:
            runs[record["arm"]][record["seed"]] = record
    return {arm: by_seed for arm, by_seed in runs.items() if by_seed}


def pilot_table(task: str, records: Sequence[Record]) -> list[str]:
    """Return the table from which the learning rates follow: distinct correct answers at the level of the task, and
    the updates until there, at each rate."""
    pilot = {(record["arm"], record["rate"]): record for record in records if record["seed"] == PILOT_SEED}
    rates, rows = sorted(RATES), []
    for arm in [arm for arm in ARMS if any((arm, rate) in pilot for rate in rates)]:
        cells = []
        for rate in rates:
            record = pilot.get((arm, rate))
            point = at_level(record["points"], LEVELS[task]) if record else None
            missing = "not reached" if record else ""
            cells.append(f"{point['distinct']:.2f} ({point['update']:.0f})" if point else missing)
        best = best_rate(list(records), task, arm)
        rows.append([arm, *cells, "" if best is None else short(best)])
    heads = ["arm", *map(short, rates), "best"]
    return [f"Pilot, distinct (updates) at pass@1 = {100 * LEVELS[task]:.0f} %:", "", *markdown(heads, rows), ""]


def rate_table(records: Sequence[Record]) -> list[str]:
    """Return the table of pass@64 of all runs after their last update by learning rate, that of the pilot first: for a
    task on which not all arms reach the level, so that nearly all runs of the pilot have as many updates as the
    others."""
    rows = []
    for arm in [arm for arm in ARMS if any(record["arm"] == arm for record in records)]:
        cells = []
        for rate in sorted(RATES):
            runs = [record for record in records if (record["arm"], record["rate"]) == (arm, rate)]
            runs.sort(key=lambda record: (record["seed"] != PILOT_SEED, record["seed"]))
            cells.append(" ".join(f"{100 * record['points'][-1]['pass@64']:.0f}" for record in runs))
        rows.append([arm, *cells])
    heads = ["arm", *map(short, sorted(RATES))]
    return ["pass@64 of each run after the last update, %, that of the pilot first:", "", *markdown(heads, rows), ""]


def level_table(runs: Runs, points: Points, level: float) -> list[str]:
    """Return the table of the arms that reach `level`; `points` are the metrics there."""
    rows = []
    for arm in [arm for arm in runs if points[arm]]:
        reached, around = points[arm], [crossing(record["points"], level) for record in runs[arm].values()]
        low, high = (100 * mean(pair[i]["pass@1"] for pair in around if pair) for i in (0, 1))
        cells = [f"{len(reached)} of {len(runs[arm])}", average(reached, "update"), f"{low:.0f} to {high:.0f}"]
        cells += [
            average(reached, "pass@64"),
            average(reached, "distinct"),
            difference(points, arm, "GRPO", "distinct"),
        ]
        rows.append([arm, learning_rate(runs[arm]), *cells])
    heads = ["arm", "rate", "seeds", "updates", "measured at, %", "pass@64, %", "distinct", "minus GRPO"]
    return [f"At pass@1 = {100 * level:.0f} %:", "", *markdown(heads, rows), ""]


def end_table(runs: Runs, points: Points) -> list[str]:
    """Return the table of the arms after the last update; `points` are the metrics there."""
    rows = []
    for arm, by_seed in runs.items():
        cells = [learning_rate(by_seed), str(len(by_seed)), average(points[arm], "pass@1")]
        for metric in ("pass@64", "distinct"):
            cells += [average(points[arm], metric), difference(points, arm, "GRPO", metric)]
        rows.append([arm, *cells])
    heads = ["arm", "rate", "seeds", "pass@1, %", "pass@64, %", "minus GRPO", "distinct", "minus GRPO"]
    return ["After the last update:", "", *markdown(heads, rows), ""]


def support_table(runs: Runs, points: Points) -> list[str]:
    """Return the table of what became of the base model's answers, and of the cost; `points` are the metrics after
    the last update."""
    rows = []
    for arm, by_seed in runs.items():
        losses = [lost_and_gained(record["before"], record["after"]) for record in by_seed.values()]
        lost, gained = (100 * mean(column) for column in zip(*losses, strict=True))
        pass_at_128 = 100 * mean(pass_at(128, record["after"]) for record in by_seed.values())
        entropy = mean(mean(record["entropy"][-10:]) for record in by_seed.values())
        seconds = mean(record["cpu_seconds"] / record["updates"] for record in by_seed.values())
        cells = [f"{pass_at_128:.1f}", average(points[arm], "kl"), f"{lost:.0f}", f"{gained:.0f}"]
        rows.append([arm, *cells, f"{entropy:.2f}", f"{seconds:.1f}"])
    heads = ["arm", "pass@128, %", "KL, nats", "problems lost, %", "gained, %", "entropy, nats per token"]
    heads.append("CPU s / update")
    return markdown(heads, rows) + [""]


def pair_table(at_the_level: Points, at_the_end: Points) -> list[str]:
    """Return the table of the differences that the hypotheses are about, of the arms that have runs."""
    rows = []
    for arm, base in [pair for pair in PAIRS if at_the_end.keys() >= set(pair)]:
        cells = [difference(at_the_level, arm, base, "distinct")]
        cells += [difference(at_the_end, arm, base, metric) for metric in ("pass@64", "distinct")]
        rows.append([f"{arm} − {base}", *cells])
    return markdown(["", "distinct at the level", "pass@64 at the end, points", "distinct at the end"], rows) + [""]


def task_tables(task: str, records: Sequence[Record], level: float) -> list[str]:
    """Return the lines of the tables of a task: pilot, at pass@1 = `level`, after the last update, and differences."""
    lines: list[str] = []
    if pilot := [record for record in records if record["seed"] == PILOT_SEED]:
        arms_at_level = {record["arm"] for record in pilot if at_level(record["points"], LEVELS[task])}
        all_reach_it = arms_at_level == {record["arm"] for record in pilot}
        lines += pilot_table(task, records) if all_reach_it else rate_table(records)
    runs = reported_runs(records)
    if not runs:
        return [*lines, "No run with a reported seed yet.", ""]
    at_the_level: Points = {arm: {} for arm in runs}
    for arm, by_seed in runs.items():
        for seed, record in by_seed.items():
            if point := at_level(record["points"], level):
                at_the_level[arm][seed] = point
    at_the_end = {arm: {seed: r["points"][-1] for seed, r in by_seed.items()} for arm, by_seed in runs.items()}
    if any(at_the_level.values()):
        lines += level_table(runs, at_the_level, level)
    lines += [*end_table(runs, at_the_end), *support_table(runs, at_the_end)]
    return [*lines, *pair_table(at_the_level, at_the_end)]


def draw(records: Sequence[Record], arms: Sequence[str], path: Path) -> None:
    """Draw pass@64 and distinct correct answers against pass@1 along the runs of a task, means over the reported seeds
    of each of these arms; ten arms would repeat colors."""
    curves = {arm: [record["points"] for record in runs.values()] for arm, runs in reported_runs(records).items()}
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, 1.3 * plots.PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2)
        for arm, look in plots.looks(arm for arm in arms if arm in curves).items():
            averages = [
                {name: mean(point[name] for point in points) for name in points[0]}
                for points in zip(*curves[arm], strict=True)
            ]
            for panel, name in zip(panels, ("pass@64", "distinct"), strict=True):
                panel.plot(*([point[key] for point in averages] for key in ("pass@1", name)), label=arm, **look)
        panels[0].set(xlabel="pass@1", ylabel="pass@64")
        panels[1].set(xlabel="pass@1", ylabel="distinct correct answers of 64")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save(figure, path)


def all_tables(level: float | None = None) -> list[str]:
    """Return the lines of the tables of all records; arms are compared at `level` instead of those of the plan."""
    records, lines = read_records(), []
    for task in TASKS:
        if task_records := [record for record in records if record["task"] == task]:
            lines += [f"## {task}", "", *task_tables(task, task_records, level or LEVELS[task])]
    long_records = read_records(LONG_RECORDS)
    for task in LONG_TASKS:
        if task_records := [record for record in long_records if record["task"] == task]:
            title = f"## {task}, {LONG_UPDATES} updates"
            lines += [title, "", *task_tables(task, task_records, level or LONG_LEVELS[task])]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=float, help="pass@1 at which arms are compared, instead of that of the plan")
    args = parser.parse_args()
    print("\n".join(all_tables(args.level)))
    for folder, arms, suffix in ((RECORDS, LEADING_ARMS, ""), (LONG_RECORDS, FIRST_LONG_ARMS, "_long")):
        for task in TASKS:
            task_records = [record for record in read_records(folder) if record["task"] == task]
            if reported_runs(task_records):
                draw(task_records, arms, RECORDS.parent / f"{task}{suffix}.png")


if __name__ == "__main__":
    main()

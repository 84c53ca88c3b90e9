"""Tables and figure of `many_answers.py`: metrics at equal pass@1 and at equal time.

`python -m experiments.many_answers_tables` prints the tables of docs/results/many_answers and writes its figure.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.many_answers import (
    GRPO,
    KEPT,
    OTHERS,
    PENALTY,
    PILOT_SEEDS,
    PLAN,
    RESET,
    RESULTS,
    ROLLOUT,
    SEEDS,
    read_records,
)
from experiments.paper.paper_figures import COLORS, DASHES, MARKERS
from pacs_trl.report.plots import PAGE_WIDTH, PANEL_HEIGHT, STYLE


# Metric, factor, and decimals.
METRICS = {"pass@1": (100, 1), "pass@8": (100, 1), "pass@64": (100, 1), "distinct": (100, 1)}
METRICS |= {"perplexity": (1, 2), "kl": (1, 2), "entropy": (1, 2), "updates": (1, 0)}
LEVELS = (0.3, 0.4, 0.5)
STUDENT = 2.26  # 97.5 %, ten seeds


def at_pass_1(record: dict[str, Any], level: float) -> dict[int, dict[str, float]]:
    """Return for each seed that reaches `level` its metrics and updates where pass@1 does so first, linear in pass@1
    between two measurements."""
    found = {}
    for i, seed in enumerate(record["seeds"]):
        curve = [point[i] for point in record["pass@1"]]
        reached = next((index for index, value in enumerate(curve) if value >= level), None)
        if reached:
            share = (level - curve[reached - 1]) / (curve[reached] - curve[reached - 1])
            found[seed] = at_point(record, i, reached - 1 + share)
    return found


def at_point(record: dict[str, Any], index: int, point: float) -> dict[str, float]:
    """Return the metrics of a seed at a point of its curve, linear between two measurements."""
    low = min(int(point), len(record["pass@1"]) - 2)
    found = {"updates": point * record["every"]}
    for name in METRICS.keys() - found.keys():
        before, after = (record[name][low + step][index] for step in (0, 1))
        found[name] = before + (point - low) * (after - before)
    return found


def cells(values: list[dict[str, float]], names: list[str]) -> list[str]:
    """Return mean ± standard deviation over seeds of each metric."""
    found = []
    for name in names:
        factor, digits = METRICS[name]
        of_seeds = [factor * value[name] for value in values]
        spread = f" ± {stdev(of_seeds):.{digits}f}" if len(of_seeds) > 1 else ""
        found.append(f"{mean(of_seeds):.{digits}f}{spread}" if of_seeds else "")
    return found


def difference(record: dict[str, Any], baseline: dict[str, Any], level: float, name: str) -> str:
    """Return the mean difference in points, paired by seed, ± half of its 95 % interval, and the number of seeds if
    some do not reach the level."""
    ours, theirs = at_pass_1(record, level), at_pass_1(baseline, level)
    values = [100 * (ours[seed][name] - theirs[seed][name]) for seed in ours if seed in theirs]
    if len(values) < len(SEEDS) - 2:
        return f"({len(values)} of {len(record['seeds'])})"
    some = f" ({len(values)})" if len(values) < len(record["seeds"]) else ""
    return f"{mean(values):+.1f} ± {STUDENT * stdev(values) / len(values) ** 0.5:.1f}{some}"


def markdown(heads: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1), sep="\n")
    print(*(f"| {' | '.join(row)} |" for row in rows), "", sep="\n")


def title(record: dict[str, Any]) -> str:
    return record["arm"] + (f", rate {record['rate']:g}" if record["rate"] != PLAN[0][0] else "")


def print_tables(results: Path) -> None:
    """Print the tables of the page."""
    everything = read_records(results)
    records = [record for record in everything if record["seeds"] == SEEDS]
    for level in LEVELS:
        print(f"### At pass@1 = {level:.0%}\n")
        names = [name for name in METRICS if name != "pass@1"]
        rows = []
        for record in records:
            found = list(at_pass_1(record, level).values())
            rows.append([title(record), f"{len(found)} of {len(record['seeds'])}", *cells(found, names)])
        markdown(["arm", "reached", *names], rows)
    print("### Differences at equal pass@1, in points\n")
    compared = [(name, level) for name in ("pass@64", "distinct") for level in LEVELS]
    for base in (GRPO, ROLLOUT, PENALTY[0.1]):
        baseline = next((record for record in records if title(record) == base.name), None)
        others = [record for record in records if record is not baseline and baseline is not None]
        rows = [[title(r), *(difference(r, baseline, level, name) for name, level in compared)] for r in others]
        markdown([f"minus {base.name}", *(f"{name} at {level:.0%}" for name, level in compared)], rows)
    print("### At equal CPU seconds of the updates\n")
    limit = min((record["seconds"] for record in records), default=0.0)
    rows = []
    for record in records:
        of_update = record["seconds"] / record["every"] / (len(record["pass@1"]) - 1)
        values = [at_point(record, i, limit / of_update / record["every"]) for i in range(len(SEEDS))]
        names = ["updates", "pass@1", "pass@8", "pass@64", "distinct", "entropy"]
        rows.append([title(record), f"{1000 * of_update / len(SEEDS):.1f}", *cells(values, names)])
    markdown(["arm", "ms per update", "updates", "pass@1", "pass@8", "pass@64", "distinct", "entropy"], rows)
    print(f"### Pilot, seeds {PILOT_SEEDS}, at pass@1 = 40 %\n")
    rows = []
    for record in (record for record in everything if record["seeds"] == PILOT_SEEDS):
        found = list(at_pass_1(record, 0.4).values())
        last = f"{100 * mean(record['pass@1'][-1]):.1f}"
        names = ["updates", "pass@64", "distinct"]
        rows.append([record["arm"], f"{record['rate']:g}", last, str(len(found)), *cells(found, names)])
    markdown(["arm", "learning rate", "pass@1 at the end", "reached", "updates", "pass@64", "distinct"], rows)


def draw(results: Path) -> None:
    """Write pareto.png: pass@64 and distinct correct answers against pass@1 along the runs, means over seeds."""
    shown = [GRPO, ROLLOUT, KEPT[0.3], KEPT[1.0], PENALTY[0.1], RESET[80], OTHERS[1]]
    records = {title(record): record for record in read_records(results) if record["seeds"] == SEEDS}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.3 * PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2)
        for arm, color, marker, dash in zip(shown, COLORS, MARKERS, DASHES, strict=True):
            if record := records.get(arm.name):
                for panel, name in zip(panels, ("pass@64", "distinct"), strict=True):
                    points = [[mean(point) for point in record[key]] for key in ("pass@1", name)]
                    panel.plot(*points, color=color, marker=marker, linestyle=dash, label=arm.name)
        panels[0].set(xlabel="pass@1", ylabel="pass@64")
        panels[1].set(xlabel="pass@1", ylabel="share of correct answers in 64 samples")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save(figure, results / "pareto.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    print_tables(args.results)
    draw(args.results)


if __name__ == "__main__":
    main()

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
    PLAN,
    RATE_SEEDS,
    RATES,
    RESET,
    RESULTS,
    ROLLOUT,
    SECOND,
    SEEDS,
    THIRD,
    read_records,
)
from experiments.paper.paper_figures import COLORS, DASHES, MARKERS
from pacs_trl.report.plots import PAGE_WIDTH, PANEL_HEIGHT, STYLE


# Metric, factor, and decimals.
METRICS = {"pass@1": (100, 1), "pass@8": (100, 1), "pass@64": (100, 1), "distinct": (100, 1)}
METRICS |= {"perplexity": (1, 2), "kl": (1, 2), "entropy": (1, 2), "updates": (1, 0)}
LEVEL = 0.4
BASES = (GRPO, ROLLOUT, PENALTY[0.1])
STUDENT = 2.26  # 97.5 %, ten seeds


def at_pass_1(record: dict[str, Any], level: float) -> dict[int, dict[str, float]]:
    """Return for each seed that reaches `level` its metrics and updates where pass@1 does so first, linear in pass@1
    between two measurements."""
    points = {}
    for i, seed in enumerate(record["seeds"]):
        curve = [point[i] for point in record["pass@1"]]
        reached = next((index for index, value in enumerate(curve) if value >= level), None)
        if reached:
            share = (level - curve[reached - 1]) / (curve[reached] - curve[reached - 1])
            points[seed] = at_point(record, i, reached - 1 + share)
    return points


def at_point(record: dict[str, Any], index: int, point: float) -> dict[str, float]:
    """Return the metrics of a seed at a point of its curve, linear between two measurements."""
    low = min(int(point), len(record["pass@1"]) - 2)
    metrics = {"updates": point * record["every"]}
    for name in METRICS.keys() - metrics.keys():
        before, after = (record[name][low + step][index] for step in (0, 1))
        metrics[name] = before + (point - low) * (after - before)
    return metrics


def cells(values: list[dict[str, float]], names: list[str]) -> list[str]:
    """Return mean ± standard deviation over seeds of each metric."""
    texts = []
    for name in names:
        factor, digits = METRICS[name]
        seed_values = [factor * value[name] for value in values]
        spread = f" ± {stdev(seed_values):.{digits}f}" if len(seed_values) > 1 else ""
        texts.append(f"{mean(seed_values):.{digits}f}{spread}" if seed_values else "")
    return texts


def paired_difference(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]], name: str) -> str:
    """Return the mean difference of a metric by seed ± half of its 95 % interval, and the number of seeds if it is
    less than all."""
    factor, digits = METRICS[name]
    values = [factor * (ours[seed][name] - theirs[seed][name]) for seed in ours if seed in theirs]
    if len(values) < len(SEEDS) - 2:
        return f"({len(values)} of {len(SEEDS)})"
    some = f" ({len(values)})" if len(values) < len(SEEDS) else ""
    return f"{mean(values):+.{digits}f} ± {STUDENT * stdev(values) / len(values) ** 0.5:.{digits}f}{some}"


def best_rates(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rate of each arm by the rule of the page, and print what it rests on."""
    best: dict[str, float] = {}
    rates, rows = sorted({rate for rate, *_ in RATES}), []
    runs_by_arm: dict[str, dict[float, dict[str, Any]]] = {}
    for record in records:
        if record["seeds"] == RATE_SEEDS:
            runs_by_arm.setdefault(record["arm"], {})[record["rate"]] = record
    for arm, runs in runs_by_arm.items():
        reached = {rate: list(at_pass_1(run, LEVEL).values()) for rate, run in runs.items()}
        pass_64 = {r: 100 * mean(v["pass@64"] for v in vs) for r, vs in reached.items() if len(vs) == len(RATE_SEEDS)}
        ends = {rate: 100 * mean(run["pass@1"][-1]) for rate, run in runs.items()}
        best[arm] = max(pass_64 or ends, key=(pass_64 or ends).__getitem__)
        if pass_64 and pass_64[best[arm]] < pass_64.get(PLAN[0][0], 0) + 1:
            best[arm] = PLAN[0][0]
        rate_cells = [
            f"{pass_64[rate]:.1f} ({mean(v['updates'] for v in reached[rate]):.0f})"
            if rate in pass_64
            else f"{len(reached[rate])} of 2; {ends[rate]:.0f}"
            if rate in runs
            else ""
            for rate in rates
        ]
        rows.append([arm, *rate_cells, f"{best[arm]:g}"])
    print("### Learning rates: pass@64 at pass@1 = 40 % (updates)\n")
    markdown(["arm", *(f"{rate:g}" for rate in rates), "best"], rows)
    return best


def markdown(heads: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1), sep="\n")
    print(*(f"| {' | '.join(row)} |" for row in rows), "", sep="\n")


def title(record: dict[str, Any]) -> str:
    return record["arm"] + (f", rate {record['rate']:g}" if record["rate"] != PLAN[0][0] else "")


def compare(records: list[dict[str, Any]]) -> None:
    """Print metrics of arms at `LEVEL` and differences to three of them."""
    bases = {arm: at_pass_1(record, LEVEL) for arm in BASES for record in records if record["arm"] == arm.name}
    names = ["pass@8", "pass@64", "distinct", "kl", "entropy", "updates"]
    compared = [(name, arm, base) for name in ("pass@64", "distinct") for arm, base in bases.items()]
    rows = []
    for record in sorted(records, key=lambda record: record["arm"]):
        points = at_pass_1(record, LEVEL)
        row = [record["arm"], f"{record['rate']:g}", str(len(points)), *cells(list(points.values()), names)]
        rows.append([*row, *("" if points == base else paired_difference(points, base, n) for n, _, base in compared)])
    markdown(["arm", "rate", "seeds", *names, *(f"{n} minus {arm.name}" for n, arm, _ in compared)], rows)


def print_tables(everything: list[dict[str, Any]], best: dict[str, float]) -> None:
    """Print the tables of the page."""
    records = [record for record in everything if record["seeds"] == SEEDS]
    print("### At pass@1 = 40 %, each arm at its best rate\n")
    compared = {arm.name for _, arms, *_ in [*PLAN, *SECOND, *THIRD] for arm in arms}
    best = {arm: PLAN[0][0] for arm in compared} | best
    compare([record for record in records if record["arm"] in compared and record["rate"] == best[record["arm"]]])
    first = {(arm.name, rate) for rate, arms, *_ in PLAN for arm in arms}
    planned = [record for record in records if (record["arm"], record["rate"]) in first]
    print("### At pass@1 = 40 %, one rate for all\n")
    compare([record for record in planned if record["rate"] == PLAN[0][0]])
    print("### At equal CPU seconds of the updates\n")
    limit = min(record["seconds"] for record in planned)
    rows = []
    for record in planned:
        update_seconds = record["seconds"] / record["every"] / (len(record["pass@1"]) - 1)
        values = [at_point(record, i, limit / update_seconds / record["every"]) for i in range(len(SEEDS))]
        names = ["pass@1", "pass@8", "pass@64", "distinct", "entropy"]
        updates = f"{limit / update_seconds:.0f}"
        rows.append([title(record), f"{1000 * update_seconds / len(SEEDS):.1f}", updates, *cells(values, names)])
    markdown(["arm", "ms per update", "updates", "pass@1", "pass@8", "pass@64", "distinct", "entropy"], rows)


def draw(everything: list[dict[str, Any]], best: dict[str, float], path: Path) -> None:
    """Plot pass@64 and distinct correct answers against pass@1 along the runs, means over seeds, each arm at its best
    rate."""
    shown = [GRPO, ROLLOUT, KEPT[0.3], KEPT[1.0], PENALTY[0.1], RESET[80], OTHERS[1]]
    records = {r["arm"]: r for r in everything if r["seeds"] == SEEDS and r["rate"] == best.get(r["arm"])}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.3 * PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2)
        for arm, color, marker, dash in zip(shown, COLORS, MARKERS, DASHES, strict=True):
            record = records.get(arm.name, {"pass@1": [], "pass@64": [], "distinct": []})
            for panel, name in zip(panels, ("pass@64", "distinct"), strict=True):
                points = [[mean(point) for point in record[key]] for key in ("pass@1", name)]
                panel.plot(*points, color=color, marker=marker, linestyle=dash, label=arm.name)
        panels[0].set(xlabel="pass@1", ylabel="pass@64")
        panels[1].set(xlabel="pass@1", ylabel="share of correct answers in 64 samples")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    everything = read_records(args.results)
    best = best_rates(everything)
    print_tables(everything, best)
    draw(everything, best, args.results / "pareto.png")


if __name__ == "__main__":
    main()

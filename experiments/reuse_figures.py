"""What came of the sweep of `reuse.py`, drawn: `python -m experiments.reuse_figures`, seconds, trains nothing.

Left: held-out pass@1 against K, a dot for each seed, a line through the means, every method at the learning rate that was best for it
with this K. Middle and right: reward against rollouts, and against processor seconds, of each method with the K that was best for it and with K = 1;
means over seeds, running over `WINDOW` rollouts.
"""

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.reuse import RESULTS, STAGES, Arm, curve, solved
from pacs_trl.report.plots import COLORS, METHODS, PAGE_WIDTH, PANEL_HEIGHT, STYLE
from pacs_trl.reproduce.records import Records, Run


ROOT = Path(__file__).parents[1]
WINDOW = 5
FAMILIES = {("GRPO", 1.0): "GRPO", ("PACS", 1.0): "PACS, beta 1", ("PACS", 10.0): "PACS, beta 10"}
LOOKS = {"GRPO": METHODS["GRPO"][0], "PACS, beta 1": COLORS[0], "PACS, beta 10": COLORS[2]}  # of trust_region.py
PLAIN = Arm("PACS")


def pass_at_1(runs: Sequence[Run]) -> list[float]:
    """Percent, by seed."""
    return [mean(solved(run, 1)) for run in runs]


def best(records: Records, arms: Sequence[Arm]) -> dict[tuple[str, int], tuple[Arm, list[Run]]]:
    """By family and K the arm, of those that differ in the learning rate alone, whose mean is highest over the seeds that all of them have."""

    def key(arm: Arm) -> tuple[str, int]:
        return FAMILIES[arm.method, arm.beta], arm.updates

    def plain(arm: Arm) -> bool:
        own = arm._replace(method="PACS", updates=1, beta=1.0, rate=PLAIN.rate)
        return own == PLAIN and (arm.method, arm.beta) in FAMILIES

    found = {}
    for name, group in groupby(sorted(filter(plain, dict.fromkeys(arms)), key=key), key):
        runs = {arm: records.runs(arm.name, arm.name) for arm in group}
        runs = {arm: own for arm, own in runs.items() if own}
        if runs:
            shared = set.intersection(*({run.seed for run in own} for own in runs.values()))
            top = max(runs, key=lambda arm: mean(pass_at_1([run for run in runs[arm] if run.seed in shared])))
            found[name] = top, runs[top]
    return found


def draw(found: dict[tuple[str, int], tuple[Arm, list[Run]]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.15 * PANEL_HEIGHT), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        for family, color in LOOKS.items():
            own = {k: pair for (name, k), pair in sorted(found.items()) if name == family}
            for k, (_, runs) in own.items():
                left.plot([k] * len(runs), pass_at_1(runs), "o", color=color, alpha=0.4)
            means = {k: mean(pass_at_1(runs)) for k, (_, runs) in own.items()}
            left.plot(list(means), list(means.values()), color=color, label=family)
            for k, dash in {1: ":", max(means, key=lambda k: means[k]): "-"}.items():
                arm, runs = own[k]
                kernel = np.ones(WINDOW) / WINDOW
                rewards = np.mean([np.convolve(curve(run, "reward"), kernel, "valid") for run in runs], axis=0)
                seconds = np.mean([np.add(curve(run, "drawing"), curve(run, "learning")) for run in runs], axis=0)
                look = {"color": color, "linestyle": dash, "label": f"{family}, K = {k}, {arm.rate:g}"}
                middle.plot(np.arange(WINDOW, len(seconds) + 1), rewards, **look)
                right.plot(seconds[WINDOW - 1 :], rewards, **look)
        left.set_xscale("log", base=2)
        left.set(
            title="held out",
            xlabel="K",
            ylabel="pass@1 (%)",
            ylim=(0, None),
            xticks=[1, 2, 4, 8, 16],
            xticklabels=[1, 2, 4, 8, 16],
        )
        middle.set(title="reward", xlabel="rollouts", ylim=(0, None))
        right.set(title="reward", xlabel="processor seconds", ylim=(0, None))
        figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="of `experiments.reuse`")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/reuse_sweep.png")
    args = parser.parse_args()
    found = best(Records(args.results_dir), [arm for stage in STAGES.values() for arm in stage])
    for (family, k), (arm, runs) in sorted(found.items()):
        print(f"{family}, K = {k}: {arm.rate:g}, pass@1 {[round(value, 1) for value in pass_at_1(runs)]}")
    draw(found, args.output)


if __name__ == "__main__":
    main()

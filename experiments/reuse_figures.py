"""Figure of the main runs of `reuse.py`: reward over rollouts and over CPU seconds.

`python -m experiments.reuse_figures`, seconds, trains nothing. Means over seeds, running over `WINDOW` rollouts; PACS
has beta 10 with K > 1 (with K = 1 beta has no effect).
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.paper.records import Records, Run
from experiments.reuse import LARGE, RESULTS, Arm
from experiments.reuse_tables import curve
from pacs_trl.report.plots import METHODS, PAGE_WIDTH, PANEL_HEIGHT, STYLE


ROOT = Path(__file__).parents[1]
WINDOW = 5
DASHES = {1: ":", 4: "--", 8: "-"}  # by K


def arm_of(method: str, updates: int) -> Arm:
    several = {"beta": 10.0 if method == "PACS" else 1.0} if updates > 1 else {"rate": 3e-4}
    return Arm(method, updates, **several, **LARGE)


def draw(found: dict[tuple[str, int], list[Run]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.15 * PANEL_HEIGHT), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for (method, k), runs in found.items():
            kernel = np.ones(WINDOW) / WINDOW
            rewards = np.mean([np.convolve(curve(run, "reward"), kernel, "valid") for run in runs], axis=0)
            seconds = np.mean([np.add(curve(run, "drawing"), curve(run, "learning")) for run in runs], axis=0)
            look = {"color": METHODS[method][0], "linestyle": DASHES[k], "label": f"{method}, K = {k}"}
            left.plot(np.arange(WINDOW, len(seconds) + 1), rewards, **look)
            right.plot(seconds[WINDOW - 1 :], rewards, **look)
        left.set(xlabel="rollouts", ylabel="reward", ylim=(0, None))
        right.set(xlabel="CPU seconds")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="of `experiments.reuse`")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/reuse_sweep.png")
    args = parser.parse_args()
    records = Records(args.results_dir)
    arms = {(method, k): arm_of(method, k) for method in ("PACS", "GRPO") for k in DASHES}
    draw({key: records.runs(arm.name, arm.name) for key, arm in arms.items()}, args.output)
    print(f"Wrote {args.output}.")


if __name__ == "__main__":
    main()

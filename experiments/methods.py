"""Figure of PACS, GRPO, and PPO for README, from the records of the miniature tables.

`python -m experiments.methods`, seconds, trains nothing.

Three seeds, whose warm starts all methods share. Records have no times: `--clock` trains seed 0 of each method again,
one after another, to measure them. Bands and bars are the range over seeds; differences are by seed, because most of
the spread is that of the warm starts.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.paper.records import Records, Run
from experiments.paper.runs import start_of, train_once
from pacs_trl.recipe import read_recipe
from pacs_trl.report.plots import PAGE_WIDTH, PANEL_HEIGHT, STYLE, looks


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/miniature"
MODELS = {"sums-0.1m": "0.1M parameters", "sums-1m": "1M parameters"}
CELLS = {"warm start": "base", "PPO": "ppo", "GRPO": "grpo", "PACS": "pacs"}
CLOCKED = "clock.json"
WINDOW = 8  # rollouts in a running mean


def clock(model: str, cell: str, work_dir: Path) -> list[float]:
    """Train a run of the tables again; return the seconds of the training loop until each rollout was graded."""
    arguments = ["--config", str(ROOT / f"recipes/miniature/{model}/{cell}.yaml"), "--seed", "0"]
    logs = train_once(arguments, start_of(read_recipe(arguments)), work_dir / f"{model}-{cell}")
    passed = np.cumsum([log.get("time/total", 0.0) for log in logs])
    return [round(float(at), 1) for at, log in zip(passed, logs, strict=True) if "reward" in log]


def reward(run: Run) -> np.ndarray:
    """Return the running mean of a run's reward, one number per rollout."""
    logged = [log["reward"] for log in run.training["log_history"] if "reward" in log]
    return np.convolve(logged, np.ones(WINDOW) / WINDOW, mode="valid")


def pass_at(run: Run, ks: list[int]) -> np.ndarray:
    """Return pass@k in percent, averaged over the five benchmarks."""
    benchmarks = [about for name, about in run.results["benchmarks"].items() if "/terms_" in name]
    return 100 * np.array([np.mean([about["pass_at_k"][str(k)]["value"] for about in benchmarks]) for k in ks])


def draw_reward(
    panel: Axes, runs: dict[str, list[Run]], seconds: dict[str, list[float]], look: dict[str, dict]
) -> None:
    for method, of_seeds in runs.items():
        curves = np.array([reward(run) for run in of_seeds])
        minutes = np.array(seconds[CELLS[method]])[WINDOW - 1 :] / 60
        panel.plot(minutes, curves.mean(axis=0), label=method, **look[method] | {"marker": ""})
        panel.fill_between(
            minutes, curves.min(axis=0), curves.max(axis=0), color=look[method]["color"], alpha=0.1, lw=0
        )
    panel.set(xlabel="minutes of training", ylabel="reward", xlim=(0, None), ylim=(0, 0.35))


def draw_pass_at_k(panel: Axes, runs: dict[str, list[Run]], look: dict[str, dict], ks: list[int]) -> None:
    for i, (method, of_seeds) in enumerate(runs.items()):
        values = np.array([pass_at(run, ks) for run in of_seeds])
        ends = np.abs(np.array([values.min(axis=0), values.max(axis=0)]) - values.mean(axis=0))
        shifted = np.array(ks) * 1.06 ** (i - 1.5)  # so that bars do not cover one another
        panel.errorbar(shifted, values.mean(axis=0), ends, label=method, elinewidth=0.7, **look[method])
    panel.set(xlabel="k", ylabel="pass@k (%)", ylim=(0, 100))


def draw_differences(panel: Axes, runs: dict[str, list[Run]], look: dict[str, dict], ks: list[int]) -> None:
    """Draw the differences to GRPO by seed, in points."""
    base = {run.seed: pass_at(run, ks) for run in runs["GRPO"]}
    panel.axhline(0, **look["GRPO"] | {"marker": ""})
    for i, method in enumerate(("PPO", "PACS")):
        values = np.array([pass_at(run, ks) - base[run.seed] for run in runs[method]])
        shifted = np.array(ks) * 1.08 ** (i - 0.5)
        panel.plot(shifted, values.mean(axis=0), **look[method] | {"marker": ""})
        for by_seed in values:
            panel.plot(shifted, by_seed, **look[method] | {"linestyle": "", "markersize": 2.5})
    panel.set(xlabel="k", ylabel="points", ylim=(-8, 8))


def draw(records: Records, seconds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw a row for each model: reward, pass@k, and differences by seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 2 * PANEL_HEIGHT), layout="constrained")
        grid = figure.subplots(len(MODELS), 3)
        for panels, (model, title) in zip(grid, MODELS.items(), strict=True):
            runs = {method: records.runs(f"{model}/{cell}", method) for method, cell in CELLS.items()}
            look, trained = looks(runs), {method: group for method, group in runs.items() if method != "warm start"}
            ks = next(iter(runs["PACS"][0].results["benchmarks"].values()))["k"]
            draw_reward(panels[0], trained, seconds[model], look)
            draw_pass_at_k(panels[1], runs, look, ks)
            draw_differences(panels[2], trained, look, ks)
            panels[0].set_title(f"{title}: reward")
            panels[1].set_title(f"{title}: held out")
            panels[2].set_title(f"{title}: minus GRPO")
            for panel in panels[1:]:
                panel.set_xscale("log", base=2)
                panel.set_xticks(ks, [str(k) for k in ks])
        figure.legend(*grid[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=len(CELLS))
        save(figure, path)


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(prog="python -m experiments.methods", description=__doc__)
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help=f"has records.jsonl.gz, {CLOCKED}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/methods.png")
    parser.add_argument("--clock", action="store_true", help="train, for the times")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/methods"), help="of these runs")
    arguments = parser.parse_args()
    clocked = arguments.results_dir / CLOCKED
    if arguments.clock:
        cells = [cell for method, cell in CELLS.items() if method != "warm start"]
        seconds = {model: {cell: clock(model, cell, arguments.work_dir) for cell in cells} for model in MODELS}
        clocked.write_text(json.dumps(seconds) + "\n")
    draw(Records(arguments.results_dir), json.loads(clocked.read_text()), arguments.output)
    print(f"Wrote {arguments.output}.")


if __name__ == "__main__":
    main()

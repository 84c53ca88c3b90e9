"""README's first picture, PACS, GRPO and PPO side by side: `python -m experiments.methods`, seconds, runs nothing.

pass@k is that of the records of the miniature tables (three seeds, whose warm start all methods share). These keep no times: reward
against wall time is that of the same runs made once more, one after another, by `python -m experiments.methods --clock`, which goes on
where it was stopped. Bands and bars are the range over seeds; a difference is taken seed by seed, because most of the spread is that
of the warm starts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pacs_trl.recipe import read_recipe
from pacs_trl.report.plots import PAGE_WIDTH, PANEL_HEIGHT, STYLE, looks
from pacs_trl.reproduce.records import Records, Run
from pacs_trl.reproduce.runs import start_of, train_once


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/miniature"
MODELS = {"twin-4b": "0.1M parameters", "twin-8b": "1M parameters"}
CELLS = {"warm start": "base", "PPO": "ppo", "GRPO": "grpo", "PACS": "pacs"}
CLOCKED = "clock.json"
WINDOW = 8  # rollouts in a running mean


def clock(model: str, cell: str, seed: int, work_dir: Path) -> dict[str, Any]:
    """Train a run of the tables: seconds of the training loop until the reward of each rollout is known, and that reward."""
    arguments = ["--config", str(ROOT / f"recipes/miniature/{model}/{cell}.yaml"), "--seed", str(seed)]
    logs = train_once(arguments, start_of(read_recipe(arguments)), work_dir / f"{model}-{cell}-{seed}")
    passed = np.cumsum([log.get("time/total", 0.0) for log in logs])
    curve = [(round(float(at), 2), log["reward"]) for at, log in zip(passed, logs, strict=True) if "reward" in log]
    seconds, rewards = zip(*curve, strict=True)
    return {"model": model, "cell": cell, "seed": seed, "seconds": seconds, "reward": rewards}


def pass_at(run: Run, ks: list[int]) -> np.ndarray:
    """Percent, mean over the five benchmarks that stand in place of the paper's."""
    benchmarks = [about for name, about in run.results["benchmarks"].items() if "/terms_" in name]
    return 100 * np.array([np.mean([about["pass_at_k"][str(k)]["value"] for about in benchmarks]) for k in ks])


def draw_reward(panel: Axes, clocked: dict[str, list[dict[str, Any]]], look: dict[str, dict]) -> None:
    """The running mean over rollouts, against the mean time at which they ended."""
    for method, runs in clocked.items():
        curves = [np.convolve(run["reward"], np.ones(WINDOW) / WINDOW, mode="valid") for run in runs]
        minutes = np.mean([run["seconds"] for run in runs], axis=0)[WINDOW - 1 :] / 60
        panel.plot(minutes, np.mean(curves, axis=0), label=method, **look[method] | {"marker": ""})
        lowest, highest = np.min(curves, axis=0), np.max(curves, axis=0)
        panel.fill_between(minutes, lowest, highest, color=look[method]["color"], alpha=0.1, lw=0)
    panel.set(xlabel="minutes of training", ylabel="reward", xlim=(0, None), ylim=(0, 0.35))


def draw_pass_at_k(panel: Axes, runs: dict[str, list[Run]], look: dict[str, dict], ks: list[int]) -> None:
    for i, (method, of_seeds) in enumerate(runs.items()):
        values = np.array([pass_at(run, ks) for run in of_seeds])
        ends = np.abs(np.array([values.min(axis=0), values.max(axis=0)]) - values.mean(axis=0))
        shifted = np.array(ks) * 1.06 ** (i - 1.5)  # so that bars do not cover one another
        panel.errorbar(shifted, values.mean(axis=0), ends, label=method, elinewidth=0.7, **look[method])
    panel.set(xlabel="k", ylabel="pass@k (%)", ylim=(0, 100))


def draw_differences(panel: Axes, runs: dict[str, list[Run]], look: dict[str, dict], ks: list[int]) -> None:
    """To GRPO, points by seed."""
    base = {run.seed: pass_at(run, ks) for run in runs["GRPO"]}
    panel.axhline(0, **look["GRPO"] | {"marker": ""})
    for i, method in enumerate(("PPO", "PACS")):
        values = np.array([pass_at(run, ks) - base[run.seed] for run in runs[method]])
        shifted = np.array(ks) * 1.08 ** (i - 0.5)
        panel.plot(shifted, values.mean(axis=0), **look[method] | {"marker": ""})
        for by_seed in values:
            panel.plot(shifted, by_seed, **look[method] | {"linestyle": "", "markersize": 2.5})
    panel.set(xlabel="k", ylabel="points", ylim=(-8, 8))


def draw(records: Records, clocked: list[dict[str, Any]], path: Path) -> None:
    """A row for each model: reward, pass@k, and differences by seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 2 * PANEL_HEIGHT), layout="constrained")
        grid = figure.subplots(len(MODELS), 3)
        for panels, (model, title) in zip(grid, MODELS.items(), strict=True):
            runs = {method: records.runs(f"{model}/{cell}", method) for method, cell in CELLS.items()}
            look, trained = looks(runs), {method: group for method, group in runs.items() if method != "warm start"}
            ks = next(iter(runs["PACS"][0].results["benchmarks"].values()))["k"]
            timed = {m: [r for r in clocked if (r["model"], r["cell"]) == (model, CELLS[m])] for m in trained}
            draw_reward(panels[0], timed, look)
            draw_pass_at_k(panels[1], runs, look, ks)
            draw_differences(panels[2], trained, look, ks)
            panels[0].set_title(f"{title}: reward")
            panels[1].set_title(f"{title}: held out")
            panels[2].set_title(f"{title}: minus GRPO")
            for panel in panels[1:]:
                panel.set_xscale("log", base=2)
                panel.set_xticks(ks, [str(k) for k in ks])
        figure.legend(*grid[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=len(CELLS))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def main() -> None:
    """Command line: writes the picture."""
    parser = argparse.ArgumentParser(prog="python -m experiments.methods", description=__doc__)
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help=f"has records.jsonl, {CLOCKED}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/methods.png")
    parser.add_argument("--clock", action="store_true", help="make the runs again, for their times")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/methods"), help="of these runs")
    arguments = parser.parse_args()
    if arguments.clock:
        cells = [cell for method, cell in CELLS.items() if method != "warm start"]
        runs = [clock(m, cell, seed, arguments.work_dir) for m in MODELS for seed in (0, 1, 2) for cell in cells]
        lines = ",\n".join(json.dumps(run) for run in runs)
        (arguments.results_dir / CLOCKED).write_text(f"[\n{lines}\n]\n")
    clocked = json.loads((arguments.results_dir / CLOCKED).read_text())
    draw(Records(arguments.results_dir), clocked, arguments.output)
    print(f"Wrote {arguments.output}.")


if __name__ == "__main__":
    main()

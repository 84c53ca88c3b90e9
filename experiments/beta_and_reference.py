"""When beta matters.

`python -m experiments.beta_and_reference`, minutes on one core.

Against the policy at rollout time the implicit rewards are 0 on the first update and small on the others, the sigmoid
is nearly linear, and beta only scales the gradient, which Adam takes back. Against a snapshot that is kept, implicit
rewards grow with every update; then beta decides when scores saturate and learning stops. The script trains the
miniature PACS recipe with both references and several betas from one warm start, and draws reward, spread of the
scores and saturation. With `--reset_steps` a third reference is added: the snapshot, renewed every so many updates.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import matplotlib

from experiments.figures import save
from experiments.studies import run_name, running_mean, trained, write_json


BETAS = (0.1, 1.0, 10.0)
PANELS = {
    "reward": "reward",
    "pacs/score_std": "standard deviation of scores",
    "pacs/saturated_score_fraction": "share of saturated scores",
    "entropy": "entropy (nats per token)",
}


def references(reset_steps: int | None) -> dict[str, list[str]]:
    """Label of a reference -> its settings on the command line."""
    kept = {"rollout": ["--reference", "rollout"], "snapshot, kept": ["--reference", "snapshot"]}
    if reset_steps is None:
        return kept
    renewed = ["--reference", "snapshot", "--reference_reset_steps", str(reset_steps)]
    return kept | {f"snapshot, renewed every {reset_steps}": renewed}


def train_one(arguments: Sequence[str], output_dir: Path) -> list[dict]:
    history = trained(arguments, output_dir)
    return [{key: log[key] for key in ("step", *PANELS) if key in log} for log in history if "entropy" in log]


def draw(histories: dict[str, dict[str, list[dict]]], path: Path) -> None:
    """One column per reference, one line per beta: thin what was logged, thick a running mean of the last ten
    updates."""
    from matplotlib.figure import Figure

    from pacs_trl.report.plots import COLORS, DASHES, PAGE_WIDTH, PANEL_HEIGHT, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 0.8 * PANEL_HEIGHT * len(PANELS) + 0.35), layout="constrained")
        grid = figure.subplots(len(PANELS), len(histories), sharex=True, sharey="row", squeeze=False)
        for column, (reference, by_beta) in enumerate(histories.items()):
            for row, (key, label) in enumerate(PANELS.items()):
                axes = grid[row, column]
                for i, (beta, logs) in enumerate(by_beta.items()):
                    shown = [log for log in logs if log.get(key) is not None]
                    steps, values = [log["step"] for log in shown], [log[key] for log in shown]
                    axes.plot(steps, values, color=COLORS[i], linewidth=0.4, alpha=0.4)
                    look = {"color": COLORS[i], "linestyle": DASHES[i]}
                    axes.plot(steps, running_mean(values, 10), label=f"beta {beta}", **look)
                if column == 0:
                    axes.set_ylabel(label)
                if key == "pacs/score_std":
                    axes.set_yscale("symlog", linthresh=0.01)
            grid[0, column].set_title(reference)
            grid[-1, column].set_xlabel("optimizer step")
        figure.align_ylabels()
        note = {"title": "thin lines: logged; thick: running mean of the last ten updates", "title_fontsize": 7}
        handles = grid[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(BETAS), **note)
        save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--betas", type=float, nargs="+", default=list(BETAS))
    parser.add_argument("--reset_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=80)
    parser.add_argument("--output_dir", type=Path, default=Path("docs/results/analysis"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/beta_and_reference"))
    args = parser.parse_args(argv)
    histories: dict[str, dict[str, list[dict]]] = {}
    for reference, settings in references(args.reset_steps).items():
        for beta in args.betas:
            common = ["--seed", str(args.seed), "--max_steps", str(args.max_steps), "--pacs_beta", str(beta)]
            name = f"{run_name(reference)}-{beta:g}-seed-{args.seed}"
            logs = train_one([*settings, *common], args.work_dir / name)
            histories.setdefault(reference, {})[f"{beta:g}"] = logs
            last = logs[-max(1, len(logs) // 10) :]
            means = {key: mean([log[key] for log in last if log.get(key) is not None]) for key in PANELS}
            print(f"{reference}, beta {beta:g}: " + ", ".join(f"{k} {v:.3f}" for k, v in means.items()), flush=True)
    draw(histories, args.output_dir / "beta_and_reference.png")
    write_json(args.output_dir / "beta_and_reference.json", histories)


if __name__ == "__main__":
    main()

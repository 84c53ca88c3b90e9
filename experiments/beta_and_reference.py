"""Scores under several betas and references.

`python -m experiments.beta_and_reference`, minutes on one core.

With the rollout reference implicit rewards are 0 at the first update and small at the others, the sigmoid is nearly
linear, and beta only scales the gradient, which Adam normalizes. With a kept snapshot implicit rewards grow with every
update, and beta decides when scores saturate. The script trains the miniature PACS recipe with both references and a
snapshot that is reset every `--reset_steps` updates, from one warm start, and plots the standard deviation of psi.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import matplotlib

from experiments.figures import save
from experiments.studies import run_name, running_mean, trained, write_json


BETAS = (0.1, 1.0, 10.0)
METRICS = ("reward", "pacs/score_std", "pacs/saturated_score_fraction", "entropy")


def references(reset_steps: int | None) -> dict[str, list[str]]:
    """Label of a reference -> its settings on the command line."""
    kept = {"rollout": ["--reference", "rollout"], "snapshot, kept": ["--reference", "snapshot"]}
    if reset_steps is None:
        return kept
    renewed = ["--reference", "snapshot", "--reference_reset_steps", str(reset_steps)]
    return kept | {f"snapshot, renewed every {reset_steps}": renewed}


def train_one(arguments: Sequence[str], output_dir: Path) -> list[dict]:
    history = trained(arguments, output_dir)
    return [{key: log[key] for key in ("step", *METRICS) if key in log} for log in history if "entropy" in log]


def draw(histories: dict[str, dict[str, list[dict]]], path: Path) -> None:
    """Plot the standard deviation of psi in a panel for each reference: a running mean over ten updates."""
    from pacs_trl.report.plots import PANEL_HEIGHT, STYLE, legend_below, line_look, panels_of

    with matplotlib.rc_context(STYLE):
        figure, panels = panels_of(len(histories))
        figure.set_figheight(PANEL_HEIGHT + 0.5)
        for axes, (reference, by_beta) in zip(panels, histories.items(), strict=True):
            for i, (beta, logs) in enumerate(by_beta.items()):
                shown = [log for log in logs if log.get("pacs/score_std") is not None]
                values = running_mean([log["pacs/score_std"] for log in shown], 10)
                look = line_look(i) | {"marker": ""}
                axes.plot([log["step"] for log in shown], values, label=f"beta {beta}", **look)
            axes.set(title=reference, xlabel="optimizer step", yscale="symlog", ylim=(0, 10))
            axes.set_yscale("symlog", linthresh=0.01)
        panels[0].set_ylabel("standard deviation of psi")
        legend_below(figure, panels, "")
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
            means = {key: mean([log[key] for log in last if log.get(key) is not None]) for key in METRICS}
            print(f"{reference}, beta {beta:g}: " + ", ".join(f"{k} {v:.3f}" for k, v in means.items()), flush=True)
    draw(histories, args.output_dir / "beta_and_reference.png")
    write_json(args.output_dir / "beta_and_reference.json", histories)


if __name__ == "__main__":
    main()

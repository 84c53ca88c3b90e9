"""Does a rule that adapts beta or the reset help?

`python -m experiments.adaptive_rules`, a quarter of an hour on one core.

Saturated scores have no gradient, so a rule may act on them in two ways: renew a snapshot reference as soon as too
many scores are saturated, instead of every so many updates; or scale beta so that the scores keep a spread at which
the sigmoid still bends. Each rule is trained on the miniature PACS recipe from the same warm starts as the fixed
settings it competes with. What decides is the reward of the last rollouts, over several seeds.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import matplotlib

from experiments.figures import save
from experiments.studies import markdown, run_name, running_mean, trained, write_json
from pacs_trl.pacs_trainer import PACSTrainer


MAX_SATURATED = 0.05
SPREAD = 1.0
LAST_ROLLOUTS = 10


def renewal_is_due(saturated_share: float) -> bool:
    """Whether more than `MAX_SATURATED` of the scores of the last update had next to no gradient."""
    return saturated_share > MAX_SATURATED


def next_beta(beta: float, score_std: float) -> float:
    """Beta that would have given scores the standard deviation `SPREAD`, at most twice or half the present one."""
    return beta if not score_std > 0.0 else beta * min(2.0, max(0.5, SPREAD / score_std))


class RenewWhenSaturated(PACSTrainer):
    """A snapshot reference that is renewed when `renewal_is_due` after an update."""

    def _run_update(self, model):
        loss = super()._run_update(model)
        if renewal_is_due(self._metrics["train"]["pacs/saturated_score_fraction"][-1]):
            self._snapshot.renew()
        return loss


class KeepSpread(PACSTrainer):
    """Beta follows the spread of the scores, `next_beta` after every update but the first ones, where all scores are
    0."""

    def _run_update(self, model):
        loss = super()._run_update(model)
        objective = self.update.objective
        pacs_beta = next_beta(objective.pacs_beta, self._metrics["train"]["pacs/score_std"][-1])
        self.update.objective = objective._replace(pacs_beta=pacs_beta)
        return loss


SNAPSHOT = ["--reference", "snapshot", "--pacs_beta", "10"]
ARMS: dict[str, tuple[type[PACSTrainer], list[str]]] = {
    "rollout, beta 1": (PACSTrainer, []),
    "rollout, beta 10": (PACSTrainer, ["--pacs_beta", "10"]),
    "rollout, beta by spread": (KeepSpread, []),
    "snapshot, beta 10, kept": (PACSTrainer, SNAPSHOT),
    "snapshot, beta 10, every 20": (PACSTrainer, [*SNAPSHOT, "--reference_reset_steps", "20"]),
    "snapshot, beta 10, when saturated": (RenewWhenSaturated, SNAPSHOT),
}


def rewards(arm: str, seed: int, max_steps: int, work_dir: Path) -> list[float]:
    """Mean reward of each rollout of a run, from its directory if it is there already."""
    trainer_class, settings = ARMS[arm]
    arguments = [*settings, "--seed", str(seed), "--max_steps", str(max_steps)]
    history = trained(arguments, work_dir / f"{run_name(arm)}-seed-{seed}", trainer_class)
    return [entry["reward"] for entry in history if "reward" in entry]


def draw(by_arm: dict[str, list[list[float]]], path: Path) -> None:
    """One line per arm: mean over seeds of the running mean over ten rollouts; a band of one standard deviation."""
    from matplotlib.figure import Figure

    from pacs_trl.report.plots import COLORS, DASHES, PAGE_WIDTH, PANEL_HEIGHT, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.6 * PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, reference in zip(panels, ("rollout", "snapshot"), strict=True):
            shown = {arm: runs for arm, runs in by_arm.items() if arm.startswith(reference)}
            for i, (arm, runs) in enumerate(shown.items()):
                smooth = list(zip(*(running_mean(run, LAST_ROLLOUTS) for run in runs), strict=True))
                middle = [mean(values) for values in smooth]
                spread = [stdev(values) if len(values) > 1 else 0.0 for values in smooth]
                low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
                label = arm.removeprefix(f"{reference}, ")
                axes.plot(range(1, len(middle) + 1), middle, color=COLORS[i], linestyle=DASHES[i], label=label)
                axes.fill_between(range(1, len(middle) + 1), low, high, color=COLORS[i], alpha=0.15, linewidth=0)
            axes.set_title(f"{reference} reference")
            axes.set_xlabel("rollout")
            axes.legend(title="band: one standard deviation over seeds", title_fontsize=7)
        panels[0].set_ylabel("reward")
        save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--output_dir", type=Path, default=Path("docs/results/analysis"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/adaptive_rules"))
    args = parser.parse_args(argv)
    by_arm = {arm: [rewards(arm, seed, args.max_steps, args.work_dir) for seed in args.seeds] for arm in ARMS}
    draw(by_arm, args.output_dir / "adaptive_rules.png")
    write_json(args.output_dir / "adaptive_rules.json", by_arm)
    rows = []
    for arm, runs in by_arm.items():
        ends = [mean(run[-LAST_ROLLOUTS:]) for run in runs]
        spread = f"{stdev(ends):.3f}" if len(ends) > 1 else "-"
        rows.append([arm, ", ".join(f"{end:.3f}" for end in ends), f"{mean(ends):.3f}", spread])
    heads = ["reference, beta, renewed", f"reward of the last {LAST_ROLLOUTS} rollouts, each seed", "mean", "sd"]
    print("\n".join(markdown(heads, rows, 2)))


if __name__ == "__main__":
    main()

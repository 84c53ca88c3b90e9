"""Adaptive rules for beta and for resets of the reference, against fixed settings.

`python -m experiments.adaptive_rules`, a quarter of an hour on one core.

Saturated scores have no gradient. One rule resets a snapshot reference as soon as too many scores are saturated,
instead of every so many updates; the other scales beta so that the scores keep a standard deviation of 1. Each is
compared with fixed settings on the miniature PACS recipe, from the same warm starts, by the reward of the last
rollouts over several seeds.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from experiments.studies import markdown, run_name, trained, write_json
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
        self.update.objective = replace(objective, pacs_beta=pacs_beta)
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


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--output_dir", type=Path, default=Path("docs/results/analysis"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/adaptive_rules"))
    args = parser.parse_args(argv)
    by_arm = {arm: [rewards(arm, seed, args.max_steps, args.work_dir) for seed in args.seeds] for arm in ARMS}
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

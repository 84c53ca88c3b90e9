"""Calibration and ranking of the implicit critic.

`python -m experiments.ranking` uses the models that `experiments.reuse` left in its work directory.

For each reference, beta, K, and class weighting of `ARMS`, psi is computed for held-out completions of the warm start
and of the trained policy, 16 for each of 250 problems, as in `critic.py`. Calibration: Brier score beside that of the
base rate, and calibration error of ten bins, with psi relative to the other completions of the problem (`rloo`) and to
the reference alone (`none`). Ranking: accuracy of an answer chosen at random, by majority vote, by the highest score,
and by the largest sum of sigma(psi). Means over seeds with 95 % intervals.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.critic import critic_records
from experiments.graded import read_graded
from experiments.paper.runs import start_of
from experiments.reliability import reliability_bins
from experiments.reuse import RESULTS, TASKS, Arm
from experiments.studies import markdown, mean_difference
from pacs_trl.objective import group_scores
from pacs_trl.recipe import read_recipe
from pacs_trl.verification import last_boxed


ARMS = [
    *(Arm("PACS", beta=beta, rate=3e-4, reference=kind) for kind in ("rollout", "snapshot") for beta in (1.0, 10.0)),
    *(Arm("PACS", 8, beta, weights) for weights in ("balanced", "none") for beta in (1.0, 10.0)),
]
ESTIMATORS = ("rloo", "none")


class Candidate(NamedTuple):
    score: float
    label: float
    answer: str | None  # what the last box holds


def _share_of_best(candidates: Sequence[Candidate], marks: Sequence[float]) -> float:
    """Return the chance that a candidate with the highest mark is correct, with ties broken at random."""
    return mean(c.label for c, mark in zip(candidates, marks, strict=True) if mark == max(marks))


def choices(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return the chance that the chosen answer of a problem is correct, by the rule of choice."""
    votes, weights = Counter(c.answer for c in candidates), defaultdict(float)
    for c in candidates:
        weights[c.answer] += 1 / (1 + np.exp(-c.score))
    votes[None], weights[None] = 0, 0.0  # no box, no vote
    return {
        "mean": mean(c.label for c in candidates),
        "majority vote": _share_of_best(candidates, [votes[c.answer] for c in candidates]),
        "highest score": _share_of_best(candidates, [c.score for c in candidates]),
        "weighted vote": _share_of_best(candidates, [weights[c.answer] for c in candidates]),
    }


def calibration(scores: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Return the Brier score, that of the base rate, and the calibration error of ten bins."""
    targets = np.array(labels)
    return {
        "Brier": float(np.mean((1 / (1 + np.exp(-np.array(scores))) - targets) ** 2)),
        "base rate": float(targets.mean() * (1 - targets.mean())),
        "calibration error": reliability_bins(scores, labels)["calibration_error"],
    }


def measure(arm: Arm, source: str, seed: int, work_dir: Path) -> dict[str, Any]:
    """Return a line of results: completions of `source` ("start" or "trained"), scored by the model of `arm`."""
    own = work_dir / arm.name / f"seed-{seed}"
    evaluation = own / "evaluation" if source == "trained" else work_dir / arm.task / f"start/seed-{seed}/evaluation"
    start = start_of(
        read_recipe(["--config", f"recipes/{arm.cell.recipe}.yaml", *arm.cell.words, "--seed", str(seed)])
    )
    benchmark = f"miniature/{TASKS[arm.task][1]}"
    rows = critic_records(
        evaluation, str(own / "model"), str(start), benchmark, pacs_beta=arm.beta, score_estimator="none"
    )
    _, texts = read_graded(evaluation, benchmark)
    by_problem = defaultdict(list)
    for row in rows:
        text = texts[row["problem"], row["sample"]]["completion"]
        by_problem[row["problem"]].append(Candidate(row["score"], row["label"], last_boxed(text)))
    labels = [candidate.label for group in by_problem.values() for candidate in group]
    found: dict[str, Any] = {"arm": arm.name, "completions": source, "seed": seed}
    for estimator in ESTIMATORS:
        scores = group_scores(
            torch.tensor([candidate.score for group in by_problem.values() for candidate in group]),
            torch.tensor(labels),
            num_generations=len(rows) // len(by_problem),
            score_estimator=estimator,
        )
        found[estimator] = calibration(scores.tolist(), labels)
    chosen = [choices(group) for group in by_problem.values()]
    return found | {"chosen": {name: 100 * mean(own[name] for own in chosen) for name in chosen[0]}}


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each arm and source of completions: means over seeds, and the difference of the highest score
    to the majority vote."""
    calibrations = [f"{name}, {estimator}" for estimator in ESTIMATORS for name in ("Brier", "calibration error")]
    chosen = ["mean", "majority vote", "highest score", "weighted vote"]
    heads = ["completions", "seeds", "base rate", *calibrations, *chosen, "highest score - majority"]
    rows = []
    for name, source in dict.fromkeys((line["arm"], line["completions"]) for line in lines):
        own = [line for line in lines if (line["arm"], line["completions"]) == (name, source)]
        cells = [source, str(len(own)), f"{mean(line['rloo']['base rate'] for line in own):.3f}"]
        cells += [
            f"{mean(line[e][key] for line in own):.3f}" for e in ESTIMATORS for key in ("Brier", "calibration error")
        ]
        cells += [f"{mean(line['chosen'][key] for line in own):.1f}" for key in chosen]
        apart = [line["chosen"]["highest score"] - line["chosen"]["majority vote"] for line in own]
        rows.append([name, *cells, mean_difference(apart)])
    return markdown(["", *heads], rows, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/reuse"), help="of `experiments.reuse`")
    parser.add_argument("--output", type=Path, default=RESULTS / "critic.jsonl", help="goes on where it was stopped")
    parser.add_argument("--report", action="store_true", help="of what is there, and score nothing more")
    args = parser.parse_args()
    lines = [json.loads(text) for text in args.output.read_text().splitlines()] if args.output.is_file() else []
    done = {(line["arm"], line["completions"], line["seed"]) for line in lines}
    wanted = [(arm, source, seed) for arm in ARMS for source in ("start", "trained") for seed in args.seeds]
    for arm, source, seed in [] if args.report else wanted:
        if (arm.name, source, seed) not in done:
            lines.append(measure(arm, source, seed, args.work_dir))
            with args.output.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()

"""May the implicit critic be trusted? `python -m experiments.ranking EVALUATION --benchmark miniature/addition --policy ... --reference ...`

For the completions of an evaluation, scored as in `critic.py`: whether sigma(psi) says how often they are right (bins, Brier score against
that of the share of right ones), with psi against the other completions of a problem (`rloo`) and against the reference alone (`none`); and
how often the completion that is ranked first is right, beside the majority vote over answers and the mean over completions. Differences are
paired over problems, with 95 % intervals.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from experiments.critic import critic_records
from pacs_trl.evaluation import bootstrap_interval, paired_bootstrap
from pacs_trl.evaluation.store import read_graded
from pacs_trl.report.plots import reliability_bins
from pacs_trl.verification import last_boxed


class Candidate(NamedTuple):
    score: float
    label: float
    answer: str | None  # what the last box holds


def _share_of_best(candidates: Sequence[Candidate], marks: Sequence[float]) -> float:
    """Chance that a candidate with the highest mark is right, ties drawn at random."""
    return mean(c.label for c, mark in zip(candidates, marks, strict=True) if mark == max(marks))


def choices(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Chance that the answer given to a problem is right: any candidate, the most frequent answer, the highest score."""
    votes = Counter(c.answer for c in candidates if c.answer is not None)
    return {
        "mean": mean(c.label for c in candidates),
        "majority vote": _share_of_best(candidates, [votes[c.answer] for c in candidates]),
        "highest score": _share_of_best(candidates, [c.score for c in candidates]),
    }


def calibration(candidates: Sequence[Candidate]) -> str:
    """Brier score, that of the base rate, and the mean distance of bins from the diagonal."""
    scores, labels = (np.array(values) for values in list(zip(*candidates, strict=True))[:2])
    bins = reliability_bins(scores, labels)
    brier, base = np.mean((1 / (1 + np.exp(-scores)) - labels) ** 2), labels.mean() * (1 - labels.mean())
    return f"Brier {brier:.3f} (base rate {base:.3f}), calibration error {bins['calibration_error']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evaluation", type=Path, help="output directory of `pacs-trl evaluate`")
    parser.add_argument("--benchmark", required=True)
    parser.add_argument("--policy", required=True, help="trained checkpoint")
    parser.add_argument("--reference", required=True, help="checkpoint that training started from")
    parser.add_argument("--pacs_beta", type=float, default=1.0)
    args = parser.parse_args()
    _, texts = read_graded(args.evaluation, args.benchmark)
    where = args.evaluation, args.policy, args.reference, args.benchmark
    for estimator in ("rloo", "none"):
        by_problem: dict[str, list[Candidate]] = {}
        for row in critic_records(*where, pacs_beta=args.pacs_beta, score_estimator=estimator):
            if row["label"] is not None:
                text = texts[row["problem"], row["sample"]]["completion"]
                by_problem.setdefault(row["problem"], []).append(
                    Candidate(row["score"], row["label"], last_boxed(text))
                )
        print(f"{estimator}: {calibration([c for own in by_problem.values() for c in own])}", flush=True)
    shares = [choices(candidates) for candidates in by_problem.values()]  # the order is that of either estimator
    found = {name: [100 * share[name] for share in shares] for name in shares[0]}
    for name, values in found.items():
        print(f"{name}: {'{:.1f} [{:.1f}, {:.1f}]'.format(*bootstrap_interval(values))}")
    for name in ("mean", "majority vote"):
        apart = paired_bootstrap(found[name], found["highest score"])
        print(f"highest score minus {name}: {'{:+.1f} [{:+.1f}, {:+.1f}]'.format(*apart)}")


if __name__ == "__main__":
    main()

"""What `reuse.py` has recorded, as the tables of docs/results/reuse.

`python -m experiments.reuse_tables`, seconds, trains nothing.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.paper.records import Records, Run
from experiments.reuse import KS, LARGE, RESULTS, STAGES, TASKS, Arm
from experiments.studies import markdown, mean_difference
from pacs_trl.evaluation import pass_at_k


def _arms(*stages: str, key: Callable[[Arm], Any]) -> list[Arm]:
    return sorted(dict.fromkeys(arm for stage in stages for arm in STAGES[stage]), key=key)


def _by_updates(arm: Arm) -> tuple:
    own = arm.reference, arm.minibatches, arm.rate, arm.method, arm.weights, arm.beta
    return list(TASKS).index(arm.task), arm.updates, *own


SMALL = ("one", "two", "four", "eight", "sixteen", "rates", "weights", "parts", "critic", "more")
TABLES = {
    "The cells that decide: 60 rollouts of 256": _arms("large", "large-more", key=_by_updates),
    "K, beta, learning rate, class weights, minibatches: 40 rollouts of 128": _arms(*SMALL, key=_by_updates),
    "Rollouts of an older policy": _arms("delays", key=lambda arm: (arm.delay, not arm.correct, arm.method, arm.beta)),
    "Other tasks, and a larger model": _arms("sums", "equation", "larger", key=_by_updates),
    "Drawn by vLLM": _arms("vllm", key=_by_updates),
}


def _pacs(k: int, beta: float = 1.0, **settings: Any) -> Arm:
    return _at_its_rate("PACS", k, beta, **settings)


def _grpo(k: int, **settings: Any) -> Arm:
    return _at_its_rate("GRPO", k, **settings)


def _at_its_rate(method: str, k: int, beta: float = 1.0, **settings: Any) -> Arm:
    return Arm(method, k, beta, **({"rate": 3e-4 if k == 1 else 1e-4} | settings))


PAIRS: list[tuple[Arm, Arm]] = [  # baseline, candidate
    *((_pacs(1, **LARGE), _pacs(k, 10.0, **LARGE)) for k in (4, 8)),
    *((_grpo(1, **LARGE), _grpo(k, **LARGE)) for k in (4, 8)),
    *((_grpo(k, **LARGE), _pacs(k, 10.0 if k > 1 else 1.0, **LARGE)) for k in (1, 4, 8)),
    *((baseline, _pacs(8, 3.0, **LARGE)) for baseline in (_pacs(8, 10.0, **LARGE), _grpo(8, **LARGE))),
    *((_pacs(k, rate=rate), _pacs(k, 10.0, rate=rate)) for k, rate in ((1, 3e-4), (2, 1e-4), (4, 1e-4), (4, 3e-4))),
    *((_pacs(8), _pacs(8, beta)) for beta in (3.0, 10.0, 30.0)),
    *((_pacs(k, rate=rate), _pacs(k, 10.0, rate=rate)) for k, rate in ((8, 3e-5), (8, 3e-4), (16, 3e-5), (16, 1e-4))),
    *((_pacs(8, beta), _pacs(8, beta, weights="none")) for beta in (1.0, 10.0)),
    *((at(1, rate=1e-4, minibatches=4), at(4)) for at in (_pacs, _grpo)),
    *((_grpo(8, task=task), _pacs(8, 10.0, task=task)) for task in TASKS if task != "addition"),
    *((_pacs(1, task=task), _pacs(8, 10.0, task=task)) for task in TASKS if task != "addition"),
    *((_grpo(1, task=task), _grpo(8, task=task)) for task in TASKS if task != "addition"),
    *((at(1), at(1, delay=s, correct=then)) for at in (_pacs, _grpo) for then in (True, False) for s in (1, 2, 4, 8)),
    *((_grpo(1, delay=s), _pacs(1, delay=s)) for s in (1, 2, 4, 8)),
    *((_pacs(1, delay=s), _pacs(1, 10.0, delay=s)) for s in (1, 2, 4, 8)),
]


def curve(run: Run, key: str) -> list[float]:
    assert run.training is not None
    return [log[key] for log in run.training["log_history"] if key in log]


def solved(run: Run, k: int) -> list[float]:
    """pass@k of every held-out problem, in percent."""
    (benchmark,) = run.results["benchmarks"].values()
    return [100 * pass_at_k(problem["n"], problem["c"], k) for problem in benchmark["problems"]]


def differences(baseline: Sequence[Run], candidate: Sequence[Run], k: int) -> list[float]:
    """pass@k of the candidate minus that of the baseline, in points, for each seed of both."""
    of_seeds = [{run.seed: mean(solved(run, k)) for run in runs} for runs in (baseline, candidate)]
    return [of_seeds[1][seed] - of_seeds[0][seed] for seed in of_seeds[1] if seed in of_seeds[0]]


def table(records: Records, arms: Sequence[Arm]) -> list[str]:
    """A row for each arm that has runs: means over seeds ± standard deviation, and the difference to GRPO in its
    place."""
    columns = ["seeds", *(f"pass@{k}" for k in (1, KS[-1])), "reward", "entropy", "gap", "drawing, s", "learning, s"]
    rows = []
    for arm in dict.fromkeys(arms):
        runs = records.runs(arm.name, arm.name)
        if not runs:
            continue
        values = [[mean(solved(run, k)) for run in runs] for k in (1, KS[-1])]
        values += [[mean(100 * v for v in curve(run, "reward")[-10:]) for run in runs]]
        values += [
            [(curve(run, key) or [math.nan])[-1] for run in runs] for key in ("entropy", "gap", "drawing", "learning")
        ]
        cells = [
            f"{mean(v):.{d}f}" + (f" ± {stdev(v):.{d}f}" if len(v) > 1 and d else "")
            for v, d in zip(values, [1, 1, 1, 3, 2, 0, 0], strict=True)
        ]
        own = {"beta": 1.0, "weights": "balanced", "reference": "rollout"}
        baseline = records.runs(arm._replace(method="GRPO", **own).name, "GRPO")
        difference = "" if arm.method == "GRPO" else mean_difference(differences(baseline, runs, 1))
        rows.append([arm.name, len(runs), *cells, difference])
    return markdown(["", *columns, "pass@1 minus GRPO"], rows)


def starts(records: Records) -> list[str]:
    """What the warm starts of a task solve: means over seeds ± standard deviation."""
    rows = []
    for task in TASKS:
        if runs := records.runs(f"{task}/start", task):
            values = [[mean(solved(run, k)) for run in runs] for k in KS]
            cells = [f"{mean(v):.1f} ± {stdev(v):.1f}" if len(v) > 1 else f"{v[0]:.1f}" for v in values]
            rows.append([task, len(runs), *cells])
    return markdown(["", "seeds", *(f"pass@{k}" for k in KS)], rows)


def pairs(records: Records) -> list[str]:
    """Differences by seed, for each of `PAIRS` that has runs."""
    rows = []
    for baseline, candidate in PAIRS:
        runs = [records.runs(arm.name, arm.name) for arm in (baseline, candidate)]
        of_k = [differences(*runs, k) for k in (1, KS[-1])]
        if of_k[0]:
            rows.append([candidate.name, baseline.name, len(of_k[0]), *map(mean_difference, of_k)])
    return markdown(["", "minus", "seeds", "pass@1", "pass@16"], rows, 2)


def sections(results_dir: Path) -> dict[str, list[str]]:
    """Tables by their headings."""
    records = Records(results_dir)
    tables = {heading: table(records, arms) for heading, arms in TABLES.items()}
    return tables | {"Warm starts": starts(records), "Differences": pairs(records)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="of `experiments.reuse`")
    for heading, lines in sections(parser.parse_args().results_dir).items():
        print(f"## {heading}", "", *lines, "", sep="\n")


if __name__ == "__main__":
    main()

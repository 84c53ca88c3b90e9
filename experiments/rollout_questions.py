"""DARS without class weights, its breadth, and the tokens of VERL's bonus on miniature sums.

`python -m experiments.rollout_questions`

The arms of a seed share their warm start. PACS and DARS generate about 15,360 completions: 60 generations of 256, or
23 of variable size. Finished runs are read from `--results_dir`, and an interrupted run starts again.
"""

import math
from statistics import mean
from typing import Any

from experiments.miniature.files import benchmark
from experiments.paper.cells import Options, run_cell
from experiments.paper.records import Cell, Records, Run
from experiments.studies import arms_parser, markdown, mean_difference, options_of, publish, run_name


DARS = {"method": "dars", "adaptive_rollouts": "equal_treatment", "max_generations": 32, "class_weighting": "none"}
VERL = {"method": "verl", "hidden_state_stride": 10, "max_steps": 160}
PLAIN, DEPTH, ALL = "PACS, no class weights", "DARS, no class weights", "VERL, bonus on all tokens"
ARMS: dict[str, dict[str, Any]] = {
    "warm start": {},
    PLAIN: {"class_weighting": "none"},
    DEPTH: DARS | {"max_steps": 92},
    "DARS-B, no class weights": DARS
    | {"gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 46, "warmup_steps": 4},
    ALL: VERL,
    "VERL, bonus on the last token": VERL | {"bonus_tokens": "last"},
}
BASES = {DEPTH: PLAIN, "DARS-B, no class weights": DEPTH, "VERL, bonus on the last token": ALL}
KS = (1, 8, 64)
BENCHMARKS = {"benchmarks": [benchmark(f"terms_{n}") for n in range(3, 8)]}


def cell_of(arm: str) -> Cell:
    trained = arm != "warm start"
    name = f"rollout_questions/{run_name(arm)}"
    return Cell(arm, "miniature/sums-0.1m/pacs", trained, settings=ARMS[arm], name=name)


def measured(run: Run) -> list[float]:
    """Return pass@k for each of `KS` and the share of problems that are never solved in percent, means over
    benchmarks, and the entropy of the last ten updates in nats (0 without training)."""
    benchmarks = list(run.results["benchmarks"].values())
    shares = [mean(b["pass_at_k"].get(str(k), {"value": math.nan})["value"] for b in benchmarks) for k in KS]
    shares.append(mean(problem["c"] == 0 for b in benchmarks for problem in b["problems"]))
    log = [entry["entropy"] for entry in run.training["log_history"][-10:]] if run.training else [0.0]
    return [*(100 * share for share in shares), mean(log)]


def report(options: Options) -> list[str]:
    """Return a row for each arm: means over seeds, and differences to the arm of `BASES` by seed."""
    records, rows = Records(options.results_dir), []
    measurements = {arm: {run.seed: measured(run) for run in records.runs(cell_of(arm).run, arm)} for arm in ARMS}
    for arm, values in measurements.items():
        cells = [
            f"{mean(column):.{1 if i < 4 else 3}f}" for i, column in enumerate(zip(*values.values(), strict=True))
        ]
        base = measurements.get(BASES.get(arm, ""), {})
        shared = [seed for seed in values if seed in base]
        for i, factor in ((0, 1), (2, 1), (4, 1000)):
            cells.append(mean_difference([factor * (values[seed][i] - base[seed][i]) for seed in shared]))
        if values:
            rows.append([arm, ", ".join(map(str, values)), *cells])
    heads = ["", "seeds", *(f"pass@{k}" for k in KS), "never solved", "entropy"]
    return markdown([*heads, "pass@1 minus", "pass@64 minus", "entropy minus, 1/1000 nats"], rows)


def main() -> None:
    parser = arms_parser(__doc__, "rollout_questions", ARMS)
    args = parser.parse_args()
    options = options_of(args, num_samples=64, evaluation_keys=BENCHMARKS)
    for seed in args.seeds:
        for arm in args.arms:
            run_cell(cell_of(arm), seed, options)
            publish(args.results_dir / "table.md", report(options))


if __name__ == "__main__":
    main()

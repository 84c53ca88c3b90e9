"""Additional completions for hard prompts (DARS), and refill of uniform groups, at equal numbers of completions.

`python -m experiments.draws --seeds 0 1 2`

The arms of a seed share their warm start and generate about 23,040 completions: 60 generations of 384, 90 of 256, or,
without a budget, 34 of variable size. Tasks: sums of three to seven terms, some of which are never solved (five
benchmarks, 128 samples), and additions, which are learned quickly (64 samples). Measured are pass@k, the share of
problems that are never solved, and how soon the reward reaches a target. Finished arms are read from `--results_dir`,
and an interrupted arm resumes from its last checkpoint. Two to three minutes per arm and seed on one core.
"""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from experiments.paper.cells import Options, run_cell
from experiments.paper.records import Records, Run
from experiments.paper.render import Cell
from experiments.studies import arms_parser, markdown, options_of, over_seeds, publish, run_name, saved
from pacs_trl.report.inputs import read_log_history


TASKS: dict[str, dict] = {
    "sums": {},
    "addition": {
        "model_name_or_path": "miniature/addition/tiny",
        "dataset_name": "miniature/addition",
        "max_completion_length": 32,
    },
}
SIZES = {"sums": {}, "addition": {"benchmarks": "miniature/addition", "num_samples": 64}}
TARGETS = {"sums": 0.25, "addition": 0.3}  # mean reward of a generation's first draw
# 32 prompts x 8, and 128 completions more; four updates in each generation, of 60 generations.
MORE = {"method": "dars", "max_generations": 32, "adaptive_rollouts_budget": 128, "max_steps": 240}
ARMS = {
    "PACS, 90 generations of 32 x 8": {"max_steps": 360},
    "PACS, 60 generations of 32 x 12": {"num_generations": 12, "per_device_train_batch_size": 96, "max_steps": 240},
    "DARS, equal treatment": MORE | {"adaptive_rollouts": "equal_treatment"},
    "DARS, equal treatment, no budget": {
        "method": "dars",
        "adaptive_rollouts": "equal_treatment",
        "max_generations": 32,
        "max_steps": 136,  # as many completions on sums, where it asks for 425 more in a generation
    },
    "DARS, hardness weighted": MORE | {"adaptive_rollouts": "hardness_weighted"},
    "DARS, equal treatment, no class weights": MORE
    | {"adaptive_rollouts": "equal_treatment", "class_weighting": "none"},
    # on average; how many rounds it takes depends on the model
    "refill, 60 generations": {
        "method": "dars",
        "refill_uniform_groups": True,
        "max_refill_rounds": 1,
        "max_steps": 240,
    },
}
START, PLAIN = "warm start", "PACS, 90 generations of 32 x 8"
KS = (1, 8, 64)


def cell_of(arm: str, task: str) -> Cell:
    name = run_name(arm)
    if arm == START:
        return Cell(arm, "miniature/sums-0.1m/pacs", False, settings=TASKS[task], name=f"draws/{task}/{name}")
    settings = ARMS[arm] | TASKS[task] | saved(20)
    return Cell(arm, "miniature/sums-0.1m/pacs", settings=settings, name=f"draws/{task}/{name}")


def curve(history: list[dict], first: int) -> list[tuple[int, float, float]]:
    """Return optimizer step, completions so far, and mean reward of each generation of `first` completions plus
    additional ones."""
    found, drawn = [], 0.0
    for entry in history:
        if "reward" in entry:
            drawn += first + entry.get("adaptive/additional", 0) + first / 32 * entry.get("refill/prompts", 0)
            found.append((entry["step"], drawn, entry["reward"]))
    return found


def reached(points: list[tuple[int, float, float]], target: float) -> str:
    """Return optimizer steps and completions until five generations have the mean reward `target`."""
    for i in range(4, len(points)):
        if mean(reward for _, _, reward in points[i - 4 : i + 1]) >= target:
            return f"{points[i][0]} / {points[i][1]:,.0f}"
    return "not reached"


def measured(run: Run) -> list[float]:
    """Return pass@k for each of `KS`, averaged over benchmarks, and the share of problems that are never solved, in
    percent."""
    found = list(run.results["benchmarks"].values())
    shares = [mean(b["pass_at_k"].get(str(k), {"value": math.nan})["value"] for b in found) for k in KS]
    return [100 * x for x in [*shares, mean(p["c"] == 0 for b in found for p in b["problems"])]]


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0:.1f}"


def difference(values: Sequence[float]) -> str:
    """Return the mean of differences by seed with Student's 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:+.1f}"
    return "{:+.1f} ± {:.1f}".format(*over_seeds(values))


def report(options: Options, task: str) -> list[str]:
    """Return a row for each arm: mean and standard deviation over seeds, in percent, and the difference to plain
    PACS."""
    records = Records(options.results_dir)
    columns = [
        *(f"pass@{k}" for k in KS),
        "never solved",
        "completions",
        f"steps / completions to {TARGETS[task]:.0%}",
    ]
    columns += [f"pass@{k} minus plain" for k in (KS[0], KS[-1])]
    rows = []
    found = {arm: {run.seed: run for run in records.runs(cell_of(arm, task).run, arm)} for arm in (START, *ARMS)}
    for arm, runs in found.items():
        if not runs:
            continue
        values = {seed: measured(run) for seed, run in sorted(runs.items())}
        cells = [spread(column) for column in zip(*values.values(), strict=True)]
        if arm == START:
            cells += ["", "", "", ""]
        else:
            work = cell_of(arm, task).directory
            files = [work(options.work_dir, seed) / "model" / "trainer_state.json" for seed in values]
            points = [curve(read_log_history(file), 384 if "12" in arm else 256) for file in files]
            cells += [f"{mean(own[-1][1] for own in points):,.0f}"]
            cells += [", ".join(reached(own, TARGETS[task]) for own in points)]
            pairs = [(values[seed], measured(found[PLAIN][seed])) for seed in values if seed in found[PLAIN]]
            shown = pairs and arm != PLAIN
            cells += [
                difference([own[i] - plain[i] for own, plain in pairs]) if shown else "" for i in (0, len(KS) - 1)
            ]
        rows.append([arm, ", ".join(map(str, values)), *cells])
    return markdown([task, "seeds", *columns], rows)


def main() -> None:
    parser = arms_parser(__doc__, "draws", ARMS)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    args = parser.parse_args()
    for seed in args.seeds:
        for task in args.tasks:
            options = options_of(args, **SIZES[task])
            for arm in (START, *args.arms):
                run_cell(cell_of(arm, task), seed, options)
            publish(args.results_dir / f"{task}.md", report(options, task))


if __name__ == "__main__":
    main()

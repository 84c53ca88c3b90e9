"""Do more completions of hard prompts, and other prompts in place of uniform groups, help? `python -m experiments.draws --seeds 0 1 2`

The arms of a seed share their warm start (sums, the smaller model of the tables) and draw the same number of completions: 23,040, as
60 generations of 384 or 90 of 256. The schedules ask for more than their budget nearly always; what was drawn is printed. What
decides is pass@1 and pass@k over the five benchmarks of the miniature, how many problems are not solved in
128 attempts, and how soon the reward reaches a target. Restartable: finished arms are taken from `--results_dir`, an interrupted one goes on from its last checkpoint. About five
minutes for each arm and seed on one free core.
"""

from statistics import mean, stdev

from experiments.arms import arms_parser, options_of
from pacs_trl.report.inputs import read_log_history
from pacs_trl.reproduce.cells import Options, run_cell
from pacs_trl.reproduce.records import Records
from pacs_trl.reproduce.tables import Cell


TARGET = 0.4  # mean reward of a generation's first draw
SAVED = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}
# 32 prompts x 8, and 128 completions more; four updates in each generation, of 60 generations.
MORE = {"max_generations": 32, "adaptive_rollouts_budget": 128, "max_steps": 240}
ARMS = {
    "PACS, 90 generations of 32 x 8": {"max_steps": 360},
    "PACS, 60 generations of 32 x 12": {"num_generations": 12, "per_device_train_batch_size": 96, "max_steps": 240},
    "DARS, equal treatment": MORE | {"adaptive_rollouts": "equal_treatment"},
    "DARS, hardness weighted": MORE | {"adaptive_rollouts": "hardness_weighted"},
    "DARS, equal treatment, no class weights": MORE
    | {"adaptive_rollouts": "equal_treatment", "class_weighting": "none"},
    # on average; how many rounds it takes depends on the model
    "refill, 60 generations": {"refill_uniform_groups": True, "max_refill_rounds": 1, "max_steps": 240},
}
KS = (1, 8, 64)


def cell_of(arm: str) -> Cell:
    name = arm.lower().replace(", ", "_").replace(" ", "_")
    return Cell(arm, "miniature/twin-4b/pacs", settings=ARMS[arm] | SAVED, name=f"draws/{name}")


def curve(history: list[dict], first: int) -> list[tuple[int, float, float]]:
    """Of each generation, which begins with `first` completions: optimizer step, completions so far, and mean reward."""
    found, drawn = [], 0.0
    for entry in history:
        if "reward" in entry:
            drawn += first + entry.get("adaptive/additional", 0) + first / 32 * entry.get("refill/prompts", 0)
            found.append((entry["step"], drawn, entry["reward"]))
    return found


def reached(points: list[tuple[int, float, float]], target: float = TARGET) -> str:
    """Optimizer steps and completions until five generations have the mean reward `target`."""
    for i in range(4, len(points)):
        if mean(reward for _, _, reward in points[i - 4 : i + 1]) >= target:
            return f"{points[i][0]} / {points[i][1]:,.0f}"
    return "not reached"


def report(options: Options) -> list[str]:
    """A row for each arm: mean and standard deviation over seeds, in percent."""
    records = Records(options.results_dir)
    columns = [*(f"pass@{k}" for k in KS), "never solved", "completions", f"steps / completions to {TARGET:.0%}"]
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for arm in ARMS:
        cell = cell_of(arm)
        runs = records.runs(cell.run, arm)
        measured = [list(run.results["benchmarks"].values()) for run in runs]
        shares = [
            [mean(b["pass_at_k"][str(k)]["value"] for b in benchmarks) for benchmarks in measured]
            for k in KS
            if measured and str(k) in measured[0][0]["pass_at_k"]
        ]
        shares.append([mean(p["c"] == 0 for b in benchmarks for p in b["problems"]) for benchmarks in measured])
        files = [cell.directory(options.work_dir, run.seed) / "model" / "trainer_state.json" for run in runs]
        points = [curve(read_log_history(file), 384 if "12" in arm else 256) for file in files]
        if runs:
            cells = [f"{100 * mean(s):.1f} ± {100 * (stdev(s) if len(s) > 1 else 0):.1f}" for s in shares]
            cells += [f"{mean(own[-1][1] for own in points):,.0f}", ", ".join(map(reached, points))]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    args = arms_parser(__doc__, "draws", ARMS).parse_args()
    options = options_of(args)
    for seed in args.seeds:
        for arm in args.arms:
            run_cell(cell_of(arm), seed, options)
            print("\n".join(report(options)), flush=True)


if __name__ == "__main__":
    main()

"""Methods compared on a real pretrained model, SmolLM2-135M-Instruct: accuracy, entropy, and cost per update.

`python -m experiments.pretrained --seeds 0 1 2` (after `make model`)

All arms of a seed start from the same weights and see the same prompts. Each method first takes the best of three
learning rates, by pass@1 with a seed that is not reported. Held out: 64 problems of the task, 16 completions each at
temperature 1. Finished runs are read from `--results_dir`, so the command can be stopped and repeated. One cell
alone: `--arms PACS --seeds 0 --rate 2e-5`. `--task` chooses sums or a task of reasoning-gym (with the extra `gym`).
"""

import re
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.paper.cells import Options, run_cell
from experiments.paper.records import Cell, Records, Run
from experiments.studies import arms_parser, markdown, mean_difference, options_of, publish, run_name
from pacs_trl.data import gym
from pacs_trl.report import plots
from pacs_trl.report.tables import pass_at_k_cells


START, RATES, LORA_RATES, SWEPT_SEED = "before training", (1.0e-5, 2.0e-5, 4.0e-5), (2.0e-4, 5.0e-4, 1.0e-3), 9
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
TASKS: dict[str, dict] = {
    "sums": {},
    "chain_sum": {"chain_sum": {"config": {"max_terms": 2, "max_digits": 2}, "answer": "last_number"}},
    "lcm": {"lcm": {"config": {"max_value": 12}, "answer": "last_number"}},
    "three_terms": {
        "chain_sum": {"config": {"min_terms": 3, "max_terms": 3, "max_digits": 1}, "answer": "last_number"}
    },
}
ARMS: dict[str, dict] = {
    START: {},
    "PACS": {"method": "pacs"},
    "GRPO": {"method": "grpo"},
    "RLOO": {"method": "rloo", "beta": 0.0},
    "RLOO, KL 0.05": {"method": "rloo"},  # the default of TRL
    "MaxRL": {"method": "maxrl"},
    "REAL": {"method": "real"},
    "PPO": {"method": "ppo"},
    "PACS, kept, beta 0.3": {"method": "pacs", "reference": "snapshot", "pacs_beta": 0.3},
    "GRPO, KL 0.1": {"method": "grpo", "beta": 0.1},
    "PACS, LoRA": {"method": "pacs", **LORA},
    "GRPO, LoRA": {"method": "grpo", "disable_dropout": True, **LORA},  # as PACS by default
    "GRPO, LoRA, dropout 0.05": {"method": "grpo", **LORA},  # the defaults of TRL
    "RLOO, LoRA": {"method": "rloo", "beta": 0.0, "disable_dropout": True, **LORA},
    "MaxRL, LoRA": {"method": "maxrl", "disable_dropout": True, **LORA},
    "REAL, LoRA": {"method": "real", "disable_dropout": True, **LORA},
}
KS = (1, 4, 8, 16)
CURVES = ("reward", "entropy", "completions/mean_length", "step_time")


def cell_of(task: str, arm: str, rate: float, steps: int) -> Cell:
    folder, recipe, settings = f"pretrained/{task}", "chain_sum", {"reasoning_gym": TASKS[task]}
    if task == "sums":
        folder, recipe, settings = "pretrained", "sums" if arm.startswith("PACS") or arm == START else "sums_grpo", {}
    if arm == START:
        return Cell(arm, f"smollm2-135m/{recipe}", trained=False, name=f"{folder}/before", settings=settings)
    settings |= ARMS[arm] | {"max_steps": steps, "learning_rate": rate}
    name = f"{folder}/{run_name(arm)}_{rate:g}_{steps}"
    return Cell(arm, f"smollm2-135m/{recipe}", settings=settings, name=name)


def sizes_of(task: str) -> dict[str, Any]:
    """Return evaluation and curves of a task, which is evaluated as it is trained."""
    keys = {
        "benchmarks": ",".join(f"{gym.NAME}/{name}" for name in TASKS[task]),
        gym.NAME: TASKS[task],
        "prompt_instruction": gym.INSTRUCTION,
        "n": 8,
        "k": "1,2,4,8",
    }
    return {
        "evaluation": "evaluation/smollm2_sums",
        "evaluation_keys": keys if TASKS[task] else {},
        "curves": CURVES,
    }


def passes(run: Run) -> dict[int, float]:
    """Return pass@k in percent for each of `KS` that was measured."""
    (benchmark,) = run.results["benchmarks"].values()
    return {k: 100 * benchmark["pass_at_k"][str(k)]["value"] for k in KS if str(k) in benchmark["pass_at_k"]}


def rates_of(arm: str) -> tuple[float, ...]:
    return LORA_RATES if "LoRA" in arm else RATES


def best_rate(records: Records, task: str, arm: str, steps: int) -> float:
    """Return the learning rate with the highest pass@1 of those that were run with `SWEPT_SEED`."""
    pass_1: dict[float, float] = {}
    for rate in rates_of(arm):
        runs = records.runs(cell_of(task, arm, rate, steps).run, arm)
        pass_1.update((rate, passes(run)[1]) for run in runs if run.seed == SWEPT_SEED)
    return max(pass_1, key=lambda rate: pass_1[rate])


def runs_of(options: Options, task: str, rates: dict[str, float], steps: int) -> dict[str, dict[int, Run]]:
    """Return the recorded runs by arm and seed, for the arms that have any."""
    records = Records(options.results_dir)
    recorded = {arm: records.runs(cell_of(task, arm, rate, steps).run, arm) for arm, rate in rates.items()}
    by_seed = {arm: {run.seed: run for run in runs if run.seed in options.seeds} for arm, runs in recorded.items()}
    return {arm: runs for arm, runs in by_seed.items() if runs}


def draw(runs_by_arm: dict[str, dict[int, Run]], path: Path) -> None:
    """Draw reward and entropy over the updates, and held-out pass@k."""
    titles = {"reward": "reward", "entropy": "entropy (nats per token)"}
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, plots.PANEL_HEIGHT + 0.5), layout="constrained")
        *curves, last = figure.subplots(1, 3)
        look_of, drawn = plots.looks(runs_by_arm), []
        for panel, (key, title) in zip(curves, titles.items(), strict=True):
            for arm, runs in runs_by_arm.items():
                logs = [run.training["log_history"] for run in runs.values() if run.training]
                drawn.append([plots.series(log, key) for log in logs])
                plots.draw_runs(panel, drawn[-1], arm, look_of[arm])
            plots.whole_steps(panel)
            panel.set(title=title, xlabel="optimizer step", ylim=(0, 1 if key == "reward" else None))
        for arm, runs in runs_by_arm.items():
            results = [run.results for run in runs.values()]
            (benchmark,) = results[0]["benchmarks"]
            ks = sorted(map(int, results[0]["benchmarks"][benchmark]["pass_at_k"]))
            plots.draw_pass_at_k(last, pass_at_k_cells(results, [benchmark], ks), arm, look_of[arm])
        plots.percent_against_k(last, "held-out pass@k, 95 % intervals")
        plots.legend_below(figure, [last], plots.note_on_lines(drawn))
        save(figure, path)


def report(options: Options, task: str, rates: dict[str, float], steps: int) -> list[str]:
    """Return a table with a row per arm: pass@k by seed, the paired difference from PACS, entropy, and seconds."""
    rows, runs_by_arm = [], runs_of(options, task, rates, steps)
    for arm, runs in runs_by_arm.items():
        columns = zip(*(passes(run).values() for run in runs.values()), strict=True)
        cells = [f"{mean(column):.1f} ({', '.join(f'{x:.1f}' for x in column)})" for column in columns]
        pairs = [(run, runs_by_arm["PACS"][seed]) for seed, run in runs.items() if seed in runs_by_arm.get("PACS", {})]
        differences = [passes(run)[1] - passes(pacs)[1] for run, pacs in pairs] if arm not in (START, "PACS") else []
        logs = [run.training["log_history"] for run in runs.values() if run.training]
        ends = [mean([y for _, y in plots.series(history, "entropy")][-5:]) for history in logs]
        seconds = [mean([y for _, y in plots.series(history, "step_time")][1:]) for history in logs]
        measured = [f"{mean(column):.{digits}f}" if column else "" for column, digits in ((ends, 2), (seconds, 1))]
        rate = f"{rates[arm]:g}" if arm != START else ""
        rows.append([arm, rate, ", ".join(map(str, runs)), *cells, mean_difference(differences), *measured])
    ks = [f"pass@{k}" for k in passes(next(run for runs in runs_by_arm.values() for run in runs.values()))]
    heads = ["", "learning rate", "seeds", *ks, "pass@1 minus PACS", "entropy, nats", "s / update"]
    return markdown(heads, rows, 3)


def kind_of(entry: dict[str, Any]) -> str:
    """Return the kind of answer that an entry of reasoning-gym has."""
    question, answer = entry["question"], entry["answer"]
    if "LCM" in question:
        return "the larger number" if int(answer) == max(map(int, re.findall(r"\d+", question))) else "another number"
    return "negative" if answer.startswith("-") else "difference" if "-" in question else "sum"


def problems_of(run: Run) -> list[dict[str, Any]]:
    (benchmark,) = run.results["benchmarks"].values()
    return benchmark["problems"]


def by_kind(task: str, runs_by_arm: dict[str, dict[int, Run]]) -> list[str]:
    """Return a table with the percentage of correct completions by kind of answer, over all seeds of an arm."""
    ((name, settings),) = TASKS[task].items()
    problems = {arm: [p for run in runs.values() for p in problems_of(run)] for arm, runs in runs_by_arm.items()}
    entries = gym.checked_dataset(name, settings["config"], gym.BENCHMARK_SEED, gym.BENCHMARK_SIZE)
    kinds = {p["id"]: kind_of(entries[int(p["id"])]) for arm_problems in problems.values() for p in arm_problems}
    titles, rows = sorted(set(kinds.values())), []
    for arm, arm_problems in problems.items():
        shares = [mean(p["c"] / p["n"] for p in arm_problems if kinds[p["id"]] == kind) for kind in titles]
        rows.append([arm, *(f"{100 * share:.0f}" for share in shares)])
    numbers = list(kinds.values())
    return ["", *markdown(["", *(f"{kind} ({numbers.count(kind)})" for kind in titles)], rows)]


def support(runs_by_arm: dict[str, dict[int, Run]], before: Run) -> list[str]:
    """Return a table with the number of problems that have a correct completion before and after training, only after
    it, and only before it, means over seeds, and the mean diversity of the correct completions of a problem."""
    solved, rows = [p["c"] > 0 for p in problems_of(before)], []
    for arm, runs in runs_by_arm.items():
        pairs = [list(zip(solved, (p["c"] > 0 for p in problems_of(run)), strict=True)) for run in runs.values()]
        counts = [
            [seed_pairs.count(pair) for seed_pairs in pairs] for pair in ((True, True), (False, True), (True, False))
        ]
        diversity = [x for run in runs.values() for scores in run.diversity.values() for x in scores.values()]
        rows.append(
            [arm, *(f"{mean(column):.1f}" for column in counts), f"{mean(diversity):.2f}" if diversity else ""]
        )
    return ["", *markdown(["", "solved before and after", "only after", "only before", "diversity"], rows)]


def main() -> None:
    parser = arms_parser(__doc__, "pretrained", ARMS)
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--steps", type=int, default=20, help="updates of a run")
    parser.add_argument("--rate", type=float, help="learning rate of all arms, instead of the best of three")
    args = parser.parse_args()
    options = options_of(args, **sizes_of(args.task))
    rates = {}
    for arm in args.arms:
        if arm != START and args.rate is None:
            for rate in rates_of(arm):
                run_cell(cell_of(args.task, arm, rate, args.steps), SWEPT_SEED, options)
        swept = arm != START and args.rate is None
        rates[arm] = best_rate(Records(args.results_dir), args.task, arm, args.steps) if swept else args.rate or 0.0
    for seed in args.seeds:
        for arm in args.arms:
            run_cell(cell_of(args.task, arm, rates[arm], args.steps), seed, options)
            runs_by_arm = runs_of(options, args.task, rates, args.steps)
            lines = report(options, args.task, rates, args.steps)
            lines += by_kind(args.task, runs_by_arm) if TASKS[args.task] else []
            lines += support(runs_by_arm, next(iter(runs_by_arm[START].values()))) if START in runs_by_arm else []
            publish(Path(args.results_dir) / f"{args.task}.md", lines)
    draw(runs_of(options, args.task, rates, args.steps), Path(args.results_dir) / f"{args.task}.png")


if __name__ == "__main__":
    main()

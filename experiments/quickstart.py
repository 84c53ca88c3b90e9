"""The whole project in minutes on two CPU cores.

`python -m experiments.quickstart`.

One warm start, PACS and GRPO from it through the same `pacs_trl.train` and recipe format as every other run, and
pass@k on held-out problems before and after with the evaluation of every other run. Only the order of the steps and
the summary are written here.
"""

import sys
from importlib import import_module

from experiments.graded import read_graded
from pacs_trl.errors import exit_code
from pacs_trl.settings import Parser
from pacs_trl.settings.names import require_matplotlib


def _run(argv: list[str]) -> None:
    require_matplotlib("The quickstart")
    import_module("experiments.quickstart").main(argv)


if __name__ == "__main__":  # before the imports below, which need matplotlib, and for seconds
    sys.exit(exit_code("python -m experiments.quickstart", _run, sys.argv[1:]))

import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.paper.runs import start_of, train_once
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.run import evaluate
from pacs_trl.recipe import Recipe, read_recipe
from pacs_trl.report import plots
from pacs_trl.report.tables import Measured, methods, pass_at_k_cells, pass_at_k_rows
from pacs_trl.rewards import shared_verifier


RECIPES = Path(__file__).parents[1] / "recipes" / "miniature"
METHODS = {"PACS": RECIPES / "quickstart_pacs.yaml", "GRPO": RECIPES / "quickstart_grpo.yaml"}
START = "warm start"

# 250 held-out problems with 16 completions each: the 95 % interval of pass@1 is about 4 percentage points wide.
BENCHMARK = "miniature/addition"
NUM_PROBLEMS = 250
NUM_SAMPLES = 16
KS = (1, 2, 4, 8)

NUM_SHOWN = 5


def run_seed(seed: int, output_dir: Path, train_arguments: Sequence[str] = ()) -> dict[str, Any]:
    """
    Warm start, evaluation, then training and evaluation with each method, with one seed for all of them.

    Args:
        seed (`int`):
            Seed of the initial weights, of the warm start and of the training runs. The held-out problems and their
            samples have seeds of their own, the same in every run.
        output_dir (`Path`):
            Gets `before/`, `after-pacs/` and `after-grpo/` (samples, grades, results.json), `pacs/` and `grpo/`
            (checkpoint, model card, recipe, `train.log`). What an earlier run left there is removed.
        train_arguments (sequence of `str`, *optional*):
            Overrides of the recipes as on the command line of `pacs_trl.train`.

    Returns:
        `dict`: `"seed"`, `"seconds"`, `"processor_seconds"` (of this process and those it waited for), and by method
        `"results"` (as in results.json), `"logs"` (the trainer's `log_history`) and `"examples"` (the first completion
        of the first problems).
    """
    started, used = time.monotonic(), _processor_seconds()
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(parents=True)
    results: dict[str, dict[str, Any]] = {}
    logs: dict[str, list[dict[str, Any]]] = {}
    print(f"Seed {seed}: warm start (kept for the next time)", flush=True)
    recipe = read_recipe(["--config", str(METHODS["PACS"]), *train_arguments, "--seed", str(seed)])
    start = start_of(recipe)
    print(f"Seed {seed}: held-out problems before", flush=True)
    results[START] = _evaluate(recipe, start, output_dir / "before", START)
    for method, path in METHODS.items():
        arguments = ["--config", str(path), *train_arguments, "--seed", str(seed)]
        checkpoint = output_dir / method.lower()
        print(f"Seed {seed}: {method}, {recipe.training.max_steps} updates, then held-out problems", flush=True)
        logs[method] = train_once(arguments, start, checkpoint)
        results[method] = _evaluate(recipe, checkpoint, output_dir / f"after-{method.lower()}", method)
    return {
        "seed": seed,
        "seconds": time.monotonic() - started,
        "processor_seconds": _processor_seconds() - used,
        "results": results,
        "logs": logs,
        "examples": _examples(output_dir),
    }


def _processor_seconds() -> float:
    """User and system time of this process and of the warm start and verifiers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _evaluate(recipe: Recipe, model: Path, output_dir: Path, method: str) -> dict[str, Any]:
    """The policy as it is, temperature 1 and no truncation of the distribution, on problems it has never seen."""
    arguments = EvaluationArguments(
        model=str(model),
        benchmarks=BENCHMARK,
        output_dir=str(output_dir),
        method=method,
        n=NUM_SAMPLES,
        k=",".join(map(str, KS)),
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=recipe.training.max_completion_length,
        prompt_instruction=recipe.data.prompt_instruction,
        system_prompt=recipe.data.system_prompt,
        engine="transformers",
        batch_size=256,
        max_problems=NUM_PROBLEMS,
    )
    return evaluate(arguments, shared_verifier())


def _examples(output_dir: Path) -> dict[str, list[str]]:
    """Problem -> the first completion before and after, each with the verifier's verdict."""
    examples: dict[str, list[str]] = {}
    for directory in ("before", *(f"after-{method.lower()}" for method in METHODS)):
        grades, records = read_graded(output_dir / directory, BENCHMARK)
        for problem in load_benchmark(BENCHMARK, max_problems=NUM_SHOWN).problems:
            verdict = "right" if grades[problem.id][0] == "1" else "wrong"
            shown = f"`{records[problem.id, 0]['completion']}` {verdict}"
            examples.setdefault(problem.problem, []).append(shown)
    return examples


def doubled_and_apart(before: Measured, after: Measured) -> bool:
    """Whether pass@1 at least doubled and the two 95 % intervals do not overlap."""
    return after.value >= 2 * before.value and after.lower > before.upper


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """pass@1 and pass@8 of each seed and method, the difference of the methods, and some completions, as Markdown."""
    lines = ["| seed | | pass@1 | pass@8 | doubled, intervals apart |", "| --- | --- | --- | --- | --- |"]
    for run in runs:
        rows = {r.method: r for r in pass_at_k_rows(list(run["results"].values()), BENCHMARK, baseline="GRPO")}
        for method in (START, *METHODS, "PACS - GRPO"):
            cells = rows[method].cells
            verdict = ""
            if method in METHODS:
                verdict = "yes" if doubled_and_apart(rows[START].cells[1], cells[1]) else "no"
            lines.append(f"| {run['seed']} | {method} | {_text(cells[1])} | {_text(cells[8])} | {verdict} |")
    lines += ["", "| seed | seconds | processor seconds |", "| --- | ---: | ---: |"]
    lines += [f"| {run['seed']} | {run['seconds']:.0f} | {run['processor_seconds']:.0f} |" for run in runs]
    lines += [
        "",
        f"| seed | problem | {START} | {' | '.join(METHODS)} |",
        "| --- | --- |" + " --- |" * (1 + len(METHODS)),
    ]
    for run in runs:
        lines += [f"| {run['seed']} | `{problem}` | {' | '.join(t)} |" for problem, t in run["examples"].items()]
    return "\n".join(lines)


def _text(cell: Measured) -> str:
    return f"{cell.value:.1f} [{cell.lower:.1f}, {cell.upper:.1f}]"


def draw(results: Sequence[dict[str, Any]], logs: Mapping[str, Sequence[list[dict[str, Any]]]], path: Path) -> None:
    """
    Reward, entropy and PACS's loss over the updates, and held-out pass@k.

    Args:
        results: Parsed results files of the warm starts and of both methods.
        logs: The log histories of all seeds by method.
        path: Of the PNG.
    """
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, 2 * plots.PANEL_HEIGHT), layout="constrained")
        panels = dict(zip(("reward", "entropy", "loss", "pass_at_k"), figure.subplots(2, 2).flat, strict=True))
        look_of = plots.looks([START, *METHODS])
        for method, runs in logs.items():
            for key in ("reward", "entropy"):
                plots.draw_runs(panels[key], [plots.series(run, key) for run in runs], method, look_of[method])
        losses = [plots.series(run, "loss") for run in logs["PACS"]]
        plots.draw_runs(panels["loss"], losses, "PACS", look_of["PACS"])
        panels["reward"].set(title="reward", ylim=(0, 1))
        panels["entropy"].set(title="entropy (nats per token)", ylim=(0, None))
        panels["loss"].set(title="loss of PACS; ln 2 on the first of four updates")
        for key in ("reward", "entropy", "loss"):
            panels[key].set_xlabel("optimizer step")
        for method, group in methods(results).items():
            cells = pass_at_k_cells(group, [BENCHMARK], KS)
            plots.draw_pass_at_k(panels["pass_at_k"], cells, method, look_of[method])
        plots.percent_against_k(panels["pass_at_k"], "held-out pass@k; bands: 95 % intervals over problems")
        seeds = len(logs["PACS"])
        note = plots.RUNS + (f" ({seeds} seeds)" if seeds > 1 else "")
        plots.legend_below(figure, [panels["pass_at_k"]], note)
        save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: runs every seed, prints the summary, and writes it and the figure to `output_dir`."""
    parser = Parser("quickstart", __doc__, prog="python -m experiments.quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of each method for each")
    parser.add_argument("--max_steps", type=int, help="optimizer steps, instead of the recipes'")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/quickstart"), help="seed-N/ in it is replaced"
    )
    arguments = parser.parse_args(argv)
    overrides = [] if arguments.max_steps is None else ["--max_steps", str(arguments.max_steps)]

    runs = [run_seed(seed, arguments.output_dir / f"seed-{seed}", overrides) for seed in arguments.seeds]
    text = summary(runs)
    (arguments.output_dir / "summary.md").write_text(text + "\n")
    results = [result for run in runs for result in run["results"].values()]
    logs = {method: [run["logs"][method] for run in runs] for method in METHODS}
    draw(results, logs, arguments.output_dir / "quickstart.png")
    print(f"\n{text}\n\nTables, figure (quickstart.png) and checkpoints are in {arguments.output_dir}.")

"""The whole project in minutes on two CPU cores: `python -m experiments.quickstart`.

Warm start, PACS through the same `pacs_trl.train` and recipe format as every other run, and pass@k on held-out problems
before and after with the evaluation of every other run. Only the order of the steps and the summary are written here.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.evaluate import evaluate
from pacs_trl.evaluation.store import read_graded
from pacs_trl.recipe import Recipe, read_recipe
from pacs_trl.report.plots import COLORS, PAGE_WIDTH, PANEL_HEIGHT, STYLE
from pacs_trl.reproduce.runs import start_of, train_once
from pacs_trl.verification import shared_verifier


RECIPE = Path(__file__).parents[1] / "recipes" / "miniature" / "pacs.yaml"

# 250 held-out problems with 16 completions each: the 95 % interval of pass@1 is about 5 percentage points wide.
NUM_PROBLEMS = 250
NUM_SAMPLES = 16
KS = (1, 2, 4, 8)

NUM_SHOWN = 5


def run_seed(seed: int, output_dir: Path, train_arguments: Sequence[str] = ()) -> dict[str, Any]:
    """
    Warm start, evaluation, PACS, evaluation, with one seed for all of them.

    Args:
        seed (`int`):
            Seed of the initial weights, of the warm start and of the training run. The held-out problems and their
            samples have seeds of their own, the same in every run.
        output_dir (`Path`):
            Gets `before/` and `after/` (samples, grades, results.json) and `pacs/` (checkpoint, model card, recipe,
            `train.log`). What an earlier run left there is removed.
        train_arguments (sequence of `str`, *optional*):
            Overrides of the recipe as on the command line of `pacs_trl.train`.

    Returns:
        `dict`: `"seed"`, `"seconds"`, `"before"` and `"after"` (pass@k as in results.json), `"examples"`, and the
        trainer's `"log_history"`.
    """
    started = time.monotonic()
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(parents=True)
    checkpoint = output_dir / "pacs"
    arguments = ["--config", str(RECIPE), *train_arguments, "--seed", str(seed)]
    recipe = read_recipe(arguments)

    print(f"Seed {seed}: warm start (kept for the next time)", flush=True)
    start = start_of(recipe)
    print(f"Seed {seed}: held-out problems before", flush=True)
    before = evaluate(_evaluation(recipe, start, output_dir / "before", "warm start"), shared_verifier())
    print(f"Seed {seed}: training, {recipe.training.max_steps} steps", flush=True)
    history = train_once(arguments, start, checkpoint)
    print(f"Seed {seed}: held-out problems after", flush=True)
    after = evaluate(
        _evaluation(recipe, checkpoint, output_dir / "after", recipe.run.method.upper()), shared_verifier()
    )
    benchmark = recipe.data.dataset_name
    return {
        "seed": seed,
        "seconds": time.monotonic() - started,
        "before": before["benchmarks"][benchmark]["pass_at_k"],
        "after": after["benchmarks"][benchmark]["pass_at_k"],
        "examples": _examples(benchmark, output_dir),
        "log_history": history,
    }


def _evaluation(recipe: Recipe, model: Path, output_dir: Path, method: str) -> EvaluationArguments:
    """The policy as it is, temperature 1 and no truncation of the distribution, on problems it has never seen."""
    return EvaluationArguments(
        model=str(model),
        benchmarks=recipe.data.dataset_name,
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


def _examples(benchmark: str, output_dir: Path) -> list[dict[str, Any]]:
    """The first completion of the first problems, before and after; `right` as the verifier graded it."""
    shown = load_benchmark(benchmark, max_problems=NUM_SHOWN).problems
    examples: list[dict[str, Any]] = [{"problem": p.problem, "answer": p.solution} for p in shown]
    for when in ("before", "after"):
        grades, records = read_graded(output_dir / when, benchmark)
        for example, problem in zip(examples, shown, strict=True):
            example[when] = {"completion": records[problem.id, 0]["completion"], "right": grades[problem.id][0] == "1"}
    return examples


def doubled_and_apart(run: dict[str, Any]) -> bool:
    """Whether pass@1 at least doubled and the two 95 % intervals do not overlap."""
    before, after = run["before"]["1"], run["after"]["1"]
    return after["value"] >= 2 * before["value"] and after["lower"] > before["upper"]


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """Table of pass@1 and pass@8 for each seed and some completions, as Markdown."""
    lines = [
        "| seed | pass@1 before | pass@1 after | pass@8 before | pass@8 after | doubled, intervals apart | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        cells = [_interval(run[when][k]) for k in ("1", "8") for when in ("before", "after")]
        verdict = "yes" if doubled_and_apart(run) else "no"
        lines.append(f"| {run['seed']} | {' | '.join(cells)} | {verdict} | {run['seconds']:.0f} |")
    lines += ["", "| seed | problem | before | after |", "| --- | --- | --- | --- |"]
    for run in runs:
        for example in run["examples"]:
            texts = [f"`{example[w]['completion']}` {_mark(example[w]['right'])}" for w in ("before", "after")]
            lines.append(f"| {run['seed']} | `{example['problem']}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def _interval(cell: dict[str, float]) -> str:
    return f"{100 * cell['value']:.1f} [{100 * cell['lower']:.1f}, {100 * cell['upper']:.1f}]"


def _mark(right: bool) -> str:
    return "right" if right else "wrong"


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward and entropy over the steps, pass@k before (dashed) and after (solid) with 95 % bands; a color per seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, PANEL_HEIGHT + 0.35), layout="constrained")
        reward, entropy, pass_at_k = figure.subplots(1, 3)
        for run, color in zip(runs, COLORS * len(runs), strict=False):
            for panel, key in ((reward, "reward"), (entropy, "entropy")):
                logged = [log for log in run["log_history"] if key in log]
                panel.plot([log["step"] for log in logged], [log[key] for log in logged], color=color)
            _draw_pass_at_k(pass_at_k, run, color)
        reward.set(title="reward", xlabel="optimizer step", ylim=(0, 1))
        entropy.set(title="entropy (nats per token)", xlabel="optimizer step")
        entropy.set_ylim(bottom=0)
        pass_at_k.set(title="held-out pass@k", xlabel="k", ylim=(0, 1.02))
        pass_at_k.set_xscale("log", base=2)
        pass_at_k.set_xticks(KS, [str(k) for k in KS])
        pass_at_k.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        figure.legend(*pass_at_k.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def _draw_pass_at_k(panel: Axes, run: dict[str, Any], color: str) -> None:
    for when, dash in (("before", "--"), ("after", "-")):
        cells = [run[when][str(k)] for k in KS]
        label = f"seed {run['seed']}, {when}"
        panel.plot(KS, [cell["value"] for cell in cells], dash, marker="o", color=color, label=label)
        lower, upper = [cell["lower"] for cell in cells], [cell["upper"] for cell in cells]
        panel.fill_between(KS, lower, upper, color=color, alpha=0.15, linewidth=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: runs every seed, prints the summary and writes it, the figure and the numbers to `output_dir`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.quickstart", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each")
    parser.add_argument("--max_steps", type=int, help="optimizer steps, instead of the recipe's")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/quickstart"), help="seed-N/ in it is replaced"
    )
    arguments = parser.parse_args(argv)
    overrides = [] if arguments.max_steps is None else ["--max_steps", str(arguments.max_steps)]

    runs = [run_seed(seed, arguments.output_dir / f"seed-{seed}", overrides) for seed in arguments.seeds]
    text = summary(runs)
    (arguments.output_dir / "summary.md").write_text(text + "\n")
    (arguments.output_dir / "summary.json").write_text(json.dumps(runs, indent=1) + "\n")
    draw(runs, arguments.output_dir / "quickstart.png")
    print(f"\n{text}\n\nTables, figure (quickstart.png) and checkpoints are in {arguments.output_dir}.")


if __name__ == "__main__":
    main()

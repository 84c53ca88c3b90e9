"""PACS on a real model in about eight minutes on two CPU cores: `python -m experiments.quickstart`.

SmolLM2-135M-Instruct learns to add; `--miniature` trains a model of one million parameters from a warm start instead,
with PACS and GRPO. Training, recipes, and evaluation are those of every other run; this module puts them in order and
writes the summary.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from experiments.graded import read_graded
from pacs_trl.errors import exit_code
from pacs_trl.settings import Parser
from pacs_trl.settings.names import require_matplotlib


def _run(argv: Sequence[str]) -> None:
    require_matplotlib("The quickstart")
    import_module("experiments.quickstart").main(argv)


if __name__ == "__main__":  # before the imports below, which need matplotlib, and for seconds
    sys.exit(exit_code("python -m experiments.quickstart", _run, sys.argv[1:]))

import resource
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from experiments.bootstrap import bounds
from experiments.figures import save
from experiments.miniature.files import benchmark, write_data
from experiments.paper.runs import start_of, train_once
from experiments.smollm2 import prepare_model
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.run import evaluate
from pacs_trl.recipe import Recipe, read_recipe
from pacs_trl.report import plots
from pacs_trl.report.tables import Measured, one_line, paired_difference, pass_at_k_cells
from pacs_trl.report.tables import methods as methods_of


class Setting(NamedTuple):
    """A quickstart: its recipes by method, the name of the model before training, problems held out of a task of
    the miniature and samples of each, and the third panel of the figure (key of the log, title)."""

    recipes: dict[str, Path]
    start: str
    task: str
    num_problems: int
    num_samples: int
    batch_size: int
    panel: tuple[str, str]

    @property
    def benchmark(self) -> str:
        return f"miniature/{self.task}"


RECIPES = Path(__file__).parents[1] / "recipes"
METHODS = ("PACS", "GRPO")
# The 95 % interval of pass@1 is about 10 percentage points wide with 100 problems, and 4 with 250.
SMOLLM2 = Setting(
    {"PACS": RECIPES / "smollm2-135m" / "sums.yaml", "GRPO": RECIPES / "smollm2-135m" / "sums_grpo.yaml"},
    start="before",
    task="questions",
    num_problems=100,
    num_samples=8,
    batch_size=128,
    panel=("completions/mean_length", "length of completions (tokens)"),
)
MINIATURE = Setting(
    {method: RECIPES / "miniature" / f"quickstart_{method.lower()}.yaml" for method in METHODS},
    start="warm start",
    task="addition",
    num_problems=250,
    num_samples=16,
    batch_size=256,
    panel=("loss", "loss; of PACS ln 2 on the first of four updates"),
)
KS = (1, 2, 4, 8)

NUM_SHOWN = 5


def run_seed(
    seed: int,
    output_dir: Path,
    train_arguments: Sequence[str] = (),
    setting: Setting = MINIATURE,
    methods: Sequence[str] = METHODS,
) -> dict[str, Any]:
    """
    Evaluate the model before training, train it with each method, and evaluate it after, with one seed for all.

    Args:
        seed (`int`):
            Seed of the training runs and of the miniature's warm start. The held-out problems and their samples have
            other seeds, the same in every run.
        output_dir (`Path`):
            Gets `before/` and `after-pacs/` (samples, grades, results.json), `pacs/` (checkpoint, model card, recipe),
            and the same of GRPO. Earlier contents are removed.
        train_arguments (sequence of `str`, *optional*):
            Overrides of the recipes as on the command line of `pacs_trl.train`.
        setting ([`Setting`]), methods (sequence of `str`):
            What is trained, and how.

    Returns:
        `dict`: `"seed"`, `"seconds"`, `"processor_seconds"` (of this process and those it waited for), `"results"`
        (as in results.json, by method), `"logs"` (the trainer's `log_history` by method), and `"examples"` (the first
        completion of the first problems).
    """
    started, used = time.monotonic(), _processor_seconds()
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(parents=True)
    logs: dict[str, list[dict[str, Any]]] = {}
    write_data()
    recipe = read_recipe(["--config", str(setting.recipes["PACS"]), *train_arguments, "--seed", str(seed)])
    start = start_of(recipe) if setting.start == MINIATURE.start else prepare_model()
    print(f"Seed {seed}: held-out problems before, with {start}", flush=True)
    results = {setting.start: _evaluate(setting, recipe, start, output_dir / "before", setting.start)}
    for method in methods:
        arguments = ["--config", str(setting.recipes[method]), *train_arguments, "--seed", str(seed)]
        checkpoint = output_dir / method.lower()
        print(f"Seed {seed}: {method}, {recipe.training.max_steps} updates, then held-out problems", flush=True)
        logs[method] = train_once(arguments, start, checkpoint, show=setting.start != MINIATURE.start)
        results[method] = _evaluate(setting, recipe, checkpoint, output_dir / f"after-{method.lower()}", method)
    return {
        "seed": seed,
        "seconds": time.monotonic() - started,
        "processor_seconds": _processor_seconds() - used,
        "results": results,
        "logs": logs,
        "examples": _examples(setting, output_dir, methods),
    }


def _processor_seconds() -> float:
    """User and system time of this process and of the warm start and verifiers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _evaluate(setting: Setting, recipe: Recipe, model: Path, output_dir: Path, method: str) -> dict[str, Any]:
    """Sample from the policy at temperature 1, without truncating its distribution, on held-out problems."""
    arguments = EvaluationArguments(
        model=str(model),
        benchmarks=benchmark(setting.task),
        output_dir=str(output_dir),
        method=method,
        n=setting.num_samples,
        k=",".join(map(str, KS)),
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=recipe.training.max_completion_length,
        prompt_instruction=recipe.data.prompt_instruction,
        system_prompt=recipe.data.system_prompt,
        engine="transformers",
        dtype="float32",
        batch_size=setting.batch_size,
        max_problems=setting.num_problems,
    )
    with recipe.verification.build() as verifier:
        return evaluate(arguments, verifier)


def _examples(setting: Setting, output_dir: Path, methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the first completion before and after training by problem, each with its grade."""
    examples: dict[str, list[str]] = {}
    for directory in ("before", *(f"after-{method.lower()}" for method in methods)):
        grades, records = read_graded(output_dir / directory, setting.benchmark)
        shown_problems = min(NUM_SHOWN, setting.num_problems)
        for problem in load_benchmark(benchmark(setting.task), max_problems=shown_problems).problems:
            grade = "correct" if grades[problem.id][0] == "1" else "incorrect"
            shown = f"`{one_line(records[problem.id, 0]['completion'])}` {grade}"
            examples.setdefault(str(problem.problem), []).append(shown)
    return examples


def doubled_and_apart(before: Measured, after: Measured) -> bool:
    """Whether pass@1 at least doubled and the two 95 % intervals do not overlap."""
    return after.value >= 2 * before.value and bounds(after)[0] > bounds(before)[1]


def summary(runs: Sequence[dict[str, Any]], setting: Setting = MINIATURE) -> str:
    """pass@1 and pass@8 of each seed and method, the difference of the methods, and some completions, as Markdown."""
    methods = list(runs[0]["logs"])
    names = [setting.start, *methods, *(["PACS - GRPO"] if len(methods) > 1 else [])]
    lines = ["| seed | | pass@1 | pass@8 | doubled, intervals apart |", "| --- | --- | --- | --- | --- |"]
    for run in runs:
        results_by_method = methods_of(list(run["results"].values()))
        rows = {method: pass_at_k_cells(group, [setting.benchmark], KS) for method, group in results_by_method.items()}
        if len(methods) > 1:
            rows[names[-1]] = paired_difference(
                results_by_method["PACS"], results_by_method["GRPO"], [setting.benchmark], KS
            )
        for method in names:
            cells, verdict = rows[method], ""
            if method in methods:
                verdict = "yes" if doubled_and_apart(rows[setting.start][1], cells[1]) else "no"
            lines.append(f"| {run['seed']} | {method} | {_text(cells[1])} | {_text(cells[8])} | {verdict} |")
    lines += ["", "| seed | seconds | CPU seconds |", "| --- | ---: | ---: |"]
    lines += [f"| {run['seed']} | {run['seconds']:.0f} | {run['processor_seconds']:.0f} |" for run in runs]
    lines += ["", f"| seed | problem | {' | '.join(names[: 1 + len(methods)])} |"]
    lines += ["| --- | --- |" + " --- |" * (1 + len(methods))]
    for run in runs:
        lines += [f"| {run['seed']} | `{problem}` | {' | '.join(t)} |" for problem, t in run["examples"].items()]
    return "\n".join(lines)


def _text(cell: Measured) -> str:
    return f"{cell.value:.1f} [{cell.lower:.1f}, {cell.upper:.1f}]"


def draw(
    results: Sequence[dict[str, Any]],
    logs: Mapping[str, Sequence[list[dict[str, Any]]]],
    path: Path,
    setting: Setting = MINIATURE,
) -> None:
    """
    Draw reward, entropy, and the setting's panel over the updates, and held-out pass@k.

    Args:
        results: Parsed results files of the models before training and of the methods.
        logs: The log histories of all seeds by method.
        path: Of the PNG.
        setting ([`Setting`]): What was trained.
    """
    titles = {"reward": "reward", "entropy": "entropy (nats per token)", setting.panel[0]: setting.panel[1]}
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, 2 * plots.PANEL_HEIGHT), layout="constrained")
        panels = dict(zip((*titles, "pass_at_k"), figure.subplots(2, 2).flat, strict=True))
        look_of, drawn = plots.looks([setting.start, *logs]), []
        for key, title in titles.items():
            for method, runs in logs.items():
                if key != "loss" or method == "PACS":
                    drawn.append([plots.series(run, key) for run in runs])
                    plots.draw_runs(panels[key], drawn[-1], method, look_of[method])
            plots.whole_steps(panels[key])
            panels[key].set(title=title, xlabel="optimizer step")
        panels["reward"].set(ylim=(0, 1))
        panels["entropy"].set(ylim=(0, None))
        for method, group in methods_of(results).items():
            cells = pass_at_k_cells(group, [setting.benchmark], KS)
            plots.draw_pass_at_k(panels["pass_at_k"], cells, method, look_of[method])
        plots.percent_against_k(panels["pass_at_k"], "held-out pass@k; bands: 95 % intervals over problems")
        seeds = len(logs["PACS"])
        note = plots.note_on_lines(drawn) + (f" ({seeds} seeds)" if seeds > 1 else "")
        plots.legend_below(figure, [panels["pass_at_k"]], note)
        save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: runs every seed, prints the summary, and writes it and the figure to `output_dir`."""
    parser = Parser("quickstart", __doc__, prog="python -m experiments.quickstart")
    parser.add_argument("--miniature", action="store_true", help="train the miniature, which needs no download")
    parser.add_argument("--compare", action="store_true", help="train with GRPO, too; --miniature always does")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of each method for each")
    parser.add_argument("--max_steps", type=int, help="optimizer steps, instead of the recipes'")
    parser.add_argument("--max_problems", type=int, help="held-out problems, instead of 100 or 250")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/quickstart"), help="seed-N/ in it is replaced"
    )
    arguments = parser.parse_args(argv)
    overrides = [] if arguments.max_steps is None else ["--max_steps", str(arguments.max_steps)]
    setting = MINIATURE if arguments.miniature else SMOLLM2
    if arguments.max_problems is not None:
        setting = setting._replace(num_problems=arguments.max_problems)
    methods = METHODS if arguments.miniature or arguments.compare else METHODS[:1]

    folders = [arguments.output_dir / f"seed-{seed}" for seed in arguments.seeds]
    runs = [run_seed(*each, overrides, setting, methods) for each in zip(arguments.seeds, folders, strict=True)]
    text = summary(runs, setting)
    (arguments.output_dir / "summary.md").write_text(text + "\n")
    results = [result for run in runs for result in run["results"].values()]
    logs = {method: [run["logs"][method] for run in runs] for method in methods}
    draw(results, logs, arguments.output_dir / "quickstart.png", setting)
    model = folders[0] / "pacs"
    config = setting.recipes["PACS"].relative_to(RECIPES.parent)
    print(
        f"\n{text}\n\nTables and figure (quickstart.png) are in {arguments.output_dir}.\n"
        f"The trained model, with its card: AutoModelForCausalLM.from_pretrained('{model}').\n"
        "Train it further:\n  accelerate launch --cpu -m "
        f"pacs_trl.train --config {config} --model_name_or_path {model} --output_dir {model}-more"
    )

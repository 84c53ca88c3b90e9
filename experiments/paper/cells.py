"""Run of one cell of a miniature table: warm start, training, evaluation, and record.

Files stay in the work directory of the run; the numbers for tables go to the records of the results directory.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.diversity import correct_responses, hashing_embedder, problem_diversities
from pacs_trl.report.report import read_log_history
from pacs_trl.settings import read_mapping

from .records import CURVES, Cell, Records, Run, record, require_same_settings
from .runs import start_of, train_once


RECIPES = Path(__file__).parents[2] / "recipes"

# Completions per problem when a checkpoint in the middle of training is measured (figure 3).
CHECKPOINT_SAMPLES = 8


class Options(NamedTuple):
    """Sizes and directories of runs."""

    seeds: tuple[int, ...] = (0, 1, 2)  # one run of every cell for each
    max_steps: int | None = None  # of training, instead of the recipe's
    warm_start_steps: int | None = None  # length of the warm start, whatever it reaches, to try things out
    num_samples: int | None = None  # of the evaluation, instead of its recipe's, as max_problems
    max_problems: int | None = None
    results_dir: Path = Path("docs/results/miniature")  # records, tables and figures
    work_dir: Path = Path("outputs/tables")  # models, logs and samples: all that a run leaves
    evaluation_keys: Mapping[str, Any] = MappingProxyType({})  # instead of the evaluation recipe's
    evaluation: str = "evaluation/miniature_tables"  # recipe of the evaluation
    curves: tuple[str, ...] = CURVES  # quantities of the training log that are recorded


def run_cell(cell: Cell, seed: int, options: Options) -> None:
    """Train, evaluate, and record one miniature cell with one seed, unless it is recorded. The seed determines the
    warm start, which all methods share, and the training run. An interrupted run continues where it stopped.

    Raises:
        `ValueError`: if the cell was recorded, or the work directory started, with other settings.
    """
    from pacs_trl.evaluation.arguments import EvaluationArguments
    from pacs_trl.recipe import read_recipe
    from pacs_trl.rewards import configure_verification

    arguments = ["--config", str(RECIPES / f"{cell.recipe}.yaml"), *cell.words]
    if options.max_steps is not None:
        arguments += ["--max_steps", str(options.max_steps)]
    recipe = read_recipe(arguments)
    settings = cell_settings(cell, recipe.settings, options)
    records = Records(options.results_dir)
    records.require_same_settings(cell.run, settings)
    if seed in records.seeds(cell.run):
        return
    work = cell.directory(options.work_dir, seed)
    _begin(work, settings | {"seed": seed})
    short_warm_start: dict[str, Any] = {}
    if options.warm_start_steps is not None:
        short_warm_start = {"max_steps": options.warm_start_steps, "target_accuracy": None}
    model = start = start_of(recipe, seed, **short_warm_start)
    if cell.trained:
        model = work / "model"
        train_once([*arguments, "--seed", str(seed)], start, model)
    protocol = {key: value for key, value in settings["evaluation"].items() if not key.startswith("verification_")}
    evaluation = EvaluationArguments(
        model=str(model), output_dir=str(work / "evaluation"), method=cell.label, **protocol
    )
    configure_verification(recipe.verification)  # training does it, too, but not every cell is trained
    results = _evaluate(evaluation)
    training = read_training(model, _measure_checkpoints(model, evaluation)) if cell.trained else None
    training = training and training | {"curves": options.curves}
    diversity = diversities(work / "evaluation", results["benchmarks"], hashing_embedder)
    record(options.results_dir, cell.run, Run(seed, results, diversity, training), settings)
    for checkpoint in model.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def cell_settings(cell: Cell, recipe: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return the settings of all runs of a cell: the keys of its recipe without the seed, and sizes."""
    training = {key: value for key, value in recipe.items() if key not in ("seed", "output_dir")}
    return {
        "training": training if cell.trained else None,
        "warm_start_steps": options.warm_start_steps,
        "evaluation": evaluation_settings(options),
    }


def evaluation_settings(options: Options) -> dict[str, Any]:
    """Return the settings of the evaluation in the size of the options, with every k up to n."""
    settings = read_mapping(RECIPES / f"{options.evaluation}.yaml", "evaluation")
    if options.num_samples is not None:
        settings["n"] = options.num_samples
    if options.max_problems is not None:
        settings["max_problems"] = options.max_problems
    settings |= dict(options.evaluation_keys)
    settings["k"] = [k for k in map(int, str(settings["k"]).split(",")) if k <= settings["n"]]
    return settings


def _evaluate(arguments) -> dict[str, Any]:
    from pacs_trl.evaluation.run import evaluate
    from pacs_trl.rewards import shared_verifier

    return evaluate(arguments, shared_verifier(), progress=False)


def _measure_checkpoints(model: Path, evaluation) -> list[dict[str, float]]:
    """Return pass@1 of the checkpoints of a run: `{"step", "eval_BENCHMARK/pass@1"}` each."""
    measured = []
    steps = sorted(int(path.name.rsplit("-")[-1]) for path in model.glob("checkpoint-*"))
    for step in steps:
        smaller = replace(
            evaluation,
            model=str(model / f"checkpoint-{step}"),
            output_dir=str(Path(evaluation.output_dir).with_name(f"evaluation-{step}")),
            n=min(evaluation.n, CHECKPOINT_SAMPLES),
            k="1",
        )
        measured.append(measured_checkpoint(step, _evaluate(smaller)))
    return measured


def measured_checkpoint(step: int, results: dict[str, Any]) -> dict[str, float]:
    entries = results["benchmarks"].items()
    return {"step": step} | {f"eval_{name}/pass@1": entry["pass_at_k"]["1"]["value"] for name, entry in entries}


def read_training(model: Path, checkpoints: list[dict[str, float]]) -> dict[str, Any]:
    """Return the log of the optimizer steps and the measured checkpoints of a run."""
    history = read_log_history(model / "trainer_state.json")
    return {"log_history": [log for log in history if "entropy" in log], "checkpoints": checkpoints}


def diversities(evaluation_dir: Path, benchmarks: Iterable[str], embed: Callable) -> dict[str, dict[str, float]]:
    """Return the diversity of correct completions by benchmark and problem, where there are at least two."""
    return {name: problem_diversities(correct_responses(evaluation_dir, name), embed) for name in benchmarks}


def _begin(work: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a work directory, or check that it was started with the same."""
    path = work / "settings.json"
    if work.is_dir() and any(work.iterdir()):
        recorded = json.loads(path.read_text()) if path.is_file() else None
        remedy = "Remove that directory to run the cell again, or choose another --work_dir."
        return require_same_settings(recorded, settings, str(work), remedy)
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")

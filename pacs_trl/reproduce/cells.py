"""One cell of a miniature table, in this process: warm start, training, evaluation, and what is kept of them.

A finished cell is a directory with `results.json`, `diversity.json`, `settings.json` and, if it was trained, `training.json`.
Full-size cells (`full.py`) keep the same of what their commands leave.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..settings import read_mapping
from .runs import start_of, train_once
from .tables import Cell


RECIPES = Path(__file__).parents[2] / "recipes"

# What is kept of the training log: enough for the figures, little enough to be committed.
LOGGED = (
    *("step", "reward", "entropy", "completions/mean_length", "grad_norm"),
    *("pacs/score_std", "pacs/saturated_score_fraction"),
)

# Completions per problem when a checkpoint in the middle of training is measured (figure 3).
CHECKPOINT_SAMPLES = 8


class Options(NamedTuple):
    """
    How much is run, and where it goes.

    Args:
        seeds (`tuple[int, ...]`): One run of every cell for each.
        max_steps (`int`, *optional*): Optimizer steps, instead of the recipe's.
        warm_start_steps (`int`, *optional*): Length of the supervised warm start, whatever it reaches, to try things out.
        num_samples, max_problems (`int`, *optional*): Size of the evaluation, instead of the evaluation recipe's.
        results_dir (`Path`): Finished cells; tables and figures are made from what lies here.
        work_dir (`Path`): Checkpoints and samples, which only an unfinished cell needs.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    max_steps: int | None = None
    warm_start_steps: int | None = None
    num_samples: int | None = None
    max_problems: int | None = None
    results_dir: Path = Path("docs/results/miniature")
    work_dir: Path = Path("outputs/tables")


def run_cell(cell: Cell, seed: int, options: Options) -> Path:
    """
    Train and evaluate one miniature cell with one seed, or find it finished.

    The seed decides the warm start, which all methods of a seed share, and the training run; the samples of the evaluation have
    seeds of their own. An interrupted run continues from its last checkpoint and with the samples it has drawn.

    Returns:
        `Path`: directory with `results.json`, `diversity.json`, `settings.json`, and for a trained cell `training.json` (log,
        checkpoints measured).

    Raises:
        `ValueError`: if the directory of the record, or that of the work, was begun with other settings.
    """
    from ..evaluation.arguments import EvaluationArguments
    from ..evaluation.diversity import hashing_embedder
    from ..recipe import read_recipe

    record, work = cell.directory(options.results_dir, seed), cell.directory(options.work_dir, seed)
    arguments = ["--config", str(RECIPES / f"{cell.recipe}.yaml"), "--seed", str(seed)]
    if options.max_steps is not None:
        arguments += ["--max_steps", str(options.max_steps)]
    recipe = read_recipe(arguments)
    settings = {
        "training": {key: value for key, value in recipe.settings.items() if key != "output_dir"}
        if cell.trained
        else None,
        "warm_start_steps": options.warm_start_steps,
        "evaluation": evaluation_settings(options),
    }
    if (record / "results.json").is_file():
        _require_same_settings(record, settings, cell, "--results_dir")
        return record
    _begin(work, settings, cell)
    given = options.warm_start_steps
    short = {} if given is None else {"max_steps": given, "target_accuracy": None}
    model = start = start_of(recipe, **short)
    record.mkdir(parents=True, exist_ok=True)
    if cell.trained:
        model = work / "model"
        train_once(arguments, start, model)
    evaluation = EvaluationArguments(
        model=str(model), output_dir=str(work / "evaluation"), method=cell.label, **settings["evaluation"]
    )
    results = _evaluate(evaluation)
    if cell.trained:
        write_training(record, model, _measure_checkpoints(model, evaluation))
    write_diversity(record, work / "evaluation", results["benchmarks"], hashing_embedder)
    (record / "settings.json").write_text(_text(settings))
    # Last, and in one move: its presence says that the cell is finished.
    shutil.copy(work / "evaluation" / "results.json", record / ".results.json")
    (record / ".results.json").rename(record / "results.json")
    for checkpoint in model.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return record


def evaluation_settings(options: Options) -> dict[str, Any]:
    """The evaluation of the miniature tables, of the size that the options ask for; every k that n allows."""
    settings = read_mapping(RECIPES / "miniature" / "evaluation.yaml", "evaluation")
    given = {"n": options.num_samples, "max_problems": options.max_problems}
    settings |= {key: value for key, value in given.items() if value is not None}
    settings["k"] = [k for k in map(int, str(settings["k"]).split(",")) if k <= settings["n"]]
    return settings


def _evaluate(arguments) -> dict[str, Any]:
    from ..evaluation.evaluate import evaluate
    from ..verification import shared_verifier

    return evaluate(arguments, shared_verifier(), progress=False)


def _measure_checkpoints(model: Path, evaluation) -> list[dict[str, float]]:
    """pass@1 of the checkpoints of a run, `{"step", "eval_BENCHMARK/pass@1"}` each."""
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
    """`{"step", "eval_BENCHMARK/pass@1"}` of the evaluation of a checkpoint."""
    entries = results["benchmarks"].items()
    return {"step": step} | {f"eval_{name}/pass@1": entry["pass_at_k"]["1"]["value"] for name, entry in entries}


def write_training(record: Path, model: Path, checkpoints: list[dict[str, float]]) -> None:
    """Write training.json: of the log of a finished run what the figures show, and its checkpoints measured."""
    history = json.loads((model / "trainer_state.json").read_text())["log_history"]
    kept = [{key: log[key] for key in LOGGED if key in log} for log in history if "entropy" in log]
    training = {"log_history": kept, "checkpoints": checkpoints}
    (record / "training.json").write_text(json.dumps(training, separators=(",", ":")) + "\n")


def write_diversity(record: Path, evaluation_dir: Path, benchmarks: Iterable[str], embed: Callable) -> None:
    """Write diversity.json: benchmark -> problem -> diversity of its correct completions, where there are at least two."""
    from ..evaluation.diversity import correct_responses, problem_diversities

    diversity = {name: problem_diversities(correct_responses(evaluation_dir, name), embed) for name in benchmarks}
    (record / "diversity.json").write_text(json.dumps(diversity, separators=(",", ":")) + "\n")


def _begin(work: Path, settings: dict[str, Any], cell: Cell) -> None:
    """Say in a work directory what it is for before anything else lies there, or check that it was begun for the same."""
    if work.is_dir() and any(work.iterdir()):
        _require_same_settings(work, settings, cell, "--work_dir")
        return
    work.mkdir(parents=True, exist_ok=True)
    (work / "settings.json").write_text(_text(settings))


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=1) + "\n"


def _require_same_settings(directory: Path, settings: dict[str, Any], cell: Cell, option: str) -> None:
    remedy = f"Remove that directory to run the cell again, or choose another {option}."
    if not (directory / "settings.json").is_file():
        raise ValueError(
            f"{directory} has no settings.json, so that nothing says whether it was made with the settings that "
            f"{cell.recipe} has now, and one table cannot hold others. {remedy}"
        )
    made_with = _flat(json.loads((directory / "settings.json").read_text()))
    wanted = _flat(settings)
    changed = sorted(k for k in made_with.keys() | wanted.keys() if made_with.get(k) != wanted.get(k))
    if changed:
        raise ValueError(
            f"{directory} was made with other settings than {cell.recipe} has now ({', '.join(changed)} differ), and one "
            f"table cannot hold both. {remedy}"
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """`training` and `evaluation` with their keys, the rest as it is: `training.max_steps`, `warm_start_steps`."""
    parts = {name: part if isinstance(part, dict) else {"": part} for name, part in settings.items()}
    return {f"{name}.{key}".rstrip("."): value for name, part in parts.items() for key, value in part.items()}

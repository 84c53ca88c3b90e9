"""`pacs-trl reproduce TABLE`: the runs behind a table of the paper, cell by cell, and what came out beside what was published.

A table is a file in `recipes/miniature/tables/`: which cells it has and which recipe makes each of them, at miniature and at
full scale. A cell is a recipe and a seed; it is trained, evaluated and written to the results directory, and is finished
once its results.json is there. The miniature runs here, in this process; full-size training is launched by `accelerate`, and
without `--run` only its commands are printed. Tables and figures are those of `report/reproduction.py`.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pacs_trl.report.reproduction import Cell, Table, write_tables


RECIPES = Path(__file__).parents[1] / "recipes"
TABLES = RECIPES / "miniature" / "tables"
EVALUATION = {
    "miniature": RECIPES / "miniature" / "evaluation.yaml",
    "full": RECIPES / "evaluation" / "v2.yaml",
}

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
        warm_start_steps (`int`, *optional*): Longest supervised warm start, to try things out.
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


def read_table(name: str, scale: str) -> Table:
    """
    A table with the cells that exist at a scale.

    Args:
        name (`str`): Name of a file in `recipes/miniature/tables/`, without `.yaml`.
        scale (`str`): `"miniature"` or `"full"`.

    Raises:
        `ValueError`: if there is no such table.
    """
    if not (TABLES / f"{name}.yaml").is_file():
        raise ValueError(f"There is no table {name!r}; choose from {', '.join(table_names())}, or 'all'.")
    content = yaml.safe_load((TABLES / f"{name}.yaml").read_text())
    cells = [
        Cell(label, recipe=entry[scale], trained=entry.get("trained", True))
        for label, entry in content.pop("cells").items()
        if scale in entry
    ]
    return Table(name=name, cells=cells, **content)


def table_names() -> list[str]:
    """
    Names of all tables, in the order of the paper: tables before figures, by number.

    Raises:
        `ValueError`: if the package was installed without its recipes.
    """
    if not TABLES.is_dir():
        raise ValueError(
            f"The tables are recipes, and there is no {TABLES}: the package was installed without them. Clone the "
            "repository and install that: `pip install --editable .`"
        )
    return sorted((path.stem for path in TABLES.glob("*.yaml")), key=lambda n: (n[0] == "f", int(n.split("_")[1])))


def run_cell(cell: Cell, seed: int, options: Options) -> Path:
    """
    Train and evaluate one miniature cell with one seed, or find it finished.

    The seed decides the warm start, which all methods of a seed share, and the training run; the samples of the evaluation have
    seeds of their own. An interrupted run continues from its last checkpoint and with the samples it has drawn.

    Returns:
        `Path`: directory with `results.json`, `diversity.json`, `settings.json`, and for a trained cell `training.json` (log,
        checkpoints measured).

    Raises:
        `ValueError`: if the directory holds a finished run with other settings.
    """
    from pacs_trl.evaluation.arguments import EvaluationArguments
    from pacs_trl.miniature.warm_start import warm_start
    from pacs_trl.recipe import read_recipe
    from pacs_trl.train import main as train

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
        _require_same_settings(record, settings, cell)
        return record
    short = {} if options.warm_start_steps is None else {"max_steps": options.warm_start_steps}
    model = start = warm_start(recipe.model.model_name_or_path.removeprefix("miniature/"), seed=seed, **short)
    record.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if cell.trained:
        model = work / "model"
        if not (model / "trainer_state.json").is_file():  # written when training is over
            # The trainer writes its metrics to standard output, the progress bar to standard error.
            with (work / "train.log").open("a") as log, redirect_stdout(log):
                train(
                    [*arguments, "--model_name_or_path", str(start), "--output_dir", str(model)]
                    + ["--resume_from_checkpoint", "last"]
                )
    evaluation = EvaluationArguments(
        model=str(model), output_dir=str(work / "evaluation"), method=cell.label, **settings["evaluation"]
    )
    results = _evaluate(evaluation)
    if cell.trained:
        history = json.loads((model / "trainer_state.json").read_text())["log_history"]
        kept = [{key: log[key] for key in LOGGED if key in log} for log in history if "entropy" in log]
        training = {"log_history": kept, "checkpoints": _measure_checkpoints(model, evaluation)}
        (record / "training.json").write_text(json.dumps(training, separators=(",", ":")) + "\n")
    diversity = _diversity(work / "evaluation", results)
    (record / "diversity.json").write_text(json.dumps(diversity, separators=(",", ":")) + "\n")
    (record / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
    # Last, and in one move: its presence says that the cell is finished.
    shutil.copy(work / "evaluation" / "results.json", record / ".results.json")
    (record / ".results.json").rename(record / "results.json")
    for checkpoint in model.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return record


def evaluation_settings(options: Options) -> dict[str, Any]:
    """The evaluation of the miniature tables, of the size that the options ask for; every k that n allows."""
    settings = yaml.safe_load(EVALUATION["miniature"].read_text())
    given = {"n": options.num_samples, "max_problems": options.max_problems}
    settings |= {key: value for key, value in given.items() if value is not None}
    settings["k"] = [k for k in map(int, str(settings["k"]).split(",")) if k <= settings["n"]]
    return settings


def _evaluate(arguments) -> dict[str, Any]:
    from pacs_trl.evaluation.evaluate import evaluate
    from pacs_trl.verification import shared_verifier

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
        entries = _evaluate(smaller)["benchmarks"]
        values = {f"eval_{name}/pass@1": entry["pass_at_k"]["1"]["value"] for name, entry in entries.items()}
        measured.append({"step": step, **values})
    return measured


def _diversity(evaluation_dir: Path, results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """benchmark -> problem -> diversity of its correct completions, where there are at least two."""
    from pacs_trl.evaluation.diversity import correct_responses, hashing_embedder, problem_diversities

    return {
        name: problem_diversities(correct_responses(evaluation_dir, name), hashing_embedder)
        for name in results["benchmarks"]
    }


def _require_same_settings(record: Path, settings: dict[str, Any], cell: Cell) -> None:
    finished = _flat(json.loads((record / "settings.json").read_text()))
    wanted = _flat(settings)
    changed = sorted(k for k in finished.keys() | wanted.keys() if finished.get(k) != wanted.get(k))
    if changed:
        raise ValueError(
            f"{record} was made with other settings than {cell.recipe} has now ({', '.join(changed)} differ), and one table "
            "cannot hold both. Remove that directory to run the cell again, or choose another --results_dir."
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """`training` and `evaluation` with their keys, the rest as it is: `training.max_steps`, `warm_start_steps`."""
    parts = {name: part if isinstance(part, dict) else {"": part} for name, part in settings.items()}
    return {f"{name}.{key}".rstrip("."): value for name, part in parts.items() for key, value in part.items()}


def full_commands(cell: Cell, seed: int, options: Options) -> list[list[str]]:
    """The command lines of a full-size cell: training as its recipe's header launches it, then evaluation."""
    path = f"recipes/{cell.recipe}.yaml"
    record, model = cell.directory(options.results_dir, seed), cell.directory(options.work_dir, seed)
    settings = yaml.safe_load((RECIPES / f"{cell.recipe}.yaml").read_text())
    evaluation = ["pacs-trl", "evaluate", "--config", f"recipes/evaluation/{EVALUATION['full'].name}"]
    if cell.recipe.startswith("evaluation/"):  # names its model itself
        return [["pacs-trl", "evaluate", "--config", path, "--output_dir", str(record), "--method", cell.label]]
    start = settings["model_name_or_path"]
    evaluation += ["--model", str(model) if cell.trained else start]
    evaluation += ["--output_dir", str(record), "--method", cell.label]
    if not cell.trained:
        return [evaluation]
    header = (RECIPES / f"{cell.recipe}.yaml").read_text().splitlines()
    launch = shlex.split(next(line for line in header if "accelerate launch" in line).removeprefix("#"))
    training = [*launch, "--seed", str(seed), "--output_dir", str(model), "--resume_from_checkpoint", "last"]
    return [training, evaluation]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pacs-trl reproduce", description="Run or resume the runs behind a table.")
    parser.add_argument("tables", nargs="+", metavar="TABLE", help=f"{', '.join(table_names())}, or all")
    parser.add_argument("--scale", choices=list(EVALUATION), default="miniature")
    parser.add_argument("--cells", help="names of cells or recipes, separated by commas (default: every cell)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of every cell for each")
    parser.add_argument("--max_steps", type=int, help="optimizer steps, instead of the recipe's")
    parser.add_argument("--warm_start_steps", type=int, help="longest supervised warm start, to try things out")
    parser.add_argument("--num_samples", type=int, help="completions per problem, instead of the evaluation's")
    parser.add_argument("--max_problems", type=int, help="problems per benchmark, instead of the evaluation's")
    parser.add_argument("--results_dir", type=Path, help="default: docs/results/SCALE")
    parser.add_argument("--work_dir", type=Path, help="default: outputs/tables/SCALE")
    parser.add_argument("--run", action="store_true", help="full scale: run the commands instead of printing them")
    parser.add_argument("--report_only", action="store_true", help="run nothing: tables of what is finished")
    arguments = parser.parse_args(argv)
    names = table_names() if arguments.tables == ["all"] else arguments.tables
    tables = [read_table(name, arguments.scale) for name in names]
    options = Options(
        tuple(arguments.seeds),
        arguments.max_steps,
        arguments.warm_start_steps,
        arguments.num_samples,
        arguments.max_problems,
        arguments.results_dir or Path("docs/results") / arguments.scale,
        arguments.work_dir or Path("outputs/tables") / arguments.scale,
    )
    cells = _chosen(tables, arguments.cells)
    if not arguments.report_only:
        for seed in options.seeds:
            for cell in cells:
                print(f"seed {seed}: {cell.recipe}{'' if cell.trained else ' before training'}", flush=True)
                if arguments.scale == "miniature":
                    run_cell(cell, seed, options)
                elif not (cell.directory(options.results_dir, seed) / "results.json").is_file():
                    for command in full_commands(cell, seed, options):
                        print("  " + shlex.join(command), flush=True)
                        if arguments.run:
                            subprocess.run(command, check=True)
    print(write_tables(tables, options.results_dir, twins=arguments.scale == "miniature"))
    return 0


def _chosen(tables: Sequence[Table], names: str | None) -> list[Cell]:
    """The cells of some tables, each run once however many tables show it."""
    by_run = {cell.run: cell for table in tables for cell in table.cells}
    if names is None:
        return list(by_run.values())
    wanted = {name.strip() for name in names.split(",")}
    labels = {cell.run: {cell.run} for cell in by_run.values()}
    for table in tables:
        for cell in table.cells:
            labels[cell.run].add(cell.label)
    unknown = wanted - set().union(*labels.values())
    if unknown:
        known = ", ".join(sorted(set().union(*labels.values())))
        raise ValueError(f"There are no cells {', '.join(sorted(unknown))} here, but {known}.")
    return [cell for cell in by_run.values() if labels[cell.run] & wanted]


if __name__ == "__main__":
    sys.exit(main())

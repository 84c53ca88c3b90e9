"""Full-size cells of a table: shell commands, their cost, and the records of their results.

The number of machines and their names ($NODE_RANK, $HEAD) are variables of the shell. In the results directory of a
seed every evaluation has a directory (`v2`, `checkpoint-80`), from which the record is made.
"""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pacs_trl.errors import FailedRun
from pacs_trl.evaluation.results import read_results, require_same_protocol
from pacs_trl.plan import cost
from pacs_trl.report import tables
from pacs_trl.settings import read_mapping

from .cells import CHECKPOINT_SAMPLES, RECIPES, Options, diversities, measured_checkpoint, read_training
from .published import TABLE_3_DIVERSITY
from .records import Cell, Records, Run, record


# On eight nodes of eight GPUs, for which the batches of the recipes are written.
ACCELERATE = "recipes/accelerate_configs/fsdp2_8x8.yaml"
LAUNCH = (
    f"accelerate launch --config_file {ACCELERATE} --machine_rank $NODE_RANK --main_process_ip $HEAD -m pacs_trl.train"
)

# Embedding every completion of MATH 500 takes hours, and the paper has no number to put beside it.
DIVERSITY_BENCHMARKS = sorted({name for values in TABLE_3_DIVERSITY.values() for name in values})

# Of the benchmarks, and what `pacs-trl plan` expects of completions: a share of the longest.
NUM_PROBLEMS = {"math_500": 500, "amc_23": 40, "aime_2024": 30, "aime_2025": 30, "beyond_aime": 100}
MEAN_LENGTH = 0.35


class Line(NamedTuple):
    """A shell command and its estimated GPU hours on H200; `None` for a model of unknown shape."""

    text: str
    gpu_hours: float | None


def full_commands(cell: Cell, seed: int, options: Options, *, checkpoints: bool = False) -> list[Line]:
    """Return the commands that a full-size cell still needs: training, then evaluations, with `checkpoints` also of
    the saved ones. The seed is that of training, or of the samples if nothing is trained."""
    results, model = cell.directory(options.results_dir, seed), cell.directory(options.work_dir, seed)
    settings = read_mapping(RECIPES / f"{cell.recipe}.yaml", "recipe") | dict(cell.settings)
    if cell.recipe.startswith("evaluation/"):  # names its model and its method itself
        asked = ["--seed", str(seed)]
    elif cell.trained:
        asked = ["--model", str(model), "--method", cell.label]
    else:
        asked = ["--model", settings["model_name_or_path"], "--method", cell.label, "--seed", str(seed)]
    lines, base = [], settings.get("model") or settings["model_name_or_path"]
    if seed not in Records(options.results_dir).seeds(cell.run):
        for name in cell.evaluations:
            lines += _evaluation(name, results / Path(name).name, asked, base)
    if checkpoints and cell.trained:
        for step in range(settings["save_steps"], settings["max_steps"] + 1, settings["save_steps"]):
            smaller = ["--model", f"{model}/checkpoint-{step}", "--method", cell.label]
            smaller += ["--n", str(CHECKPOINT_SAMPLES), "--k", "1"]
            lines += _evaluation(
                cell.evaluations[0], results / f"checkpoint-{step}", smaller, base, CHECKPOINT_SAMPLES
            )
    if lines and cell.trained and not (model / "trainer_state.json").is_file():  # written when training is over
        words = ["--config", f"recipes/{cell.recipe}.yaml", *cell.words, "--seed", str(seed)]
        words += ["--output_dir", str(model), "--resume_from_checkpoint", "last"]
        lines.insert(0, Line(f"{LAUNCH} {shlex.join(words)}", _training_hours(cell)))
    return lines


def _training_hours(cell: Cell) -> float | None:
    """Return the estimate of `pacs-trl plan`."""
    from pacs_trl.plan.check import check_recipe
    from pacs_trl.plan.estimates import Estimate
    from pacs_trl.plan.launch import read_launch

    launch, _ = read_launch(str(RECIPES.parent / ACCELERATE), None)
    assert launch is not None
    recipe, _ = check_recipe(str(RECIPES / f"{cell.recipe}.yaml"), cell.words, launch.num_processes)
    assert recipe is not None
    return Estimate(recipe, launch).gpu_hours(round(MEAN_LENGTH * recipe.training.max_completion_length))


def _evaluation(name: str, output_dir: Path, asked: Sequence[str], base: str, n: int | None = None) -> list[Line]:
    """Return the command of an evaluation of a model made from `base`; none if its results exist."""
    if (output_dir / "results.json").is_file():
        return []
    words = ["pacs-trl", "evaluate", "--config", f"recipes/{name}.yaml", *asked, "--output_dir", str(output_dir)]
    settings, shape, hours = read_mapping(RECIPES / f"{name}.yaml", "evaluation"), cost.model_shape(base), None
    if shape is not None:
        rows = (n or settings["n"]) * sum(NUM_PROBLEMS[benchmark] for benchmark in settings["benchmarks"].split(","))
        longest = settings["max_new_tokens"]
        weights = 2 * shape.parameters
        cache = settings["gpu_memory_utilization"] * cost.H200.memory_bytes - weights
        lengths = (256, MEAN_LENGTH * longest, longest)
        memory = {"weight_bytes": weights, "kv_cache_bytes": cache, "gpu": cost.H200}
        hours = cost.decoding_seconds(shape, rows, *lengths, **memory) / 3600
    return [Line(shlex.join(words), hours)]


def run_line(line: str) -> None:
    """Run a command with bash, where an unset variable is an error; raise [`FailedRun`] if it fails."""
    status = subprocess.run(["bash", "-uc", line]).returncode
    if status:
        raise FailedRun(f"This line ended with status {status}. Fix the problem and run the same command.\n  {line}")


def collect(cell: Cell, options: Options, *, diversity: bool = False) -> None:
    """Record every seed of a cell whose files are complete, with the diversity if a table shows it."""
    recorded = {run.seed: run for run in Records(options.results_dir).runs(cell.run, cell.label)}
    for directory in sorted((options.results_dir / cell.run).glob("seed-*")):
        seed, model = int(directory.name.removeprefix("seed-")), options.work_dir / cell.run / directory.name
        parts = [directory / Path(name).name for name in cell.evaluations]
        if not all((part / "results.json").is_file() for part in parts):
            continue
        run = recorded.get(seed, Run(seed, {}, {}, None))._replace(results=_merged(parts))
        if cell.trained and (model / "trainer_state.json").is_file():
            run = run._replace(training=read_training(model, _measured_checkpoints(directory)))
        if diversity and (parts[0] / "grades").is_dir() and not run.diversity:
            from experiments.diversity import DEFAULT_EMBEDDER, sentence_embedder

            embed = sentence_embedder(DEFAULT_EMBEDDER)
            run = run._replace(diversity=diversities(parts[0], DIVERSITY_BENCHMARKS, embed))
        record(options.results_dir, cell.run, run)


def _measured_checkpoints(directory: Path) -> list[dict[str, float]]:
    """Return pass@1 of the evaluated checkpoints by step."""
    paths = {
        int(path.parent.name.removeprefix("checkpoint-")): path for path in directory.glob("checkpoint-*/results.json")
    }
    return [measured_checkpoint(step, read_results(paths[step])) for step in sorted(paths)]


def _merged(parts: Sequence[Path]) -> dict[str, Any]:
    """Merge the results of a run: all benchmarks, common values of k, and the smallest n."""
    results = [read_results(part) for part in parts]
    require_same_protocol(results, [str(part) for part in parts])
    benchmarks = {name: entry for result in results for name, entry in result["benchmarks"].items()}
    smallest = {"n": min(result["n"] for result in results), "k": tables.common_ks(results)}
    return results[0] | smallest | {"benchmarks": benchmarks}

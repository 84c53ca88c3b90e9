"""Problems that reasoning-gym generates, for training (`dataset_name: reasoning_gym`) and benchmarks.

Entry i of a dataset with seed s has the random numbers of s + i, so benchmarks have seeds of their own.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import UserError
from ..settings import did_you_mean


NAME = "reasoning_gym"
INSTRUCTION = "Reply with the answer only."
DEFAULT_SIZE = 1000
BENCHMARK_SEED = 1_000_000
BENCHMARK_SIZE = 100
MAX_BENCHMARK_SIZE = 1000


def check_settings(args: Any) -> None:
    """Raise a `ValueError` if no tasks are named, or training would share entries with benchmarks."""
    if not isinstance(args.reasoning_gym, dict) or not args.reasoning_gym:
        raise UserError(
            "`reasoning_gym` must name tasks, for example {chain_sum: {weight: 1, config: {max_terms: 2}}}."
        )
    last_seed = args.dataset_seed + (args.dataset_size or DEFAULT_SIZE) - 1
    last_benchmark_seed = BENCHMARK_SEED + MAX_BENCHMARK_SIZE - 1
    if args.dataset_seed <= last_benchmark_seed and last_seed >= BENCHMARK_SEED:
        raise UserError(
            f"`dataset_seed`: training would use the seeds {args.dataset_seed} to {last_seed} of reasoning-gym, of "
            f"which benchmarks use {BENCHMARK_SEED} to {last_benchmark_seed}. Lower dataset_seed or dataset_size."
        )


def checked_dataset(task: str, config: Mapping[str, Any], seed: int, size: int) -> Any:
    """Return a dataset of reasoning-gym. Raises a `ValueError` if it is not installed or refuses the task."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f"`reasoning_gym`: the package with the task {task} cannot be imported ({error}). Install pacs_trl with "
            "the extra [gym]."
        ) from error
    try:
        return create_dataset(task, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        hint = did_you_mean(task, list(DATASETS)) if task not in DATASETS else ""
        raise UserError(
            f"`reasoning_gym`: the task {task} with the config {dict(config)} is rejected: {error}.{hint}"
        ) from error


class TaskSettings(NamedTuple):
    """Settings of a task: its share of the problems, its configuration, and which part of a completion is graded
    (`"last_number"`, or `None` for all of it)."""

    weight: float = 1
    config: Mapping[str, Any] = MappingProxyType({})
    answer: str | None = None


def task_settings(task: str, settings: Any) -> TaskSettings:
    """Read the settings of a task, a mapping or `None`. Raises a `ValueError` for other keys or values."""
    error = UserError(
        f"`reasoning_gym`: {task} has {settings!r}. Its keys are weight, above 0; config, a mapping; and answer: "
        "last_number."
    )
    if not isinstance(settings, dict | None):
        raise error
    written = {key: value for key, value in (settings or {}).items() if value is not None}
    if not written.keys() <= set(TaskSettings._fields):
        raise error
    read = TaskSettings(**written)
    has_weight = isinstance(read.weight, int | float) and read.weight > 0
    if not has_weight or not isinstance(read.config, Mapping) or read.answer not in (None, "last_number"):
        raise error
    return read


def gym_rows(tasks: Mapping[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """Return `size` problems with `question` and `solution`, the name of the entry as JSON; of each task as many as
    its `weight` (default 1) says. With `answer: last_number`, the last number of an answer is graded."""
    settings_by_task = {task: task_settings(task, written) for task, written in tasks.items()}
    total_weight = sum(settings.weight for settings in settings_by_task.values())
    weight_so_far = 0.0
    rows: list[dict[str, Any]] = []
    for task, settings in settings_by_task.items():
        weight_so_far += settings.weight
        # Rounding the sum so far lets the counts of all tasks sum to `size`.
        num_problems = round(weight_so_far / total_weight * size) - len(rows)
        dataset_size = max(num_problems, 1)
        entries = checked_dataset(task, settings.config, seed, dataset_size)
        name_of_dataset: dict[str, Any] = {
            "task": task,
            "config": dict(settings.config),
            "seed": seed,
            "size": dataset_size,
        }
        if settings.answer is not None:
            name_of_dataset["answer"] = settings.answer
        for i in range(num_problems):
            solution = json.dumps(name_of_dataset | {"index": i})
            rows.append({"question": entries[i]["question"], "solution": solution, "task": task})
    return rows


def benchmark(task: str, settings: Any, max_problems: int | None) -> list[dict[str, Any]]:
    """Return the problems of a benchmark, whose seeds no training run uses."""
    size = max_problems or BENCHMARK_SIZE
    if size > MAX_BENCHMARK_SIZE:
        raise UserError(f"A benchmark of reasoning-gym has at most {MAX_BENCHMARK_SIZE} problems, not {size}.")
    return gym_rows({task: settings}, size, BENCHMARK_SEED)

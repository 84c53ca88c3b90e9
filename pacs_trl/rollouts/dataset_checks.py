"""Checks of datasets: columns, prompts, and gold answers; whether reward functions can be called with them."""

import inspect
from collections.abc import Collection, Iterable
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from trl.trainer.utils import get_callable_name

from ..data.columns import columns_of, is_in_memory
from ..data.golds import report_golds
from ..errors import UserError
from ..rewards import shared_verifier
from .rollout_config import RolloutConfig


# Keyword arguments that TRL passes to every reward function in addition to dataset columns.
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Those of our trainers, for reward functions that have such a parameter.
OPTIONAL_PARAMETERS = ("compute_logps",)


def check_dataset(name: str, dataset: Any, reward_funcs: Any = (), passed: Collection[str] = ()) -> None:
    """Raise a `ValueError` if a dataset (or one of a dict) has no column `prompt`, a prompt in memory is neither text
    nor a list of messages, or a reward function cannot be called with its columns. `passed` are further keyword
    arguments, for functions with such a parameter. Rows of streams, and those that a transform makes, are checked when
    they arrive."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part, reward_funcs, passed)
    elif isinstance(dataset, Dataset | IterableDataset) and (columns := columns_of(dataset)) is not None:
        check_columns(name, columns, needs_prompt="environments" not in passed)
        checks_prompts = is_in_memory(dataset) and "environments" not in passed  # which may modify prompts
        for i, prompt in enumerate(dataset["prompt"][:] if checks_prompts else ()):
            if isinstance(prompt, list):
                is_prompt = bool(prompt) and all(message.get("role") for message in prompt)
            else:
                is_prompt = bool(prompt) and isinstance(prompt, str)
            if not is_prompt:
                raise UserError(
                    f"Row {i} of {name} has the prompt {prompt!r:.100}. It must be text, or a list of messages that "
                    "each have a role; remove such rows, or make them with `pacs_trl.data.build_prompt`."
                )
        keywords = {*_ALWAYS_PASSED, *columns} - {"prompt", "completion"}  # TRL passes plurals
        keywords |= {"environments"} & set(passed)
        for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
            if not callable(function) or isinstance(function, nn.Module):
                continue
            signature = inspect.signature(function)
            try:
                optional = signature.parameters.keys() & {*passed, "truncated"}
                signature.bind(**dict.fromkeys(keywords | optional))
            except TypeError as error:
                raise UserError(
                    f"The reward function {get_callable_name(function)!r} cannot be called with the columns of "
                    f"{name}, {', '.join(columns)} ({error}). Write "
                    "it as `def reward(completions, COLUMN, **kwargs)`; rename the column, or give it a default value."
                ) from error


def without_unused_columns(name: str, dataset: Any) -> Any:
    """Return a dataset, or a dict of datasets, with the columns that TRL keeps with `remove_unused_columns`. Raises a
    `ValueError` if a transform reads others; `name` is that of the dataset in errors."""
    if isinstance(dataset, dict):
        return {key: without_unused_columns(f"{name}[{key!r}]", part) for key, part in dataset.items()}
    if not isinstance(dataset, Dataset | IterableDataset) or dataset.column_names is None:
        return dataset
    columns = [column for column in ("prompt", "image", "images") if column in dataset.column_names]
    kept = dataset.select_columns(columns)
    try:
        columns_of(kept)  # calls the transform
    except KeyError as error:
        if error.args[0] not in dataset.column_names:  # an error of the transform
            raise
        raise UserError(
            f"The transform of {name} reads the column {error}, which remove_unused_columns: true removes. Set "
            "remove_unused_columns: false."
        ) from error
    return kept


def check_columns(name: str, columns: Iterable[str], *, needs_prompt: bool = True) -> None:
    """Raise a `ValueError` if there is no `prompt` among the columns although it is needed, or a column has the name
    of an argument that reward functions get from the trainer."""
    columns = list(columns)
    for column in columns:
        if column in (*_ALWAYS_PASSED, *OPTIONAL_PARAMETERS):
            raise UserError(
                f"{name} has the column `{column}`, but the trainer passes its own `{column}` to reward functions. "
                "Rename the column, or remove it."
            )
    if needs_prompt and "prompt" not in columns:
        raise UserError(
            f"{name} has no column `prompt`, the model input, only {', '.join(columns) or 'none'}. Rename the column "
            "of problems, or make it with `pacs_trl.data.build_prompt`."
        )


def check_environment_names(datasets: dict[str, Any], names: Collection[str]) -> None:
    """Raise a `ValueError` if an example names an environment that does not exist. Streaming datasets and those with a
    transform are skipped."""
    for title, dataset in datasets.items():
        if is_in_memory(dataset):
            for row, name in enumerate(dataset["environment"][:]):
                if name not in names:
                    raise UserError(
                        f"Row {row} of {title} has environment={name!r}, which is not among the environments of "
                        f"`environment_factory`: {', '.join(map(repr, names))}. Correct the column, or add the "
                        "environment."
                    )


def check_golds(dataset: Any) -> None:
    """Report gold answers of a training set that cannot be graded or may be misread. Streaming datasets and
    those with a transform are skipped."""
    if is_in_memory(dataset) and "solution" in dataset.column_names:
        report_golds("the training set", dataset["solution"][:], shared_verifier())


def check_number_of_prompts(num_prompts: int, args: RolloutConfig) -> None:
    """Raise a `ValueError` if a generation batch needs more distinct prompts than the training set has."""
    needed = args.generation_batch_size // args.num_generations
    if num_prompts < needed:
        raise UserError(
            f"The training set has {num_prompts} prompts, but a generation batch needs {needed} different ones "
            f"({args.generation_size} / num_generations={args.num_generations}). Use more prompts, or lower these "
            "batch sizes."
        )

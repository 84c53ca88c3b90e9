"""Environments of users: import, checks before the model is loaded, and one example for a whole group.

An environment has the attributes of TRL's experimental Specs (OpenReward, Harbor): `environment_factory` returns
objects with `reset` and tool methods, `train_dataset` has the examples, and `reward_funcs` compute the rewards.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from ..settings.names import object_of_user
from .tool_calls import as_observation


if TYPE_CHECKING:  # slow to import
    from datasets import Dataset


EMPTY_PROMPT = [{"role": "user", "content": ""}]  # an observation is appended


def environment_of_user(name: str, key: str = "environment") -> Any:
    """Import an environment by `module:attribute`. Raises a `ValueError`, also if it is none; `key` is the setting."""
    found = object_of_user(name, key)
    if inspect.getattr_static(found, "environment_factory", None) is None:  # without loading what properties load
        raise ValueError(
            f"{key}: {name!r} is no environment, but a {type(found).__name__} without `environment_factory`. Name an "
            "object with `environment_factory`, `train_dataset`, and `reward_funcs`."
        )
    return found


def reward_functions_of(environment: Any) -> list[Callable]:
    """Return the reward functions of an environment as a list, which is empty if its objects have `get_reward`."""
    given = getattr(environment, "reward_funcs", None) or []
    return list(given) if isinstance(given, list | tuple) else [given]


def examples_of(environment: Any, num_examples: int, num_held_out: int = 0, first_seed: int = 0) -> "Dataset":
    """Return the `train_dataset` of an environment; if it has none, empty prompts with a `seed` each. Raises a
    `ValueError` if `num_examples` is not positive then."""
    from datasets import Dataset

    dataset = getattr(environment, "train_dataset", None)
    if dataset is not None and not isinstance(dataset, Dataset):
        raise ValueError(
            f"The `train_dataset` of the environment is a {type(dataset).__name__}. Make it a `datasets.Dataset`, or "
            "None if `reset` chooses examples by `seed`."
        )
    if dataset is not None:
        return dataset
    if num_examples <= 0:
        raise ValueError("The environment has no `train_dataset`, so the run has no length. Set max_steps.")
    number = num_examples + num_held_out
    return Dataset.from_dict({"prompt": [EMPTY_PROMPT] * number, "seed": list(range(first_seed, first_seed + number))})


def environment_tools(environment: Any) -> list[Callable]:
    """Return the methods that the model may call, as TRL finds them: public ones, except `reset` and `get_reward`."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(environment, name) for name in names]


def prepare_environments(factories: Any, datasets: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Start one environment of each kind, reset it twice with its first example, and return factories that return it
    first, and the datasets, which get a column `seed`, the index of the example, if every `reset` takes it. All
    completions of a group must see the same example, so `reset` must return the same observation for equal
    arguments."""
    from datasets import Dataset
    from transformers.utils import get_json_schema

    is_single = not isinstance(factories, dict)
    row: dict[str, Any] = {}
    try:
        named = {name: _Factory(each) for name, each in ({None: factories} if is_single else factories).items()}
        first, found = {name: factory.ready[0] for name, factory in named.items()}, dict(datasets)
        for tool in [tool for environment in first.values() for tool in environment_tools(environment)]:
            get_json_schema(tool)  # raises for methods without types or description
        for key, dataset in found.items():
            if not isinstance(dataset, Dataset) or len(dataset) == 0:
                continue
            if "seed" not in dataset.column_names and all(_takes_seed(each.reset) for each in first.values()):
                found[key] = dataset = dataset.add_column("seed", list(range(len(dataset))))
            kinds = [None] if is_single else dataset["environment"][:]
            for name in first.keys() & set(kinds):
                row = dataset[kinds.index(name)]
                row = {column: row[column] for column in row if is_single or column != "environment"}
                _ = [first[name].reset(**row) for _ in range(2)]
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # no `reset`, another signature, code of a user, or its server
        columns = f" at `reset` with the columns {', '.join(row)}" if row else ""
        raise ValueError(
            f"The environment failed{columns} ({type(error).__name__}: {error}). Write `reset` as `def reset(self, "
            "**kwargs)` and tools with types and a docstring, and start what they need."
        ) from error
    return (named[None] if is_single else named), found


class _Factory:
    """Factory of environments whose `reset` returns one observation per example. The first one is started at once."""

    def __init__(self, factory: Callable):
        self.factory, self.observations, self.ready = factory, {}, []
        self.ready = [self()]

    def __call__(self) -> Any:
        if self.ready:
            return self.ready.pop()
        environment = self.factory()
        reset = environment.reset

        @wraps(reset)
        def checked(**row: Any) -> Any:
            observation = reset(**row)
            if observation is not None:
                observation = as_observation(observation, takes_images=True)
            digest = hash(json.dumps(observation, default=lambda each: type(each).__name__))  # images have no text
            if self.observations.setdefault(hash(json.dumps(row, default=repr)), digest) != digest:
                raise ValueError(
                    f"`reset` of the environment {type(environment).__name__} returned two observations for one "
                    "example, and completions of a group must see the same one. Choose it by a column of the dataset, "
                    "or by `seed`: `def reset(self, seed, **kwargs)`."
                )
            return observation

        environment.reset = checked
        return environment


def _takes_seed(function: Callable) -> bool:
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

"""Environments of users: import, and checks before the model is loaded.

An environment has the attributes of TRL's experimental Specs (OpenReward, Harbor): `environment_factory` returns
objects with `reset` and tool methods, `train_dataset` has the examples, and `reward_funcs` compute the rewards.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..settings.names import object_of_user
from .columns import is_in_memory


if TYPE_CHECKING:  # slow to import
    from datasets import Dataset


EMPTY_PROMPT = [{"role": "user", "content": ""}]  # an observation is appended


def environment_of_user(name: str, key: str = "environment") -> Any:
    """Import an environment by `module:attribute`. Raises a `ValueError`, also if it is none; `key` is the setting."""
    environment = object_of_user(name, key)
    # `getattr_static` does not load what properties load.
    if inspect.getattr_static(environment, "environment_factory", None) is None:
        raise UserError(
            f"{key}: {name!r} is no environment, but a {type(environment).__name__} without `environment_factory`. "
            "Name an object with `environment_factory`, `train_dataset`, and `reward_funcs`."
        )
    return environment


def reward_functions_of(environment: Any) -> list[Callable]:
    """Return the reward functions of an environment as a list, which is empty if its objects have `get_reward`."""
    reward_funcs = getattr(environment, "reward_funcs", None) or []
    if isinstance(reward_funcs, list | tuple):
        return list(reward_funcs)
    return [reward_funcs]


def examples_of(environment: Any, num_examples: int, num_held_out: int = 0, first_seed: int = 0) -> "Dataset":
    """Return the `train_dataset` of an environment; if it has none, empty prompts with a `seed` each. Raises a
    `ValueError` if `num_examples` is not positive then."""
    from datasets import Dataset

    dataset = getattr(environment, "train_dataset", None)
    if dataset is not None and not isinstance(dataset, Dataset):
        raise UserError(
            f"The `train_dataset` of the environment is a {type(dataset).__name__}. Make it a `datasets.Dataset`, or "
            "None if `reset` chooses examples by `seed`."
        )
    if dataset is not None:
        return dataset
    if num_examples <= 0:
        raise UserError("The environment has no `train_dataset`, so the run has no length. Set max_steps.")
    num_seeds = num_examples + num_held_out
    seeds = list(range(first_seed, first_seed + num_seeds))
    return Dataset.from_dict({"prompt": [EMPTY_PROMPT] * num_seeds, "seed": seeds})


def environment_tools(environment: Any) -> list[Callable]:
    """Return the methods that the model may call, as TRL finds them: public ones, except `reset` and `get_reward`."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(environment, name) for name in names]


def prepare_environments(factories: Any, datasets: Mapping[str, Any], *, takes_images: bool = True) -> Any:
    """
    Start one environment of each kind, reset it with its first example, and return factories that return it first.

    Args:
        factories: A factory of environments, or a dictionary of several by the name in the column `environment`.
        datasets (mapping): Datasets by the name of the argument; streams and `None` are skipped.
        takes_images (`bool`): Whether observations may have images.

    Raises:
        `ValueError`: if an environment fails, if environments cannot be told apart, or if images are not taken, but
            returned.
    """
    from transformers.utils import get_json_schema

    from ..rollouts.group_starts import check_observation, takes_seed

    is_single = not isinstance(factories, dict)
    factories_by_name = {None: factories} if is_single else factories
    columns_of_reset: list[str] = []  # of the last call of `reset`, for the message
    try:
        eager_factories = {name: _EagerFactory(factory) for name, factory in factories_by_name.items()}
        environments = {name: factory.ready[0] for name, factory in eager_factories.items()}
        for environment in environments.values():
            for tool in environment_tools(environment):
                get_json_schema(tool)  # raises for methods without types or description

        for argument, dataset in datasets.items():
            if not is_in_memory(dataset) or len(dataset) == 0:
                continue
            if is_single:
                names_in_rows = [None]
            elif "environment" in dataset.column_names:
                names_in_rows = dataset["environment"][:]
            else:
                raise UserError(
                    f"{argument} has no column `environment`, which names the environment of each example among "
                    f"{', '.join(map(repr, eager_factories))}. Add the column, or pass a single environment."
                )
            for name in environments.keys() & set(names_in_rows):
                environment = environments[name]
                row = dict(dataset[names_in_rows.index(name)])
                if not is_single:
                    del row["environment"]
                columns_of_reset = list(row)
                if takes_seed(environment.reset):
                    row = {"seed": 0, **row}
                    columns_of_reset = list(row)
                observation = environment.reset(**row)
                if observation is not None:
                    check_observation(observation, type(environment).__name__, takes_images=takes_images)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # no `reset`, another signature, code of a user, or its server
        where = f" at `reset` with the columns {', '.join(columns_of_reset)}" if columns_of_reset else ""
        raise UserError(
            f"The environment failed{where} ({type(error).__name__}: {error}). Write `reset` as `def reset(self, "
            "**kwargs)` and tools with types and a docstring, and start what they need."
        ) from error
    return eager_factories[None] if is_single else eager_factories


class _EagerFactory:
    """Factory of environments. The first one is started at once."""

    def __init__(self, factory: Callable):
        self.factory = factory
        self.ready = [factory()]

    def __call__(self) -> Any:
        return self.ready.pop() if self.ready else self.factory()

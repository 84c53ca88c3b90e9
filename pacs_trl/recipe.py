"""A recipe: one YAML file, plus command-line overrides, that describes one training run.

`method` decides which trainer runs and which settings exist; everything else is read by TRL's `TrlParser` into the
dataclasses of that trainer. Reading a recipe loads no model, no data and no GPU.
"""

import difflib
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import NamedTuple

from transformers.trainer_utils import HubStrategy
from trl import GRPOConfig, ModelConfig, TrlParser

from .baselines.ppo_config import PPOConfig
from .data import DataArguments
from .pacs_config import PACSConfig
from .redaction import PublishedArguments
from .settings import from_words, illegal_settings, read_mapping, settings_of
from .verification import VerificationArguments


@dataclass
class GRPOArguments(PublishedArguments, GRPOConfig):
    """TRL's configuration, of which trackers get what others may see."""


METHODS = {"pacs": PACSConfig, "grpo": GRPOArguments, "ppo": PPOConfig}


@dataclass
class RunArguments:
    """
    What is run.

    Args:
        method (`str`, *optional*, defaults to `"pacs"`):
            `"pacs"`, or a baseline on the same data and rewards: `"grpo"` (TRL's own trainer) or
            `"ppo"`.
        reward_funcs (`list[str]`, *optional*, defaults to `["math_reward"]`):
            Names from `pacs_trl.rewards`, or `package.module.function` of your own, importable from the working
            directory. With several, `reward_weights` says how they add up.
        expected_processes (`int`, *optional*):
            Number of processes that the batch sizes are written for. Another number makes another batch, which `pacs-trl
            plan` says in words.
    """

    method: str = field(default="pacs", metadata={"help": "Which trainer runs.", "choices": list(METHODS)})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={"help": "Names from pacs_trl.rewards, or package.module.function of your own."},
    )
    expected_processes: int | None = field(
        default=None, metadata={"help": "Number of processes that the batch sizes are written for."}
    )

    def __post_init__(self):
        if not self.reward_funcs:
            raise ValueError("reward_funcs is empty: there would be nothing to learn from. Write [math_reward].")


class Recipe(NamedTuple):
    """A recipe as dataclasses. `training` configures the method's trainer; `settings` are the keys that were given, with
    their final values: written to a file, they repeat the run."""

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    training: GRPOConfig
    verification: VerificationArguments
    settings: dict


class _Parser(TrlParser):
    """Says in one sentence what argparse says after the usage of all settings."""

    def error(self, message: str):
        if not message.startswith("argument --"):
            raise ValueError(f"The settings cannot be read: {message}.")
        names, _, reason = message.removeprefix("argument --").partition(": ")
        raise ValueError(f"`{names.split('/')[0]}` is refused: {reason}.")


def read_recipe(argv: Sequence[str]) -> Recipe:
    """
    Read `--config RECIPE.yaml [--key value ...]`.

    Args:
        argv (`Sequence[str]`):
            Command-line arguments; keys given there win over the file. `--help` prints all keys and exits.

    Returns:
        [`Recipe`].

    Raises:
        `ValueError`: on a file that does not exist or is not a mapping, an unknown method or key (with the nearest known
            one), values of the wrong type or out of range, and whatever the dataclasses refuse.
    """
    if "-h" in argv or "--help" in argv:
        words = _words([word for word in argv if word not in ("-h", "--help")])
        _Parser(_parts(_method(words)), prog="pacs-trl train").parse_args(["--help"])
    settings = read_settings(argv)
    errors = setting_errors(settings)
    if not errors:
        os.environ.update({key: str(value) for key, value in (settings.get("env") or {}).items()})
        recipe, errors = build_recipe(settings)
    if errors:
        raise ValueError(" ".join(errors.values()))
    return recipe


def read_settings(argv: Sequence[str]) -> dict:
    """
    The keys of `--config RECIPE.yaml [--key value ...]`; those of the command line win.

    Raises:
        `ValueError`: if the file does not exist or is no mapping, or a word of the command line belongs to no key.
    """
    words = _words(argv)
    path = words.pop("config", None)
    if path == []:
        raise ValueError("--config must name a recipe.")
    settings = {} if path is None else read_mapping(path[0], "recipe")
    known = settings_of(*_parts(_method(words, settings)))
    for key, values in words.items():
        if key not in known and key.removeprefix("no_") in known:  # booleans that default to True have both
            settings[key.removeprefix("no_")] = False
        else:
            settings[key] = from_words(values, known[key]) if key in known else values
    return settings


def _words(argv: Sequence[str]) -> dict[str, list[str]]:
    """`--key value ...` and `--key=value` as keys with their words."""
    words: dict[str, list[str]] = {}
    key = None
    for word in argv:
        if word.startswith("--"):
            key, *value = word[2:].split("=", 1)
            key = key.replace("-", "_")
            words[key] = value
        elif key is None:
            raise ValueError(f"Cannot make sense of {word!r}: settings are given as --key value.")
        else:
            words[key].append(word)
    return words


def _method(words: dict[str, list[str]], settings: dict | None = None) -> str:
    """The method, PACS also where there is none of that name."""
    method = words["method"][0] if words.get("method") else (settings or {}).get("method")
    return method if isinstance(method, str) and method in METHODS else "pacs"


def build_recipe(settings: dict) -> tuple[Recipe | None, dict[str, str]]:
    """
    Make the dataclasses of a recipe.

    Args:
        settings (`dict`):
            Legal each on its own, see [`setting_errors`].

    Returns:
        [`Recipe`] and no messages, or `None` and what is wrong, by what it is wrong with.
    """
    method = settings.get("method", "pacs")
    errors = {
        name: f"The recipe names no {what}: `{name}` is missing. Set it to {remedy}."
        for name, what, remedy in (
            ("dataset_name", "data", "a named set, a data file or a Hub id"),
            ("model_name_or_path", "model", "a path or a Hub id"),
        )
        if settings.get(name) is None
    }
    if errors:
        return None, errors
    given = {key: value for key, value in settings.items() if key != "env"}
    parser = _Parser(_parts(method))
    parser.set_defaults_with_config(**given)
    parts = []
    try:
        values = vars(parser.parse_args([]))
    except ValueError as error:
        return None, {"settings": str(error)}
    for part in _parts(method):
        try:
            parts.append(part(**{f.name: values[f.name] for f in fields(part) if f.init}))
        except ValueError as error:
            errors[part.__name__] = str(error)
        except (
            TypeError,
            OSError,
            ImportError,
        ) as error:  # how libraries refuse unknown keys, files, missing packages
            errors[part.__name__] = f"The settings of {part.__name__} are refused: {type(error).__name__}: {error}"
    if errors:
        return None, errors
    final = {}
    for key in sorted(given.keys() - {"hub_token"} | {"method"}):  # a recipe is published, a token never
        value = next(getattr(part, key) for part in parts if hasattr(part, key))
        final[key] = value.value if isinstance(value, Enum) else value
    recipe = Recipe(*parts, final)
    if "hub_strategy" not in settings:
        recipe.training.hub_strategy = HubStrategy.END
    errors = relation_errors(recipe)
    return (None, errors) if errors else (recipe, errors)


def _parts(method: str) -> tuple[type, ...]:
    return (RunArguments, DataArguments, ModelConfig, METHODS[method], VerificationArguments)


def setting_errors(settings: dict) -> dict[str, str]:
    """What is wrong with settings, each on its own: its name, its type, its range. One message per key."""
    method = settings.get("method", "pacs")
    if not isinstance(method, str) or method not in METHODS:
        return {"method": f"`method` must be one of {', '.join(METHODS)}; got {method!r}."}
    known = settings_of(*_parts(method))
    messages = {
        key: _explain_unknown(key, method, known.keys() | {"env"})
        for key in sorted(settings.keys() - known.keys() - {"env"})
    }
    if not isinstance(settings.get("env") or {}, dict):
        messages["env"] = f"env must be a mapping of environment variables, got {settings['env']!r}."
    return messages | illegal_settings(settings, known)


def relation_errors(recipe: Recipe) -> dict[str, str]:
    """What is wrong between settings."""
    errors = {}
    if recipe.training.push_to_hub and recipe.training.hub_strategy != HubStrategy.END:
        errors["hub_strategy"] = (
            f"hub_strategy={recipe.training.hub_strategy.value!r} must be 'end': before the end of training transformers would "
            "upload the whole folder, with the token in training_args.bin, logs and completions. Remove the key."
        )
    functions, weights = recipe.run.reward_funcs, recipe.training.reward_weights
    if weights is None:
        return errors
    message = None
    if len(weights) != len(functions):
        message = f"have one weight for each of the {len(functions)} reward functions ({', '.join(functions)})."
    elif recipe.run.method == "pacs" and (abs(sum(weights) - 1) > 1e-6 or min(weights) < 0):
        message = (
            f"not be negative and must sum to 1, not {sum(weights):g}: the weighted sum of the rewards is the label of "
            "PACS, from 0 (wrong) to 1 (right)."
        )
    return errors | ({"reward_weights": f"reward_weights={weights} must {message}"} if message else {})


def _explain_unknown(key: str, method: str, known: Set[str]) -> str:
    owners = [m for m, config in METHODS.items() if key in {f.name for f in fields(config)}]
    if owners:
        return f"`{key}` is a setting of method {' and '.join(owners)}, not of {method}; remove it or change `method`."
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return f"`{key}` is not a setting of method {method}.{hint}"

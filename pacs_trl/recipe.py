"""A recipe: one YAML file, plus command-line overrides, that describes one training run.

`method` decides which trainer runs and which settings exist; everything else is read by TRL's `TrlParser` into the
dataclasses of that trainer. Reading a recipe loads no model, no data and no GPU.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import yaml
from trl import GRPOConfig, ModelConfig, TrlParser

from .baselines.ppo_config import PPOConfig
from .data import DataArguments
from .pacs_config import PACSConfig
from .verification import VerificationArguments


METHODS = {"pacs": PACSConfig, "grpo": GRPOConfig, "ppo": PPOConfig}


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
    """

    method: str = field(default="pacs", metadata={"help": "Which trainer runs.", "choices": list(METHODS)})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={"help": "Names from pacs_trl.rewards, or package.module.function of your own."},
    )


class Recipe(NamedTuple):
    """A recipe as dataclasses. `training` configures the method's trainer; `settings` are the keys that were given, with
    their final values: written to a file, they repeat the run."""

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    training: GRPOConfig
    verification: VerificationArguments
    settings: dict


def read_recipe(argv: Sequence[str]) -> Recipe:
    """
    Read `--config RECIPE.yaml [--key value ...]`.

    Args:
        argv (`Sequence[str]`):
            Command-line arguments; keys given there win over the file.

    Returns:
        [`Recipe`].

    Raises:
        `ValueError`: on a file that does not exist or is not a mapping, an unknown method or key (with the nearest known
            one), and whatever the dataclasses refuse.
    """
    argv = list(argv)
    keys = _keys_in_file(argv)
    given = {*keys, *(a[2:].split("=")[0].replace("-", "_") for a in argv if a.startswith("--")), "config"}
    method = _value_of(argv, "method") or keys.get("method", "pacs")
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
    types = (RunArguments, DataArguments, ModelConfig, METHODS[method], VerificationArguments)
    known = {f.name for t in types for f in fields(t)} | {"config", "env"}
    # `--flag value` and `--no_flag` both exist for booleans that default to True
    unknown = sorted(k for k in given if k not in known and k.removeprefix("no_") not in known)
    if unknown:
        raise ValueError(" ".join(_explain_unknown(key, method, known) for key in unknown))
    if "dataset_name" not in given:
        raise ValueError(
            "The recipe names no data: `dataset_name` is missing. Set it to a named set, a data file or a Hub id."
        )
    if "model_name_or_path" not in given:
        raise ValueError("The recipe names no model: `model_name_or_path` is missing. Set it to a path or a Hub id.")
    parts = TrlParser(types).parse_args_and_config(argv)
    settings = {"method": method}
    for key in sorted(given - {"config", "env", "hub_token"}):  # a recipe is published, a token never
        key = key if key in known else key.removeprefix("no_")
        value = next(getattr(part, key) for part in parts if hasattr(part, key))
        settings[key] = value.value if isinstance(value, Enum) else value
    return Recipe(*parts, settings)


def _keys_in_file(argv: list[str]) -> dict:
    path = _value_of(argv, "config")
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ValueError(f"The recipe {path!r} does not exist (seen from {Path.cwd()}).")
    content = yaml.safe_load(Path(path).read_text())
    if not isinstance(content, dict):
        raise ValueError(f"The recipe {path!r} must be a YAML mapping of settings, got {type(content).__name__}.")
    return content


def _value_of(argv: list[str], key: str) -> str | None:
    for i, argument in enumerate(argv):
        if argument == f"--{key}" and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith(f"--{key}="):
            return argument.split("=", 1)[1]
    return None


def _explain_unknown(key: str, method: str, known: set[str]) -> str:
    owners = [m for m, config in METHODS.items() if key in {f.name for f in fields(config)}]
    if owners:
        return f"`{key}` is a setting of method {' and '.join(owners)}, not of {method}; remove it or change `method`."
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return f"`{key}` is not a setting of method {method}.{hint}"

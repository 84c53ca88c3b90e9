"""Every setting of `pacs-trl train`, as a table: the help of a command and most of a user's mistakes need no library.

`table.json` is made from the dataclasses by `python -m pacs_trl.settings.table`. It is read where the versions of TRL
and transformers are those that it was made with; elsewhere the dataclasses are asked, which takes seconds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import RANGES, Setting, settings_of, typed_settings
from .command_line import Parser, asks_for_help, did_you_mean, environment_errors, read_settings, words_by_key


FILE = Path(__file__).with_suffix(".json")
VERSIONS_OF = ("trl", "transformers")
METHODS = ("pacs", "grpo", "ppo")

# Keys without which there is nothing to train: what they name, and how.
NEEDED = {
    "dataset_name": ("data", "a named set, a data file or a Hub id"),
    "model_name_or_path": ("model", "a path or a Hub id"),
}


def made() -> dict[str, Any]:
    """The table by the dataclasses: settings by group and name; of a name in two groups of a method the first counts."""
    from transformers import TrainingArguments
    from trl import GRPOConfig, ModelConfig

    from ..baselines.ppo_config import PPOConfig
    from ..data import DataArguments
    from ..pacs_config import PACSConfig
    from ..recipe import RunArguments
    from ..verification import VerificationArguments

    of_transformers = [f.name for f in fields(TrainingArguments)]
    groups: dict[str, tuple[type, Sequence[str] | None]] = {
        "run": (RunArguments, None),
        "pacs": (PACSConfig, list(PACSConfig.__annotations__)),
        "ppo": (PPOConfig, list(PPOConfig.__annotations__)),
        "data": (DataArguments, None),
        "verification": (VerificationArguments, None),
        "model": (ModelConfig, None),
        "trl": (GRPOConfig, [f.name for f in fields(GRPOConfig) if f.name not in of_transformers]),
        "transformers": (GRPOConfig, of_transformers),
    }
    return {
        "versions": {name: version(name) for name in VERSIONS_OF},
        "groups": {group: described(part, names) for group, (part, names) in groups.items()},
    }


def described(part: type, names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Fields of a dataclass (all of them, or those named) as plain values: what [`~settings.Setting`] says of them, and their help."""
    by_name = {field.name: field for field in fields(part)}
    found = {}
    for name in by_name if names is None else names:
        field, (default, choices, kinds, items, _) = by_name[name], settings_of(part)[name]
        found[name] = {
            "default": default.value if isinstance(default, Enum) else default,
            "choices": list(choices),
            "kinds": sorted(kinds),
            "items": items,
            "help": " ".join(str(field.metadata.get("help", "")).split()),
            "required": field.default is MISSING and field.default_factory is MISSING,
        }
    return found


@cache
def table() -> dict[str, Any]:
    """The table for the libraries that are installed."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content if content["versions"] == {name: version(name) for name in VERSIONS_OF} else made()


def groups_of(method: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings of a method by group."""
    own = {"pacs", "ppo"} - {method}
    groups, seen = {}, set()
    for group, settings in table()["groups"].items():
        if group not in own:
            groups[group] = {name: entry for name, entry in settings.items() if name not in seen}
            seen |= settings.keys()
    return groups


@cache
def settings_of_method(method: str | None) -> dict[str, Setting]:
    """The settings of a method, those of PACS where there is none of that name."""
    return {
        name: Setting(entry["default"], tuple(entry["choices"]), set(entry["kinds"]), entry["items"], RANGES.get(name))
        for group in groups_of(method if method in METHODS else "pacs").values()
        for name, entry in group.items()
    }


def values_and_errors(
    settings: Mapping[str, Any], known: Mapping[str, Mapping[str, Setting]]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """
    What can be said of the keys of a recipe one by one.

    Args:
        settings (`Mapping[str, Any]`): Keys and values as YAML reads them.
        known (`Mapping[str, Mapping[str, Setting]]`): The settings of each method.

    Returns:
        The legal values, the keys of illegal ones, and a message for each mistake; only that if there is no such method.
    """
    method = settings.get("method", "pacs")
    if not isinstance(method, str) or method not in known:
        near = did_you_mean(method, known) if isinstance(method, str) else ""
        return {}, set(), [f"`method` must be one of {', '.join(known)}; got {method!r}.{near}"]
    given, illegal = typed_settings(settings, known[method])
    missing = [
        f"The recipe names no {what}: `{name}` is missing. Set it to {remedy}."
        for name, (what, remedy) in NEEDED.items()
        if settings.get(name) is None
    ]
    return given, set(illegal), [*_unknown_keys(settings, method, known), *illegal.values(), *missing]


def _unknown_keys(settings: Mapping[str, Any], method: str, known: Mapping[str, Mapping[str, Setting]]) -> list[str]:
    messages = []
    for key in sorted(settings.keys() - known[method].keys() - {"env"}):
        owners = [name for name in known if key in known[name]]
        if owners:
            message = f"`{key}` is a setting of method {' and '.join(owners)}, not of {method}; remove it or change `method`."
        else:
            message = (
                f"`{key}` is not a setting of method {method}.{did_you_mean(key, known[method].keys() | {'config'})}"
            )
        messages.append(message)
    return messages + environment_errors(settings)


def check_train(argv: Sequence[str]) -> None:
    """
    The help of `pacs-trl train` where it is asked for, and everything that the table can say against its arguments.

    Raises:
        `SystemExit`: with code 0, after the help.
        `ValueError`: with every mistake.
    """
    if asks_for_help(argv):
        words = words_by_key([word for word in argv if word not in ("-h", "--help")])
        method = (words.get("method") or ["pacs"])[0]
        train_parser(method if method in METHODS else "pacs").parse_args(["--help"])
    settings = read_settings(argv, settings_of_method)
    errors = values_and_errors(settings, {method: settings_of_method(method) for method in METHODS})[-1]
    if errors:
        raise ValueError(" ".join(errors))


TITLES = {
    "run": "what is run",
    "pacs": "PACS",
    "ppo": "PPO",
    "data": "data",
    "verification": "verification",
    "model": "model (from TRL)",
    "trl": "inherited from TRL: rollouts, rewards, vLLM, the loss of GRPO",
    "transformers": "inherited from transformers: optimizer, schedule, logging, checkpoints, Hub",
}
METAVARS = {"str": "TEXT", "float": "X", "int": "N", "bool": "true|false", "dict": "JSON", "list": "WORD"}


def train_parser(method: str) -> Parser:
    """What prints the help of training with a method."""
    parser = Parser(
        "train",
        f"Train from a recipe. Its keys are those below, here of method {method}; `--method {' or '.join(METHODS)}` with "
        "--help shows those of another. The command line wins over the file. On several processes: accelerate launch -m "
        "pacs_trl.train with the same arguments.",
        usage="pacs-trl train [--config RECIPE.yaml] [--key value ...]",
    )
    parser.add_argument("--config", metavar="RECIPE.yaml", help="file of keys and values")
    for group, settings in groups_of(method).items():
        add_settings(parser.add_argument_group(TITLES[group]), settings)
    return parser


def add_settings(group: Any, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Options of a parser for settings as the table has them; only for their help, so that any word is taken."""
    for name, entry in settings.items():
        notes = [f"One of {', '.join(map(str, entry['choices']))}."] if entry["choices"] else []
        if entry["required"]:
            notes.append("Required.")
        elif entry["default"] not in (None, "", []):
            default = entry["default"]
            notes.append(f"Default: {default if isinstance(default, str) else json.dumps(default)}")
        text = " ".join([entry["help"], *(note.replace("%", "%%") for note in notes)])
        is_list = set(entry["kinds"]) <= {"list", "NoneType"}
        word = next((word for kind, word in METAVARS.items() if kind in entry["kinds"]), "TEXT")
        group.add_argument(f"--{name}", metavar=word, nargs="+" if is_list else None, help=text)


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

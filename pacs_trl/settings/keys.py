"""Keys of a recipe or a command line one by one: what is wrong with them, and their help."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from . import Setting, settings_of, typed_settings
from .command_line import did_you_mean, environment_errors


# Keys without which there is nothing to train: what they name, and how.
NEEDED = {
    "dataset_name": ("data", "a named set, a data file or a Hub id"),
    "model_name_or_path": ("model", "a path or a Hub id"),
}

# Settings that the baselines cannot have, and why.
OF_LATER_DRAWS = (
    *("guidance", "max_guided_fraction", "guided_weight"),
    *(
        "adaptive_rollouts",
        "max_generations",
        "adaptive_rollouts_budget",
        "refill_uniform_groups",
        "max_refill_rounds",
    ),
)
ONLY_OF_PACS = ", whose loss takes groups of one size, all drawn from the prompt that is learnt from, in one draw"


def values_and_errors(
    settings: Mapping[str, Any], known: Mapping[str, Mapping[str, Setting]]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """What can be said of the keys of a recipe one by one, `known` being the settings of each method: the legal
    values, the keys of illegal ones, and a message for each mistake; only that if there is no such method."""
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
            reason = ONLY_OF_PACS if key in OF_LATER_DRAWS else ""
            message = f"`{key}` is a setting of method {' and '.join(owners)}, not of {method}{reason}; remove it or change `method`."
        else:
            message = (
                f"`{key}` is not a setting of method {method}.{did_you_mean(key, known[method].keys() | {'config'})}"
            )
        messages.append(message)
    return messages + environment_errors(settings)


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


METAVARS = {"str": "TEXT", "float": "X", "int": "N", "bool": "true|false", "dict": "JSON", "list": "WORD"}


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

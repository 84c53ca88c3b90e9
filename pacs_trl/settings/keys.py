"""Keys of a recipe one by one: what is wrong with them."""

from collections.abc import Mapping
from typing import Any

from . import Setting, typed_settings
from .command_line import did_you_mean, environment_errors


# Keys without which there is nothing to train: what they name, and how.
NEEDED = {
    "dataset_name": ("data", "a named set, a data file or a Hub id"),
    "model_name_or_path": ("model", "a path or a Hub id"),
}


def values_and_errors(
    settings: Mapping[str, Any], method: str, known: Mapping[str, Mapping[str, Setting]]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Return what can be said of the keys of a recipe one by one, `known` being the settings of each method: the legal
    values, the keys of illegal ones, and a message for each mistake."""
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
            owner = " and ".join(owners)
            message = f"`{key}` is a setting of method {owner}, not of {method}; remove it or change `method`."
        else:
            message = (
                f"`{key}` is not a setting of method {method}.{did_you_mean(key, known[method].keys() | {'config'})}"
            )
        messages.append(message)
    return messages + environment_errors(settings)

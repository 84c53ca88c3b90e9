"""Checks of the values of settings: ranges, choices, and settings that would be ignored. Loads no library."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin

from ..errors import UserError
from .fields import type_hints
from .trl_settings import CHOICES, NEEDS, RANGES, REFUSED, TURNED_OFF_BY_0, WITHOUT_EFFECT


def illegal_values(config: Any) -> list[str]:
    """Return one message per field of a configuration that has another type of number, is out of its range, or is not
    among its choices."""
    hints = type_hints(type(config))  # type: ignore[arg-type]  # of the cache
    messages = []
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        problem = (
            _type_problem(field, hint, value)
            or _range_problem(field, hint, value)
            or _choice_problem(field, hint, value)
        )
        if problem is not None:
            messages.append(problem)
    return messages


def _type_problem(field: Field, hint: Any, value: Any) -> str | None:
    """Return an error message if a field holds numbers, and its value is text, or has a fraction in a field of
    integers."""
    types = {*(get_args(hint) or (hint,))} - {type(None)}
    if types == {int} and isinstance(value, float | str):
        kind = "an integer"
    elif types == {float} and isinstance(value, str):
        kind = "a number"
    else:
        return None
    return f"{field.name} must be {kind}, got {value!r}. Its default is {field.default!r}."


def _range_problem(field: Field, hint: Any, value: Any) -> str | None:
    """Return an error message if a field has a range, and its value is outside, or is missing."""
    legal = field.metadata.get("metavar") or RANGES.get(field.name)
    if legal is None:
        return None
    is_outside = isinstance(value, int | float) and value not in legal
    is_missing = value is None and not _may_be_none(field, hint)
    if not (is_outside or is_missing):
        return None
    turned_off = " 0 turns it off." if field.name in TURNED_OFF_BY_0 else ""
    return f"{field.name} must be {legal}, got {value!r}. Its default is {field.default!r}.{turned_off}"


def _may_be_none(field: Field, hint: Any) -> bool:
    """Return whether a field may be `None`: by its default or by its type. With `num_generations: None`, which the
    type allows, TRL raises a `TypeError`."""
    if field.default is None:
        return True
    return type(None) in get_args(hint) and field.name != "num_generations"


def _choice_problem(field: Field, hint: Any, value: Any) -> str | None:
    """Return an error message if a field has choices, and its value is neither among them nor `None` by default."""
    literals = get_args(hint) if get_origin(hint) is Literal else ()
    choices = field.metadata.get("choices") or literals or CHOICES.get(field.name)
    is_unset = value is None and field.default is None
    if not choices or is_unset or _is_among(value, choices):
        return None
    return f"{field.name} must be one of {', '.join(map(str, choices))}; got {value!r}."


def _is_among(value: Any, choices: Collection[Any]) -> bool:
    """Return whether a value is one of the choices; 0 and 1 are no booleans, which code tests with `is True`."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def refuse_illegal_values(config: Any) -> None:
    """Raise a `ValueError` with all [`illegal_values`]."""
    if messages := illegal_values(config):
        raise UserError(" ".join(messages))


def unbounded_length_errors(config: Any) -> list[str]:
    """Return that `loss_type: dr_grpo` needs `max_completion_length`, if a configuration does not have it."""
    if config.loss_type != "dr_grpo" or config.max_completion_length is not None:
        return []
    return [
        "loss_type='dr_grpo' divides by max_completion_length, which is None. Set max_completion_length, or another "
        "loss_type."
    ]


def ignored_settings(config: Any, names: Collection[str], reason: str, instead: str = "`method: grpo`") -> list[str]:
    """Return one message per setting that a method ignores for a `reason` and that differs from its default; `instead`
    says what takes it."""
    defaults = {field.name: field.default for field in fields(config)}
    return [
        f"{name}={getattr(config, name)!r} would be ignored: {reason}. Remove the key (its default is "
        f"{defaults[name]!r}), or train with {instead}."
        for name in names
        if getattr(config, name) != defaults[name]
    ]


def without_effect(written: Collection[str], values: Mapping[str, Any]) -> list[str]:
    """Return one message per switch that turns written settings off ([`WITHOUT_EFFECT`]); `values` are those of all
    settings."""
    messages, named = [], set()
    for (switch, off), settings in WITHOUT_EFFECT.items():
        keys = [key for key in settings if key in written and values[key] is not None and key not in named]
        if keys and values[switch] == off:
            named.update(keys)
            words = str(off).lower()
            messages.append(
                f"{' and '.join(keys)} {'have' if len(keys) > 1 else 'has'} no effect with {switch}: {words}. Change "
                f"{switch}, or remove {'them' if len(keys) > 1 else 'the key'}."
            )
    return messages


def refused_settings(config: Any) -> list[str]:
    """Return one message per setting of TRL and transformers that no trainer of this package honors and that differs
    from its default, or that is ignored without another setting."""
    messages = []
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value == default:
            continue
        if reason := REFUSED.get(field.name):
            messages.append(f"{field.name}={value!r} {reason}. Remove the key (its default is {default!r}).")
        condition = NEEDS.get(field.name)
        if condition is not None and not getattr(config, condition):
            messages.append(
                f"{field.name}={value!r} would be ignored without {condition}. Set {condition}, or remove the key."
            )
    return messages

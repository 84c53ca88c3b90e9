"""Which values of a setting make sense: types by the dataclasses, ranges by the table below, and what a method
ignores.

Pure functions of values: the configurations ask when they are made, and `recipe.py` asks before it makes any, so that
`train` stops and `plan` goes on with all that is wrong with a recipe, also on a machine that could not train it. Rules
between settings stand with the configurations, those of transformers and TRL in `rollouts/trainer_settings.py`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from .ranges import CHOICES, RANGES, Range


# `name (`type`): text` in the docstring of a dataclass, up to the next name, a heading or an empty line.
DOCUMENTED = re.compile(r"^ +(\w+) \((`.*?)\):\s+(.*?)(?=^ +\w+ \(`|^ *>|^ *$|\Z)", re.MULTILINE | re.DOTALL)


def with_help(arguments: type) -> type:
    """Decorator of a dataclass: what its docstring says of a field is the help of the field on the command line."""
    texts = {
        name: " ".join(text.split()).replace("%", "%%")
        for name, _, text in DOCUMENTED.findall(arguments.__doc__ or "")
    }
    for field in fields(arguments):
        if field.name in arguments.__annotations__:
            field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})
    return arguments


# Of GRPOConfig, what neither PACS nor PPO reads, and why.
OF_OTHER_LOSSES = {
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), "it belongs to the SAPO loss"),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "it belongs to the VESPO loss"
    ),
}

# Texts that may be true or false as well.
_YES, _NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as transformers' parser reads texts
_ALSO_BOOLEAN = {"fsdp", "scale_rewards", "resume_from_checkpoint", "include_num_input_tokens_seen", "report_to"}

# Mappings that may be the name of a JSON file instead.
_MAY_BE_A_FILE = {"accelerator_config", "fsdp_config", "deepspeed"}


class Setting(NamedTuple):
    """A field of a dataclass. (`Field.type` will not do: transformers' parser writes into it.)"""

    default: Any
    choices: tuple
    kinds: set[str]
    items: str  # of a list or a mapping: their kind
    range: Range | None


@cache
def settings_of(*parts: type) -> dict[str, Setting]:
    """The settings of some dataclasses by name; the first one wins."""
    found = {}
    for part in reversed(parts):
        annotations = get_type_hints(part)
        for field in fields(part):
            annotation = annotations[field.name]
            choices = field.metadata.get("choices") or CHOICES.get(field.name) or _enumerated(annotation)
            default = field.default if field.default is not MISSING else None
            if field.default_factory is not MISSING:
                default = field.default_factory()
            bounds = field.metadata.get("range") or RANGES.get(field.name)
            found[field.name] = Setting(default, tuple(choices), _kinds(annotation), _items(annotation), bounds)
    return found


def _enumerated(annotation: Any) -> Sequence[str]:
    """The words that an annotation spells out, as literals or as an enumeration."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    enums = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Enum)]
    return [member.value for enum in enums for member in enum]


def illegal_values(config: object) -> list[str]:
    """What is wrong with the numbers and words of a configuration object by the tables, a sentence for each."""
    found = settings_of(type(config)).items()
    return [text for name, setting in found if (text := illegal_value(name, getattr(config, name), setting))]


def ignored_settings(config_class: type, given: Any, reasons: Mapping[str, str]) -> list[str]:
    """A sentence for each setting that a method would ignore, and that is not at its default; `reasons` says why."""
    known = settings_of(config_class)
    return [
        f"{config_class.__name__} does not take {name}={getattr(given, name)!r}: {reason}, so the value would be "
        f"ignored. Remove the key (its default is {known[name].default!r}), or train with `method: grpo`."
        for name, reason in reasons.items()
        if getattr(given, name) != known[name].default
    ]


def refuse_illegal_values(config: object) -> None:
    """Raises:
    `ValueError`: with one sentence per number or word of a configuration object that is illegal by the tables."""
    if messages := illegal_values(config):
        raise ValueError(" ".join(messages))


def illegal_value(name: str, value: Any, setting: Setting) -> str | None:
    """What is wrong with the value of a setting by the tables, `None` if nothing is; text that spells a number is
    one."""
    if value is None and "NoneType" in setting.kinds:
        return None
    number = _number(value) if setting.kinds & {"int", "float"} else None
    if setting.range is not None and number is not None and number not in setting.range:
        nearest = setting.range.nearest(number) if math.isfinite(number) else None
        return _out_of_range(name, value, setting, nearest)
    if isinstance(number, float) and not math.isfinite(number):
        return f"{name} must be finite, got {value!r}.{_default(setting)}"
    if setting.choices and value not in setting.choices:
        remedy = (
            " Write null, or remove the key." if str(value).lower() == "none" and "NoneType" in setting.kinds else ""
        )
        return f"{name} must be one of {', '.join(map(str, setting.choices))}; got {value!r}.{remedy}"
    return None


def _out_of_range(name: str, value: Any, setting: Setting, nearest: float | None = None) -> str:
    remedy = _default(setting) if nearest is None else f" Nearest legal value: {nearest:g}."
    return f"{name} must be {setting.range}, got {value!r}: {setting.range.why}.{remedy}"


def typed_settings(given: Mapping[str, Any], known: Mapping[str, Setting]) -> tuple[dict[str, Any], dict[str, str]]:
    """Those of the settings, as YAML reads them, that are known and legal, where text that spells a number, a boolean
    or a mapping is one; and one message per illegal one. For `known` see [`settings_of`]."""
    values, messages = {}, {}
    for name, value in given.items():
        if name not in known:
            continue
        if message := _wrong_type(name, value, known[name]) or illegal_value(name, value, known[name]):
            messages[name] = message
        else:
            values[name] = _converted(value, known[name])
    return values, messages


def _wrong_type(name: str, value: Any, setting: Setting) -> str | None:
    """YAML makes lists, texts and numbers of what is written, and the dataclasses keep them as they are."""
    kinds = setting.kinds
    must = f"{name} must be {_words(kinds)}, got"
    if value is None:
        if name == "num_generations":  # its type allows None, and nothing else does
            return _out_of_range(name, value, setting)
        needed = "NoneType" not in kinds and setting.default is not None
        return f"{name} must have a value, got null. Remove it for its default." if needed else None
    if isinstance(value, dict):
        return None if "dict" in kinds else f"{must} a mapping: {value!r}."
    if isinstance(value, list):
        if "list" not in kinds:
            return f"{must} a list: {value!r}."
        numbers = setting.items == "float"
        fits = all(_is_finite(v) if numbers else isinstance(v, str) for v in value)
        return None if fits else f"{name} must be a list of {'finite numbers' if numbers else 'texts'}, got {value!r}."
    if kinds <= {"list", "NoneType"}:
        return f"{name} must be a list, got {value!r}. Write [{value}]."
    if isinstance(value, bool):
        if "bool" in kinds or name in _ALSO_BOOLEAN:
            return None
        read = "an unquoted yes or on as true" if value else "an unquoted no or off as false"
        return f"{must} {value!r}.{f' YAML reads {read}: quote it.' if 'str' in kinds else ''}"
    if isinstance(value, int | float):
        if "float" in kinds or "int" in kinds and (isinstance(value, int) or setting.range is not None):
            return None  # a number that is not whole is said with its range
        return f"{must} {value!r}.{f' Quote it: {str(value)!r}.' if 'str' in kinds else ''}"
    if not isinstance(value, str):  # a date
        return f"{must} {value!r}. Quote it."
    if not kinds & {"str", "bool", "int", "float", "dict"}:
        return f"{must} {value!r}."
    return _wrong_text(name, value, setting)


def _wrong_text(name: str, text: str, setting: Setting) -> str | None:
    kinds = setting.kinds
    if kinds <= {"bool", "NoneType"} and text.lower() not in _YES + _NO:
        return f"{name} must be true or false, got {text!r}."
    if kinds <= {"int", "float", "NoneType"}:
        number, kind = _number(text), "float" if "float" in kinds else "int"
        if number is None and setting.range is not None and setting.range.whole:
            return _out_of_range(name, text, setting)
        if number is None or kind == "int" and isinstance(number, float) and setting.range is None:
            return f"`{name}` is refused: invalid {kind} value: {text!r}."
    if "dict" in kinds and name not in _MAY_BE_A_FILE and _mapping(text) is None:
        return f"{name} must be a mapping, got {text!r}, which is no JSON of one."
    return None


def _converted(value: Any, setting: Setting) -> Any:
    """Text as what it spells where the type is no text; everything else as it is."""
    kinds = setting.kinds - {"NoneType"}
    if isinstance(value, list) and setting.items == "float":
        return [_number(v) for v in value]
    if isinstance(value, dict) and setting.items == "float":
        return {name: v if (number := _number(v)) is None else number for name, v in value.items()}
    if not isinstance(value, str):
        return value
    if kinds == {"bool"}:
        return value.lower() in _YES
    if kinds <= {"int", "float"}:
        return _number(value)
    mapping = _mapping(value) if "dict" in kinds else None
    return value if mapping is None else _converted(mapping, setting)


def from_words(name: str, words: list[str], setting: Setting) -> Any:
    """
    The value that the words behind a key of a command line spell; without any it is true, as for a flag.

    Raises:
        `ValueError`: if there is none, and the setting cannot be true.
    """
    kinds = setting.kinds
    if not words and not kinds & {"bool", "list"} and name not in _ALSO_BOOLEAN:
        raise ValueError(f"--{name} must be followed by {_words(kinds)}.")
    is_text = "str" in kinds and not kinds & {"dict", "int", "float", "bool"}
    values = words if is_text or setting.items == "str" else list(map(_from_yaml, words))
    if kinds <= {"list", "NoneType"}:  # one word is a list of one
        return values
    return True if not values else values[0] if len(values) == 1 else values


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """
    Content of a YAML file that must be a mapping; keys are texts. `what` says what it is in errors: "recipe",
    "accelerate file".

    Raises:
        `ValueError`: if there is no such file, it cannot be read, or it holds something else.
    """
    if not Path(path).is_file():
        wrong = (
            "is a directory, and must be a file" if Path(path).is_dir() else f"does not exist (seen from {Path.cwd()})"
        )
        raise ValueError(f"The {what} {str(path)!r} {wrong}.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The {what} {str(path)!r} cannot be read as UTF-8 text: {error}.") from error
    return parse_mapping(text, f"{what} {str(path)!r}")


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """As [`read_mapping`], of a text that is there already."""
    try:
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"The {where} is not YAML: {' '.join(str(error).split())}.") from error
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"The {where} has {' and '.join(twice)} more than once, of which the last would win. Keep one of each."
        )
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"The {where} must be a YAML mapping of settings, got {found}.")
    return {str(key): value for key, value in content.items()}  # `on:` and `no:` are no strings to YAML


def _from_yaml(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:  # a text with braces or colons
        return word


def _mapping(text: str) -> dict | None:
    """The mapping that a text spells in JSON, if it does."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _kinds(annotation: Any) -> set[str]:
    """Names of the types that an annotation allows; an enumeration is written as text, as its union says."""
    if get_origin(annotation) is Literal:
        return {type(value).__name__ for value in get_args(annotation)}
    if get_origin(annotation) in (list, dict):
        return {get_origin(annotation).__name__}
    if get_args(annotation):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation.__name__}


def _items(annotation: Any) -> str:
    text = str(annotation).replace("dict[str, ", "list[")
    return next((kind for kind in ("float", "str") if f"list[{kind}]" in text), "")


def _words(kinds: set[str]) -> str:
    words = {
        "str": "text",
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "list": "a list",
        "dict": "a mapping",
    }
    return " or ".join(word for kind, word in words.items() if kind in kinds) or "left out, as no recipe can spell it"


def _number(value: Any) -> int | float | None:
    """A number or a text that spells one, as `1e-6` does for YAML and every value of a command line."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _default(setting: Setting) -> str:
    return "" if setting.default is None else f" Its default is {setting.default}."

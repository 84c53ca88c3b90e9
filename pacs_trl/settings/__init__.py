"""Settings from YAML files and command lines, ranges of values, and help.

Commands parse `--config FILE.yaml [--key value ...]` with TRL's parser; unknown names get a suggestion. This module
imports only PyYAML, so that help and wrong options do not wait for libraries.
"""

import argparse
import ast
import difflib
import math
import operator
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml


# Ranges -----------------------------------------------------------------------------------------------------


_COMPARISONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
_WORDS = {"least": "at least", "above": "above", "most": "at most", "below": "below"}


def bounded(default: float | None, **bounds: float) -> Any:
    """Return a dataclass field with legal values, which parsers take as `metavar`: `bounded(1.0, above=0, most=2)`."""
    legal = " and ".join(f"{_WORDS[name]} {bound:g}" for name, bound in bounds.items())
    return field(default=default, metadata={"metavar": legal})


def _is_legal(value: float, legal: str) -> bool:
    conditions = [condition.rpartition(" ") for condition in legal.split(" and ")]
    is_finite = -math.inf < value < math.inf  # also of integers that no float can hold
    return is_finite and all(_COMPARISONS[words](value, float(bound)) for words, _, bound in conditions)


# Legal values of settings of TRL, and names in other libraries.
_TRL = yaml.safe_load(Path(__file__).with_name("trl.yaml").read_text(encoding="utf-8"))


def illegal_values(config: object) -> list[str]:
    """Return one message per field of a configuration that is out of its range or not among its choices."""
    hints, messages = _type_hints(type(config)), []
    for each in fields(config):
        name, value = each.name, getattr(config, each.name)
        legal = each.metadata.get("metavar") or _TRL["ranges"].get(name)
        literals = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        choices = each.metadata.get("choices") or literals
        is_required = name == "num_generations" or type(None) not in get_args(hints[name])  # TRL: a TypeError
        is_missing = value is None and each.default is not None and is_required
        turned_off = " 0 turns it off." if name in _TRL["turned_off_by_0"] else ""
        if legal and (is_missing or isinstance(value, int | float) and not _is_legal(value, legal)):
            messages.append(f"{name} must be {legal}, got {value!r}. Its default is {each.default!r}.{turned_off}")
        elif choices and value not in choices and not (value is None and each.default is None):
            messages.append(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")
    return messages


@cache
def _type_hints(part: type) -> dict[str, Any]:
    return get_type_hints(part)


def refuse_illegal_values(config: object) -> None:
    """Raise a `ValueError` with all [`illegal_values`]."""
    if messages := illegal_values(config):
        raise ValueError(" ".join(messages))


# Settings of GRPOConfig that only shape GRPO's loss, and those of the SAPO and VESPO losses among them.
OF_OTHER_LOSSES = ("sapo_temperature_neg", "sapo_temperature_pos")
OF_OTHER_LOSSES += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
SHAPES_ONLY_GRPO = (
    *("delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "scale_rewards"),
    *("multi_objective_aggregation", "top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl"),
    *OF_OTHER_LOSSES,
)


def ignored_settings(given: Any, names: Collection[str], reason: str, instead: str = "`method: grpo`") -> list[str]:
    """Return one message per setting that a method ignores for a `reason` and that differs from its default; `instead`
    says what takes it."""
    defaults = {each.name: each.default for each in fields(given)}
    return [
        f"{name}={getattr(given, name)!r} would be ignored: {reason}. Remove the key (its default is "
        f"{defaults[name]!r}), or train with {instead}."
        for name in names
        if getattr(given, name) != defaults[name]
    ]


def refused_settings(config: Any) -> list[str]:
    """Return one message per setting of TRL and transformers that no trainer of this package honors and that differs
    from its default, or that is ignored without another setting."""
    messages = []
    for each in fields(config):
        value = getattr(config, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value == default:
            continue
        if reason := _TRL["refused"].get(each.name):
            messages.append(f"{each.name}={value!r} {reason}. Remove the key (its default is {default!r}).")
        condition = _TRL["needs"].get(each.name)
        if condition is not None and not getattr(config, condition):
            messages.append(
                f"{each.name}={value!r} would be ignored without {condition}. Set {condition}, or remove the key."
            )
    return messages


# YAML -------------------------------------------------------------------------------------------------------


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """Read a YAML file that must be a mapping. `what` names it in errors: "recipe", "accelerate file"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"The {what} {str(path)!r} cannot be read from {Path.cwd()} ({getattr(error, 'strerror', error)}). "
            "Correct the path."
        ) from error
    return parse_mapping(text, f"{what} {str(path)!r}")


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a YAML file, see [`read_mapping`]."""
    try:
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"The {where} is not YAML: {' '.join(str(error).split())}. Fix the syntax.") from error
    is_mapping = isinstance(content, dict)
    names = [key.value for key, _ in node.value] if is_mapping else []
    twice = " and ".join(sorted({name for name in names if names.count(name) > 1}))
    if twice or not is_mapping:
        problem = f"contains {twice} more than once. Keep one of each."
        kind = f"must be a YAML mapping, got {type(content).__name__}. Write `key: value` lines."
        raise ValueError(f"The {where} {problem if is_mapping else kind}")
    return {str(key): value for key, value in content.items()}  # YAML reads `on:` and `no:` as booleans


# Command lines ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser of `pacs-trl NAME`. Options are declared with underscores and accept hyphens."""

    def __init__(self, name: str, description: str, **kwargs: Any):
        super().__init__(**{"prog": f"pacs-trl {name}", "description": description, "allow_abbrev": False, **kwargs})

    def parse_known_args(self, args=None, namespace=None):
        self.words = with_underscores(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self.words, namespace)

    def error(self, message):
        known, is_unknown = self._option_string_actions, message.startswith("unrecognized")
        if is_unknown or message.startswith("the following arguments are required"):  # perhaps misspelled
            options = [word.partition("=")[0] for word in self.words if word.startswith("--")]
            for option in [option for option in options if option not in known]:
                if (near := did_you_mean(option, known)) or is_unknown:
                    message = f"There is no option `{option}`.{near}"
                    break
        super().error(message)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with underscores for hyphens in options."""
    return [re.sub("^--[^=]+", lambda option: "--" + option[0][2:].replace("-", "_"), word) for word in argv]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a suggestion of the nearest known names after a space; empty without one."""
    if (ours := _TRL["names_elsewhere"].get(name)) in known:
        return f" Did you mean `{ours}`?"
    nearest = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or sorted(other for other in known if other.startswith(f"{name}_"))[:3]
        or sorted(other for other in known if f"_{name}_" in f"_{other}_")[:3]
        or difflib.get_close_matches(name, known, n=1)
    )
    return f" Did you mean {' or '.join(f'`{other}`' for other in nearest)}?" if nearest else ""


def read_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Read `--config FILE.yaml [--key value ...]`; the command line wins. A key without a value is true. Raises a
    `ValueError` if the file cannot be read or is not a mapping, or a word has no key."""
    words: dict[str, list[str]] = {}
    key = None
    for word in with_underscores(argv):
        if word.startswith("--"):
            key, *value = word[2:].split("=", 1)
            words[key] = value
        elif key is None:
            raise ValueError(f"{word!r} has no key. Write settings as --key value and a recipe as --config FILE.")
        else:
            words[key].append(word)
    path = words.pop("config", None)
    if path == []:
        raise ValueError("--config needs a file. Write --config RECIPE.yaml.")
    settings = {} if path is None else read_mapping(path[0], "recipe")
    for key, values in words.items():
        settings[key] = values if len(values) > 1 else None if values == ["null"] else values[0] if values else True
    return settings


def typed_values(settings: Mapping[str, Any], parts: Sequence[type], what: str) -> dict[str, Any]:
    """Return the values of all fields of some dataclasses without common fields, converted by TRL's parser, without
    `env`. `what` names the configuration in errors."""
    from transformers import HfArgumentParser  # TRL's parser; takes seconds to import

    class FieldParser(HfArgumentParser):
        def error(self, message):
            message = re.sub(r"--(\w+)(/--[\w-]+)?", r"`\1`", message).removeprefix("argument ")
            raise ValueError(f"{message}. Correct or add the value.")

    parser = FieldParser(parts, allow_abbrev=False, add_help=False)
    actions = {action.dest: action for action in parser._actions}
    hints = {name: str(hint) for part in parts for name, hint in _type_hints(part).items()}
    words, as_they_are, unknown = [], {}, []
    for key, value in settings.items():
        if key not in actions and key.removeprefix("no_") in actions and value is True:
            key, value = key.removeprefix("no_"), False
        if key not in actions:
            unknown += [key] if key != "env" else []
            continue
        if isinstance(value, str) and "dict" in hints[key] and value.lstrip().startswith("{"):  # YAML or JSON
            value = parse_mapping(value, f"setting `{key}`")
        if isinstance(value, list) and actions[key].nargs == "+":
            words += [f"--{key}", *map(str, value)]
        elif isinstance(value, list | dict | None) or key == "fsdp" and value is True:  # not a single word
            kind = "None" if value is None else type(value).__name__
            if kind not in hints[key] and value is not True and not (value is None and actions[key].default is None):
                raise ValueError(
                    f"{key} must be {hints[key]}, got {kind}. Write a value of that type, or remove the key."
                )
            as_they_are[key] = value
            actions[key].required = False
        else:
            words.append(f"--{key}={value}")
    if unknown:
        suggestion = did_you_mean(unknown[0], actions.keys() | {"config"}) or " Remove the key."
        raise ValueError(
            f"`{unknown[0]}` is not a setting of {what}.{suggestion}"
            if len(unknown) == 1
            else f"Some keys are not settings of {what}: {', '.join(sorted(unknown))}. Correct or remove them."
        )
    return vars(parser.parse_args(words)) | as_they_are


def set_environment(settings: Mapping[str, Any]) -> None:
    """Set the environment variables of the key `env`."""
    env = settings.get("env") or {}
    if not isinstance(env, dict):
        raise ValueError(f"env must be a mapping, got {env!r}. Write environment variables as `NAME: value` below it.")
    os.environ.update({key: str(value) for key, value in env.items()})


# Help -------------------------------------------------------------------------------------------------------


_PACKAGE = Path(__file__).parents[1]


def answer_help(command: str, argv: Sequence[str]) -> None:
    """Print the help of `train` or `evaluate` if requested, from the source of its dataclasses, and exit; otherwise
    check that the recipe can be read."""
    settings = read_settings([word for word in argv if word not in ("-h", "--help")])
    if not {"-h", "--help"} & set(argv):
        return
    entry = yaml.safe_load((_PACKAGE / "templates" / "help.yaml").read_text())[command]
    method = str(settings.get("method", "pacs"))
    description = textwrap.fill(entry["description"].format(method=method), 100)
    print(f"usage: {entry['usage']}\n\n{description}\n\n  --config FILE.yaml\n      Keys and values.")
    for name in entry["classes"]:
        for node in dataclass_sources(name.format(method=method.replace("_", ""))):
            if declared := [f"  --{ast.unparse(line)}" for line in node.body if isinstance(line, ast.AnnAssign)]:
                text = (ast.get_docstring(node) or "").partition("\n\n")[2]
                print(f"\n{node.name}:", *declared, "", textwrap.indent(text, "  "), sep="\n")
    raise SystemExit(0)


def render(template: str, **values: Any) -> str:
    """Return the text that a file of `templates` makes of values, without empty lines at its end."""
    from jinja2 import Template

    text = (_PACKAGE / "templates" / template).read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, lstrip_blocks=True).render(values).rstrip("\n")


def dataclass_sources(name: str) -> list[ast.ClassDef]:
    """Return the source of a class of this package (its name in any case) and of its bases in the package."""
    for file, text in _sources().items():
        if found := re.search(rf"^class ({name})\b", text, re.MULTILINE | re.IGNORECASE):
            nodes = ast.parse(text, file).body
            node = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == found[1])
            imports = [line for line in nodes if isinstance(line, ast.ImportFrom) and line.level == 0]
            external = {alias.name for line in imports for alias in line.names}  # trl.GRPOConfig
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id not in external]
            return [node, *(source for base in bases for source in dataclass_sources(base))]
    return []


@cache
def _sources() -> dict[str, str]:
    return {str(file): file.read_text(encoding="utf-8") for file in sorted(_PACKAGE.rglob("*.py"))}

"""Help of `train` and `evaluate`, and docs/settings.md, from the fields of their dataclasses.

The configuration of `train` extends TRL's, which takes seconds to import. So `make settings` writes the help of the
default method to a file of the package, too:

    python -m pacs_trl.settings.help
"""

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ..methods import DEFAULT_METHOD, method_names
from . import read_settings
from .fields import type_hints


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
TRAIN_HELP = ROOT / "pacs_trl" / "templates" / "train_help.txt"  # of the default method
WIDTH = 100
TRAIN_USAGE = "pacs-trl train [--config RECIPE.yaml] [--key value ...]"
TRAIN_DESCRIPTION = """\
Train from a recipe. Keys on the command line override the file. This help lists the settings of this package for
method {method}; use `--method NAME --help` for another one. On several processes, run accelerate launch -m
pacs_trl.train with the same arguments. All fields of trl.GRPOConfig (with transformers.TrainingArguments) and of
trl.ModelConfig are settings too (learning_rate, max_steps, num_generations, use_vllm, use_peft, ...): see `trl grpo
--help`, https://huggingface.co/docs/trl/grpo_trainer and
https://huggingface.co/docs/transformers/main_classes/trainer ."""
EVALUATE_USAGE = "pacs-trl evaluate [--config FILE.yaml] --model MODEL --benchmarks NAMES --output_dir DIR [--key ...]"
EVALUATE_DESCRIPTION = """\
Sample completions, grade them, and report pass@k. The command line overrides the file. Running the same command again
samples only what is missing."""


def answer_help(command: str, argv: Sequence[str]) -> None:
    """Print the help of `train` or `evaluate` if requested, and exit; otherwise check that the recipe can be read."""
    settings = read_settings([word for word in argv if word not in ("-h", "--help")])
    if not {"-h", "--help"} & set(argv):
        return
    method = settings.get("method", DEFAULT_METHOD)
    if command == "evaluate":
        text = evaluate_help()
    elif method == DEFAULT_METHOD:
        text = TRAIN_HELP.read_text(encoding="utf-8")
    else:
        text = train_help(method)
    print(text, end="")
    raise SystemExit(0)


def train_help(method: str) -> str:
    """Return the help of `train` for a method. Imports TRL."""
    from ..recipe import settings_classes

    return _help_text(TRAIN_USAGE, TRAIN_DESCRIPTION.format(method=method), settings_classes(method))


def evaluate_help() -> str:
    """Return the help of `evaluate`."""
    from ..evaluation.arguments import EvaluationArguments
    from ..rewards import VerificationArguments

    return _help_text(EVALUATE_USAGE, EVALUATE_DESCRIPTION, (EvaluationArguments, VerificationArguments))


def _help_text(usage: str, description: str, classes: Sequence[type]) -> str:
    lines = [
        f"usage: {usage}",
        "",
        textwrap.fill(description, WIDTH),
        "",
        "  --config FILE.yaml",
        "      Keys and values.",
    ]
    for config in classes:
        for part, settings_of_part in declared_settings(config).items():
            lines += ["", f"{part.__name__}:"]
            for setting in settings_of_part:
                lines.append(f"  --{setting.name} ({legal_values(part, setting)})")
                lines.append(textwrap.indent(textwrap.fill(setting.metadata["help"], WIDTH - 6), " " * 6))
    return "\n".join(lines) + "\n"


def declared_settings(config: type) -> dict[type, list[Field]]:
    """Return the settings of a dataclass by the class that declares them, without those of TRL and transformers. One
    that a subclass declares again belongs to the subclass."""
    remaining = {setting.name: setting for setting in fields(config)}
    sections: dict[type, list[Field]] = {}
    for part in config.__mro__:
        declared = [remaining.pop(name) for name in get_annotations(part) if name in remaining]
        if declared and part.__module__.partition(".")[0] not in ("trl", "transformers"):
            sections[part] = declared
    return sections


def legal_values(part: type, setting: Field) -> str:
    """Return type, legal values, and default of a setting: `float, above 0, default 1.0`."""
    hint = type_hints(part)[setting.name]
    if choices := choices_of(part, setting):
        words = [" | ".join(map(repr, choices))]
    else:
        words = [hint.__name__ if isinstance(hint, type) else str(hint).removesuffix(" | None")]
    if "metavar" in setting.metadata:
        words.append(str(setting.metadata["metavar"]))
    if setting.default is not MISSING:
        words.append(f"default {setting.default!r}")
    elif setting.default_factory is not MISSING:
        words.append(f"default {setting.default_factory()!r}")
    else:
        words.append("required")
    return ", ".join(words)


def choices_of(part: type, setting: Field) -> tuple[Any, ...]:
    """Return the legal values of a setting that has a list of them, `choices` or a `Literal`; else an empty tuple."""
    if "choices" in setting.metadata:
        return tuple(setting.metadata["choices"])
    hint = type_hints(part)[setting.name]
    for member in (hint, *get_args(hint)):  # also of `Literal[...] | None`
        if get_origin(member) is Literal:
            return get_args(member)
    return ()


PAGE_START = """\
Look up every setting of this package: type, legal values, default, and effect. The settings of `trl.GRPOConfig`, which
every method has, and of `trl.ModelConfig` (model, LoRA, quantization) are keys of a recipe, too; `trl grpo --help`
prints them. `pacs-trl train --method NAME --help` and `pacs-trl evaluate --help` print what is below. This page is
generated by `make settings`."""


def reference_page() -> str:
    """Return docs/settings.md."""
    from ..evaluation.arguments import EvaluationArguments
    from ..recipe import config_class, settings_classes

    shared, method_configs = settings_classes("pacs")[:-1], [config_class(method) for method in method_names()]
    sections: dict[type, list[Field]] = {}
    for config in (*shared, *method_configs, EvaluationArguments):
        for part, settings_of_part in declared_settings(config).items():
            section = sections.setdefault(part, [])
            names = {setting.name for setting in section}
            section.extend(setting for setting in settings_of_part if setting.name not in names)
    paragraphs = ["# Settings", _wrapped(PAGE_START)]
    for part, settings_of_part in sections.items():
        paragraphs.append(f"## {part.__name__}")
        paragraphs.append("\n".join(_item(part, setting) for setting in settings_of_part))
    return "\n\n".join(paragraphs) + "\n"


def _item(part: type, setting: Field) -> str:
    return _wrapped(f"- `{setting.name}` ({legal_values(part, setting)}): {setting.metadata['help']}")


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(reference_page(), encoding="utf-8")
    TRAIN_HELP.write_text(train_help(DEFAULT_METHOD), encoding="utf-8")

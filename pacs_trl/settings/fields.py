"""Settings as dataclass fields: default, help, and legal values in one place, which parsers, `--help`, and
docs/settings.md print. Loads no library."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Range:
    """Numbers from `least` (or above `above`) to `most` (or below `below`)."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        if not -math.inf < value < math.inf:  # also of integers that no float can hold
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def setting(default: Any, help: str, *, choices: Sequence[str] | None = None, **bounds: float) -> Any:
    """
    Return a dataclass field for one setting.

    Args:
        default: Its default.
        help (`str`): What it does, as Markdown.
        choices (`Sequence[str]`, *optional*): Legal values, if they are not those of a `Literal`.
        **bounds: Legal numbers: `least`, `above`, `most`, `below`. Parsers take the [`Range`] as `metavar`, because
            they pass metadata to argparse, which knows that key.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    if bounds:
        metadata["metavar"] = Range(**bounds)
    return field(default=default, metadata=metadata)


class Switch(argparse.Action):
    """
    Option of a parser for a field of the type `Literal[True, False, "auto"]`.

    A field of the type `bool` is parsed by transformers, which knows one more way to write it than values:
    `--no_NAME`. Here all of them work too: `--NAME`, `--NAME true`, `--NAME no`, `--no_NAME`, and `--NAME auto`.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any):
        self.negations = [f"--no_{dest}", f"--no-{dest.replace('_', '-')}"]
        kwargs |= {"nargs": "?", "const": True, "type": switch_value}
        super().__init__([*option_strings, *self.negations], dest, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        if option_string not in self.negations:
            setattr(namespace, self.dest, values)
        elif values is self.const:
            setattr(namespace, self.dest, False)
        else:
            raise argparse.ArgumentError(self, f"{option_string} takes no value, got {values!r}")


def switch_value(word: str) -> bool | str:
    """Return what a word means as the value of a [`Switch`], in any case: a boolean if it is one of the words that
    transformers' parser reads as booleans, else the word itself."""
    word = word.lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    return word


def switch(default: bool | str | None, help: str) -> Any:
    """Return a dataclass field for one setting that is true, false, or `"auto"`; its type is a `Literal` of these."""
    return field(default=default, metadata={"help": help, "action": Switch})


def read_switches(config: Any) -> None:
    """Replace 0 and 1 by booleans in the fields of a configuration that [`switch`] declares, as a [`Switch`] reads
    them on a command line and TRL in its boolean settings."""
    for each in fields(config):
        value = getattr(config, each.name)
        if each.metadata.get("action") is Switch and value in (0, 1):
            setattr(config, each.name, bool(value))


@cache
def type_hints(part: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name."""
    return get_type_hints(part)

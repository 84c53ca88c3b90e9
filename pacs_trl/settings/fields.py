"""Settings as dataclass fields: default, help, and legal values in one place, which parsers, `--help`, and
docs/settings.md print. Loads no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@cache
def type_hints(part: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name."""
    return get_type_hints(part)

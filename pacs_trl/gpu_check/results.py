"""What a piece has found, as one file each: whole or not there, and read without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..evaluation.results import write_results
from ..redaction import published


Status = Literal["passed", "failed", "not possible"]


class Piece(NamedTuple):
    """
    What runs in a process of its own.

    Attributes:
        part, name (`str`): Key of `PARTS`, and what the report and the file are called.
        function (`str`): `module:function`; called with `device`, `directory` (its own, empty) and the settings, returns [`Found`].
        settings (`dict`): Plain data: the sizes.
        needs (`tuple[str, ...]`): See [`~machine.lacking`].
        env (`dict`): Environment variables of the process.
        kept (`str`): Name of a directory that pieces share, instead of an empty one.
    """

    part: str
    name: str
    function: str
    settings: dict[str, Any] = {}
    needs: tuple[str, ...] = ()
    env: dict[str, str] = {}
    kept: str = ""


class Found(NamedTuple):
    """What a piece returns: tables as rows of plain data, what must hold and whether it does, and one line that says it all."""

    rows: Sequence[dict[str, Any]]
    bars: dict[str, bool]
    short: str = ""


class NotPossible(Exception):
    """Why a piece cannot be run in this environment, in words for the report."""


def write(output: Path, piece: Piece, status: Status, reason: str = "", **more: Any) -> None:
    """Write the result of a piece, without secrets and paths that an error may name: reports are sent to others."""
    (output / "results").mkdir(parents=True, exist_ok=True)
    entry = {"part": piece.part, "name": piece.name, "status": status, **published({"reason": reason}), **more}
    write_results(output / "results" / f"{piece.name}.json", entry)


def read(output: Path) -> dict[str, dict[str, Any]]:
    """The results that are there, by name. A file that a broken machine or an editor left torn is none."""
    found = {}
    for file in sorted((output / "results").glob("*.json")):
        try:
            entry = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # UnicodeDecodeError too
            continue
        environment = entry.get("environment") if isinstance(entry, dict) else None
        known = isinstance(environment, dict) and isinstance(environment.get("versions"), dict)
        if known and {"part", "name", "status", "reason"} <= entry.keys():
            found[file.stem] = entry
    return found

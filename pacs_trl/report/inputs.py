"""Readers of JSON files for reports, model cards, and uploads; errors name the file and the missing field."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.results import read_results


_RESULTS = "method n k protocol benchmarks created model prompt_digest engine hardware versions commit".split()
_TRAINING = "created num_processes hardware commit versions".split()


class Document(dict):
    """A JSON object of the file `where`; a missing field raises a `ValueError` that names both."""

    def __init__(self, content: dict[str, Any], where: str):
        super().__init__(content)
        self.where = where

    def __missing__(self, field: str):
        raise ValueError(f"{self.where} is damaged: it has no `{field}`. Create it again, or use a complete copy.")


def parse_json(text: str | bytes, where: str, fields: Sequence[str] = ()) -> Document:
    """
    Parse a JSON object as nested [`Document`]s, and check that it has some fields.

    Raises:
        `ValueError`: naming `where`, if it is not such an object.
    """
    try:
        content = json.loads(text, object_hook=lambda found: Document(found, where))
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{where} is damaged: it is not JSON ({error}). Create it again.") from error
    if not isinstance(content, Document):
        raise ValueError(f"{where} is damaged: it is not a JSON object ({content!r:.60}). Create it again.")
    for field in fields:
        content[field]
    return content


def read_json(path: Path, fields: Sequence[str] = ()) -> Document:
    """Read a JSON object from a file, see [`parse_json`]."""
    return parse_json(path.read_bytes(), str(path), fields)


def read_described(path: str | Path) -> Document:
    """
    Read a results file of `pacs-trl evaluate`.

    Raises:
        `ValueError`: if it cannot be read, or a benchmark has no graded problem.
    """
    results = parse_json(json.dumps(read_results(path)), str(path), _RESULTS)
    graded = [any(not problem["ungraded"] for problem in of["problems"]) for of in results["benchmarks"].values()]
    if not results["k"] or not graded or not all(graded):
        raise ValueError(f"{path} has no benchmark, or one without graded problems. Evaluate again.")
    return results


def read_log_history(path: Path) -> list[dict[str, Any]]:
    """Read the log history of a `trainer_state.json`."""
    history = read_json(path)["log_history"]
    for log in history:
        log["step"]
    return history


def read_training_facts(path: Path) -> Document:
    """Read a `provenance.json`: the `evaluation.provenance.training_facts` and additions of the trainer."""
    return read_json(path, _TRAINING)

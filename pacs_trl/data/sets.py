"""Sets of problems for training and evaluation: description, loader, and file reader.

A problem without an answer is dropped and counted by `load_training_data` and an error in `load_benchmark`.
"""

import gzip
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import yaml

from ..errors import UserError
from ..settings.names import function_of_user, hub_suggestion, looks_like_path
from ..verification import gold_texts, last_boxed
from ..verification.cases import json_of_tests
from .messages import content_as_text
from .prompts import is_conversation


logger = logging.getLogger(__name__)

FILE_FORMATS = (".jsonl", ".json", ".parquet")
_OTHER_FILES = (".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".gz", ".zip")  # that name no repository

_ASSERTS = re.compile(r"\s*{.*\"type\"\s*:\s*\"asserts\"", re.DOTALL)


@dataclass(frozen=True)
class ProblemSet:
    """
    Source of a set of problems, and conversion of its rows.

    Args:
        hub_id (`str`): Dataset repository on the Hub.
        revision (`str`, *optional*): Commit of that repository; without it the newest is loaded.
        config (`str`, *optional*): Configuration of the repository.
        split (`str`): Split to load.
        problem_column, solution_column (`str`): Columns of the problem (text or messages) and of the gold answer.
        is_prompt (`bool`): Whether text in `problem_column` is a whole prompt, which gets neither instruction
            nor chat template.
        id_column (`str`, *optional*): Column with the id of a row in samples and grades; by default its position.
        answer_in (`str`): Where `solution_column` has the gold: `"column"` (the whole value), `"last_box"` (the
            content of the last `\\boxed{}`), or `"tests"` (tests of a program, see `verification/cases.py`). A mapping
            is always read as tests.
        instruction (`str`, *optional*): Replacement for the default instruction.
        files (`list[str]`, *optional*): JSON lines files of a repository without splits.
        package_file (`str`, *optional*): Compressed JSON lines file with the rows in a Python package, which is read
            instead where the package is installed.
        convert_rows (`Callable`, *optional*): Converts stored rows into rows with these columns.
        title (`str`): Name in tables.
        version (`int`): Version of a benchmark, raised whenever its rows or the way an answer is read change.
    """

    hub_id: str
    revision: str | None = None
    config: str | None = None
    split: str = "train"
    problem_column: str = "problem"
    solution_column: str = "answer"
    is_prompt: bool = False
    id_column: str | None = None
    answer_in: Literal["column", "last_box", "tests"] = "column"
    instruction: str | None = None
    files: list[str] | None = None
    package_file: str | None = None
    convert_rows: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    title: str = ""
    version: int = 1


def named_sets(kind: str, convert: Mapping[str, Callable]) -> dict[str, ProblemSet]:
    """Read the sets of a kind, `"training"` or `"benchmarks"`; `convert` has `convert_rows` of a set by its name."""
    entries = yaml.safe_load((Path(__file__).parent / "problem_sets.yaml").read_text(encoding="utf-8"))[kind]
    return {name: ProblemSet(convert_rows=convert.get(name), **entry) for name, entry in entries.items()}


def hub_ids() -> list[str]:
    """Return the repositories of all named sets."""
    sets = [*named_sets("training", {}).values(), *named_sets("benchmarks", {}).values()]
    return [entry.hub_id for entry in sets]


# Problem columns of the user's own data, in order of precedence.
PROBLEM_COLUMNS = ("prompt", "problem", "question", "messages")


def choose_columns(
    entry: ProblemSet, names: Sequence[str], problem_column: str | None, solution_column: str | None
) -> ProblemSet:
    """Choose the columns of the user's own data that the user does not name."""
    candidates = [column for column in PROBLEM_COLUMNS if column in names]
    if not candidates:
        candidates = [entry.problem_column]
    is_prompt = False
    if not problem_column:
        problem_column = candidates[0]
        is_prompt = problem_column == "prompt"
    if is_prompt and len(candidates) > 1:
        logger.warning(
            f"The column `prompt` of {entry.title or entry.hub_id} is used unchanged, and `{candidates[1]}` is not. "
            f"Set problem_column: {candidates[1]} to use the other."
        )
    if not solution_column:
        solution_columns = ("solution", "answer") if problem_column == "prompt" else ("answer", "solution")
        default = "messages" if problem_column == "messages" else solution_columns[0]
        solution_column = next((name for name in solution_columns if name in names), default)
    return replace(entry, problem_column=problem_column, solution_column=solution_column, is_prompt=is_prompt)


def load_rows(name: str, entry: ProblemSet, path: str | Path | None = None) -> list[dict[str, Any]]:
    """Load the rows of a set from the file `path`, a function of the user, the Hub, or a folder. Raises a `ValueError`
    that says what to correct if they cannot be loaded."""
    file_of_package = _installed_file(entry.package_file)
    if path is not None or Path(name).is_file():
        rows = read_rows(Path(path or name))
    elif is_function(name):
        rows = list(function_of_user(name, "dataset_name")())
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError(
                f"dataset_name: {name!r} must return rows, one dict with the columns per problem. Correct it."
            )
    elif file_of_package is not None:
        lines = gzip.decompress(file_of_package.read_bytes()).decode().splitlines()
        rows = [json.loads(line) for line in lines if line]
    elif _looks_like_file(name) and not Path(name).exists():
        raise UserError(f"The data {name!r} does not exist (relative to {Path.cwd()}). Correct the path.")
    else:
        rows = _load_with_datasets(name, entry)
    return entry.convert_rows(rows) if entry.convert_rows else rows


def _looks_like_file(name: str) -> bool:
    return looks_like_path(name) or Path(name).suffix.lower() in _OTHER_FILES


def _installed_file(package_file: str | None) -> Path | None:
    """Return the file that a `package_file` of [`ProblemSet`] names, `None` if its package is not installed."""
    if not package_file:
        return None
    package, _, file = package_file.partition("/")
    installed = find_spec(package)
    if installed is None or not installed.origin:
        return None
    return Path(installed.origin).parent / file


def _load_with_datasets(name: str, entry: ProblemSet) -> list[dict[str, Any]]:
    """Load the rows of a repository on the Hub, or of a folder."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    files = [f"hf://datasets/{entry.hub_id}@{entry.revision or 'main'}/{file}" for file in entry.files or ()]
    try:
        if files:
            dataset = load_dataset("json", data_files=files, split="train")
        else:
            dataset = load_dataset(entry.hub_id, entry.config, split=entry.split, revision=entry.revision)
        return dataset.to_list()
    except OSError as error:  # no connection, no such dataset, no rights, a folder of something else
        suggestion = hub_suggestion("datasets", entry.hub_id, hub_ids())
        raise UserError(
            f"{entry.title or name} ({entry.hub_id}) could not be loaded ({error}).{suggestion} Without a "
            "connection, name a downloaded file: dataset_path (named sets) or dataset_name in training, NAME=PATH in "
            "evaluation."
        ) from error
    except (ValueError, DatasetsError) as error:  # no such split or configuration, files that do not fit together
        reason = shorten(str(error.__cause__ or error), 400).rstrip(".")
        raise UserError(
            f"The dataset {entry.hub_id!r} could not be loaded: {reason}. Correct dataset_split, dataset_config, "
            "or its files, or name one of the files."
        ) from error


def is_data_file(name: str | Path) -> bool:
    """Whether a name ends like that of a file that is read."""
    return Path(name).suffix.lower() in FILE_FORMATS


def is_function(name: str) -> bool:
    """Whether the name of a dataset is a function of the user, `package.module:function`."""
    return ":" in name and "/" not in name and not Path(name).exists()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `.jsonl`, `.json`, or `.parquet` file; columns may have values of several types."""
    if path.is_dir():
        raise UserError(f"The data file {str(path)!r} is a directory. Name one file of it.")
    if not path.is_file():
        raise UserError(f"The data file {str(path)!r} does not exist (relative to {Path.cwd()}). Correct the path.")
    suffix = path.suffix.lower()
    if suffix not in FILE_FORMATS:
        remedy = "Convert it"
        if suffix == ".csv":
            remedy += ": `from datasets import Dataset; Dataset.from_csv(FILE).to_json('rows.jsonl')`"
        raise UserError(
            f"The data file {str(path)!r} is not in a format that is read, which are {', '.join(FILE_FORMATS)}. "
            f"{remedy}."
        )
    import pyarrow.parquet

    line_of_error = ""  # for the message
    try:
        if suffix == ".parquet":
            rows = pyarrow.parquet.read_table(path).to_pylist()  # lists stay lists; pandas would make arrays of them
        elif suffix == ".json":
            rows = json.loads(path.read_bytes())
        else:
            rows = []
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # other line ends may be inside a text
                line_of_error = f", line {number}"
                if line.strip():
                    rows.append(json.loads(line))
            line_of_error = ""
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError("it has no rows" if rows == [] else "it must be a list of JSON objects")
    except (ValueError, RecursionError, OSError, pyarrow.ArrowException) as error:
        hint = " A file with one object per line must end in .jsonl." if suffix == ".json" else ""
        raise UserError(
            f"The data file {str(path)!r}{line_of_error} cannot be read: {error}. Write one JSON object with the "
            f"columns per problem.{hint}"
        ) from error
    return rows


def require_columns(source: str, rows: Sequence[dict[str, Any]], columns: Mapping[str, str | None]) -> list[str]:
    """Return the columns of rows. Raises a `ValueError` if one of those that settings name is not among them."""
    present = list(dict.fromkeys(column for row in rows for column in row))
    for setting, column in columns.items():
        if column is not None and column not in present:
            raise UserError(
                f"`{setting}` {column!r} is not a column of {source!r}, which has {', '.join(present)}. Set "
                f"`{setting}` to one of them, or add it to the data."
            )
    return present


def gold_answer(value: Any, answer_in: str = "column") -> str | list[str] | None:
    """Return the gold answer in a cell, a list if there are alternatives, `None` if there is none. A cell contains
    text, a number, a list of alternatives (see [`~verification.gold_texts`]), tests of a program, or a conversation,
    whose last assistant turn has the answer, in a box if there is one. For `answer_in` see [`ProblemSet`]."""
    is_json_of_asserts = isinstance(value, str) and _ASSERTS.match(value)
    if answer_in == "tests" or isinstance(value, Mapping) or is_json_of_asserts:
        return json_of_tests(value)
    if value and is_conversation(value):
        replies = [content_as_text(turn).get("content") for turn in value if turn["role"] == "assistant"]
        last_reply = ""
        if replies and isinstance(replies[-1], str):
            last_reply = replies[-1]
        value = last_boxed(last_reply) or last_reply
    texts = list(gold_texts(value))
    if answer_in == "last_box":
        boxes = [last_boxed(text) for text in texts]
        texts = [content for content in boxes if content]
    if not texts:
        return None
    return texts[0] if len(texts) == 1 else texts

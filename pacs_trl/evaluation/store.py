"""Sample store: an append-only JSONL file of completions that survives SIGKILL at any moment.

The header line describes the samples (model, benchmark, prompt, sampling settings); every other line is a completion.
Opening a file that has completions of other settings raises an error, so that two experiments never share a store. One
process writes at a time: the one that holds the lock of the file. Needs the standard library only.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import UserError
from .requests import Completion, Request


logger = logging.getLogger(__name__)

STORE_FORMAT = 1


class SampleStore(AbstractContextManager):
    """
    Completions of one benchmark, keyed by (problem id, sample number).

    A record has `problem`, `sample`, `seed`, `settings` (digest of the header), `num_tokens`, `finish_reason`,
    `completion`, and more for conversations. Opening removes a last line that a crash truncated, with a warning.

    Args:
        path (`Path`): File, created if it does not exist.
        settings (`dict`): Plain data that identifies the samples.

    Raises:
        `ValueError`: if the file has completions of other settings (the message lists the differences), is being
            written by another process, or is damaged before its last line.
        `OSError`: if the file cannot be created or written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.settings_digest = digest(settings)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.keys: set[tuple[str, int]] = set()
        self._file = open(self.path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            problem = self._read_first_line(settings) or self._read_keys()
        except BlockingIOError:
            problem = "is being written by another process. Wait for it"
        if problem:
            self._file.close()
            raise UserError(f"{self.path} {problem}, or use another output directory.")

    def append(self, request: Request, completion: Completion) -> dict[str, Any]:
        """Write one completion, flush it to the operating system, so that a kill does not lose it, and return its
        record."""
        record = {
            "problem": request.problem_id,
            "sample": request.sample,
            "seed": request.seed,
            "settings": self.settings_digest,
            "num_tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason,
            "completion": completion.text,
            **completion.more,
        }
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        self.keys.add((request.problem_id, request.sample))
        return record

    def __exit__(self, *exc_info) -> None:
        """Flush to disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _read_first_line(self, settings: dict[str, Any]) -> str | None:
        """Compare the header with that of `settings`, and write it if the file has no completions, or a crash
        truncated the header. Return what is wrong, as the predicate of a sentence, or `None`."""
        expected = json.dumps({"format": STORE_FORMAT, "settings": settings}).encode() + b"\n"
        self._file.seek(0)
        first_line = self._file.readline()
        has_samples = self._file.read(1) != b""
        self._file.seek(len(first_line))
        is_header = first_line.startswith(b'{"format": ') and first_line.endswith(b"\n")
        is_without_samples = is_header and not has_samples
        if first_line != expected and (is_without_samples or expected.startswith(first_line)):
            self._file.truncate(0)
            self._file.write(expected)
            self._file.flush()
            return None
        try:
            lines = differences(json.loads(first_line), json.loads(expected))
        except ValueError:
            lines = ["it is not a sample store"]
        if not lines:
            return None
        text = "\n  ".join(lines)
        return f"has samples of other settings (stored != requested):\n  {text}\nUse the stored settings"

    def _read_keys(self) -> str | None:
        """Read the keys of all records, and remove a truncated last line. Return what is wrong, as the predicate of a
        sentence, or `None`."""
        end = self._file.tell()
        for number, line in enumerate(iter(self._file.readline, b""), start=2):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("truncated")  # although the newline may be all that is missing
                record = json.loads(line)
                self.keys.add((record["problem"], record["sample"]))
            except (ValueError, KeyError, TypeError):
                has_further_lines = bool(self._file.readline())
                if has_further_lines:
                    return f"is damaged in line {number}, which is not its last. Remove the line by hand"
                logger.warning(f"{self.path}: removed an incomplete last line; that sample is generated again.")
                self._file.truncate(end)
                return None
            end += len(line)
        return None


def read_samples(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a sample store in file order, without locking it."""
    with Path(path).open("rb") as lines:
        next(lines)  # the settings
        for line in lines:
            yield json.loads(line)


def evaluation_file(output_dir: str | Path, kind: str, benchmark: str) -> Path:
    """Return the path of the "samples" or "grades" of a benchmark in an evaluation directory."""
    suffix = {"samples": ".jsonl", "grades": ".json"}[kind]
    return Path(output_dir) / kind / f"{benchmark.replace('/', '_')}{suffix}"


def identifying_facts(model: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a model: the content of a checkpoint instead of its path, else name and revision."""
    if "digest" not in model:
        return model
    return {key: value for key, value in model.items() if key != "name"}


def digest(settings: dict[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Any, new: Any, *, key: str = "") -> list[str]:
    """Return one line `a.b: OLD != NEW` per leaf in which two pieces of plain data differ, sorted by key."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for name in sorted(old.keys() | new.keys()):
            lines += differences(old.get(name), new.get(name), key=f"{key}.{name}" if key else name)
        return lines
    return [] if old == new else [f"{key}: {old!r} != {new!r}"]

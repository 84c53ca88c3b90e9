"""Sampled completions on disk: an append-only JSONL file that survives kill -9 at any moment.

The first line says what the samples are (model, benchmark, prompt, sampling settings); every other line is one
completion. A file made with other settings is refused, so that two experiments never share a store. One process writes
at a time: the file is never replaced, so whoever holds its lock is its only writer, from the first line on. The file
knows nothing of engines or grading, and needs the standard library only.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


STORE_FORMAT = 1


class SampleStore:
    """
    The completions of one benchmark, keyed by (problem id, sample number).

    Each record holds `problem`, `sample`, `seed`, `settings` (digest of the first line), `num_tokens`, `finish_reason`
    and `completion`. Opening repairs a last line that was cut by a crash; `repaired` then holds a sentence that says
    so.

    Args:
        path (`Path`): The file; made, with its first line, if it does not exist.
        settings (`dict`): Plain data that identifies the samples.

    Raises:
        `ValueError`: if the file was made with other settings (with the differences), is being written by another
            process, is damaged before its last line, or holds a completion twice.
        `OSError`: if the file cannot be made or written: no rights, or no room left.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.settings_digest = digest(settings)
        self.repaired: str | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            lock(
                self._file,
                f"{self.path} is being written by another process; wait for it or use another output directory.",
            )
            _check_settings(self._first_line(settings), settings, self.path)
            self.keys: set[tuple[str, int]] = self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __len__(self):
        return len(self.keys)

    def append(
        self, problem: str, sample: int, seed: int, text: str, num_tokens: int, finish_reason: str
    ) -> dict[str, Any]:
        """Write one completion and hand it to the operating system, so that a killed process loses nothing written."""
        assert (problem, sample) not in self.keys, f"sample {sample} of problem {problem} is already stored"
        record = {
            "problem": problem,
            "sample": sample,
            "seed": seed,
            "settings": self.settings_digest,
            "num_tokens": num_tokens,
            "finish_reason": finish_reason,
            "completion": text,
        }
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        self.keys.add((problem, sample))
        return record

    def records(self) -> Iterator[dict[str, Any]]:
        """Every stored completion in file order; read while nothing is being appended."""
        yield from read_samples(self.path)

    def close(self) -> None:
        """Flush to the disk and release the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _first_line(self, settings: dict[str, Any]) -> bytes:
        """The first line, written now if the file is new or if a crash cut this very line, and nothing else is in
        it."""
        whole = json.dumps({"format": STORE_FORMAT, "settings": settings}).encode() + b"\n"
        found = self._file.readline()
        if found == whole or not whole.startswith(found):
            return found
        self._file.seek(0)
        self._file.write(whole)
        self._file.flush()
        return whole

    def _scan(self) -> set[tuple[str, int]]:
        """Read the keys from the current position on and leave the file positioned behind the last whole record."""
        keys: set[tuple[str, int]] = set()
        line_number = 1
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line:
                return keys
            line_number += 1
            key = _key(line)
            if key is None:
                self._repair(start, line_number)
                return keys
            if key in keys:
                raise ValueError(
                    f"{self.path} holds sample {key[1]} of problem {key[0]} twice (line {line_number}); the counts "
                    "would be wrong. Remove one of the two lines or sample afresh."
                )
            keys.add(key)

    def _repair(self, start: int, line_number: int) -> None:
        if self._file.readline():
            raise ValueError(
                f"{self.path} is damaged in line {line_number}, before its last line. A crash can only cut the last "
                "line, so something else wrote to this file: remove the damaged line by hand, or sample afresh."
            )
        dropped = self._file.tell() - start
        self._file.seek(start)
        self._file.truncate()
        self.repaired = f"{self.path}: removed {dropped} bytes of an incomplete last line; that sample is drawn again."


def read_samples(path: str | Path) -> Iterator[dict[str, Any]]:
    """
    The records of a sample store, in file order, without opening it for writing.

    `pandas.DataFrame(read_samples(PATH)).to_parquet(OTHER_PATH)` makes a Parquet file of it.
    """
    with Path(path).open("rb") as lines:
        next(lines)  # the settings
        for line in lines:
            yield json.loads(line)


def evaluation_file(output_dir: str | Path, kind: str, benchmark: str) -> Path:
    """Where `pacs-trl evaluate` keeps the "samples" or the "grades" of a benchmark."""
    return Path(output_dir) / kind / (benchmark.replace("/", "_") + {"samples": ".jsonl", "grades": ".json"}[kind])


def read_graded(
    output_dir: str | Path, benchmark: str
) -> tuple[dict[str, str], dict[tuple[str, int], dict[str, Any]]]:
    """
    The grades of each problem, one character per sample (1 correct, 0 wrong, - not gradable), and the graded records
    by (problem id, sample number); the store may hold more.

    Raises:
        `ValueError`: if there are no grades, or a graded sample is missing.
    """
    path = evaluation_file(output_dir, "grades", benchmark)
    if not path.is_file():
        raise ValueError(
            f"There is no {path}: this needs samples and grades, so the whole output directory of `pacs-trl "
            "evaluate`, not its results.json alone."
        )
    grades = json.loads(path.read_text(encoding="utf-8"))
    samples = evaluation_file(output_dir, "samples", benchmark)
    records = {(record["problem"], record["sample"]): record for record in read_samples(samples)}
    graded = [(problem, sample) for problem, outcomes in grades.items() for sample in range(len(outcomes))]
    if missing := [key for key in graded if key not in records]:
        raise ValueError(
            f"{samples} lacks sample {missing[0][1]} of problem {missing[0][0]!r}, which {path} grades. Evaluate "
            "again."
        )
    return grades, {key: records[key] for key in graded}


def digest(settings: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Any, new: Any, *, key: str = "") -> list[str]:
    """Where two pieces of plain data differ: one line `a.b: OLD != NEW` per leaf, keys in alphabetical order."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for name in sorted(old.keys() | new.keys()):
            inner = f"{key}.{name}" if key else name
            lines += differences(old.get(name), new.get(name), key=inner)
        return lines
    return [] if old == new else [f"{key}: {old!r} != {new!r}"]


def lock(file: IO, refusal: str) -> None:
    """Hold a file until it is closed. Raises a `ValueError` with these words where another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None


def _check_settings(first_line: bytes, settings: dict[str, Any], path: Path) -> None:
    try:
        header = json.loads(first_line)
    except ValueError:
        header = {}
    if not isinstance(header, dict) or header.get("format") != STORE_FORMAT:
        raise ValueError(f"{path} is not a sample store of format {STORE_FORMAT}; use another output directory.")
    lines = differences(header["settings"], json.loads(json.dumps(settings)))
    if lines:
        raise ValueError(
            f"{path} holds samples made with other settings (stored != asked for):\n  "
            + "\n  ".join(lines)
            + "\nGo back to the stored settings, or use another output directory."
        )


def _key(line: bytes) -> tuple[str, int] | None:
    """Key of a record line; None if the line is not a whole record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return record["problem"], record["sample"]
    except (ValueError, KeyError, TypeError):
        return None

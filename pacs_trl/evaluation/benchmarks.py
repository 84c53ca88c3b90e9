"""The benchmarks of the paper as data: adding one is adding one entry to `BENCHMARKS`.

An entry says where the rows are and which columns hold the problem and the answer; it holds no prompt and no grader,
because those are the ones of training (`pacs_trl.data.build_prompt`, `pacs_trl.verification.Verifier`). Raise `version`
whenever the rows or the way an answer is read change: results of different versions are never put in one table.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from ..data import gold_answer


@dataclass(frozen=True)
class Benchmark:
    """
    Where one benchmark's rows are and how to read them.

    Args:
        title (`str`): Name in tables.
        hub_id (`str`): Dataset repository on the Hub.
        split (`str`): Split to load.
        problem_column, answer_column (`str`): Columns of the problem text and of the gold answer.
        id_column (`str`, *optional*): Column that names a row; without it a problem is named by its position.
        revision (`str`, *optional*): Commit of the dataset repository; without it the newest is loaded. Either way the
            digest of the rows is written to the results.
        config (`str`, *optional*): Dataset configuration.
        answer_in (`str`): How the gold answer is read out of its column, as for training sets (`pacs_trl.data.gold_answer`).
        version (`int`): Version of this entry.
    """

    title: str
    hub_id: str
    split: str
    problem_column: str
    answer_column: str
    id_column: str | None = None
    revision: str | None = None
    config: str | None = None
    answer_in: str = "column"
    version: int = 1


FILE_FORMATS = (".jsonl", ".json", ".parquet")

BENCHMARKS = {
    "math_500": Benchmark(
        title="MATH 500",
        hub_id="HuggingFaceH4/MATH-500",
        split="test",
        problem_column="problem",
        answer_column="answer",
        id_column="unique_id",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    ),
    "amc_23": Benchmark(
        title="AMC 23",
        hub_id="zwhe99/amc23",
        split="test",
        problem_column="question",
        answer_column="answer",
        id_column="id",
    ),
    "aime_2024": Benchmark(
        title="AIME 2024",
        hub_id="Maxwell-Jia/AIME_2024",
        split="train",
        problem_column="Problem",
        answer_column="Answer",
        id_column="ID",
    ),
    "aime_2025": Benchmark(
        title="AIME 2025",
        hub_id="yentinglin/aime_2025",
        split="train",
        problem_column="problem",
        answer_column="answer",
        id_column="id",
    ),
    "beyond_aime": Benchmark(
        title="BeyondAIME",
        hub_id="ByteDance-Seed/BeyondAIME",
        split="test",
        problem_column="problem",
        answer_column="answer",
    ),
    "gsm8k": Benchmark(
        title="GSM8K",
        hub_id="openai/gsm8k",
        config="main",
        split="test",
        problem_column="question",
        answer_column="answer",
        answer_in="after_hashes",
        revision="740312add88f781978c0658806c59bc2815b9866",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem: `id` is unique in its benchmark, `solution` is the gold answer (or alternatives) for the verifier."""

    id: str
    problem: str
    solution: str | list[str]


@dataclass(frozen=True)
class LoadedBenchmark:
    """Problems with the facts that results need: `source` is plain data (id, revision, split, version, digest)."""

    name: str
    title: str
    problems: list[Problem]
    source: dict = field(default_factory=dict)


def load_benchmark(spec: str, *, max_problems: int | None = None) -> LoadedBenchmark:
    """
    Load a benchmark by name.

    Args:
        spec (`str`):
            A name from `BENCHMARKS`; `name=PATH` to read the same columns from a local `.jsonl`, `.json` or `.parquet`
            file; such a PATH alone (or with a name of your own) for a file with the columns `problem` and `answer`; or
            `miniature/<task>` for the test split of a task of the miniature world.
        max_problems (`int`, *optional*):
            Keep the first so many problems.

    Returns:
        [`LoadedBenchmark`].

    Raises:
        `ValueError`: for an unknown name, a missing file or column, a row that is no mapping, an empty benchmark, an empty
        problem or answer, two rows with one id, or a `max_problems` below 1.
    """
    if max_problems is not None and max_problems < 1:
        raise ValueError(
            f"max_problems must be at least 1, got {max_problems}: with no problems there is nothing to evaluate. Leave it out "
            "for all problems."
        )
    name, _, path = spec.partition("=")
    if not path and Path(name).suffix in FILE_FORMATS:
        name, path = Path(name).stem, name
    if name.startswith("miniature/"):
        title, version, rows, source = _miniature_rows(name)
        problems = [Problem(str(i), row["problem"], row["answer"]) for i, row in enumerate(rows)]
    elif name in BENCHMARKS or path:
        entry = BENCHMARKS.get(name) or Benchmark(name, "", "", problem_column="problem", answer_column="answer")
        title, version = entry.title, entry.version
        rows, source = (_file_rows(Path(path)), {"file": Path(path).name}) if path else _hub_rows(entry)
        problems = [_problem(name, entry, i, row) for i, row in enumerate(rows)]
    else:
        raise ValueError(
            f"Unknown benchmark {name!r}. Choose from {', '.join(BENCHMARKS)}, miniature/<task>, point one of them at a "
            "local file with name=PATH, or give the path of a file of your own with the columns `problem` and `answer`."
        )
    if max_problems is not None:
        problems = problems[:max_problems]
    _check_problems(spec, problems)
    source |= {"version": version, "num_problems": len(problems), "digest": problems_digest(problems)}
    return LoadedBenchmark(name, title, problems, source)


def problems_digest(problems: list[Problem]) -> str:
    """First 16 hex digits of the SHA-256 over ids, problems and answers: equal digests mean the same questions."""
    content = json.dumps([[p.id, p.problem, p.solution] for p in problems], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _problem(name: str, entry: Benchmark, index: int, row: dict) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(
            f"Benchmark {name} needs one JSON object with columns per problem, but row {index} is {str(row)[:80]!r}."
        )
    columns = [entry.problem_column, entry.answer_column] + ([entry.id_column] if entry.id_column else [])
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(
            f"Benchmark {name} reads the columns {columns}, but row {index} has no {missing}. Columns found: {list(row)}."
        )
    answer = gold_answer(row[entry.answer_column], entry.answer_in)
    if answer is None:
        raise ValueError(
            f"Benchmark {name} finds no gold answer in column {entry.answer_column!r} of row {index}: "
            f"{str(row[entry.answer_column])[-80:]!r}."
        )
    return Problem(str(row[entry.id_column]) if entry.id_column else str(index), row[entry.problem_column], answer)


def _check_problems(spec: str, problems: list[Problem]) -> None:
    if not problems:
        raise ValueError(f"Benchmark {spec} has no problems; there is nothing to evaluate.")
    first_row: dict[str, int] = {}
    for row, problem in enumerate(problems):
        if problem.id in first_row:
            raise ValueError(
                f"Benchmark {spec} has the problem id {problem.id!r} twice, in rows {first_row[problem.id]} and {row}; "
                "samples are stored by id, so ids must be unique."
            )
        first_row[problem.id] = row
        if not isinstance(problem.problem, str) or not problem.problem.strip():
            raise ValueError(f"Benchmark {spec} has no problem text in row {row} (id {problem.id!r}).")


def _miniature_rows(name: str) -> tuple[str, int, list[dict], dict]:
    from ..miniature import tasks

    task = name.removeprefix("miniature/")
    if task not in tasks.TASKS:
        raise ValueError(f"Unknown miniature task {task!r}. Choose from {', '.join(sorted(tasks.TASKS))}.")
    return (
        task.replace("_", " "),
        1,
        tasks.problems(task, "test"),
        {"generator": "pacs_trl.miniature", "split": "test"},
    )


def _hub_rows(entry: Benchmark) -> tuple[list[dict], dict]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(entry.hub_id, entry.config, split=entry.split, revision=entry.revision)
    except OSError as error:  # no connection, no such dataset, no rights
        raise ValueError(
            f"{entry.title} ({entry.hub_id}) could not be loaded from the Hub: {error}. Without a connection, download its "
            "rows elsewhere and name the file: name=PATH."
        ) from error
    source = {"hub_id": entry.hub_id, "config": entry.config, "split": entry.split, "revision": entry.revision}
    return dataset.to_list(), source


def _file_rows(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"The benchmark file {path} does not exist.")
    if path.suffix == ".jsonl":
        lines = path.read_bytes().split(b"\n")
        return [_parsed(line, f"line {i} of {path}") for i, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".json":
        rows = _parsed(path.read_bytes(), str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path} must hold a list of problems, got {type(rows).__name__}; see also .jsonl.")
        return rows
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()  # lists stay lists; pandas would make arrays of them
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise ValueError(f"The benchmark cannot be read: {path} is not a Parquet file: {error}.") from error
    raise ValueError(f"A benchmark file is .jsonl, .json or .parquet, got {path.name}.")


def _parsed(content: bytes, where: str):
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"The benchmark cannot be read: {where} is not JSON: {error}.") from error

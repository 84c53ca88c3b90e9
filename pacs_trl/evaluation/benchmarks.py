"""Benchmarks of the paper, one entry of `data/problem_sets.yaml` each, and their loader.

An entry names the source and its columns; prompt and grader are those of training, not those of the benchmarks' own
runners. Raise `version` whenever the rows or the way an answer is read change: results of different versions are never
put in one table.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import gym
from ..data.environments import (
    EMPTY_PROMPT,
    environment_of_user,
    examples_of,
    prepare_environments,
    reward_functions_of,
)
from ..data.images import (
    checked_messages,
    image_blocks,
    image_digest,
    image_size,
    images_of_columns,
    with_absolute_paths,
    with_image_blocks,
)
from ..data.prompts import read_problem
from ..data.sets import ProblemSet, choose_columns, gold_answer, is_data_file, load_rows, named_sets, read_rows
from ..errors import UserError
from ..settings import did_you_mean
from ..verification.cases import json_of_tests
from . import benchmark_rows


LETTERS = "ABCD"  # of options

BENCHMARKS = named_sets(
    "benchmarks",
    {
        "livecodebench": benchmark_rows.livecodebench,
        "humaneval": benchmark_rows.humaneval,
        "mbpp": benchmark_rows.mbpp,
        "gpqa_diamond": benchmark_rows.gpqa,
    },
)


@dataclass(frozen=True)
class Problem:
    """
    One problem.

    Attributes:
        id (`str`): Unique in its benchmark.
        problem (`str` or `list[dict]`): Text or messages; in multiple choice the question without options.
        solution (`str` or `list[str]`): The gold answer or a list of alternatives; in multiple choice the letter of
            the correct option in stored order.
        options (tuple of `str`): Answers of multiple choice, in stored order; empty for other problems.
        row (`dict`, *optional*): Of an environment: the arguments of `reset`.
        images (`tuple`): Of columns, as the row has them.
    """

    id: str
    problem: str | list[dict]
    solution: str | list[str]
    options: tuple[str, ...] = ()
    row: dict[str, Any] | None = None
    images: tuple = ()

    @property
    def has_images(self) -> bool:
        """Whether the problem has images, in columns or in blocks of its messages."""
        return bool(self.images) or _has_image_blocks(self.problem)

    def with_images(self, prompt: Any) -> Any:
        """Return a prompt of this problem with its images in blocks."""
        return with_image_blocks(prompt, self.images) if self.has_images else prompt

    def for_seed(self, seed: int) -> tuple[str | list[dict], str | list[str]]:
        """Return problem and gold answer of the sample with this seed, which has its own order of options."""
        if not self.options:
            return self.problem, self.solution
        letters = LETTERS[: len(self.options)]
        shuffled = random.Random(seed).sample(letters, len(letters))  # stored letters in the order of this sample
        lines = []
        for letter, stored_letter in zip(letters, shuffled, strict=True):
            lines.append(f"{letter}) {self.options[LETTERS.index(stored_letter)]}")
        gold_letter = letters[shuffled.index(str(self.solution))]
        return "\n".join([f"{self.problem}\n", *lines]), gold_letter


@dataclass(frozen=True)
class LoadedBenchmark:
    """
    Problems of a benchmark.

    Attributes:
        name (`str`), title (`str`): Name in files and metrics, and in tables.
        problems (`list[Problem]`): In the order of the source.
        source (`dict`): Plain data that identifies the problems: id, revision, split, version, digest.
        instruction (`str`, *optional*): Replacement for the default instruction.
        is_code (`bool`): Whether answers are tests of programs.
        is_prompt (`bool`): Whether text is a whole prompt.
        environment (`tuple`, *optional*): The factories and reward functions of an environment.
    """

    name: str
    title: str
    problems: list[Problem]
    source: dict = field(default_factory=dict)
    instruction: str | None = None
    is_code: bool = False
    is_prompt: bool = False
    environment: tuple[Any, list] | None = None

    @property
    def has_images(self) -> bool:
        """Whether a problem has images."""
        return any(problem.has_images for problem in self.problems)

    @property
    def is_gym(self) -> bool:
        """Whether reasoning-gym generates and grades the problems."""
        return self.source.get("generator") == gym.NAME


def load_benchmark(
    spec: str,
    *,
    max_problems: int | None = None,
    columns: Mapping[str, str] | None = None,
    gym_tasks: Mapping[str, Any] | None = None,
) -> LoadedBenchmark:
    """
    Load the first `max_problems` of a benchmark.

    `spec` is a name in `BENCHMARKS`; `name=PATH` to read its columns from a local `.jsonl`, `.json`, or `.parquet`
    file; a PATH alone (or with another name) for a file of your own, with `problem_column` and `solution_column` in
    `columns`; `reasoning_gym/<task>` for 100 problems of it, with its `config` and `answer` in `gym_tasks`; or
    `module:attribute` for an environment. Raises a `ValueError` for an unknown name, a missing file or column, an
    empty benchmark, problem, or answer, or two rows with one id.
    """
    if ":" in spec and not name_and_path(spec)[1]:
        return _environment(spec, max_problems)
    name, path = checked_name(spec)
    columns = columns or {}
    try:
        if name.startswith(f"{gym.NAME}/") and not path:
            entry, source, rows = _gym_problems(name, gym_tasks or {}, max_problems)
        elif name in BENCHMARKS:
            entry = BENCHMARKS[name]
            if path:
                source = {"file": Path(path).name}
            else:
                source = {fact: getattr(entry, fact) for fact in ("hub_id", "config", "split", "revision")}
            rows = load_rows(name, entry, path or None)
        else:  # a file of the user
            source = {"file": Path(path).name, **columns}
            rows = read_rows(Path(path))
            names = list(dict.fromkeys(column for row in rows for column in row))
            entry = choose_columns(
                ProblemSet("", title=name), names, columns.get("problem_column"), columns.get("solution_column")
            )
        if path or Path(name).is_file():  # paths of images are relative to the file
            rows = [with_absolute_paths(row, Path(path or name).parent) for row in rows]
        problems = [_problem(name, entry, i, row) for i, row in enumerate(rows)][:max_problems]
    except KeyError as error:
        raise UserError(
            f"Benchmark {name} needs the column {error}, which a row lacks. Use the files of the Hub, or name the "
            "columns of a file of your own with problem_column and solution_column."
        ) from error
    counts = Counter(problem.id for problem in problems)
    repeated = [problem_id for problem_id, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"Benchmark {spec} contains the id {repeated[0]!r} twice. Make ids unique: samples are stored by id."
        )
    content = json.dumps([_content(problem) for problem in problems], ensure_ascii=False)
    source |= {"version": entry.version, "num_problems": len(problems), "digest": _digest(content)}
    return LoadedBenchmark(
        name,
        entry.title,
        problems,
        source,
        entry.instruction,
        is_code=json_of_tests(problems[0].solution) is not None,
        is_prompt=entry.is_prompt,
    )


def _gym_problems(
    name: str, gym_tasks: Mapping[str, Any], max_problems: int | None
) -> tuple[ProblemSet, dict[str, Any], list[dict[str, Any]]]:
    """Return entry, source, and rows of a task of reasoning-gym; `name` is `reasoning_gym/<task>`."""
    task = name.partition("/")[2]
    settings_of_user = gym_tasks.get(task)
    settings = gym.task_settings(task, settings_of_user)
    entry = ProblemSet(
        "",
        title=task.replace("_", " "),
        instruction=gym.INSTRUCTION,
        problem_column="question",
        solution_column="solution",
    )
    source = {"generator": gym.NAME, "seed": gym.BENCHMARK_SEED, "config": dict(settings.config)}
    if settings.answer is not None:
        source["answer"] = settings.answer
    return entry, source, gym.benchmark(task, settings_of_user, max_problems)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def checked_name(spec: str) -> tuple[str, str]:
    """Return [`name_and_path`]. Raises a `ValueError` if there is no such benchmark."""
    name, path = name_and_path(spec)
    if not (path or name in BENCHMARKS or name.startswith(f"{gym.NAME}/")):
        raise UserError(
            f"There is no benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} Choose from {', '.join(BENCHMARKS)}, "
            "reasoning_gym/<task>, and NAME=PATH or PATH of a .jsonl, .json, or .parquet file."
        )
    return name, path


def _environment(name: str, max_problems: int | None) -> LoadedBenchmark:
    """Return the examples of an environment; without a dataset, 100 with the seeds of benchmarks."""
    environment = environment_of_user(name, "benchmarks")
    dataset = examples_of(environment, max_problems or gym.BENCHMARK_SIZE, first_seed=gym.BENCHMARK_SEED)
    factories = prepare_environments(environment.environment_factory, {name: dataset}, takes_images=False)
    rows = list(dataset)[:max_problems]
    problems = []
    for i, row in enumerate(rows):
        prompt = read_problem(row.get("prompt"), "prompt") or EMPTY_PROMPT
        problems.append(Problem(str(i), prompt, "", row=row))
    digest = _digest(json.dumps(rows, default=repr))
    source = {"environment": name, "version": 1, "num_problems": len(problems), "digest": digest}
    factories_and_rewards = (factories, reward_functions_of(environment))
    return LoadedBenchmark(name, name, problems, source, is_prompt=True, environment=factories_and_rewards)


def name_and_path(spec: str) -> tuple[str, str]:
    """Split `name`, `name=PATH`, or PATH into the name of a benchmark and the path of a file, or an empty string. The
    name of a PATH alone is that of the file without its suffix."""
    name, _, path = spec.partition("=")
    if not path and is_data_file(name):
        return Path(name).stem, name
    return name, path


def _problem(name: str, entry: ProblemSet, index: int, row: dict) -> Problem:
    """Read a row. Raises a `ValueError` that names benchmark and row if problem, answer, or images cannot be read."""
    try:
        answer = gold_answer(row[entry.solution_column], entry.answer_in)
        problem = read_problem(row[entry.problem_column], entry.problem_column)
        images = tuple(images_of_columns(row))
        if images or _has_image_blocks(problem):
            _check_images(problem, images, entry)
        if answer is None or problem is None:
            column = entry.problem_column if problem is None else entry.solution_column
            raise UserError(f"the column {column!r} is empty ({row[column]!r:.80}). Remove the row, or complete it.")
    except ValueError as error:
        raise UserError(f"Benchmark {name}, row {index}: {error}") from error
    problem_id = str(row[entry.id_column]) if entry.id_column else str(index)
    is_multiple_choice = entry.convert_rows is benchmark_rows.gpqa  # rows of others may have a column of this name
    options = tuple(row["options"]) if is_multiple_choice else ()
    return Problem(problem_id, problem, answer, options, images=images)


def _has_image_blocks(problem: Any) -> bool:
    """Return whether the messages of a problem have blocks of images."""
    return next(image_blocks(problem), None) is not None


def _check_images(problem: Any, images: Sequence[Any], entry: ProblemSet) -> None:
    """Raise a `ValueError` if images of columns or of blocks cannot be read, or do not fit the placeholders of the
    problem."""
    if isinstance(problem, str) and not entry.is_prompt:  # text that becomes a message
        problem = [{"role": "user", "content": problem}]
    messages = checked_messages(problem, images)
    images_of_blocks = [block["image"] for block in image_blocks(messages) if "image" in block]
    for image in [*images, *images_of_blocks]:
        image_size(image)


def _content(problem: Problem) -> list:
    """Return what identifies a problem as plain data; images by their hashes."""
    text = problem.problem
    hashes = [image_digest(image) for image in problem.images]
    if isinstance(text, list) and problem.has_images:
        for block in image_blocks(text):
            if block.get("image") is not None:
                hashes.append(image_digest(block["image"]))
        text = json.loads(json.dumps(text, default=lambda image: "image"))
    content = [problem.id, text, problem.solution, *problem.options]
    if hashes:
        content.append(hashes)
    return content

"""Benchmarks of the paper, one entry of `data/problem_sets.yaml` each, and their loader.

An entry names the source and its columns; prompt and grader are those of training, not those of the benchmarks' own
runners. Raise `version` whenever the rows or the way an answer is read change: results of different versions are never
put in one table.
"""

import builtins
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from ..verification.code import CodeVerifier


LETTERS = "ABCD"
# The window of the PACS paper's evaluation, both days included: 322 problems, as its scores imply.
LIVECODEBENCH_WINDOW = ("2024-07-01", "2025-01-01")
# Imports that LiveCodeBench's runner prepends to a program.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
).split()
_PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join(_MODULES[:12])}",
        f"import {', '.join(_MODULES[12:])}",
        "sys.setrecursionlimit(50000)",
    ]
)
_UNPACK = """
import base64, pickle, sys, zlib
sys.stdout.write(pickle.loads(zlib.decompress(base64.b64decode(sys.stdin.read()))))
"""


def _livecodebench(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the rows of the window, with public and private tests. Raises a `ValueError` for tests that cannot be
    unpacked, or an empty window."""
    first, last = LIVECODEBENCH_WINDOW
    chosen = [row for row in rows if first <= str(row["contest_date"])[:10] <= last]
    if not chosen:
        raise UserError(f"None of the {len(rows)} rows of LiveCodeBench is from {first} to {last}. Use other files.")
    packed = [row["private_test_cases"] for row in chosen]
    unpacked = _unpack([text for text in packed if not text.lstrip().startswith("[")])
    converted = []
    for row, text in zip(chosen, packed, strict=True):
        private = text if text.lstrip().startswith("[") else next(unpacked)
        cases = json.loads(row["public_test_cases"]) + json.loads(private)
        name = json.loads(row["metadata"]).get("func_name")
        task = "Read the input from standard input and write the answer to standard output."
        if row.get("starter_code"):
            task = f"Complete this code:\n```python\n{row['starter_code'].strip()}\n```"
        tests: dict[str, Any] = {"type": "stdin_stdout"} if name is None else {"type": "function", "name": name}
        tests["cases"] = [{"input": case["input"], "output": case["output"]} for case in cases]
        if name is not None:
            for case in tests["cases"]:
                case["input"] = [json.loads(line) for line in case["input"].split("\n")]
                case["output"] = json.loads(case["output"])
        tests |= {"compare": "lines" if name is None else "tokens", "prelude": _PRELUDE}
        problem = f"{row['question_content'].strip()}\n\n{task}"
        converted.append({"id": row["question_id"], "problem": problem, "answer": tests})
    return converted


def _unpack(texts: list[str]) -> Iterator[str]:
    """Yield the text in each pickle. A pickle can run any program, so they are unpacked in the sandbox."""
    if not texts:
        return
    verifier = CodeVerifier(
        num_workers=2, cpu_seconds=60.0, timeout_seconds=120.0, memory_limit_mb=4096, output_limit_mb=1024
    )
    with verifier:
        for start in range(0, len(texts), 8):  # some are a hundred megabytes
            part = texts[start : start + 8]
            for execution in verifier.run([_UNPACK] * len(part), part):
                if execution.outcome is not None:
                    why = (execution.messages.strip().splitlines() or [execution.error])[-1]
                    raise UserError(f"Private tests of LiveCodeBench cannot be unpacked: {why}. Check the file.")
                yield execution.output


def _gpqa(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert questions with options, of which the correct one is stored first; each sample has its own order."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return [
        {
            "id": row.get("Record ID") or str(index),
            "problem": row["Question"].strip(),
            "options": [row[name].strip() for name in names],
            "answer": "A",
        }
        for index, row in enumerate(rows)
    ]


def _humaneval(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert problems whose asserts are in a function `check`; the prompt has their imports and helpers."""
    return [
        {
            "id": row["task_id"],
            "problem": f"Complete this function:\n```python\n{row['prompt'].strip()}\n```",
            "answer": _asserts(row["test"], row["entry_point"], row["prompt"]),
        }
        for row in rows
    ]


def _mbpp(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert problems of MBPP, or of its sanitized version; the asserts are part of the problem, as usual."""
    converted = []
    for row in rows:
        text, asserts = row.get("text") or row["prompt"], "\n".join(row["test_list"])
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
        defined = re.findall(r"^\s*(?:def|class)\s+(\w+)", row.get("code") or "", re.MULTILINE)
        called = re.findall(r"(\w+)\(", asserts)
        name = min(called, key=lambda name: (name not in defined, name in vars(builtins)), default=None)
        problem = f"{text}\n\nThe program must pass these tests:\n```python\n{asserts}\n```"
        converted.append({"id": row["task_id"], "problem": problem, "answer": _asserts(f"{setup}\n{asserts}", name)})
    return converted


def _asserts(code: str, name: str | None, prelude: str = "") -> dict[str, Any]:
    return {"type": "asserts", "code": code, "entry_point": name, "prelude": prelude}


_CONVERT = {"livecodebench": _livecodebench, "humaneval": _humaneval, "mbpp": _mbpp, "gpqa_diamond": _gpqa}
BENCHMARKS = named_sets("benchmarks", _CONVERT)


@dataclass(frozen=True)
class Problem:
    """One problem: `id` is unique in its benchmark, `problem` is text or messages, `solution` is the gold answer or a
    list of alternatives. In multiple choice `problem` is the question, `options` are the answers in stored order, and
    `solution` is a letter."""

    id: str
    problem: str | list[dict]
    solution: str | list[str]
    options: tuple[str, ...] = ()
    row: dict[str, Any] | None = None  # of an environment: the arguments of `reset`
    images: tuple = ()  # of columns, as the row has them

    @property
    def has_images(self) -> bool:
        return bool(self.images) or next(image_blocks(self.problem), None) is not None

    def with_images(self, prompt: Any) -> Any:
        """Return a prompt of this problem with its images in blocks."""
        return with_image_blocks(prompt, self.images) if self.has_images else prompt

    def for_seed(self, seed: int) -> tuple[str | list[dict], str | list[str]]:
        """Return problem and gold answer of the sample with this seed, which has its own order of options."""
        if not self.options:
            return self.problem, self.solution
        letters = LETTERS[: len(self.options)]
        order = random.Random(seed).sample(letters, len(letters))  # stored letters as they are shown
        listed = "\n".join(
            f"{shown}) {self.options[LETTERS.index(stored)]}" for shown, stored in zip(letters, order, strict=True)
        )
        return f"{self.problem}\n\n{listed}", letters[order.index(str(self.solution))]


@dataclass(frozen=True)
class LoadedBenchmark:
    """Problems of a benchmark: `source` is plain data (id, revision, split, version, digest), `instruction` replaces
    the default one; with `is_code` answers are tests of programs; with `is_prompt` text is a whole prompt;
    `environment` has the factories and reward functions."""

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
    source: dict[str, Any]
    try:
        if name.startswith(f"{gym.NAME}/") and not path:
            task = name.partition("/")[2]
            written = (gym_tasks or {}).get(task)
            settings = gym.task_settings(task, written)
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
            rows = gym.benchmark(task, written, max_problems)
        elif name in BENCHMARKS:
            entry = BENCHMARKS[name]
            source = {fact: getattr(entry, fact) for fact in ("hub_id", "config", "split", "revision")}
            if path:
                source = {"file": Path(path).name}
            rows = load_rows(name, entry, path or None)
        else:  # a file of the user
            source = {"file": Path(path).name, **columns}
            rows = read_rows(Path(path))
            names = list(dict.fromkeys(column for row in rows for column in row))
            entry = choose_columns(
                ProblemSet("", title=name), names, columns.get("problem_column"), columns.get("solution_column")
            )
        if path or Path(name).is_file():
            rows = [with_absolute_paths(row, Path(path or name).parent) for row in rows]
        problems = [_problem(name, entry, i, row) for i, row in enumerate(rows)][:max_problems]
    except KeyError as error:
        raise UserError(
            f"Benchmark {name} needs the column {error}, which a row lacks. Use the files of the Hub, or name the "
            "columns of a file of your own with problem_column and solution_column."
        ) from error
    if repeated := [row_id for row_id, count in Counter(p.id for p in problems).items() if count > 1]:
        raise UserError(
            f"Benchmark {spec} contains the id {repeated[0]!r} twice. Make ids unique: samples are stored by id."
        )
    is_code = json_of_tests(problems[0].solution) is not None
    content = json.dumps([_content(problem) for problem in problems], ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    source |= {"version": entry.version, "num_problems": len(problems), "digest": digest}
    return LoadedBenchmark(name, entry.title, problems, source, entry.instruction, is_code, entry.is_prompt)


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
    prompts = [read_problem(row.get("prompt"), "prompt") or EMPTY_PROMPT for row in rows]
    problems = [Problem(str(i), prompt, "", row=rows[i]) for i, prompt in enumerate(prompts)]
    digest = hashlib.sha256(json.dumps(rows, default=repr).encode()).hexdigest()[:16]
    source = {"environment": name, "version": 1, "num_problems": len(problems), "digest": digest}
    factories_and_rewards = (factories, reward_functions_of(environment))
    return LoadedBenchmark(name, name, problems, source, is_prompt=True, environment=factories_and_rewards)


def name_and_path(spec: str) -> tuple[str, str]:
    """Split a spec into the name of a benchmark and the path of a file, or an empty string."""
    name, _, path = spec.partition("=")
    return (Path(name).stem, name) if not path and is_data_file(name) else (name, path)


def _problem(name: str, entry: ProblemSet, index: int, row: dict) -> Problem:
    try:
        answer = gold_answer(row[entry.solution_column], entry.answer_in)
        problem = read_problem(row[entry.problem_column], entry.problem_column)
        images = tuple(images_of_columns(row))
        if images or next(image_blocks(problem), None) is not None:
            _check_images(problem, images, entry)
        if answer is None or problem is None:
            column = entry.problem_column if problem is None else entry.solution_column
            raise UserError(f"the column {column!r} is empty ({row[column]!r:.80}). Remove the row, or complete it.")
    except ValueError as error:
        raise UserError(f"Benchmark {name}, row {index}: {error}") from error
    row_id = str(row[entry.id_column]) if entry.id_column else str(index)
    options = tuple(row["options"]) if entry.convert_rows is _gpqa else ()
    return Problem(row_id, problem, answer, options, images=images)


def _check_images(problem: Any, images: Sequence[Any], entry: ProblemSet) -> None:
    """Raise a `ValueError` if images cannot be read, or do not fit the placeholders of the problem."""
    is_question = isinstance(problem, str) and not entry.is_prompt  # which becomes a message
    messages = checked_messages([{"role": "user", "content": problem}] if is_question else problem, images)
    for image in [*images, *(block["image"] for block in image_blocks(messages) if "image" in block)]:
        image_size(image)


def _content(problem: Problem) -> list:
    """Return what identifies a problem as plain data; images by their hashes."""
    text, hashes = problem.problem, [image_digest(image) for image in problem.images]
    if isinstance(text, list) and problem.has_images:
        images = [block["image"] for block in image_blocks(text) if block.get("image") is not None]
        hashes += [image_digest(image) for image in images]
        text = json.loads(json.dumps(text, default=lambda image: "image"))
    return [problem.id, text, problem.solution, *problem.options, *([hashes] if hashes else [])]

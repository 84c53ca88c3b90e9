"""Grading of completions against gold answers, in processes that can be killed.

sympy evaluates the model's answers and holds the interpreter meanwhile, so neither a thread nor a signal handler can
stop it reliably: one power tower can stall a training node. Grading therefore runs in worker processes with limits on
CPU time, wall-clock time, and memory: `pool.py` watches them, and `worker.py` grades. This module is the interface of
trainer and evaluation. The workers import it too, so it needs only the standard library.
"""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from hashlib import blake2b
from multiprocessing.connection import Connection
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError
from .numerals import MAX_EXPONENT


class Outcome(IntEnum):
    """
    Result of grading one completion. As a label: 1.0, 0.0, or `None` for a completion that is masked out.

    `TIMEOUT`, `KILLED`, and `TOO_LONG` count as wrong, because a policy must not leave its group by writing an answer
    that cannot be graded. They have separate metrics, because the verifier may be the cause.
    """

    CORRECT = 0
    WRONG = 1  # the answer differs from the gold
    NO_ANSWER = 2  # the completion has no answer or is not text, or the extractor failed
    GOLD_UNPARSEABLE = 3  # missing or unreadable gold answer
    TIMEOUT = 4  # over the CPU time or wall-clock limit
    KILLED = 5  # the worker ran out of memory, crashed, or was killed from outside
    TOO_LONG = 6  # completion over the length limit, not graded
    ERROR = 7  # the program ended with an exception

    @property
    def label(self) -> float | None:
        if self is Outcome.GOLD_UNPARSEABLE:
            return None
        return 1.0 if self is Outcome.CORRECT else 0.0


class Grade(NamedTuple):
    """Outcome of one completion and its wall-clock seconds (0.0 from the cache). For programs also the share of passed
    tests, and the error of the first failed one."""

    outcome: Outcome
    seconds: float = 0.0
    share: float = 0.0
    error: str = ""


def completion_text(completion: Any) -> str | None:
    """Return the text of a completion, plain (`str`) or conversational (content of the last message); `None` for any
    other type and after the reply of a tool."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = None if completion[-1].get("role") == "tool" else completion[-1].get("content")
    return completion if isinstance(completion, str) else None


# GSM8K's mark of the final answer. JSON of tests may contain the mark too, followed by a quotation mark.
_AFTER_HASHES = re.compile(r"(?:\A|\s)####\s*([^\n\"]+)\Z")
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gold_texts(gold: Any) -> tuple[str, ...]:
    """Return the alternative gold answers of a cell of the `solution` column as strings: from a string, a number, or a
    list of these, without missing ones (`None`, NaN, blank) and other types. 27.0 becomes "27", 1e-05 becomes
    "0.00001", and a worked solution that ends in `#### 1,200`, as in GSM8K, becomes "1200"."""
    if isinstance(gold, list | tuple):
        return tuple(text for item in gold for text in gold_texts(item))
    if not isinstance(gold, str | Number) or gold != gold:  # NaN, a missing number in tables
        return ()
    if not isinstance(gold, str):
        return _number_texts(gold)
    text = _plain(gold).strip()
    if final := _AFTER_HASHES.search(text):
        text = final.group(1)
        text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    return (text,) if text else ()


def _number_texts(number: Any) -> tuple[str, ...]:
    """Return a number in decimal notation, without the decimals of a whole number, and a large float such as 6.02e23
    also as a product with a power of ten, because math-verify compares digits with a rounded product as unequal."""
    text = str(number)
    try:
        value = Decimal(text)
    except InvalidOperation:  # a boolean, a fraction, or a complex number
        return (text,)
    if not value.is_finite() or abs(value.adjusted()) > MAX_EXPONENT:
        return (text,)
    digits = format(value.to_integral_value() if value == value.to_integral_value() else value, "f")
    mantissa, _, exponent = text.partition("e+")
    return (digits, f"{mantissa} \\times 10^{{{exponent}}}") if exponent else (digits,)


def _plain(text: str) -> str:
    """Return a plain `str`: the pool cannot unpickle a subclass whose module it has not imported."""
    return str.__str__(text)


PROTOCOLS = ("robust", "authors", "trl", "number", "reasoning_gym")
# Longer completions are never parsed.
MAX_CHARACTERS = 200_000
_MAX_GOLDS = 4096  # about 20 CPU seconds

# TeX also boxes a number, letter, or command without braces: `\boxed 9`, `\boxed\frac{1}{2}`.
_BARE_CONTENT = r"[-+]?\d+(?:[.,/]\d+)*|[A-Z](?![A-Za-z])|-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|-?\\sqrt\{[^{}]*\}"
_BOX_OR_BRACE = re.compile(
    rf"\\(?:f?boxed|f?box|framebox)\s*\{{|\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?P<bare>{_BARE_CONTENT})|[{{}}]"
)


def last_boxed(text: str, with_braces: bool = False) -> str | None:
    """Return the content of the last box: `\\boxed{...}`, `\\fbox{...}`, or `\\framebox{...}` with balanced braces, or
    unless `with_braces`, a number, letter, or command without braces, as in `\\boxed 9`. `None` if there is none or
    the text exceeds `MAX_CHARACTERS`. Takes linear time, because this also runs in the trainer."""
    if len(text) > MAX_CHARACTERS:
        return None
    # For each open brace the start of its box; `None` without a box.
    opened: list[int | None] = []
    last = None
    for match in _BOX_OR_BRACE.finditer(text):
        if match["bare"] is not None:
            if not with_braces:
                last = slice(*match.span("bare"))
        elif match.group() != "}":
            opened.append(None if match.group() == "{" else match.end())
        elif opened and (start := opened.pop()) is not None and (last is None or start > last.start):
            last = slice(start, match.start())
    return None if last is None else text[last].strip()


def final_answer(text: str, with_braces: bool = False) -> str | None:
    """Return the content of the last `<answer>...</answer>`, else of the last box (see [`last_boxed`])."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else last_boxed(text, with_braces)


def usable_processors() -> int:
    """Return the number of processors that this process may use; those of the machine where the system has no limit
    of processes (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_num_workers() -> int:
    """Return the number of usable processors, divided by the ranks of this node, between 1 and 16."""
    return min(16, max(1, usable_processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def connect(end: socket.socket, send_seconds: float) -> Connection:
    """Return a connection that takes over this end of a socket pair. Sending raises an `OSError` if the peer receives
    nothing for `send_seconds`."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(send_seconds) + 1, 0))
    return Connection(end.detach())


class ChildProcess:
    """
    A module of this folder that runs its `main` in a fresh interpreter, until the connection to it closes. `end`
    closes it and waits; it is also called when the object is collected or the interpreter exits.

    Args:
        module (`str`): Name of the module.
        connection (`Any`): This side's end of the connection, with a method `close`.
        settings (`dict`): Passed to the process as JSON, with the id of this process as `parent_pid`.
        flags (sequence of `str`, *optional*): Options of the interpreter.
        env (`dict`, *optional*): Environment variables, by default those of this process.
        **popen_arguments: Streams and inherited files, see [`subprocess.Popen`].
    """

    def __init__(
        self,
        module: str,
        connection: Any,
        settings: dict[str, Any],
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        **popen_arguments: Any,
    ):
        self.connection = connection
        # The package of this process, last on the path, where it hides no other module.
        package_root = str(Path(__file__).resolve().parents[2])
        code = f"import sys; sys.path.append({package_root!r}); "
        code += f"from pacs_trl.verification.{module} import main; sys.path.pop(); main()"
        # The order of sets is then equal in every run, hence sympy's rewriting and the outputs of programs.
        env = {**(os.environ if env is None else env), "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            [sys.executable, *flags, "-P", "-c", code, json.dumps(settings | {"parent_pid": os.getpid()})],
            start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer, which then ends the process
            env=env,
            **popen_arguments,
        )
        self.pid = process.pid
        self.end = weakref.finalize(self, _end_process, process, connection, os.getpid())


def _end_process(process: subprocess.Popen, connection: Any, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_verifiers: "weakref.WeakSet[BaseVerifier]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Replace locks, which threads of the parent may hold, and workers, which answer to the parent."""
    for verifier in _verifiers:
        verifier._lock, verifier._pool = threading.Lock(), None


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(eq=False)
class BaseVerifier(ABC):
    """
    Lock and cache of a verifier; subclasses provide the four abstract methods. All public methods are thread-safe:
    batches of different threads queue. A forked process starts other workers.
    """

    # Outcomes of which the verifier or the data may be the cause instead of the model.
    FAILURES: ClassVar[frozenset[Outcome]] = frozenset(
        {Outcome.GOLD_UNPARSEABLE, Outcome.TIMEOUT, Outcome.KILLED, Outcome.TOO_LONG}
    )
    cache_size = 65_536  # grades

    num_workers: int | None = None
    timeout_seconds: float = 5.0
    cpu_seconds: float = 0.4
    memory_limit_mb: int = 1024

    def __post_init__(self):
        if self.num_workers is None:
            self.num_workers = default_num_workers()
        if self.num_workers < 1 or not 0.0 < self.cpu_seconds <= self.timeout_seconds:
            raise UserError(
                f"num_workers={self.num_workers}, cpu_seconds={self.cpu_seconds}, timeout_seconds="
                f"{self.timeout_seconds} cannot work. Use at least one worker, and 0 < cpu_seconds <= timeout_seconds."
            )
        self._cache: OrderedDict[bytes, Grade] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: Any = None
        _verifiers.add(self)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _prepare(self, completion: Any, solution: Any, is_truncated: bool) -> Grade | tuple[bytes, Any]:
        """Return the grade of a completion that needs no worker; otherwise the key of the cache, and a job."""

    @abstractmethod
    def _run_jobs(self, jobs: list[Any]) -> list[Grade]:
        """Return the grades of jobs, which run in parallel."""

    @abstractmethod
    def _start(self) -> Any:
        """Start the workers, unless they run."""

    @abstractmethod
    def _end(self) -> None:
        """End the workers, if they run."""

    def start(self) -> Any:
        """Start the worker processes."""
        with self._lock:
            return self._start()

    def close(self) -> None:
        """End the worker processes. A later call starts new ones and keeps the cache."""
        with self._lock:
            self._end()

    def grade(
        self, completions: Sequence[Any], solutions: Sequence[Any], truncated: Sequence[bool] | None = None
    ) -> list[float | None]:
        """
        Return 1.0 for a correct completion, 0.0 for a wrong one, and `None` if its solution is missing or unreadable.

        Args:
            completions (`Sequence`): Strings; other types count as no answer.
            solutions (`Sequence`): One per completion: gold answers (see [`gold_texts`]), or tests of a program as
                mappings or JSON (see `cases.py`).
            truncated (`Sequence[bool]`, *optional*): Which completions lack an end-of-sequence token; by default none.
                Ignored for programs.

        Raises:
            ValueError: if the lengths differ, or programs cannot be confined as required.
            RuntimeError: if the worker processes cannot be started, or failed twice on the same batch.
        """
        return [grade.outcome.label for grade in self.grade_detailed(completions, solutions, truncated)]

    def grade_detailed(
        self, completions: Sequence[Any], solutions: Sequence[Any], truncated: Sequence[bool] | None = None
    ) -> list[Grade]:
        """Return a [`Grade`] per completion, see [`grade`]."""
        truncated = [False] * len(completions) if truncated is None else truncated
        with self._lock:
            prepared = [self._prepare(*each) for each in zip(completions, solutions, truncated, strict=True)]
            grades: dict[bytes, Grade] = {}
            jobs: dict[bytes, Any] = {}
            for item in prepared:
                if isinstance(item, Grade):
                    continue
                key, job = item
                if key in self._cache:
                    grades[key] = self._cache[key]._replace(seconds=0.0)
                else:
                    jobs[key] = job
            if jobs:
                grades |= zip(jobs, self._run_jobs(list(jobs.values())), strict=True)
            for key in jobs:
                if grades[key].outcome is not Outcome.KILLED:  # the completion may not be the cause
                    self._cache[key] = grades[key]
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
            return [item if isinstance(item, Grade) else grades[item[0]] for item in prepared]

    def _key(self, *texts: str) -> bytes:
        digest = blake2b(digest_size=16)
        for text in texts:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\xff")  # a byte that no UTF-8 text contains
        return digest.digest()


@dataclass(eq=False)
class Verifier(BaseVerifier):
    """
    Grade mathematical answers in parallel, within limits.

    The workers start in the background, in about a second: in a `with` statement, [`start`], or the first [`grade`].

    Args:
        num_workers (`int`, *optional*): Worker processes. Defaults to [`default_num_workers`].
        timeout_seconds (`float`): Wall-clock limit per completion, after which the worker is killed.
        cpu_seconds (`float`): CPU time per completion, after which the kernel ends the worker. Normally this limit
            acts first, so that labels do not depend on the load of the machine.
        memory_limit_mb (`int`): Address space of one worker, in MiB; sympy needs about 100.
        protocol (`str`): `"robust"` (answers as people and models write them, see `robust/`), `"authors"` (the PACS
            authors' grader), `"trl"` (TRL's `accuracy_reward`), `"number"` (the last number of the completion, for
            which expressions are no answers), or `"reasoning_gym"` (the scorer of the entry that a solution names,
            see `gym_grader.py`).
        grade_truncated (`bool`): Grade truncated completions like others. By default only their last closed box is
            graded.

    Example:

    ```python
    with Verifier(num_workers=2) as verifier:
        verifier.grade([r"so it is \\boxed{\\frac{1}{2}}", "no idea"], ["0.5", "7"])  # [1.0, 0.0]
    ```
    """

    max_characters = MAX_CHARACTERS

    protocol: str = "robust"
    grade_truncated: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            raise UserError(f"`protocol` is {self.protocol!r}. Set it to {' or '.join(map(repr, PROTOCOLS))}.")

    def unreadable_golds(self, solutions: Sequence[Any]) -> list[int]:
        """Return the indices of solutions that are missing or not parsed as a mathematical expression, so that at most
        a completion with the same text in its box is graded correct. Of other than plain numbers, which take 5 ms
        each, at most `_MAX_GOLDS` are parsed, evenly spaced."""
        unreadable = []
        indices: dict[tuple[str, ...], list[int]] = {}  # of the solutions with the same golds
        for index, golds in enumerate(map(gold_texts, solutions)):
            if not golds:
                unreadable.append(index)
            elif not any(map(_NUMBER.fullmatch, golds)):
                indices.setdefault(golds, []).append(index)
        stride = -(-len(indices) // _MAX_GOLDS) or 1
        sample = list(indices)[::stride]
        if sample:
            with self._lock:
                grades = self._run_jobs([("", golds) for golds in sample])
            for golds, grade in zip(sample, grades, strict=True):
                if grade.outcome is not Outcome.NO_ANSWER:  # an empty completion has none, unless the golds are bad
                    unreadable += indices[golds]
        return sorted(unreadable)

    def _prepare(
        self, completion: Any, solution: Any, is_truncated: bool
    ) -> Grade | tuple[bytes, tuple[str, tuple[str, ...]]]:
        text = _plain(completion) if isinstance(completion, str) else ""
        golds = gold_texts(solution)
        if not golds:
            return Grade(Outcome.GOLD_UNPARSEABLE)
        if len(text) > self.max_characters:
            return Grade(Outcome.TOO_LONG)
        graded_part = self._graded_part(text, is_truncated and not self.grade_truncated)
        if not graded_part.strip():
            return Grade(Outcome.NO_ANSWER)
        return self._key(graded_part, *golds), (graded_part, golds)

    def _graded_part(self, text: str, only_marked: bool) -> str:
        """Return the part of a completion that is graded; with `only_marked` the last answer in tags or a closed box,
        empty without one."""
        if self.protocol == "reasoning_gym":
            answer = final_answer(text, with_braces=only_marked)
            if answer is None:
                answer = "" if only_marked else text
            return answer.strip()
        if not only_marked:
            return text
        content = last_boxed(text, with_braces=True)
        return "" if content is None else f"\\boxed{{{content}}}"

    def _run_jobs(self, jobs: list[tuple[str, tuple[str, ...]]]) -> list[Grade]:
        """Send jobs to the pool and return its grades. If the pool fails, try once more with a new one."""
        for _ in range(2):
            connection = self._start().connection
            failure = "it does not answer"
            try:
                connection.send(jobs)
                # The pool enforces its limits. If it stalls (a suspended process), the trainer must not.
                if connection.poll(120.0 + len(jobs) * self.timeout_seconds / (self.num_workers or 1)):
                    return connection.recv()
            except (OSError, EOFError) as error:
                failure = repr(error)
            except BaseException:  # e.g. an interrupt: an answer may be half read, so this pool cannot be reused
                self._end()
                raise
            self._end()
        raise RuntimeError(
            f"The verification processes failed twice on a batch of {len(jobs)} completions ({failure}). See their "
            "messages on stderr."
        )

    def _start(self) -> ChildProcess:
        if self._pool is None:
            names = ("num_workers", "timeout_seconds", "cpu_seconds", "memory_limit_mb", "protocol")
            settings = {name: getattr(self, name) for name in names}
            ours, theirs = socket.socketpair()
            with theirs:  # only the pool keeps this end open
                self._pool = ChildProcess("pool", connect(ours, 120.0), settings, stdin=theirs.fileno())
        return self._pool

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None

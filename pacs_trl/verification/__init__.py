"""One completion against one gold answer: 1.0, 0.0 or None, in processes that can be killed.

sympy evaluates what a model writes. It holds the interpreter while it does, so neither a thread nor a signal handler
can stop it for certain, and a single power tower can stall a training node. Grading therefore runs in worker processes
with limits on processor time, wall-clock time and memory: `pool.py` says who watches whom, and `worker.py` holds the
grading itself. This module is the side that trainer and evaluation see. It needs only the standard library, because
the workers import it too.
"""

import os
import re
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

from .client import PoolProcess


if TYPE_CHECKING:
    from .code import CodeVerifier


class Outcome(IntEnum):
    """
    What became of one completion. Three-valued as a label: 1.0, 0.0, or `None` for a row that says nothing.

    `TIMEOUT`, `KILLED` and `TOO_LONG` count as wrong, because a policy must not be able to leave the group by writing
    something that cannot be graded; they are counted apart, because they may also be the verifier's fault.
    """

    CORRECT = 0
    WRONG = 1  # an answer that is not equal to the gold
    NO_ANSWER = 2  # no answer was found, the extractor failed, or the completion is not text
    GOLD_UNPARSEABLE = 3  # missing or unreadable gold: the completion cannot be judged
    TIMEOUT = 4  # over the processor-time or wall-clock limit
    KILLED = 5  # the worker ended otherwise: out of memory, crashed, or killed from outside
    TOO_LONG = 6  # completion over the length limit, not graded
    ERROR = 7  # of programs only: it ended with an exception

    @property
    def label(self) -> float | None:
        if self is Outcome.GOLD_UNPARSEABLE:
            return None
        return 1.0 if self is Outcome.CORRECT else 0.0

    @property
    def is_failure(self) -> bool:
        """Whether the reason may be the verifier or the data rather than the model."""
        return self in (Outcome.GOLD_UNPARSEABLE, Outcome.TIMEOUT, Outcome.KILLED, Outcome.TOO_LONG)


class Grade(NamedTuple):
    """Outcome of one completion and the wall-clock seconds it took (0.0 when it was known before)."""

    outcome: Outcome
    seconds: float


def completion_text(completion: Any) -> str | None:
    """Text of a completion, plain (`str`) or conversational (content of its last message); `None` for anything else,
    also for one that ends with what a tool said, since no room was left for an answer."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = None if completion[-1].get("role") == "tool" else completion[-1].get("content")
    return completion if isinstance(completion, str) else None


# What GSM8K marks as the final answer, at the end of a text. The JSON of tests may hold the mark too, and a quotation
# mark behind it.
_AFTER_HASHES = re.compile(r"(?:\A|\s)####\s*([^\n\"]+)\Z")
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gold_texts(gold: Any) -> tuple[str, ...]:
    """The alternative gold answers in one cell of a `solution` column, as texts: of a text, a number, or a list of
    these (any of which is right), without the missing ones (`None`, NaN, blank) and what is neither (a tensor, a
    mapping, whose text no answer would equal); empty when there is no gold at all. 27.0 becomes "27", and a worked
    solution that ends in `#### 1,200`, as in GSM8K, becomes "1200"."""
    if isinstance(gold, list | tuple):
        return tuple(text for item in gold for text in gold_texts(item))
    if not isinstance(gold, str | Number) or gold != gold:  # NaN, which is how tables spell a missing number
        return ()
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
    text = _plain(str(gold)).strip()
    if final := _AFTER_HASHES.search(text):
        text = final.group(1)
        text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    return (text,) if text else ()


def _plain(text: str) -> str:
    """The characters of a text. The pool cannot read an instance of a subclass: it has not imported what defines
    that."""
    return str.__str__(text)


# Longer completions are not read, by no process.
MAX_CHARACTERS = 200_000

_BOX_OR_BRACE = re.compile(r"\\f?boxed\s*\{|[{}]")


def last_boxed(text: str) -> str | None:
    """
    Content of the last `\\boxed{...}` with balanced braces in `text`, `None` when there is none.

    One pass, in time linear in the length, because this also runs in the trainer's process, where it holds the
    interpreter. A text of more than `MAX_CHARACTERS` has no box: it is not read.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    # Of each open brace where the content of its box begins; `None` for one without a box.
    opened: list[int | None] = []
    last = None
    for match in _BOX_OR_BRACE.finditer(text):
        if match.group() != "}":
            opened.append(None if match.group() == "{" else match.end())
        elif opened and (start := opened.pop()) is not None and (last is None or start > last.start):
            last = slice(start, match.start())
    return None if last is None else text[last].strip()


def _closed_box(text: str) -> str | None:
    """The last closed box of a text, with nothing around it; `None` without one."""
    content = last_boxed(text)
    return None if content is None else f"\\boxed{{{content}}}"


def default_num_workers() -> int:
    """Processors this process may use, shared among the ranks on this node; at least 1, at most 16."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(16, max(1, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


# Of a verifier, what its processes are told.
_POOL_SETTINGS = ("num_workers", "timeout_seconds", "cpu_seconds", "memory_limit_mb", "protocol")
_verifiers: "weakref.WeakSet[Any]" = weakref.WeakSet()


@dataclass(eq=False)
class Verifier:
    """
    Grades completions in parallel, within limits, in order.

    Starting takes about a second and happens in the background, with the `with` statement, [`start`] or the first
    [`grade`]. Any thread may call any method; batches of different threads queue. A process forked from one that holds
    a verifier gets workers of its own.

    Args:
        num_workers (`int`, *optional*): Worker processes. Defaults to the processors of this rank, at most 16.
        timeout_seconds (`float`): Wall-clock limit per item, after which the worker is killed.
        cpu_seconds (`float`): Processor time per item, after which the kernel ends the worker. This is the limit that
            normally decides, so that a label does not depend on how busy the machine is.
        memory_limit_mb (`int`): Address space of one worker, in MiB.
        max_characters (`int`): Longer completions are not graded.
        protocol (`str`): `"authors"` (the PACS authors' grader) or `"trl"` (TRL's `accuracy_reward`).
        cache_size (`int`): Number of outcomes that are kept.
        grade_truncated (`bool`): Grade a truncated completion like any other. By default only its last closed box is
        graded,
            and without one it has no answer.

    Example:

    ```python
    with Verifier(num_workers=2) as verifier:
        verifier.grade([r"so it is \\boxed{\\frac{1}{2}}", "no idea"], ["0.5", "7"])  # [1.0, 0.0]
    ```
    """

    # Items and characters per message to the pool: bounds the memory that a large evaluation takes in transit.
    _MAX_MESSAGE_ITEMS = 2048
    _MAX_MESSAGE_CHARACTERS = 1 << 25
    _MAX_GOLDS = 4096  # about 20 CPU seconds

    num_workers: int | None = None
    timeout_seconds: float = 5.0
    cpu_seconds: float = 0.4
    memory_limit_mb: int = 1024
    max_characters: int = MAX_CHARACTERS
    protocol: str = "authors"
    cache_size: int = 65_536
    grade_truncated: bool = False

    def __post_init__(self):
        if self.num_workers is None:
            self.num_workers = default_num_workers()
        self._check_limits()
        self.counts: Counter[Outcome] = Counter()
        self._read_golds: set[tuple[str, ...]] = set()
        self._cache: OrderedDict[bytes, Outcome] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: PoolProcess | None = None
        _verifiers.add(self)

    def _check_limits(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {self.num_workers}.")
        if not 0.0 < self.cpu_seconds <= self.timeout_seconds:
            raise ValueError(
                f"`cpu_seconds` must be positive and at most `timeout_seconds`, got {self.cpu_seconds} and "
                f"{self.timeout_seconds}: an item cannot use more processor time than passes, so a larger limit would "
                "never act."
            )
        if self.memory_limit_mb < 256:
            raise ValueError(
                f"`memory_limit_mb` must be at least 256, got {self.memory_limit_mb}: sympy itself takes about 100."
            )
        if self.protocol not in ("authors", "trl"):
            raise ValueError(f"`protocol` must be 'authors' or 'trl', got {self.protocol!r}.")

    def __enter__(self) -> "Verifier":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the worker processes without waiting for them."""
        with self._lock:
            self._started_pool()

    def close(self) -> None:
        """End the worker processes. A later call starts new ones; counts and cache are kept."""
        with self._lock:
            self._drop_pool()

    def succeed(self, other: "Verifier") -> None:
        """Close another verifier. Its worker processes stay and are this one's if they were told the same."""
        with other._lock:
            if all(getattr(self, name) == getattr(other, name) for name in _POOL_SETTINGS):
                self._pool, other._pool = other._pool, None
            other._drop_pool()

    def grade(
        self, completions: Sequence[Any], solutions: Sequence[Any], truncated: Sequence[bool] | None = None
    ) -> list[float | None]:
        """
        Labels of completions: 1.0 for right, 0.0 for wrong, `None` when the gold is missing or unparseable. What is no
        text counts as no answer; for the solutions, one per completion, see [`gold_texts`]. `truncated` says which
        completions do not end with an end-of-sequence token; by default all do.

        Raises:
            ValueError: When the two lengths differ.
            RuntimeError: When the worker processes cannot be started, or broke down twice on the same batch.
        """
        return [grade.outcome.label for grade in self.grade_detailed(completions, solutions, truncated)]

    def grade_detailed(
        self, completions: Sequence[Any], solutions: Sequence[Any], truncated: Sequence[bool] | None = None
    ) -> list[Grade]:
        """As [`grade`], with the outcome and the seconds of each completion. Counts the outcomes in `counts`."""
        if len(completions) != len(solutions):
            raise ValueError(
                f"Every completion needs its solution, but there are {len(completions)} completions and "
                f"{len(solutions)} solutions."
            )
        with self._lock:
            grades = self._grade(completions, [gold_texts(solution) for solution in solutions], truncated)
            self.counts.update(grade.outcome for grade in grades)
        return grades

    def unreadable_golds(self, solutions: Sequence[Any]) -> list[int]:
        """
        Positions of the solutions that are missing or not read as a mathematical expression, so that no completion, or
        at most one with the same text in its box, is graded correct.

        Each gold is read and found once in the life of the verifier. Reading takes about 5 ms, so of more than
        `_MAX_GOLDS` different ones that are not plain numbers, that many or fewer are read, at equal distances.
        """
        places: dict[tuple[str, ...], list[int]] = {}
        found = []
        for index, alternatives in enumerate(map(gold_texts, solutions)):
            if not alternatives:
                found.append(index)
            elif not any(map(_NUMBER.fullmatch, alternatives)):
                places.setdefault(alternatives, []).append(index)
        with self._lock:
            items = [("", alternatives) for alternatives in places if alternatives not in self._read_golds]
            items = items[:: -(-len(items) // self._MAX_GOLDS) or 1]
            for start in range(0, len(items), self._MAX_MESSAGE_ITEMS):
                part = items[start : start + self._MAX_MESSAGE_ITEMS]
                for (_, alternatives), (outcome, _) in zip(part, self._request(part), strict=True):
                    found += places[alternatives] if outcome != Outcome.NO_ANSWER else []
            self._read_golds.update(places)
        return sorted(found)

    def _grade(
        self, completions: Sequence[Any], golds: list[tuple[str, ...]], truncated: Sequence[bool] | None
    ) -> list[Grade]:
        completions = [_plain(completion) if isinstance(completion, str) else None for completion in completions]
        if truncated is not None and not self.grade_truncated:
            pairs = zip(completions, truncated, strict=True)
            completions = [_closed_box(text) if text and is_cut else text for text, is_cut in pairs]
        grades: dict[int, Grade] = {}
        places: OrderedDict[bytes, list[int]] = OrderedDict()  # what is to be graded, and where it occurs
        for index, (text, alternatives) in enumerate(zip(completions, golds, strict=True)):
            if (known := self._known_without_grading(text, alternatives)) is not None:
                grades[index] = Grade(known, 0.0)
                continue
            key = _key(text, alternatives)
            if key in self._cache:
                self._cache.move_to_end(key)
                grades[index] = Grade(self._cache[key], 0.0)
            else:
                places.setdefault(key, []).append(index)
        keys = list(places)
        items = [(completions[places[key][0]], golds[places[key][0]]) for key in keys]
        for start, stop in _slices(items, self._MAX_MESSAGE_ITEMS, self._MAX_MESSAGE_CHARACTERS):
            for key, (outcome, seconds) in zip(keys[start:stop], self._request(items[start:stop]), strict=True):
                grade = Grade(Outcome(outcome), seconds)
                self._remember(key, grade.outcome)
                grades.update(dict.fromkeys(places[key], grade))
        return [grades[index] for index in range(len(completions))]

    def _known_without_grading(self, text: str | None, alternatives: tuple[str, ...]) -> Outcome | None:
        if not alternatives:
            return Outcome.GOLD_UNPARSEABLE
        if text is None or not text.strip():
            return Outcome.NO_ANSWER
        return Outcome.TOO_LONG if len(text) > self.max_characters else None

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        if outcome is Outcome.KILLED:  # perhaps not the item's fault
            return
        self._cache[key] = outcome
        if len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)

    def _request(self, items: list[tuple[str, tuple[str, ...]]]) -> list[tuple[int, float]]:
        """Have the pool grade a list of items; once more with a new pool when it breaks down."""
        for is_last_attempt in (False, True):
            try:
                return self._started_pool().ask(items)
            except OSError as error:  # includes a connection that is closed and one that stays silent
                self._drop_pool()
                if is_last_attempt:
                    raise RuntimeError(
                        f"The verification processes broke down twice on a batch of {len(items)} completions "
                        f"({error}). Their own messages are on stderr."
                    ) from error
            except BaseException:  # an interrupt, say: an answer may be half read, so nothing can follow on this pool
                self._drop_pool()
                raise
        raise AssertionError("unreachable")

    def _started_pool(self) -> PoolProcess:
        if self._pool is None:
            self._pool = PoolProcess(**{name: getattr(self, name) for name in _POOL_SETTINGS})
        return self._pool

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None


def _key(text: str, alternatives: tuple[str, ...]) -> bytes:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    for alternative in alternatives:
        digest.update(b"\xff" + alternative.encode("utf-8", "surrogatepass"))  # a byte that no UTF-8 text contains
    return digest.digest()


def _slices(items: list[tuple[str, Any]], max_items: int, max_characters: int) -> list[tuple[int, int]]:
    """Consecutive ranges of items within the two limits; an item over the second one travels alone."""
    bounds = [0]
    characters = 0
    for index, (text, _) in enumerate(items):
        if index - bounds[-1] == max_items or (characters + len(text) > max_characters and index > bounds[-1]):
            bounds.append(index)
            characters = 0
        characters += len(text)
    return list(zip(bounds, [*bounds[1:], len(items)])) if items else []


@dataclass
class VerificationArguments:
    """
    Settings of the verifier that training and evaluation share; for more about them, see [`Verifier`] and
    [`~verification.code.CodeVerifier`].

    Args:
        verification_protocol (`str`): `"authors"` (the PACS authors' grader) or `"trl"` (TRL's `accuracy_reward`).
        verification_num_workers (`int`, *optional*): Worker processes per rank; by default its share of the
        processors.
        verification_timeout_seconds (`float`): Wall-clock limit per completion.
        verification_cpu_seconds (`float`): CPU time limit per completion.
        verification_memory_limit_mb (`int`): Address space of a worker, in MiB.
        verification_grade_truncated (`bool`): Grade completions that were cut at the length limit like any other. By
        default
            only a closed box of such a completion counts.
        verification_max_failure_share (`float`): Training stops when more than this share of the recent completions
            failed to be verified for reasons other than being wrong. 1.0 never stops.
        code_isolation (`str`): Least confinement of programs: `"landlock+seccomp"`, `"seccomp"`, `"landlock"` or
            `"rlimits"`.
        code_cpu_seconds (`float`): CPU time limit of a program per test.
        code_timeout_seconds (`float`): Wall-clock limit of a program per test.
        code_memory_limit_mb (`int`): Address space of a program, in MiB.
        code_label (`str`): `"all"`: 1 for a program that passes every test, else 0; `"share"`: the share of tests that
        it passes.
        code_sandbox_url (`str`, *optional*): SandboxFusion server that runs programs instead of this machine.
    """

    verification_protocol: str = "authors"
    verification_num_workers: int | None = None
    verification_timeout_seconds: float = 5.0
    verification_cpu_seconds: float = 0.4
    verification_memory_limit_mb: int = 1024
    verification_grade_truncated: bool = False
    verification_max_failure_share: float = 0.5
    code_isolation: str = "landlock+seccomp"
    code_cpu_seconds: float = 2.0
    code_timeout_seconds: float = 6.0
    code_memory_limit_mb: int = 512
    code_label: str = "all"
    code_sandbox_url: str | None = None

    def __post_init__(self):
        if not 0.0 <= self.verification_max_failure_share <= 1.0:
            raise ValueError(
                "`verification_max_failure_share` is a share and must lie in [0, 1], got "
                f"{self.verification_max_failure_share}."
            )
        if self.code_label not in ("all", "share"):
            raise ValueError(f"`code_label` must be 'all' or 'share', got {self.code_label!r}.")
        self.build(), self.build_code()  # their own checks

    def build(self) -> Verifier:
        """A verifier with these settings, not yet started."""
        names = (*_POOL_SETTINGS, "grade_truncated")
        return Verifier(**{name: getattr(self, f"verification_{name}") for name in names})

    def build_code(self) -> "CodeVerifier":
        """A verifier of programs with these settings, not yet started."""
        from .code import CodeVerifier

        names = ("isolation", "cpu_seconds", "timeout_seconds", "memory_limit_mb", "sandbox_url")
        return CodeVerifier(
            num_workers=self.verification_num_workers,
            stop_early=self.code_label == "all",
            **{name: getattr(self, f"code_{name}") for name in names},
        )


def _forget_what_the_parent_was_doing() -> None:
    """In a forked process: its copies of locks may be held by threads that it has not, and the pools are its
    parent's."""
    global _shared_lock
    _shared_lock = threading.RLock()
    for verifier in _verifiers:
        verifier._lock, verifier._pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_what_the_parent_was_doing)

_shared_lock = threading.RLock()
_shared_arguments: VerificationArguments | None = None
_shared_verifier: Verifier | None = None
_shared_code_verifier: "CodeVerifier | None" = None


def configure_verification(arguments: VerificationArguments) -> Verifier:
    """Make the shared verifier of this process anew and start it in the background; the previous ones are closed."""
    global _shared_arguments, _shared_verifier, _shared_code_verifier
    verifier = arguments.build()
    with _shared_lock:
        if _shared_verifier is not None:
            verifier.succeed(_shared_verifier)
        if _shared_code_verifier is not None:
            _shared_code_verifier.close()
        _shared_arguments, _shared_verifier, _shared_code_verifier = arguments, verifier, None
    verifier.start()
    return verifier


def shared_verifier() -> Verifier:
    """The one verifier of this process: training labels and evaluation scores come from the same grader."""
    with _shared_lock:
        return _shared_verifier or configure_verification(shared_arguments())


def shared_code_verifier() -> "CodeVerifier":
    """The one verifier of programs of this process, started with its first use."""
    global _shared_code_verifier
    with _shared_lock:
        _shared_code_verifier = _shared_code_verifier or shared_arguments().build_code()
        return _shared_code_verifier


def shared_arguments() -> VerificationArguments:
    """What the shared verifiers were configured with."""
    return _shared_arguments or VerificationArguments()

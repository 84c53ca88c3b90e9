"""Programs against tests: what a completion's code does is its label, and what it may do is next to nothing.

The trainer holds the tests. A program gets the input of one case at a time, in a process of its own that a worker
forks and
confines (`sandbox.py`), and what it wrote is compared here; no expected output ever enters a process that runs or
forks programs. How far the confinement holds is measured at the start by a program that tries to break it. Languages
other than Python, packages outside the standard library, and problems with several right outputs are left out.
"""

import json
import logging
import os
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from . import MAX_CHARACTERS, Outcome, _verifiers, default_num_workers
from .cases import ProblemTests, is_expected, last_program, read_tests, runnable
from .confinement import LAYERS
from .execution import Execution, Level, LocalWorker, SandboxFusion


logger = logging.getLogger(__name__)

# What may be asked for, the strictest first.
ISOLATION = ("landlock+seccomp", "seccomp", "landlock", "rlimits")


class CodeGrade(NamedTuple):
    """Outcome of one completion, the seconds it took, the share of the tests that it passed, why not all of them, and
    what it did on the first that failed, without what was expected: a sentence for its author."""

    outcome: Outcome
    seconds: float
    share: float
    error: str = ""
    failed: str = ""


@dataclass(eq=False)
class CodeVerifier:
    """
    Runs programs against tests, in parallel, confined, within limits, in order.

    Any thread may call any method; batches of different threads queue. A process forked from one that holds a verifier
    gets workers of its own.

    Args:
        num_workers (`int`, *optional*): Programs that run at a time. Defaults to the processors of this rank, at most
        16.
        cpu_seconds (`float`): Processor time of a program on one case. The limit that normally decides.
        timeout_seconds (`float`): Time on the clock of a program on one case.
        memory_limit_mb (`int`): Address space of a program, in MiB.
        output_limit_mb (`int`): Largest output, and largest file, in MiB.
        isolation (`str`): The least confinement that will do: `"landlock+seccomp"`, `"seccomp"`, `"landlock"` or
        `"rlimits"`. What
            the kernel has is used in any case; less than this is refused.
        stop_early (`bool`): Whether the first case that fails is the last one that is run. Without it, `share` is that
        of all cases.
        sandbox_url (`str`, *optional*): A SandboxFusion server that runs the programs instead.
        cache_size (`int`): Number of grades that are kept.

    Example:

    ```python
    tests = {"type": "function", "name": "add", "cases": [{"input": [1, 2], "output": 3}]}
    with CodeVerifier(num_workers=2) as verifier:
        program = "```python\\ndef add(a, b):\\n    return a + b\\n```"
        verifier.grade([program, "no idea"], [tests, tests])  # [1.0, 0.0]
    ```
    """

    # A timeout or a kill is the program's fault, unlike with answers in mathematics.
    FAILURES = frozenset({Outcome.GOLD_UNPARSEABLE})
    _layers = LAYERS

    num_workers: int | None = None
    cpu_seconds: float = 2.0
    timeout_seconds: float = 6.0
    memory_limit_mb: int = 512
    output_limit_mb: int = 8
    isolation: str = "landlock+seccomp"
    stop_early: bool = True
    sandbox_url: str | None = None
    cache_size: int = 65_536

    def __post_init__(self):
        if self.num_workers is None:
            self.num_workers = default_num_workers()
        if self.num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {self.num_workers}.")
        if not 0.0 < self.cpu_seconds <= self.timeout_seconds:
            raise ValueError(
                f"`cpu_seconds` must be positive and at most `timeout_seconds`, got {self.cpu_seconds} and "
                f"{self.timeout_seconds}: a program cannot use more processor time than passes, so a larger limit "
                "would never act."
            )
        if self.memory_limit_mb < 128:
            raise ValueError(
                f"`memory_limit_mb` must be at least 128, got {self.memory_limit_mb}: Python itself takes 60."
            )
        if self.output_limit_mb < 1:
            raise ValueError(f"`output_limit_mb` must be at least 1, got {self.output_limit_mb}.")
        if self.isolation not in ISOLATION:
            raise ValueError(f"`isolation` must be one of {', '.join(ISOLATION)}, got {self.isolation!r}.")
        self.counts: Counter[Outcome] = Counter()
        self.level: Level | None = None
        self._cache: OrderedDict[bytes, CodeGrade] = OrderedDict()
        self._tests: OrderedDict[str, ProblemTests | ValueError] = OrderedDict()
        self._lock = threading.Lock()
        self._workers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._owner: int | None = None
        self._stopping = False
        _verifiers.add(self)

    def __enter__(self) -> "CodeVerifier":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> Level:
        """
        Start the workers and measure how far they confine a program.

        Raises:
            ValueError: When that is less than `isolation`, or nothing can be run at all.
        """
        with self._lock:
            return self._start()

    def close(self) -> None:
        """End the workers. A later call starts new ones; counts and cache are kept."""
        with self._lock:
            if self._owner == os.getpid():
                self._end_workers()

    def grade(self, completions: Sequence[Any], tests: Sequence[Any]) -> list[float | None]:
        """
        Labels of completions.

        Args:
            completions (`Sequence`): Texts with a program in a block of code. Anything else counts as no answer.
            tests (`Sequence`): Mappings or JSON texts, one per completion; see `cases.py`.

        Returns:
            `list[float | None]`: 1.0 for a program that passes every test, else 0.0; `None` when the tests cannot be
            read.

        Raises:
            ValueError: When the two lengths differ, or programs cannot be run at all, or not confined as `isolation`
            asks. RuntimeError: When two workers broke down on a program.
        """
        return [grade.outcome.label for grade in self.grade_detailed(completions, tests)]

    def grade_detailed(self, completions: Sequence[Any], tests: Sequence[Any]) -> list[CodeGrade]:
        """As [`grade`], with everything that is known of each completion. Counts the outcomes in `counts`."""
        if len(completions) != len(tests):
            raise ValueError(
                f"Every completion needs its tests, but there are {len(completions)} completions and {len(tests)} "
                "tests."
            )
        with self._lock:
            grades = self._grade(completions, tests)
            self.counts.update(grade.outcome for grade in grades)
        return grades

    def run(self, programs: Sequence[str], inputs: Sequence[str]) -> list[Execution]:
        """Run programs, each on one input, without judging them."""
        with self._lock:
            self._start()
            return self._in_parallel(
                self._run, [(program, text, False) for program, text in zip(programs, inputs, strict=True)]
            )

    def facts(self) -> dict[str, Any]:
        """What results have to say of how programs were run."""
        names = ("cpu_seconds", "timeout_seconds", "memory_limit_mb", "output_limit_mb")
        level = self.level.text if self.level else None
        return {"confinement": level, **{name: getattr(self, name) for name in names}}

    def _grade(self, completions: Sequence[Any], tests: Sequence[Any]) -> list[CodeGrade]:
        grades: dict[int, CodeGrade] = {}
        places: OrderedDict[bytes, list[int]] = OrderedDict()  # what is to be run, and where it occurs
        jobs = []
        for index, (completion, value) in enumerate(zip(completions, tests, strict=True)):
            key_of_tests, read = self._read(value)
            program = last_program(completion) if _is_readable(completion) else None
            if isinstance(read, ValueError):
                grades[index] = CodeGrade(Outcome.GOLD_UNPARSEABLE, 0.0, 0.0, str(read))
            elif program is None:
                too_long = isinstance(completion, str) and len(completion) > MAX_CHARACTERS
                grades[index] = CodeGrade(Outcome.TOO_LONG if too_long else Outcome.NO_ANSWER, 0.0, 0.0)
            else:
                key = blake2b(f"{key_of_tests}\n{program}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if key in self._cache:
                    self._cache.move_to_end(key)
                    grades[index] = self._cache[key]._replace(seconds=0.0)
                elif key not in places:
                    jobs.append((program, read))
                    places[key] = [index]
                else:
                    places[key].append(index)
        if jobs:
            self._start()
        for key, grade in zip(places, self._in_parallel(self._grade_one, jobs), strict=True):
            grades.update(dict.fromkeys(places[key], grade))
            if grade.outcome is not Outcome.KILLED:  # perhaps not the program's fault
                _remember(self._cache, key, grade, self.cache_size)
        return [grades[index] for index in range(len(completions))]

    def _read(self, value: Any) -> tuple[str, ProblemTests | ValueError]:
        """Tests, read once for each problem, and a name for them."""
        try:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError) as error:  # keys of several types, circles, depth
            return "", ValueError(f"Tests must be plain data, as JSON has them ({error}).")
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if key not in self._tests:
            try:
                read: ProblemTests | ValueError = read_tests(value)
            except ValueError as error:
                read = error
            _remember(self._tests, key, read, 256)
        return key, self._tests[key]

    def _grade_one(self, program: str, tests: ProblemTests) -> CodeGrade:
        source = runnable(tests, program)
        passed, seconds = 0, 0.0
        outcome, error, failed = Outcome.CORRECT, "", ""
        for text, expected in tests.cases:
            execution = self._run(source, text, tests.writable)
            seconds += execution.seconds
            found, why = _judged(tests, expected, execution)
            passed += found is Outcome.CORRECT
            if found is not Outcome.CORRECT and outcome is Outcome.CORRECT:
                outcome, error, failed = found, why, _told(text, found, execution)
                if self.stop_early:
                    break
        return CodeGrade(outcome, seconds, passed / len(tests.cases), error, failed)

    def _run(self, program: str, text: str, writable: bool) -> Execution:
        if self._stopping:
            raise KeyboardInterrupt
        worker = self._workers.get()
        try:
            for is_last_attempt in (False, True):
                try:
                    return worker.run(program, text, writable)
                except OSError as error:  # it was killed, or is silent for longer than its limits allow
                    worker.end()
                    worker = self._new_worker()
                    if is_last_attempt:
                        raise RuntimeError(
                            f"Two workers broke down on the same program ({error}). See stderr."
                        ) from error
        finally:
            self._workers.put(worker)
        raise AssertionError("unreachable")

    def _in_parallel(self, function: Callable, jobs: list[tuple]) -> list[Any]:
        self._stopping = False
        with ThreadPoolExecutor(self.num_workers) as pool:
            try:
                return list(pool.map(lambda job: function(*job), jobs))
            except BaseException:  # an interrupt, say: what runs ends with its case
                self._stopping = True
                pool.shutdown(cancel_futures=True)
                raise

    def _end_workers(self) -> None:
        while not self._workers.empty():
            self._workers.get().end()
        self._owner = None

    def _new_worker(self) -> LocalWorker | SandboxFusion:
        if self.sandbox_url:
            return SandboxFusion(self.sandbox_url, self.cpu_seconds, self.timeout_seconds, self.memory_limit_mb)
        limits = ("cpu_seconds", "timeout_seconds", "memory_limit_mb", "output_limit_mb")
        return LocalWorker(self._layers, {name: getattr(self, name) for name in limits})

    def _start(self) -> Level:
        if self._owner == os.getpid() and self.level is not None:
            return self.level
        self._workers = queue.SimpleQueue()  # those of a parent process are not ours
        self._owner = os.getpid()
        try:
            for _ in range(self.num_workers or 1):
                self._workers.put(self._new_worker())
            worker = self._workers.get()
            self._workers.put(worker)
            level = worker.measure()
        except BaseException as error:
            self._end_workers()
            if isinstance(error, OSError):
                where = (
                    f"`code_sandbox_url` {self.sandbox_url}"
                    if self.sandbox_url
                    else "TMPDIR and the limits of this process"
                )
                raise ValueError(
                    f"No program can be run: no worker could be started ({error}). Look at {where}."
                ) from error
            raise
        wanted = set() if self.sandbox_url or self.isolation == "rlimits" else set(self.isolation.split("+"))
        if missing := wanted - set(level.layers):
            self._end_workers()
            raise ValueError(
                f"Programs that a model writes would run here with {level.text}, but `code_isolation` asks for "
                f"{self.isolation}; {' and '.join(sorted(missing))} does not hold: {level.reasons}. Such programs "
                "could read and "
                "write what you can (docs/code.md says what succeeds at each level). Use a kernel from 5.13 on with "
                "Landlock switched on, and a container whose own profile allows both; or name a SandboxFusion server "
                "(`code_sandbox_url`); "
                f"or, on a machine that has nothing to lose, set `code_isolation` to {_within(level.layers)}."
            )
        if self.level != level:
            logger.info("Programs run with %s.", level.text)
        self.level = level
        return level


def _is_readable(completion: Any) -> bool:
    return isinstance(completion, str) and len(completion) <= MAX_CHARACTERS


def _remember(cache: OrderedDict, key: Any, value: Any, size: int) -> None:
    cache[key] = value
    if len(cache) > size:
        cache.popitem(last=False)


def _within(layers: Sequence[str]) -> str:
    return next(name for name in ISOLATION if name == "rlimits" or set(name.split("+")) <= set(layers))


def _told(text: str, outcome: Outcome, execution: Execution) -> str:
    last = (execution.messages.strip().splitlines() or [execution.error])[-1]
    did = {
        Outcome.WRONG: f"gives {execution.output.strip()!r:.200}",
        Outcome.ERROR: f"ends with {last:.200}",
        Outcome.TIMEOUT: "does not end in time",
    }
    return f"On the input {text.strip()!r:.200} it {did.get(outcome, 'crashes, or takes too much memory')}."


def _judged(tests: ProblemTests, expected: Any, execution: Execution) -> tuple[Outcome, str]:
    if execution.outcome is not None:
        return execution.outcome, execution.error
    try:
        return (Outcome.CORRECT, "") if is_expected(tests, expected, execution.output) else (Outcome.WRONG, "")
    except ValueError:
        return Outcome.ERROR, "no value"

"""Grading of programs by tests, in confined processes.

A program gets the input of one case at a time, in its own process, which a worker forks and confines (`sandbox.py`).
Its output is compared here: no expected output enters a process that runs or forks programs. At the start a program
that tries to break out measures the confinement. Not supported: languages other than Python, packages outside the
standard library, and problems with several correct outputs.
"""

import json
import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import MAX_CHARACTERS, BaseVerifier, Grade, Outcome
from .cases import PASSED, ProblemTests, UnusableTests, is_expected, last_program, read_tests, runnable
from .confinement import LAYERS
from .execution import Execution, Level, LocalWorker


logger = logging.getLogger(__name__)

# Values of `isolation`, the strictest first.
ISOLATION = ("landlock+seccomp", "seccomp", "landlock", "rlimits")


@dataclass(eq=False)
class CodeVerifier(BaseVerifier):
    """
    Run programs against tests in parallel, confined, within limits.

    Args:
        num_workers (`int`, *optional*): Programs that run in parallel. Defaults to [`default_num_workers`].
        timeout_seconds (`float`): Wall-clock limit per case.
        cpu_seconds (`float`): CPU time per case; normally this limit acts first.
        memory_limit_mb (`int`): Address space of a program, in MiB; Python needs 60.
        cache_size (`int`): Number of cached grades.
        output_limit_mb (`int`): Largest output, and largest file, in MiB.
        isolation (`str`): Weakest accepted confinement: `"landlock+seccomp"`, `"seccomp"`, `"landlock"`, or
            `"rlimits"`. All layers of the kernel are used in any case.
        stop_early (`bool`): Whether to stop at the first failed case. Otherwise `share` covers all cases.

    Example:

    ```python
    tests = {"type": "function", "name": "add", "cases": [{"input": [1, 2], "output": 3}]}
    with CodeVerifier(num_workers=2) as verifier:
        program = "```python\\ndef add(a, b):\\n    return a + b\\n```"
        verifier.grade([program, "no idea"], [tests, tests])  # [1.0, 0.0]
    ```
    """

    # A program causes its timeouts and kills, unlike an answer in mathematics.
    FAILURES = frozenset({Outcome.GOLD_UNPARSEABLE})
    _layers = LAYERS

    cpu_seconds: float = 2.0
    timeout_seconds: float = 6.0
    memory_limit_mb: int = 512
    output_limit_mb: int = 8
    isolation: str = "landlock+seccomp"
    stop_early: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.level: Level | None = None
        self._stopping = False

    def run(self, programs: Sequence[str], inputs: Sequence[str]) -> list[Execution]:
        """Run programs, each on one input, without grading them."""
        with self._lock:
            self._start()
            return self._in_parallel(self._run, list(zip(programs, inputs, strict=True)))

    def facts(self) -> dict[str, Any]:
        """Return limits and confinement, for results files."""
        names = ("cpu_seconds", "timeout_seconds", "memory_limit_mb", "output_limit_mb")
        level = self.level.text if self.level else None
        return {"confinement": level, **{name: getattr(self, name) for name in names}}

    def _prepare(
        self, completion: Any, solution: Any, is_truncated: bool
    ) -> Grade | tuple[bytes, tuple[str, ProblemTests]]:
        try:
            text = solution if isinstance(solution, str) else json.dumps(solution)
        except (TypeError, ValueError, RecursionError) as error:  # a set, a circle, depth
            return Grade(Outcome.GOLD_UNPARSEABLE, error=f"Tests must be plain data, as JSON has them ({error}).")
        tests = _tests_of(text)
        if isinstance(tests, ValueError):
            return Grade(Outcome.GOLD_UNPARSEABLE, error=str(tests))
        if isinstance(completion, str) and len(completion) > MAX_CHARACTERS:
            return Grade(Outcome.TOO_LONG)
        program = last_program(completion) if isinstance(completion, str) else None
        if program is None:
            return Grade(Outcome.NO_ANSWER)
        return self._key(text, program), (program, tests)

    def _run_jobs(self, jobs: list[tuple[str, ProblemTests]]) -> list[Grade]:
        self._start()
        return self._in_parallel(self._grade_one, jobs)

    def _grade_one(self, program: str, tests: ProblemTests) -> Grade:
        passed, seconds, first_failure = 0, 0.0, None
        for text, expected in tests.cases:
            execution = self._run(runnable(tests, program, expected), text, expected is PASSED)
            seconds += execution.seconds
            outcome, error = execution.outcome, execution.error
            if outcome is None:
                try:
                    is_right = is_expected(tests, expected, execution.output)
                    outcome = Outcome.CORRECT if is_right else Outcome.WRONG
                except UnusableTests as unusable:
                    return Grade(Outcome.GOLD_UNPARSEABLE, seconds, error=str(unusable))
                except ValueError:
                    outcome, error = Outcome.ERROR, "no value"
            passed += outcome is Outcome.CORRECT
            if outcome is not Outcome.CORRECT and first_failure is None:
                first_failure = outcome, error
                if self.stop_early:
                    break
        outcome, error = first_failure or (Outcome.CORRECT, "")
        return Grade(outcome, seconds, passed / len(tests.cases), error)

    def _run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        if self._stopping:
            raise KeyboardInterrupt
        worker, failure = self._pool.get(), None
        try:
            for _ in range(2):
                try:
                    return worker.run(program, text, has_asserts)
                except OSError as error:  # it was killed, or does not answer within its limits
                    failure = error
                    worker.end()
                    worker = self._new_worker()
        finally:
            self._pool.put(worker)
        raise RuntimeError(f"Two workers failed on the same program ({failure}). See stderr.") from failure

    def _in_parallel(self, function: Callable, jobs: list[tuple]) -> list[Any]:
        self._stopping = False
        with ThreadPoolExecutor(self.num_workers) as pool:
            try:
                return list(pool.map(lambda job: function(*job), jobs))
            except BaseException:  # e.g. an interrupt: a running program ends with its case
                self._stopping = True
                pool.shutdown(cancel_futures=True)
                raise

    def _end(self) -> None:
        while self._pool is not None and not self._pool.empty():
            self._pool.get().end()
        self._pool = None

    def _new_worker(self) -> LocalWorker:
        limits = ("cpu_seconds", "timeout_seconds", "memory_limit_mb", "output_limit_mb")
        return LocalWorker(self._layers, {name: getattr(self, name) for name in limits})

    def _start(self) -> Level:
        """Start the workers and measure their confinement. Raises a `ValueError` if it is weaker than `isolation`, or
        no program can be run."""
        if self._pool is not None and self.level is not None:
            return self.level
        self._pool = queue.SimpleQueue()
        with ExitStack() as on_failure:
            on_failure.callback(self._end)
            try:
                for _ in range(self.num_workers or 1):
                    self._pool.put(self._new_worker())
                worker = self._pool.get()
                self._pool.put(worker)
                level = worker.measure()
            except OSError as error:
                raise ValueError(
                    f"The workers for programs cannot be started ({error}). Check TMPDIR and the process limits."
                ) from error
            wanted = set() if self.isolation == "rlimits" else set(self.isolation.split("+"))
            if missing := wanted - set(level.layers):
                held = [name for name in ISOLATION if name == "rlimits" or set(name.split("+")) <= set(level.layers)]
                raise ValueError(
                    f"code_isolation={self.isolation} needs {' and '.join(sorted(missing))}, but programs would run "
                    f"with {level.text} ({level.reasons}) and could read and write your files. Use kernel 5.13 or "
                    "later with Landlock and a container profile that allows both, or, on a disposable machine, set "
                    f"code_isolation to {held[0]} (see docs/code.md)."
                )
            on_failure.pop_all()
        if self.level != level:
            logger.info("Programs run with %s.", level.text)
        self.level = level
        return level


@lru_cache(maxsize=256)  # the completions of a prompt share their tests
def _tests_of(text: str) -> ProblemTests | ValueError:
    try:
        return read_tests(text)
    except ValueError as error:
        return error

"""Grading of programs by tests, in confined processes.

A program gets the input of one case at a time, in a separate process, which a worker forks and confines
(`sandbox.py`). Its output is compared here: no expected output enters a process that runs or forks programs. At the
start a program that tries to break out measures the confinement. Not supported: languages other than Python, packages
outside the standard library, and problems with several correct outputs.
"""

import fcntl
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import zoneinfo
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError
from . import MAX_CHARACTERS, BaseVerifier, ChildProcess, Grade, Outcome
from .cases import (
    OUTPUT_LIMIT_MB,
    ProblemTests,
    ProgramError,
    UnusableTests,
    answers_in,
    input_of,
    is_expected,
    last_program,
    read_tests,
    refuse_long_outputs,
    runnable,
)
from .confinement import LAYERS, landlock_version, missing_layers


logger = logging.getLogger(__name__)

_LIMITS = ("cpu_seconds", "timeout_seconds", "memory_limit_mb", "output_limit_mb")


@lru_cache(maxsize=256)  # the completions of a prompt share their tests
def _read_tests(text: str, output_limit_mb: int) -> ProblemTests:
    tests = read_tests(text)
    refuse_long_outputs(tests, output_limit_mb)
    return tests


class Execution(NamedTuple):
    """Result of a program: outcome (`None` for success; else `ERROR`, `TIMEOUT`, or `KILLED`), output, end of standard
    error, and wall-clock seconds."""

    outcome: Outcome | None
    output: str
    messages: str
    seconds: float

    @property
    def error(self) -> str:
        """Class of the exception, or outcome in lower case; empty for success."""
        if self.outcome is None:
            return ""
        last = self.messages.strip().rpartition("\n")[2].partition(":")[0]
        is_class = self.outcome is Outcome.ERROR and last.replace(".", "").isidentifier()
        return last[:80] if is_class else self.outcome.name.lower()


# Tries to break out of each layer, and prints the layers that hold.
_PROBE = """
import json, os, socket, sys
def can(action, *arguments):
    try:
        action(*arguments)
        return True
    except (OSError, MemoryError):
        return False
def fork():
    if os.fork() == 0:
        os._exit(0)
def write():
    with open("probe", "w") as file:
        file.write("x")
limit = int(sys.stdin.read())
print(json.dumps({
    "landlock": not can(os.listdir, "..") and not can(open, "/proc/self/environ") and not can(write),
    "seccomp": not can(socket.socket) and not can(fork) and not can(os.kill, os.getppid(), 0),
    "rlimits": not can(bytearray, limit),
}))
"""


def _results_of(tests: ProblemTests, cases: Sequence[tuple[str, Any]], execution: Execution) -> list:
    """Return outcome and error of the cases that a process completed, and of one in which it failed: the last one if
    it failed afterwards. Without the rest of a script its other asserts fail too. Raises [`UnusableTests`]."""
    results = []
    for (_, expected), answer in zip(cases, answers_in(tests, execution.output), strict=False):
        try:
            is_right = is_expected(tests, expected, answer)
            results.append((Outcome.CORRECT if is_right else Outcome.WRONG, ""))
        except ValueError as error:
            results.append((Outcome.ERROR, str(error) if isinstance(error, ProgramError) else "no value"))
    failure = execution.outcome or Outcome.ERROR, execution.error or "no value"
    if execution.outcome is not None or len(results) < len(cases):
        results = [*results[: len(cases) - 1], failure]
    if tests.is_script:
        results += [failure] * (len(cases) - len(results))
    return results


class ProgramProcess(ChildProcess):
    """A running `pacs_trl.verification.sandbox`. `settings` are `layers` and limits."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(settings["timeout_seconds"] + 60.0)  # if it stalls, the trainer must not
        # Their folders are found here, because that looks up the user, and programs would inherit what it opens.
        places = {"folder": tempfile.gettempdir(), "time_zones": zoneinfo.TZPATH}
        settings = settings | {"connection": theirs.fileno()} | places
        flags = ["-s", "-S", "-X", "utf8"]  # as `python -I -S`, except for the variable that fixes the order of sets
        with theirs:  # only the worker keeps this end open
            super().__init__(
                "sandbox",
                ours,
                settings,
                flags,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        """Run a program on an input, or on asserts. Raises an `OSError` if the worker has ended or does not answer."""
        with ExitStack() as stack:
            files = []
            for content in (program, text, "", ""):
                stream = stack.enter_context(open(os.memfd_create("program"), "w+b"))
                stream.write(content.encode("utf-8", "surrogatepass"))
                stream.seek(0)  # also writes the buffer
                files.append(stream.fileno())
            for file in files[2:]:
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            socket.send_fds(self.connection, [b"asserts" if has_asserts else b"run"], files)
            if not (answer := self.connection.recv(1 << 16)):
                raise ConnectionResetError("the worker has ended")
            output = os.pread(files[2], self.settings["output_limit_mb"] << 20, 0)
            messages = os.pread(files[3], 4000, max(0, os.fstat(files[3]).st_size - 4000))
        report = json.loads(answer)
        if report["refusal"]:
            raise RuntimeError(f"A program was not run, because it could not be confined: {report['refusal']}.")
        outcome = None if report["code"] == 0 else Outcome.KILLED if report["code"] < 0 else Outcome.ERROR
        if report["timed_out"]:
            outcome = Outcome.TIMEOUT
            messages = messages or b"timeout"
        texts = output.decode("utf-8", "replace"), messages.decode("utf-8", "replace")
        return Execution(outcome, *texts, report["seconds"])


@dataclass(eq=False)
class CodeVerifier(BaseVerifier):
    """
    Run programs against tests in parallel, confined, within limits.

    Args:
        num_workers (`int`, *optional*): Programs that run in parallel. Defaults to [`default_num_workers`].
        timeout_seconds (`float`): Wall-clock limit per case, or list of asserts.
        cpu_seconds (`float`): CPU time per case, or list of asserts; normally this limit acts first.
        memory_limit_mb (`int`): Address space of a program, in MiB; Python needs 60.
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
    FAILURES: ClassVar[frozenset[Outcome]] = frozenset({Outcome.GOLD_UNPARSEABLE})
    _layers: ClassVar[tuple[str, ...]] = LAYERS  # fewer in tests

    cpu_seconds: float = 2.0
    timeout_seconds: float = 6.0
    memory_limit_mb: int = 512
    output_limit_mb: int = OUTPUT_LIMIT_MB
    isolation: str = "landlock+seccomp"
    stop_early: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.level: str | None = None  # the measured confinement, for example "landlock 7 + seccomp + rlimits"
        self._stopping = False

    def run(self, programs: Sequence[str], inputs: Sequence[str]) -> list[Execution]:
        """Run programs, each on one input, without grading them."""
        with self._lock:
            self._start()
            return self._in_parallel(self._run, list(zip(programs, inputs, strict=True)))

    def facts(self) -> dict[str, Any]:
        """Return limits and confinement, for results files."""
        return {"confinement": self.level} | {name: getattr(self, name) for name in _LIMITS}

    def _prepare(
        self, completion: Any, solution: Any, is_truncated: bool
    ) -> Grade | tuple[bytes, tuple[str, ProblemTests]]:
        try:
            text = solution if isinstance(solution, str) else json.dumps(solution)
            tests = _read_tests(text, self.output_limit_mb)
        except (TypeError, ValueError, RecursionError) as error:  # a set, a circle, depth, or unreadable tests
            return Grade(Outcome.GOLD_UNPARSEABLE, error=str(error))
        if isinstance(completion, str) and len(completion) > MAX_CHARACTERS:
            return Grade(Outcome.TOO_LONG)
        program = last_program(completion, tests.function) if isinstance(completion, str) else None
        if program is None:
            return Grade(Outcome.NO_ANSWER)
        return self._key(text, program), (program, tests)

    def _run_jobs(self, jobs: list[tuple[str, ProblemTests]]) -> list[Grade]:
        self._start()
        return self._in_parallel(self._grade_one, jobs)

    def _grade_one(self, program: str, tests: ProblemTests) -> Grade:
        source, seconds = runnable(tests, program), 0.0
        results: list[tuple[Outcome, str]] = []  # outcome and error of each case
        failures: list[tuple[Outcome, str]] = []
        while len(results) < len(tests.cases) and not (failures and self.stop_early):
            cases = tests.cases_of_next_process(len(results))
            execution = self._run(source, input_of(tests, cases), tests.are_asserts)
            seconds += execution.seconds
            try:
                results += _results_of(tests, cases, execution)
            except UnusableTests as unusable:
                return Grade(Outcome.GOLD_UNPARSEABLE, seconds, error=str(unusable))
            failures = [result for result in results if result[0] is not Outcome.CORRECT]
        outcome, error = failures[0] if failures else (Outcome.CORRECT, "")
        if failures and self.stop_early:
            results = results[: results.index(failures[0])]
        num_passed = sum(outcome is Outcome.CORRECT for outcome, _ in results)
        return Grade(outcome, seconds, num_passed / len(tests.cases), error)

    def _run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        if self._stopping:
            raise KeyboardInterrupt
        worker = self._pool.get()
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
        with ThreadPoolExecutor(self.num_workers) as pool:
            try:
                return list(pool.map(lambda job: function(*job), jobs))
            except BaseException:  # e.g. an interrupt: a running program ends with its case
                self._stopping = True
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                self._stopping = False

    def _end(self) -> None:
        while self._pool is not None and not self._pool.empty():
            self._pool.get().end()
        self._pool = None

    def _new_worker(self) -> ProgramProcess:
        layers = [layer for layer in self._layers if layer not in missing_layers()]
        return ProgramProcess({"layers": layers} | {name: getattr(self, name) for name in _LIMITS})

    def _start(self) -> None:
        """Start the workers and measure their confinement. Raises a `ValueError` if it is weaker than `isolation`, or
        no program can be run."""
        if self._pool is not None:
            return
        if sys.platform != "linux":
            raise UserError(
                f"Programs run in a sandbox of Linux, and this system is {sys.platform}. Use Linux for code_reward, "
                "run_python, asserts, and reasoning-gym, or a reward that runs no programs."
            )
        self._pool = queue.SimpleQueue()
        with ExitStack() as on_failure:
            on_failure.callback(self._end)
            for _ in range(self.num_workers or 1):
                self._pool.put(self._new_worker())
            probe = self._run(_PROBE, str(self.memory_limit_mb << 20))
            holds = json.loads(probe.output) if probe.outcome is None else {"rlimits": False}
            if not holds["rlimits"]:
                raise UserError(
                    "The sandbox cannot run programs on this machine, or limit their memory ("
                    f"{probe.error or 'no limit'}: {probe.messages or 'no message'}). Use another machine."
                )
            layers = [layer for layer in LAYERS if holds[layer]]
            names = [f"landlock {landlock_version()}" if layer == "landlock" else layer for layer in layers]
            level = " + ".join([*names, "rlimits"]) if layers else "rlimits only"
            if lacking := sorted({*self.isolation.split("+")} - {*layers, "rlimits"}):
                reasons = "; ".join(missing_layers().values()) or "switched off, or a program broke out"
                raise UserError(
                    f"code_isolation={self.isolation} needs {' and '.join(lacking)}, but programs would run with "
                    f"{level} ({reasons}) and could read and write your files. Use kernel 5.13 or later with Landlock "
                    "and a container profile that allows both, or, on a disposable machine, set code_isolation to "
                    f"{'+'.join(layers) or 'rlimits'} (see docs/code.md)."
                )
            on_failure.pop_all()
        if self.level != level:
            logger.info("Programs run with %s.", level)
        self.level = level

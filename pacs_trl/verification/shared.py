"""The verifiers of this process and their settings: training and evaluation use the same grader."""

import os
import threading
from dataclasses import dataclass
from typing import Literal

from ..settings import bounded, refuse_illegal_values
from . import Verifier
from .code import CodeVerifier


@dataclass
class VerificationArguments:
    """
    Settings of the verifiers that training and evaluation share.

    Args:
        verification_protocol (`str`): `"authors"` (the PACS authors' grader) or `"trl"` (TRL's `accuracy_reward`).
        verification_num_workers (`int`, *optional*): Worker processes per rank; by default its share of the
            processors.
        verification_timeout_seconds (`float`): Wall-clock limit per completion.
        verification_cpu_seconds (`float`): CPU time limit per completion.
        verification_memory_limit_mb (`int`): Address space of a worker, in MiB.
        verification_grade_truncated (`bool`): Grade completions that were cut at the length limit like any other. By
            default only a closed box of such a completion counts.
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

    verification_protocol: Literal["authors", "trl"] = "authors"
    verification_num_workers: int | None = bounded(None, least=1)
    verification_timeout_seconds: float = bounded(5.0, above=0)
    verification_cpu_seconds: float = bounded(0.4, above=0)
    verification_memory_limit_mb: int = bounded(1024, least=256)
    verification_grade_truncated: bool = False
    verification_max_failure_share: float = bounded(0.5, least=0, most=1)
    code_isolation: Literal["landlock+seccomp", "seccomp", "landlock", "rlimits"] = "landlock+seccomp"
    code_cpu_seconds: float = bounded(2.0, above=0)
    code_timeout_seconds: float = bounded(6.0, above=0)
    code_memory_limit_mb: int = bounded(512, least=128)
    code_label: Literal["all", "share"] = "all"
    code_sandbox_url: str | None = None

    def __post_init__(self):
        refuse_illegal_values(self)
        self.build(), self.build_code()  # the relation between CPU time and wall-clock time

    def build(self) -> Verifier:
        """Return a verifier with these settings, not yet started."""
        names = ("protocol", "num_workers", "timeout_seconds", "cpu_seconds", "memory_limit_mb", "grade_truncated")
        return Verifier(**{name: getattr(self, f"verification_{name}") for name in names})

    def build_code(self) -> CodeVerifier:
        """Return a verifier of programs with these settings, not yet started."""
        names = ("isolation", "cpu_seconds", "timeout_seconds", "memory_limit_mb", "sandbox_url")
        return CodeVerifier(
            num_workers=self.verification_num_workers,
            stop_early=self.code_label == "all",
            **{name: getattr(self, f"code_{name}") for name in names},
        )


_lock = threading.RLock()
_arguments: VerificationArguments | None = None
_verifier: Verifier | None = None
_code_verifier: CodeVerifier | None = None


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)


def configure_verification(arguments: VerificationArguments) -> Verifier:
    """Replace the shared verifiers of this process; the one of answers is started in the background."""
    global _arguments, _verifier, _code_verifier
    verifier = arguments.build()
    with _lock:
        if _verifier is not None:
            verifier.take_pool(_verifier)
        if _code_verifier is not None:
            _code_verifier.close()
        _arguments, _verifier, _code_verifier = arguments, verifier, None
    verifier.start()
    return verifier


def shared_verifier() -> Verifier:
    """Return the verifier of answers of this process."""
    with _lock:
        return _verifier or configure_verification(shared_arguments())


def shared_code_verifier() -> CodeVerifier:
    """Return the verifier of programs of this process, which starts with its first use."""
    global _code_verifier
    with _lock:
        _code_verifier = _code_verifier or shared_arguments().build_code()
        return _code_verifier


def shared_arguments() -> VerificationArguments:
    """Return the settings of the shared verifiers."""
    return _arguments or VerificationArguments()


# Characters of an output or of messages that go back into the conversation.
MAX_REPLY = 2000


def run_python(code: str, input: str = "") -> str:
    """
    Run a Python program and return what it prints.

    Args:
        code: The whole program.
        input: What it reads from standard input.

    Returns:
        What it prints.
    """
    (execution,) = shared_code_verifier().run([code], [input])
    if execution.outcome is not None:  # an exception, so that it counts among `tools/failure_frequency`
        raise RuntimeError(f"{execution.error}: {execution.messages[-MAX_REPLY:].strip()}")
    return execution.output[:MAX_REPLY]

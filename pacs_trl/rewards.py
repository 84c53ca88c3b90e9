"""Reward functions, which return the labels of PACS training, and the shared verifiers.

A reward function returns numbers in [0, 1], or `None` to remove a completion from its group. Labels may be soft, for
example a weighted sum of several functions whose `reward_weights` sum to 1.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .errors import FailedRun
from .settings.checks import refuse_illegal_values
from .settings.fields import setting
from .settings.names import function_of_user
from .verification import BaseVerifier, Grade, Outcome, Verifier, completion_text
from .verification.code import CodeVerifier


logger = logging.getLogger(__name__)


@dataclass
class VerificationArguments:
    """Settings of the verifiers of training and evaluation."""

    # Parameters that control the verification of answers
    verification_protocol: Literal["robust", "authors", "trl", "number"] = setting(
        "robust",
        '`"robust"` (answers as people and models write them; sums that could be carried out, and several different '
        'answers, are wrong), `"authors"` (the PACS authors\' grader), `"trl"` (TRL\'s `accuracy_reward`), or '
        '`"number"` (the last number of the completion; expressions are not evaluated).',
    )
    verification_num_workers: int | None = setting(
        None, "Worker processes per rank, by default its share of the processors.", least=1
    )
    verification_timeout_seconds: float = setting(5.0, "Wall-clock limit per completion.", above=0)
    verification_cpu_seconds: float = setting(0.4, "CPU time limit per completion.", above=0)
    verification_memory_limit_mb: int = setting(1024, "Address space of a worker, in MiB.", least=256)
    verification_grade_truncated: bool = setting(
        False,
        "Grade truncated completions like others. By default only a closed box of such a completion is graded.",
    )
    verification_max_failure_share: float = setting(
        0.5,
        "Training stops if more than this share of the recent completions could not be verified. 1.0 never stops.",
        least=0,
        most=1,
    )

    # Parameters that control the verification of programs
    code_isolation: Literal["landlock+seccomp", "seccomp", "landlock", "rlimits"] = setting(
        "landlock+seccomp",
        'Weakest accepted confinement of programs: `"landlock+seccomp"`, `"seccomp"`, `"landlock"`, or `"rlimits"`.',
    )
    code_cpu_seconds: float = setting(
        2.0, "CPU time limit of a program for one test case, or a whole list of asserts.", above=0
    )
    code_timeout_seconds: float = setting(
        6.0, "Wall-clock limit of a program for one test case, or a whole list of asserts.", above=0
    )
    code_memory_limit_mb: int = setting(512, "Address space of a program, in MiB.", least=128)
    code_label: Literal["all", "share"] = setting(
        "all", '`"all"`: 1 for a program that passes every test, else 0; `"share"`: share of passed tests.'
    )

    # Parameters that control answers of reasoning-gym
    reasoning_gym_label: Literal["exact", "share"] = setting(
        "exact", '`"exact"`: 1 for an answer with the full score, else 0; `"share"`: the score.'
    )

    def __post_init__(self):
        refuse_illegal_values(self)
        # Verifiers check that CPU limits are below wall-clock limits.
        self.build()
        self.build_code()

    def build(self) -> Verifier:
        """Return a verifier with these settings, not yet started."""
        return Verifier(
            protocol=self.verification_protocol,
            num_workers=self.verification_num_workers,
            timeout_seconds=self.verification_timeout_seconds,
            cpu_seconds=self.verification_cpu_seconds,
            memory_limit_mb=self.verification_memory_limit_mb,
            grade_truncated=self.verification_grade_truncated,
        )

    def build_code(self) -> CodeVerifier:
        """Return a verifier of programs with these settings, not yet started."""
        return CodeVerifier(
            isolation=self.code_isolation,
            num_workers=self.verification_num_workers,
            stop_early=self.code_label == "all",
            cpu_seconds=self.code_cpu_seconds,
            timeout_seconds=self.code_timeout_seconds,
            memory_limit_mb=self.code_memory_limit_mb,
        )


# Shared verifiers ---------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_arguments = VerificationArguments()
_verifiers: dict[str, Any] = {}  # by what they grade: "answers", "programs", or "entries" of reasoning-gym


def configure_verification(arguments: VerificationArguments) -> None:
    """Set the settings of the shared verifiers of this process, and start that of answers in the background. Running
    ones are closed, unless the settings are the same."""
    global _arguments
    with _lock:
        if arguments != _arguments:
            for verifier in _verifiers.values():
                verifier.close()
            _verifiers.clear()
        _arguments = arguments
        shared_verifier().start()


def shared_arguments() -> VerificationArguments:
    """Return the settings of the shared verifiers."""
    return _arguments


def _shared(kind: str, build: Callable[[], Any]) -> Any:
    """Return the shared verifier of a kind, which is built at its first use."""
    with _lock:
        if kind not in _verifiers:
            _verifiers[kind] = build()
        return _verifiers[kind]


def shared_verifier() -> Verifier:
    """Return the shared verifier of answers."""
    return _shared("answers", _arguments.build)


def shared_code_verifier() -> CodeVerifier:
    """Return the shared verifier of programs, which starts at its first use."""
    return _shared("programs", _arguments.build_code)


def shared_gym_verifier() -> Verifier:
    """Return the shared verifier of reasoning-gym. Raises `ValueError` if scorers cannot be confined as
    `code_isolation` asks."""
    shared_code_verifier().start()
    return _shared("entries", lambda: replace(shared_verifier(), protocol="reasoning_gym"))


# Tools --------------------------------------------------------------------------------------------------------------

# Maximum number of characters of a tool reply.
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
    if execution.outcome is not None:  # an exception, so that `tools/failure_frequency` counts it
        raise RuntimeError(f"{execution.error}: {execution.messages[-MAX_REPLY:].strip()}")
    return execution.output[:MAX_REPLY]


def tool_function(name: str) -> Callable:
    """Return `run_python`, or a tool of the user by its dotted path, also from the working directory."""
    if name == run_python.__name__:
        return run_python
    return function_of_user(name, "tools", [run_python.__name__])


# Reward functions ---------------------------------------------------------------------------------------------------


def math_reward(
    completions: list,
    solution: list,
    *,
    truncated: list[bool] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """
    Return 1.0 for a completion whose final answer equals the gold answer, 0.0 otherwise, and `None` without a readable
    gold answer.

    Uses the shared verifier ([`configure_verification`]), by default with the protocol `robust`, which reads answers
    as people and models write them; `verification_protocol: authors` is the grader of the PACS authors.

    Args:
        completions (`list`): Completions, plain (`str`) or conversational (lists of messages).
        solution (`list`): Gold answers, one per completion: text with or without `\\boxed{}` or `$`, a number, or a
            list of alternatives.
        truncated (`list[bool]`, *optional*): Passed by the trainers of this package: which completions lack an
            end-of-sequence token. Only a closed box of these is graded, see `verification_grade_truncated`.
        log_metric (`Callable`, *optional*): Passed by TRL; receives the share of each outcome as
            `verification/<name>`.
        log_extra (`Callable`, *optional*): Passed by TRL; receives gold and outcome for completion tables.
        **kwargs: Further columns that TRL passes; unused.

    Returns:
        `list[float | None]`: One label per completion.

    Raises:
        VerificationFailure: if too many of the recent completions could not be verified.
    """
    if log_extra is not None:
        log_extra("solution", [str(gold) for gold in solution])
    grades = _grade("answers", shared_verifier(), completions, solution, truncated, log_metric, log_extra)
    return [grade.outcome.label for grade in grades]


def code_reward(
    completions: list,
    solution: list,
    *,
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """
    Return 1.0 for a completion whose program passes every test, 0.0 otherwise, and `None` without readable tests.

    Runs the last closed block of the completion with the label of Python, else the last one without a label, with the
    shared verifier of programs and the confinement and limits of [`VerificationArguments`]. With `code_label: share`
    the label is the share of passed tests.

    Args:
        solution (`list`): Tests, one per completion: mappings or JSON in the form of `verification/cases.py`.
        completions, log_metric, log_extra, **kwargs: As in [`math_reward`]; also logged are the mean share of passed
            tests and the error of each program.

    Returns:
        `list[float | None]`: One label per completion.

    Raises:
        ValueError: if the confinement is weaker than `code_isolation`.
        VerificationFailure: if the tests of too many of the recent completions cannot be read.
    """
    grades = _grade("programs", shared_code_verifier(), completions, solution, None, log_metric, log_extra)
    if log_metric is not None:
        log_metric("verification/error", _mean([grade.outcome is Outcome.ERROR for grade in grades]))
        log_metric("verification/tests_passed", _mean([grade.share for grade in grades]))
    if log_extra is not None:
        log_extra("error", [grade.error for grade in grades])
    return _labels(grades, _arguments.code_label)


def reasoning_gym_reward(
    completions: list,
    solution: list,
    task: list,
    *,
    truncated: list[bool] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """
    Score of each answer to a problem of reasoning-gym by the task's own scorer; `None` if no entry is named.

    The answer is the last `<answer>...</answer>`, else the last closed box, else the whole completion; of a truncated
    completion only the first two count. With `reasoning_gym_label: exact` only the full score is 1.0, others are 0.0.

    Args:
        solution, task (`list`): Columns of `dataset_name: reasoning_gym`.
        completions, truncated, log_metric, **kwargs: As in [`math_reward`]; also logged is the mean score of each task
            as `reasoning_gym/<task>`.
    """
    grades = _grade("entries", shared_gym_verifier(), completions, solution, truncated, log_metric)
    if log_metric is not None:
        for name in sorted(set(task)):
            scores = [grade.share for grade, task_name in zip(grades, task, strict=True) if task_name == name]
            log_metric(f"reasoning_gym/{name}", _mean(scores))
    return _labels(grades, _arguments.reasoning_gym_label)


# The reward functions of this package, which may be called in any thread.
FUNCTIONS = (math_reward, code_reward, reasoning_gym_reward)


def needs_solution(reward_funcs: Iterable[Callable]) -> bool:
    """Whether a reward function has a parameter `solution` without a default, so that all examples need gold
    answers."""
    parameters = [inspect.signature(function).parameters.get("solution") for function in reward_funcs]
    return any(each is not None and each.default is each.empty for each in parameters)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _labels(grades: Sequence[Grade], kind: str) -> list[float | None]:
    """Return the label of each grade: its share with `kind="share"`, else that of its outcome; `None` without
    verdict."""
    labels: list[float | None] = []
    for grade in grades:
        label = grade.outcome.label
        if kind == "share" and label is not None:
            label = grade.share
        labels.append(label)
    return labels


class VerificationFailure(FailedRun):
    """Too many completions could not be verified."""


class _Graded(NamedTuple):
    """A graded completion: its outcome, its text if it has one, and the gold answer."""

    outcome: Outcome
    text: str | None
    gold: Any


# Completions that decide whether a run stops, at least and, except in larger batches, at most. They span batches,
# because a rank may have the completions of one prompt only: a dataset of unreadable golds must stop the run, but a
# single one must not.
_MIN_WINDOW, _MAX_WINDOW = 64, 256
_windows: dict[str, list[_Graded]] = {}  # the last completions, by kind
_kinds_with_warning: set[str] = set()


def _grade(
    kind: str,
    verifier: BaseVerifier,
    completions: list,
    solutions: list,
    truncated: list[bool] | None,
    log_metric: Callable[[str, float], None] | None,
    log_extra: Callable[[str, list], None] | None = None,
) -> list[Grade]:
    """Grade completions of a kind, log the outcomes where TRL takes them, and stop the run if too many of the recent
    completions could not be verified."""
    texts = [completion_text(completion) for completion in completions]
    grades = verifier.grade_detailed(texts, solutions, truncated)
    outcomes = [grade.outcome for grade in grades]
    if log_metric is not None and grades:
        for outcome in Outcome:
            if outcome is not Outcome.ERROR:  # which only programs have
                log_metric(f"verification/{outcome.name.lower()}", outcomes.count(outcome) / len(outcomes))
    if log_extra is not None:
        log_extra("verification", [outcome.name.lower() for outcome in outcomes])

    batch = [_Graded(*entry) for entry in zip(outcomes, texts, solutions, strict=True)]
    unreadable_golds = [graded.gold for graded in batch if graded.outcome is Outcome.GOLD_UNPARSEABLE]
    if unreadable_golds and kind not in _kinds_with_warning:
        _kinds_with_warning.add(kind)
        logger.warning(
            f"The gold answer {unreadable_golds[0]!r:.200} is missing or cannot be parsed, so its completions are "
            "masked out. verification/gold_unparseable counts further ones."
        )

    window_size = max(_MAX_WINDOW, len(batch))
    window = (_windows.get(kind, []) + batch)[-window_size:]
    _windows[kind] = window
    failures = [graded for graded in window if graded.outcome in verifier.FAILURES]
    max_share = _arguments.verification_max_failure_share
    if len(window) >= _MIN_WINDOW and len(failures) > max_share * len(window):
        examples = "\n".join(
            f"  {graded.outcome.name.lower()}: gold {str(graded.gold)[:200]!r}, completion ends in "
            f"{(graded.text or '')[-200:]!r}"
            for graded in failures[-3:]
        )
        raise VerificationFailure(
            f"{len(failures)} of the last {len(window)} completions could not be verified (timeout, killed, too "
            f"long, or gold unparseable), above verification_max_failure_share={max_share}. Examples:\n{examples}\n"
            "Check the `solution` column and the limits, or raise the share."
        )
    return grades

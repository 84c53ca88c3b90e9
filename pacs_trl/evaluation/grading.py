"""Grading of sampled completions, in the background while an engine generates the next ones.

A record is an entry of a sample store (`store.py`) and has the completion of one sample. Completions of an environment
have a reward already; all others are graded by a verifier.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from ..data.golds import report_golds
from ..errors import UserError
from ..verification import Outcome, Verifier
from ..verification.code import CodeVerifier
from .benchmarks import LoadedBenchmark, Problem
from .results import GradedSample


CHUNK_SIZE = 128  # completions graded per call of the verifier
MAX_WAITING = 32  # chunks in the queue: bounds memory when stored completions are read faster than graded


def check_grading(benchmarks: Sequence[LoadedBenchmark], verifier: Verifier, code_verifier: CodeVerifier) -> None:
    """Start the sandbox if a benchmark needs it, which fails where it is unavailable, and report unreadable golds."""
    if any(benchmark.is_code or benchmark.is_gym for benchmark in benchmarks):
        code_verifier.start()
    for benchmark in benchmarks:
        has_golds = not (benchmark.is_code or benchmark.environment or benchmark.is_gym)
        if has_golds:
            golds = [problem.solution for problem in benchmark.problems]
            ids = [problem.id for problem in benchmark.problems]
            report_golds(benchmark.title, golds, verifier, ids)


def grade_in_background(
    verifier: Verifier | CodeVerifier, problems: Sequence[Problem], records: Iterator[dict[str, Any]]
) -> tuple[dict[tuple[str, int], GradedSample], Counter[str]]:
    """
    Grade chunks of records in one thread, while the caller's thread reads the next ones from `records`, which may
    generate them.

    Returns:
        Graded samples by (problem id, sample number), and the number of each outcome (correct, wrong, no_answer,
        timeout, ...).
    """
    problem_by_id = {problem.id: problem for problem in problems}
    graded: dict[tuple[str, int], GradedSample] = {}
    num_by_outcome: Counter[str] = Counter()

    def grade(chunk: list[dict[str, Any]]) -> None:
        for record, outcome in zip(chunk, _outcomes(verifier, chunk, problem_by_id), strict=True):
            num_by_outcome[outcome.name.lower()] += 1
            graded[record["problem"], record["sample"]] = GradedSample(
                problem=record["problem"],
                outcome=outcome.label,
                num_tokens=record["num_tokens"],
                finish_reason=record["finish_reason"],
            )

    waiting: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        while chunk := list(islice(records, CHUNK_SIZE)):
            waiting.append(pool.submit(grade, chunk))
            if len(waiting) > MAX_WAITING:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return graded, num_by_outcome


def _outcomes(
    verifier: Verifier | CodeVerifier, records: Sequence[dict[str, Any]], problem_by_id: Mapping[str, Problem]
) -> list[Outcome]:
    """Return the outcomes of records of one benchmark."""
    if "reward" in records[0]:  # of an environment, as in all records of its benchmark
        return [_outcome_of_reward(record["reward"]) for record in records]
    completions = [record["completion"] for record in records]
    solutions = [problem_by_id[record["problem"]].for_seed(record["seed"])[1] for record in records]
    is_truncated = [record["finish_reason"] == "length" for record in records]
    return [result.outcome for result in verifier.grade_detailed(completions, solutions, is_truncated)]


def _outcome_of_reward(reward: float | None) -> Outcome:
    """Return the outcome that the reward of an environment means: 1 or more is correct, `None` is not gradable."""
    if reward is None:
        return Outcome.GOLD_UNPARSEABLE
    if reward >= 1:
        return Outcome.CORRECT
    return Outcome.WRONG


def check_failures(
    title: str, verifier: Verifier | CodeVerifier, num_by_outcome: Counter[str], max_share: float
) -> None:
    """Raise a `ValueError` if the verifier failed on more than `max_share` of the completions of a benchmark."""
    failures = {}
    for outcome in Outcome:
        name = outcome.name.lower()
        if outcome in verifier.FAILURES and num_by_outcome[name]:
            failures[name] = num_by_outcome[name]
    if sum(failures.values()) > max_share * num_by_outcome.total():
        raise UserError(
            f"{title}: {failures} of {num_by_outcome.total()} completions could not be verified, more than "
            f"verification_max_failure_share={max_share}. The samples are stored: check the gold answers and the "
            "verification limits, or raise the share, and run the same command again."
        )

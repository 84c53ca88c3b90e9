"""Background grading: the verifier's processes grade one chunk of completions while the engine generates the next."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from ..verification import Verifier, last_boxed
from ..verification.code import CodeVerifier
from .benchmarks import Problem
from .results import GradedSample


CHUNK_SIZE = 128
# Chunks that may wait: bounds the memory when stored completions are read faster than they can be graded.
MAX_WAITING = 32


def grade_in_background(
    verifier: Verifier | CodeVerifier, problems: Sequence[Problem], records: Iterator[dict[str, Any]]
) -> tuple[dict[tuple[str, int], GradedSample], Counter[str]]:
    """Grade the records of a sample store while they are generated, with a verifier that nobody else uses meanwhile;
    graded samples by (problem, sample), and the number of each outcome (correct, wrong, no_answer, timeout, ...)."""
    by_id = {problem.id: problem for problem in problems}
    graded: dict[tuple[str, int], GradedSample] = {}
    outcomes: Counter[str] = Counter()

    def grade(chunk: list[dict[str, Any]]) -> None:
        completions = [record["completion"] for record in chunk]
        solutions = [by_id[record["problem"]].of_sample(record["seed"])[1] for record in chunk]
        truncated = [record["finish_reason"] == "length" for record in chunk]
        more = () if isinstance(verifier, CodeVerifier) else (truncated,)
        for record, grade in zip(chunk, verifier.grade_detailed(completions, solutions, *more), strict=True):
            outcomes[grade.outcome.name.lower()] += 1
            graded[record["problem"], record["sample"]] = GradedSample(
                problem=record["problem"],
                outcome=grade.outcome.label,
                num_tokens=record["num_tokens"],
                finish_reason=record["finish_reason"],
                answer=by_id[record["problem"]].comparable(last_boxed(record["completion"]), record["seed"]),
            )

    waiting: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        for chunk in iter(lambda: list(islice(records, CHUNK_SIZE)), []):
            waiting.append(pool.submit(grade, chunk))
            if len(waiting) > MAX_WAITING:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return graded, outcomes

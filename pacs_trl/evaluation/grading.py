"""Background grading: the verifier's processes grade one chunk of completions while the engine generates the next."""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..verification import Verifier, last_boxed
from ..verification.code import CodeVerifier
from .benchmarks import Problem
from .results import GradedSample


CHUNK_SIZE = 128
# Chunks that may wait: bounds the memory when stored completions are read faster than they can be graded.
MAX_WAITING = 32


class BackgroundGrader:
    """Grades stored records with a verifier that nobody else uses meanwhile. `problems` hold the gold answers;
    `outcomes` counts the results (correct, wrong, no_answer, timeout, ...)."""

    def __init__(self, verifier: Verifier | CodeVerifier, problems: Sequence[Problem]):
        self._verifier, self._problems = verifier, {problem.id: problem for problem in problems}
        self.outcomes: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future] = deque()
        self._graded: dict[tuple[str, int], GradedSample] = {}
        self._chunk: list[dict[str, Any]] = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, record: dict[str, Any]) -> None:
        """Take one record of a sample store."""
        self._chunk.append(record)
        if len(self._chunk) == CHUNK_SIZE:
            self._submit()
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft().result()

    def finish(self) -> dict[tuple[str, int], GradedSample]:
        """Wait for the rest; graded samples by (problem, sample)."""
        self._submit()
        for future in self._waiting:
            future.result()
        return self._graded

    def _submit(self) -> None:
        self._waiting.append(self._pool.submit(self._grade, self._chunk))
        self._chunk = []

    def _grade(self, chunk: Sequence[dict[str, Any]]) -> None:
        completions = [record["completion"] for record in chunk]
        problems = [self._problems[record["problem"]] for record in chunk]
        solutions = [problem.of_sample(record["seed"])[1] for problem, record in zip(problems, chunk, strict=True)]
        if isinstance(self._verifier, CodeVerifier):
            grades: Sequence[Any] = self._verifier.grade_detailed(completions, solutions)
        else:
            truncated = [record["finish_reason"] == "length" for record in chunk]
            grades = self._verifier.grade_detailed(completions, solutions, truncated)
        self.outcomes.update(grade.outcome.name.lower() for grade in grades)
        for problem, record, grade in zip(problems, chunk, grades, strict=True):
            self._graded[record["problem"], record["sample"]] = GradedSample(
                problem=record["problem"],
                outcome=grade.outcome.label,
                num_tokens=record["num_tokens"],
                finish_reason=record["finish_reason"],
                answer=problem.comparable(last_boxed(record["completion"]), record["seed"]),
            )

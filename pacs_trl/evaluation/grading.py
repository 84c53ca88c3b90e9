"""Grading while the engine is still drawing: the verifier's processes work on the last chunk during the next one.

One background thread feeds the verifier in the order of arrival; at the end only the last chunk is waited for.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pacs_trl.evaluation.results import GradedSample


# Small enough to start early and to overlap, large enough that handing a chunk over costs nothing.
CHUNK_SIZE = 128
# Chunks that may wait: bounds the memory when a store full of completions is read back faster than it can be graded.
MAX_WAITING = 32


class BackgroundGrader:
    """
    Grades stored records with a `Verifier`, in order, in the background.

    Args:
        verifier: Something with `grade(completions, solutions) -> list[float | None]`.
        solutions (`dict`): Gold answer of each problem id.
    """

    def __init__(self, verifier: Any, solutions: dict[str, Any]):
        self._verifier, self._solutions = verifier, solutions
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: list[Future[dict[tuple[str, int], GradedSample]]] = []
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

    def finish(self) -> dict[tuple[str, int], GradedSample]:
        """Wait for the rest; outcomes by (problem, sample)."""
        self._submit()
        while self._waiting:
            self._collect()
        return self._graded

    def _submit(self) -> None:
        chunk, self._chunk = self._chunk, []
        if len(self._waiting) >= MAX_WAITING:
            self._collect()
        self._waiting.append(self._pool.submit(self._grade, chunk))

    def _collect(self) -> None:
        self._graded |= self._waiting.pop(0).result()

    def _grade(self, chunk: Sequence[dict[str, Any]]) -> dict[tuple[str, int], GradedSample]:
        from pacs_trl.data import last_boxed

        completions = [record["completion"] for record in chunk]
        outcomes = self._verifier.grade(completions, [self._solutions[record["problem"]] for record in chunk])
        return {
            (record["problem"], record["sample"]): GradedSample(
                problem=record["problem"],
                outcome=outcome,
                num_tokens=record["num_tokens"],
                finish_reason=record["finish_reason"],
                answer=last_boxed(record["completion"]),
            )
            for record, outcome in zip(chunk, outcomes, strict=True)
        }

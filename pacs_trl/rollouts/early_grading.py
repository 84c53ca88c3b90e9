"""Grading that overlaps with generation: completions that vLLM has finished are graded while it draws the others.

Their grades wait in the cache of the shared verifier, where `math_reward` finds them, so labels, their order and their
metrics are those of a run without it. The engine must hand out completions one by one: a colocated one does
(`engine.py`), a server answers for the whole batch at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from ..verification import shared_verifier


class EarlyGrading:
    """
    Grades what an engine has finished, in a thread of its own; the work itself is done by the verifier's processes.

    Completions that wait while a batch is being graded form the next batch, so that all workers have something to do.

    Args:
        decode (`Callable`):
            Texts of a list of completions, given as token ids; the same that the reward function will see.
        is_truncated (`Callable`):
            Of a list of completions, which do not end with an end-of-sequence token.
    """

    def __init__(
        self,
        decode: Callable[[list[Sequence[int]]], list[str]],
        is_truncated: Callable[[list[Sequence[int]]], list[bool]],
    ):
        self._decode = decode
        self._is_truncated = is_truncated
        self._solutions: dict[tuple[int, ...], Any] = {}
        self._finished: SimpleQueue[tuple[Sequence[int], Any]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="early_grading")
        self._tasks: list[Future[None]] = []

    @contextmanager
    def expecting(self, prompt_ids: Sequence[Sequence[int]], solutions: Sequence[Any]) -> Iterator[None]:
        """
        Inside the context these rows are generated; whatever else the engine draws is left alone.

        Args:
            prompt_ids (`Sequence`): Token ids of each prompt.
            solutions (`Sequence`): Gold answer of each prompt, `None` where there is none.
        """
        rows = zip(prompt_ids, solutions, strict=True)
        self._solutions = {tuple(ids): solution for ids, solution in rows if solution is not None}
        try:
            yield
        finally:
            self._solutions = {}

    @property
    def expects_rows(self) -> bool:
        return bool(self._solutions)

    def add(self, finished: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Prompt and completion of what has been finished since the last call, as token ids."""
        found = ((self._solutions.get(tuple(prompt_ids)), completion_ids) for prompt_ids, completion_ids in finished)
        expected = [(completion_ids, solution) for solution, completion_ids in found if solution is not None]
        for row in expected:
            self._finished.put(row)
        if expected:
            self._tasks.append(self._thread.submit(self._grade_waiting))

    def wait(self) -> None:
        """Return when everything finished so far is graded. Raises what grading has raised."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def _grade_waiting(self) -> None:
        # The only consumer: what is counted here can be taken.
        waiting = [self._finished.get() for _ in range(self._finished.qsize())]
        if waiting:
            completions = [completion for completion, _ in waiting]
            solutions = [solution for _, solution in waiting]
            shared_verifier().grade_early(self._decode(completions), solutions, self._is_truncated(completions))

"""Grading that overlaps with generation: completions that vLLM has finished are graded while it draws the others.

Their grades wait in the cache of the shared verifier, where `math_reward` finds them, so labels, their order and their
metrics are those of a run without it. The engine must hand out completions one by one: a colocated one does, a server
answers for the whole batch at once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from ..verification import shared_verifier


class EarlyGrading:
    """
    Grades what a colocated engine has finished, in a thread of its own; the work itself is done by the verifier's processes.

    Completions that wait while a batch is being graded form the next batch, so that all workers have something to do.

    Args:
        engine ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            The `step` of its `llm.llm_engine` is replaced.
        decode (`Callable`):
            Texts of a list of completions, given as token ids; the same that the reward function will see.
    """

    def __init__(self, engine: VLLMGeneration, decode: Callable[[list[Sequence[int]]], list[str]]):
        self._decode = decode
        self._solutions: dict[tuple[int, ...], Any] = {}
        self._finished: SimpleQueue[tuple[Sequence[int], Any]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="early_grading")
        self._tasks: list[Future[None]] = []
        self._step = engine.llm.llm_engine.step
        engine.llm.llm_engine.step = self._step_and_pass_on

    def expect(self, prompt_ids: Sequence[Sequence[int]], solutions: Sequence[Any]) -> None:
        """
        Name the rows that are about to be generated; whatever else the engine draws is left alone.

        Args:
            prompt_ids (`Sequence`): Token ids of each prompt.
            solutions (`Sequence`): Gold answer of each prompt, `None` where there is none.
        """
        rows = zip(prompt_ids, solutions, strict=True)
        self._solutions = {tuple(ids): solution for ids, solution in rows if solution is not None}

    def wait(self) -> None:
        """Return when everything finished so far is graded. Raises what grading has raised."""
        self._solutions = {}
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def _step_and_pass_on(self, *args, **kwargs) -> list:
        outputs = self._step(*args, **kwargs)
        finished = [output for output in outputs if output.finished and self._solutions]
        for output in finished:
            solution = self._solutions.get(tuple(output.prompt_token_ids))
            if solution is not None:
                self._finished.put((output.outputs[0].token_ids, solution))
        if finished:
            self._tasks.append(self._thread.submit(self._grade_waiting))
        return outputs

    def _grade_waiting(self) -> None:
        # The only consumer: what is counted here can be taken.
        waiting = [self._finished.get() for _ in range(self._finished.qsize())]
        if waiting:
            completions, solutions = zip(*waiting, strict=True)
            shared_verifier().grade_early(self._decode(list(completions)), solutions)

"""Seeds of vLLM requests in training.

A seed follows from the seed of the run, the number of the generation batch, the turn of the conversation, and the
index of the completion among those of all processes. It does not depend on the number of processes, so that a run
continues with the same completions when it resumes on more or fewer of them.
"""

import hashlib
from collections.abc import Sequence


def request_seed(stream: str, index: int) -> int:
    """Return the seed of one request, in [0, 2^31), as a hash of a stream and an index."""
    digest = hashlib.sha256(f"{stream}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class RequestSeeds:
    """
    Seeds of the requests of one engine.

    The first requests of a generation batch are for all completions of the engine, in order. Later ones are for those
    that called a tool, and continue their prompts and completions, from which they are recognized.

    Args:
        run_seed (`int`): `seed` of the run.
        engine (`int`): Index of the engine.
    """

    def __init__(self, run_seed: int, engine: int):
        self._batch = self._first = 0
        self._run_seed, self._engine = run_seed, engine
        self._num_calls = 0
        self._texts: list[list[int]] = []  # prompt and completion so far, of each completion of this engine
        self._rows: list[int] = []  # completions of the last requests

    def begin_batch(self, number: int, first: int) -> None:
        """Start a generation batch, whose number is the same on all processes. `first` is the index of the engine's
        first completion among those of all processes."""
        self._batch, self._first = number, first
        self._num_calls = 0
        self._texts = []

    def next(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the seeds of the next requests, for `prompts` of token ids."""
        stream = self._next_stream()
        if not self._texts:
            self._texts = [list(prompt) for prompt in prompts]
            self._rows = list(range(len(prompts)))
            return [request_seed(stream, self._first + i) for i in range(len(prompts))]
        rows = self._continued(prompts)
        if rows is None and len(prompts) == len(self._texts):
            rows = list(range(len(prompts)))  # a rollout function that requests each completion again
        if rows is None:  # one that requests some, in an order that only it knows
            self._rows = []
            return [request_seed(f"{stream}/engine {self._engine}", i) for i in range(len(prompts))]
        self._rows = rows
        for row, prompt in zip(rows, prompts, strict=True):
            self._texts[row] = list(prompt)
        return [request_seed(stream, self._first + row) for row in rows]

    def next_of_all(self) -> int:
        """Return the seed of the next call of a server with the prompts of all processes."""
        return request_seed(self._next_stream(), 0)

    def record(self, completions: Sequence[Sequence[int]]) -> None:
        """Take the completions of the last requests, which later prompts continue."""
        for row, completion in zip(self._rows, completions, strict=False):
            self._texts[row] += completion

    def _next_stream(self) -> str:
        self._num_calls += 1
        return f"{self._run_seed}/{self._batch}/{self._num_calls}"

    def _continued(self, prompts: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the index of the completion that each prompt continues, in increasing order; `None` if one continues
        none."""
        rows, row = [], -1
        for prompt in prompts:
            row += 1
            while row < len(self._texts) and list(prompt[: len(self._texts[row])]) != self._texts[row]:
                row += 1
            if row == len(self._texts):
                return None
            rows.append(row)
        return rows

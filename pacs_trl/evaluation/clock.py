"""Where the time of an evaluation goes: loading the engine, drawing tokens, and everything else (the overhead)."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class EngineClock:
    """Adds up the seconds spent inside the engine; the clock of the whole evaluation starts when it is created."""

    def __init__(self):
        self._started = time.perf_counter()
        self._load_seconds = self._engine_seconds = 0.0
        self._num_completions = self._num_tokens = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._load_seconds += time.perf_counter() - started

    def timed(self, engine: Any, requests: Sequence[Any], settings: Any) -> Iterator[Any]:
        """Pass on what `engine.generate` yields; only the time until the next answer counts as the engine's."""
        if not requests:
            return
        answers = engine.generate(requests, settings)
        while True:
            started = time.perf_counter()
            answer = next(answers, None)
            self._engine_seconds += time.perf_counter() - started
            if answer is None:
                return
            self._num_completions += 1
            self._num_tokens += answer[1].num_tokens
            yield answer

    def summary(self) -> dict[str, float]:
        """Seconds, completions and tokens of this invocation; `overhead_share` is what is neither loading nor
        drawing."""
        wall = time.perf_counter() - self._started
        overhead = wall - self._load_seconds - self._engine_seconds
        return {
            "wall_seconds": round(wall, 3),
            "load_seconds": round(self._load_seconds, 3),
            "engine_seconds": round(self._engine_seconds, 3),
            "overhead_share": round(overhead / wall, 4),
            "num_completions": self._num_completions,
            "num_tokens": self._num_tokens,
        }

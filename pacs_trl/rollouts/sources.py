"""Sources of the completions of training: generation now, or batches that were generated ahead of training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class RolloutSource(Protocol):
    """Where a trainer takes the completions of its generation batches from. Evaluations always generate now."""

    def take(self, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple[list, list | None]:
        """Return `completion_ids` and their `logprobs` for the prompts of the next generation batch. Arguments are
        those of TRL's `_generate_single_turn`."""

    def early_rewards(self) -> AbstractContextManager:
        """Return a context in which the trainer's reward functions return the rewards that they have computed for the
        batch that was taken last, where they have."""

    def finish(self) -> dict:
        """Wait for the batches in flight, and return those that were not taken, for a checkpoint."""

    def load(self, batches: dict) -> None:
        """Continue with the batches that [`finish`] returned."""

    def put_back(self) -> None:
        """Undo the last `take` if it belongs to the current optimizer step, which a run that resumes repeats."""

    def close(self) -> None:
        """End what runs beside training. A source may be used again afterwards."""


class GenerationNow:
    """Generates each batch with the current policy when it is taken; `generate` is TRL's `_generate_single_turn`."""

    def __init__(self, generate: Callable[..., tuple[list, list | None]]):
        self.take = generate

    def early_rewards(self) -> AbstractContextManager:
        return nullcontext()

    def finish(self) -> dict:
        return {}

    def load(self, batches: dict) -> None:
        pass

    def put_back(self) -> None:
        pass

    def close(self) -> None:
        pass

"""Sources of the completions of training: generation now, or completions that were generated beside training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable


class RolloutSource(Protocol):
    """
    Where a trainer takes the completions of its generation batches from. Evaluations always generate now.

    All processes call the methods in this order. In each generation batch:

    1. [`next_rows`] first, before TRL prepares prompts;
    2. [`take`] when TRL generates;
    3. [`early_rewards`] around TRL's call of the reward functions.

    Then [`wait`] before each evaluation, and [`wait`] and [`state`] for each checkpoint. When a signal or a failed
    engine stops a run inside an optimizer step, [`put_back`] before the checkpoint. In a run that resumes [`load`],
    before the first generation batch. At the end of training, also of one that fails, [`close`].
    """

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the dataset rows of the completions of this process in the next generation batch, one per completion.
        `rows` are those that are next in the order of the data loader. Raises a [`ServerFailure`] on all processes if
        an engine has failed, and [`Stopped`] if a signal stops the run first."""

    def take(self, prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the completions of the rows of [`next_rows`], with the keys of a `rollout_func`: `completion_ids`,
        `logprobs` (`None` if the engine reports none), and what else the source knows. `prompts` are token ids, or
        what a `rollout_func` gets. A source that generates now is also asked for each further turn of a conversation
        with tools, and gets the other arguments of TRL's `_generate_single_turn`. Raises as [`next_rows`] does."""

    def early_rewards(self) -> AbstractContextManager:
        """Return a context in which the trainer's reward functions return the rewards that they have computed for the
        batch that was taken last, where they have."""

    def wait(self) -> None:
        """Wait for the batches in flight, if there are any, so that no reward function of the source runs in this
        process beside what follows: an evaluation, or the saving of random states. The worker of continuous rollouts,
        another process, goes on."""

    def state(self) -> dict:
        """Return what was not taken, for a checkpoint. [`wait`] comes before."""

    def load(self, batches: dict) -> None:
        """Continue with what [`state`] returned."""

    def put_back(self) -> None:
        """Undo the last `take` if it belongs to the current optimizer step, which a run that resumes repeats."""

    def close(self) -> None:
        """End what runs beside training. A source may be used again afterwards."""


@runtime_checkable
class ConversationSource(RolloutSource, Protocol):
    """A source that holds whole conversations of a server, to which it sends the weights."""

    def tool_calls(self, prompts, prompt_ids, completion_ids, completions, logprobs, *images: Any) -> tuple:
        """Return what TRL's `_tool_call_loop` returns, for the conversations that [`take`] has returned."""

    def send_weights(self) -> None:
        """Send the current weights to the server, unless it has them. All processes must call this."""


class GenerationNow:
    """
    Generates each batch with the current policy when it is taken.

    Args:
        generate (`Callable`): Has the arguments and the result of [`~RolloutSource.take`].
    """

    def __init__(self, generate: Callable[..., dict[str, Any]]):
        self.take = generate

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows

    def early_rewards(self) -> AbstractContextManager:
        return nullcontext()

    def wait(self) -> None:
        pass

    def state(self) -> dict:
        return {}

    def load(self, batches: dict) -> None:
        pass

    def put_back(self) -> None:
        pass

    def close(self) -> None:
        pass

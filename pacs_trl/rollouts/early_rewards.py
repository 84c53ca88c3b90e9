"""Early rewards: rewards that are computed beside training, and replayed when TRL calls the reward functions.

With `rollout_lag` some reward functions are called in another thread when their generation batch arrives. These are
the functions of this package, and asynchronous ones, which run in the thread of their event loop with and without a
lag. The others are called in the main thread when their batch is taken, as without a lag: signals, event loops, and
connections of databases work in one thread only. So are functions that read the current policy: reward models, and
those with a parameter `trainer_state` or of an argument of the trainer, such as `compute_logps`.
"""

import asyncio
import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trl.data_utils import is_conversational
from trl.trainer.utils import is_async_callable

from ..rewards import FUNCTIONS
from .overrides import replaced
from .protocols import LateTrainer, SourceTrainer
from .rollout_output import ENGINE_FIELDS


_SET_BY_TRAINER = ("prompt", "completion", "completion_ids")  # no columns of reward functions


class EarlyRewards:
    """The reward functions of a run that are called when a generation batch arrives."""

    def __init__(self, trainer: LateTrainer):
        self.trainer = trainer
        self._tokenizer = copy.deepcopy(trainer.processing_class)  # threads must not share one
        self._functions = {
            index: function for index, function in enumerate(trainer.reward_funcs) if self._is_early(function)
        }

    def _is_early(self, function: Callable) -> bool:
        tokenizer = self.trainer._tokenizer
        if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
            return False  # completions are parsed when a batch is taken
        if not is_async_callable(function) and inspect.unwrap(function) not in FUNCTIONS:
            return False
        reads_policy = {"trainer_state", *self.trainer.reward_arguments()}
        return reads_policy.isdisjoint(inspect.signature(function).parameters)

    def compute(self, rows: list[dict[str, Any]], output: dict[str, list], step: int) -> dict[int, Any]:
        """
        Call the early functions. Returns what [`replay`] needs of each, by the index of the function: its `rewards`
        and what it `logged`, or the exception that it raised.

        Args:
            rows (`list[dict]`): Dataset row of each completion.
            output (`dict`): Output of the engine or of a `rollout_func`, with `completion_ids`.
            step (`int`): Optimizer step of the weights that generated the completions.
        """
        if not self._functions:
            return {}
        arguments = self._arguments(rows, output, step)
        results: dict[int, Any] = {}
        for index, function in self._functions.items():
            try:
                results[index] = self._call(function, arguments)
            except Exception as error:
                results[index] = error
        return results

    def _arguments(self, rows: list[dict[str, Any]], output: dict[str, list], step: int) -> dict[str, Any]:
        """Return the arguments that TRL passes to reward functions, except those to log with."""
        completion_ids = [ids or [self.trainer._tokenizer.eos_token_id] for ids in output["completion_ids"]]
        completions: list[Any] = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if is_conversational(rows[0]):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _SET_BY_TRAINER}
        added_columns: dict[str, list] = {}
        for name, values in output.items():
            if name not in ENGINE_FIELDS:  # what is no list is a value of all completions
                added_columns[name] = list(values) if isinstance(values, list) else [values] * len(rows)
        trainer_state = copy.copy(self.trainer.state)
        trainer_state.global_step = step
        return {
            **columns,
            **added_columns,
            "prompts": [row["prompt"] for row in rows],
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
        }

    def _call(self, function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
        logged: list[tuple[str, str, Any]] = []

        def log_metric(name: str, value: float) -> None:
            logged.append(("log_metric", name, float(value)))

        def log_extra(name: str, values: list) -> None:
            plain_values = json.loads(json.dumps([*values], default=str))  # what checkpoints can hold
            logged.append(("log_extra", name, plain_values))

        rewards = function(log_metric=log_metric, log_extra=log_extra, **arguments)
        if inspect.isawaitable(rewards):
            rewards = asyncio.run_coroutine_threadsafe(_result_of(rewards), self.trainer.async_loop).result()
        return {"rewards": rewards, "logged": logged}


async def _result_of(awaitable: Awaitable) -> Any:
    return await awaitable


def replaying(trainer: SourceTrainer, results: Mapping[int, Any]) -> AbstractContextManager[None]:
    """Return a context in which those reward functions of a trainer that have a result, by their index, are replaced
    by [`replay`] of it."""
    functions = list(trainer.reward_funcs)
    for index, result in results.items():
        functions[index] = partial(replay, result)
    return replaced(trainer, reward_funcs=functions)


def replay(result: Any, **arguments: Any) -> list[float | None]:
    """Return the rewards of a function that was called early, and log what it logged; or raise what it raised."""
    if isinstance(result, Exception):
        raise result
    for function, name, value in result["logged"]:
        arguments[function](name, value)
    return result["rewards"]

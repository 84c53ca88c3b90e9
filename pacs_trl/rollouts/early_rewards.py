"""Rewards that are computed while the trainer learns from an earlier batch (`rollout_lag`).

A function that names `trainer_state` or an argument of the trainer (`compute_logps`) as a parameter reads the current
policy, so it is called when its batch is taken, like reward models. All others are called once per batch, in the order
of batches, from a thread: never beside each other or an evaluation. Their results are stored with the batch.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from trl.data_utils import is_conversational


class EarlyRewards:
    """Compute rewards of `trainer` early, and replay them when TRL asks for them."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.tokenizer = copy.deepcopy(trainer.processing_class)  # threads must not share one
        late = {"trainer_state", *trainer.reward_arguments()}
        parses = any(getattr(trainer._tokenizer, name, None) for name in ("response_template", "response_schema"))
        self.functions = {
            i: function
            for i, function in enumerate(trainer.reward_funcs)
            if not (parses or isinstance(function, nn.Module))
            and late.isdisjoint(inspect.signature(function).parameters)
        }

    def grade(self, rows: list[dict], completion_ids: list[list[int]], step: int) -> dict[int, dict[str, Any]]:
        """Call the functions for completions without padding, given the dataset row of each and the optimizer step of
        their weights. Returns `rewards`, `metrics`, and `columns` of each function by its index, as plain values."""
        if not self.functions:
            return {}
        completion_ids = [ids or [self.trainer._tokenizer.eos_token_id] for ids in completion_ids]
        texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        in_turns = [[{"role": "assistant", "content": text}] for text in texts]
        others = [name for name in rows[0] if name not in ("prompt", "completion", "completion_ids")]
        given = {name: [row[name] for row in rows] for name in others}
        given |= {"prompts": [row["prompt"] for row in rows], "completion_ids": completion_ids}
        given["completions"] = in_turns if is_conversational(rows[0]) else texts
        given["truncated"] = self.trainer.are_truncated(completion_ids)
        given["trainer_state"] = copy.copy(self.trainer.state)
        given["trainer_state"].global_step = step
        found = {i: self._call(function, given) for i, function in self.functions.items()}
        return {i: result for i, result in found.items() if len(result["rewards"]) == len(rows)}  # TRL reports others

    def _call(self, function: Callable, given: dict[str, Any]) -> dict[str, Any]:
        metrics: list[tuple[str, float]] = []
        columns: dict[str, list] = {}
        rewards = function(
            log_metric=lambda name, value: metrics.append((name, float(value))),
            log_extra=lambda name, values: columns.setdefault(name, []).extend(  # what checkpoints can hold
                value if type(value) in (str, int, float, bool, type(None)) else str(value) for value in values
            ),
            **given,
        )
        if inspect.isawaitable(rewards):
            rewards = asyncio.run_coroutine_threadsafe(rewards, self.trainer.async_loop).result()
        return {"rewards": rewards, "metrics": metrics, "columns": columns}

    def replaying(self, results: dict[int, dict[str, Any]]) -> list[Callable]:
        """Return the reward functions of the trainer, with those that have results replaced by functions that return
        and log them."""
        functions = enumerate(self.trainer.reward_funcs)
        return [partial(_replay, results[i]) if i in results else function for i, function in functions]


def slice_of(results: dict[int, dict[str, Any]], own: slice) -> dict[int, dict[str, Any]]:
    """Return the results for some of the completions."""
    return {
        i: found | {"rewards": found["rewards"][own], "columns": {k: v[own] for k, v in found["columns"].items()}}
        for i, found in results.items()
    }


def _replay(found: dict[str, Any], *, log_metric: Callable, log_extra: Callable, **given: Any) -> list[float | None]:
    for name, value in found["metrics"]:
        log_metric(name, value)
    for name, values in found["columns"].items():
        log_extra(name, values)
    return found["rewards"]

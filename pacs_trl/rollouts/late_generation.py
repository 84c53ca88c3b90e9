"""The part of a trainer that generates ahead of training: it takes batches of `late_batches.py` instead of generating,
and their rewards instead of calling reward functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from transformers.trainer_utils import TrainOutput

from ..update.rollout import Rollout
from .late_batches import LateBatches, Stopped


class LateGeneration:
    """The part of [`ExactUpdateTrainer`] that generates ahead of training; a base class of it before
    [`RolloutTrainer`]."""

    late_rollout: Callable | None = None  # an asynchronous `rollout_func`

    def _prepare_generation(self) -> None:
        if self.args.rollout_lag and self.rollout_func is not None:
            self.late_rollout, self.rollout_func = self.rollout_func, lambda prompts, _: self._take(prompts)
        super()._prepare_generation()

    def _reset_run(self) -> None:
        super()._reset_run()
        self._late = LateBatches(self) if self.args.rollout_lag else None

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except Stopped:
            return TrainOutput(self.state.global_step, float("nan"), {})
        finally:
            if self._late is not None:
                self._late.close()

    @property
    def late_batches(self) -> dict:
        """Generation batches that were not taken yet; saved in checkpoints."""
        return {} if self._late is None else self._late.finish()

    @late_batches.setter
    def late_batches(self, batches: dict) -> None:
        if self._late is not None:
            self._late.arrived = dict(batches)

    def evaluation_loop(self, *args, **kwargs):
        if self._late is not None:  # a server has one copy of the weights, and reward functions are called in order
            self._late.finish()
            self.accelerator.wait_for_everyone()
        return super().evaluation_loop(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if self._late is not None:
            self._late.finish()  # before random states, which reward functions may use
        super()._save_rng_state(output_dir)

    def _calculate_rewards(self, *args):
        functions = self.reward_funcs
        if self._late is not None and self.model.training:
            found = self._late.taken["rewards"]
            self.reward_funcs = [partial(_replay, found[i]) if i in found else f for i, f in enumerate(functions)]
        try:
            return super()._calculate_rewards(*args)
        finally:
            self.reward_funcs = functions

    def _generate(self, prompts):
        if self.late_rollout is not None:  # else TRL would send weights while a batch is in flight
            self._last_loaded_step = self.state.global_step
        return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._late is None or not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        output = self._take([list(ids) for ids in prompt_ids])
        self._end_empty(**output)
        return output["completion_ids"], output["logprobs"]

    def _take(self, prompts: list) -> dict[str, list]:
        if not self.model.training:
            raise ValueError("rollout_func with rollout_lag generates in training only. Use another for evaluation.")
        return self._late.take(self._step // (self.args.steps_per_generation * self.num_iterations), prompts)


def set_generating_logps(rollouts: list[Rollout], names: list[str]) -> None:
    """Store the log-probs that the engine reported under other names too (`ref_logps`, `old_logps`). Tokens without
    one are masked out."""
    for rollout in rollouts:
        known = np.isfinite(rollout.sampling_logps)
        rollout.loss_mask = rollout.loss_mask & known
        for name in names:
            setattr(rollout, name, np.where(known, rollout.sampling_logps, 0.0).astype(np.float32))


def _replay(found: Any, **given: Any) -> list[float | None]:
    if isinstance(found, Exception):
        raise found
    for function, name, value in found["logged"]:
        given[function](name, value)
    return found["rewards"]

"""Calls of a user's code in a run: reward functions, rollout functions, and tools.

None of them can end the process, or keep it from stopping after a signal (`interruption.py`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.tool_calls import safe_tools
from ..errors import without_exit
from .image_checkpoints import context_of_language_model
from .interruption import Interrupted, call_or_stop, interruptible_function, stop_if_interrupted
from .reward_functions import never_exiting
from .rollout_output import checked_output


if TYPE_CHECKING:
    from .rollout_trainer import RolloutTrainer


class UserCode:
    """The part of [`RolloutTrainer`] that calls a user's code; a base class of it before [`~trl.GRPOTrainer`]."""

    def _roll_out(self, rollout_func: Callable, prompts: list, trainer: "RolloutTrainer") -> dict[str, Any]:
        """Call a rollout function, and check its output."""
        if self.args.rollout_lag:  # the output of a late rollout, which is waited for elsewhere
            output = rollout_func(prompts, trainer)
        else:
            with without_exit("rollout_func"):
                output = call_or_stop(interruptible_function(rollout_func), prompts, trainer)
        output = self.check_rollouts(output, len(prompts))
        self._end_empty(output["completion_ids"], output["logprobs"], output.get("env_mask"))
        return output

    def check_rollouts(self, output: Any, num_prompts: int) -> dict[str, Any]:
        """Return the output of a rollout function as [`checked_output`] does."""
        needs = {"needs_logprobs": self.args.rollout_lag > 0, "has_tools": bool(self.tools)}
        return checked_output(output, num_prompts=num_prompts, config=self.model.config, **needs)

    def _tool_call_loop(self, *args):
        self._sync_tool_dicts = [stoppable_tools(tools, self._is_vlm) for tools in self._sync_tool_dicts]
        self._async_tool_dicts = [stoppable_tools(tools, self._is_vlm) for tools in self._async_tool_dicts]
        with context_of_language_model(self.model.config):
            return call_or_stop(super()._tool_call_loop, *args)

    def _call_reward_functions(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """Return the rewards `(B, F)` of all processes. Raises [`Stopped`] on all of them if a signal interrupted a
        reward function on one."""
        functions, is_interrupted = self.reward_funcs, False
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else interruptible_function(function) for function in functions
        ]
        early_rewards = self._source.early_rewards() if self.model.training else nullcontext()
        try:
            with early_rewards:
                rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Interrupted:
            is_interrupted = True
            none = torch.full((len(prompts), len(functions)), torch.nan, device=self.accelerator.device)
            rewards_per_func = self.accelerator.gather(none)  # the other processes have called it
        finally:
            self.reward_funcs = functions
        stop_if_interrupted(is_interrupted)
        return rewards_per_func


def stoppable_tools(tools: dict[str, Callable], takes_images: bool = False) -> dict[str, Callable]:
    """Wrap the tools of a completion, so that they neither end the process nor keep it from stopping, and their
    results are contents of messages."""
    safe = safe_tools(tools, takes_images)
    return {name: interruptible_function(never_exiting(tool, f"The tool {name!r}")) for name, tool in safe.items()}

"""Warning of a run that has nothing to learn from: uniform groups, or only truncated completions."""

import logging
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback


logger = logging.getLogger(__name__)
# Optimizer steps without a signal before the warning: from the start of a run, and after steps with one.
PATIENCE_AT_START, PATIENCE = 3, 10
TRUNCATED = "completions/clipped_ratio"
# Fraction of uniform groups: in the optimizer step (PACS), or in its generation batches.
UNIFORM = ("pacs/uniform_group_fraction", "labels/uniform_group_fraction", "frac_reward_zero_std")
DENSE = "process/mixed_fraction"  # with process labels, uniform groups have a gradient too


class NothingToLearnCallback(TrainerCallback):
    """Log a warning after `PATIENCE` consecutive optimizer steps in which all groups were uniform or all completions
    were truncated, after the first `PATIENCE_AT_START` if no step before had a signal; once per run, resumed runs
    included."""

    _none_in, _patience = 0, PATIENCE_AT_START  # of an evaluation before training

    def __init__(self, method: str):
        self.method = method  # its name

    def on_train_begin(self, args, state, control, **kwargs):
        self._none_in = self._last_step = 0
        self._patience = PATIENCE_AT_START
        self._seen: dict[str, Any] = {}  # the last values; steps without a generation log none
        for logs in state.log_history:
            self._count(logs, logs["step"])

    def on_log(self, args, state, control, logs=None, **kwargs):
        before = self._none_in
        self._count(logs or {}, state.global_step)
        if before < self._patience <= self._none_in and state.is_world_process_zero:
            reward = self._seen.get("reward")  # None: no completion had a verdict
            logger.warning(
                f"{self.method} has had little or nothing to learn from in {self._none_in} optimizer steps in a row: "
                "in each of them every group had equal rewards or every completion was truncated (now: mean reward "
                f"{'none' if reward is None else format(reward, '.2f')}, truncated share {self._seen[TRUNCATED]:.2f} "
                f"with max_completion_length={args.max_completion_length}). The problems are too hard or too easy, "
                "completions are cut off, or the reward function cannot read them. See docs/troubleshooting.md, 'The "
                "reward is flat'."
            )

    def _count(self, logs: Mapping[str, Any], step: int) -> None:
        if "loss" not in logs or self._none_in >= self._patience:  # of an evaluation, or after the warning
            return
        self._seen |= {name: logs[name] for name in (TRUNCATED, *UNIFORM, DENSE, "reward") if name in logs}
        uniform_fraction = next((self._seen[name] for name in UNIFORM if name in self._seen), None)
        has_process_labels = (self._seen.get(DENSE) or 0.0) > 0
        all_are_uniform = uniform_fraction == 1.0 and not has_process_labels
        is_flat = all_are_uniform or self._seen.get(TRUNCATED) == 1.0
        self._none_in = self._none_in + step - self._last_step if is_flat else 0
        if not is_flat:
            self._patience = PATIENCE
        self._last_step = step

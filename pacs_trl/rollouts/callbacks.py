"""Callbacks of every trainer: state at the start of an optimizer step, settings that were changed after construction,
and a warning for runs without a gradient."""

import logging
import re
from dataclasses import fields
from typing import Any

from transformers import TrainerCallback

from .checkpoint import check_same_settings, plain_settings


logger = logging.getLogger(__name__)

PATIENCE = 10  # optimizer steps

TRUNCATED = "completions/clipped_ratio"
# Fraction of uniform groups: in the optimizer step (PACS), or in its generation batches.
UNIFORM = ("pacs/uniform_group_fraction", "frac_reward_zero_std")
DENSE = "process/mixed_fraction"  # with process labels, uniform groups have a gradient too


# A trainer, its engine, and its update copy settings when they are constructed: a later `trainer.args.KEY = VALUE`
# would be ignored, while checkpoints record the new value. Trainer reads only these on use.
_LIVE = re.compile(
    "(dataloader|eval|hub|logging|lr_scheduler|save|trackio|warmup)_.*|output_dir|run_name|project|push_to_hub"
    "|resume_from_checkpoint|ignore_data_skip|num_train_epochs|max_steps|max_grad_norm|torch_empty_cache_steps"
    "|include_num_input_tokens_seen|per_device_eval_batch_size|prediction_loss_only|load_best_model_at_end"
    "|metric_for_best_model|greater_is_better|do_train|do_eval|do_predict|restore_callback_states_from_checkpoint"
)
_LOADED = {"eval_benchmarks", "eval_max_problems"}  # fixed, unlike the rest of its group


def fixed_settings(args: Any) -> dict[str, Any]:
    """Return the settings that are fixed when a trainer is constructed, in the form of [`plain_settings`]."""
    names = [field.name for field in fields(args)]
    return plain_settings(args, [name for name in names if name in _LOADED or not _LIVE.fullmatch(name)])


def check_fixed(fixed: dict[str, Any], args: Any) -> None:
    """Raise a `ValueError` that lists the settings that were changed after a trainer was constructed."""
    remedy = "construct a new trainer with these settings"
    check_same_settings("The trainer", fixed, fixed_settings(args), kind="trainer", remedy=remedy)


class StepStart(TrainerCallback):
    """Store the trainer's state at the start of each optimizer step, which only Trainer knows, and check that no
    callback or reward function has changed a setting, before the step and before the checkpoint after it."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._state: dict | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._state = None

    def on_step_begin(self, args, state, control, **kwargs):
        check_fixed(self.trainer._fixed_settings, args)
        self._state = {name: getattr(self.trainer, name) for name in self.trainer._counters}
        self._metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        self._tokens = state.num_input_tokens_seen

    def on_step_end(self, args, state, control, **kwargs):
        check_fixed(self.trainer._fixed_settings, args)
        self._state = None

    def rewind(self) -> None:
        """Restore the state at the start of the current optimizer step, whose completions must be generated again."""
        for name, value in (self._state or {}).items():
            setattr(self.trainer, name, value)
        if self._state is not None:
            self.trainer.state.num_input_tokens_seen = self._tokens
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["train"].update(self._metrics)


class NoSignalCallback(TrainerCallback):
    """
    Log a warning after `PATIENCE` consecutive optimizer steps in which all groups were uniform or all completions were
    truncated, once per run, resumed runs included. The metrics that it reads are equal on all processes.

    Args:
        trainer ([`RolloutTrainer`]): The trainer. Its attribute `signal`, which is saved in checkpoints, holds the
            number of such steps (`"none_in"`) and the metrics of the last generation batch.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self._lengths: dict[str, int] = {}

    def on_step_begin(self, args, state, control, **kwargs):
        self._lengths = {name: len(values) for name, values in self.trainer._metrics["train"].items()}

    def on_step_end(self, args, state, control, **kwargs):
        metrics, signal = self.trainer._metrics["train"], self.trainer.signal
        if signal["none_in"] >= PATIENCE:
            return
        for name in (TRUNCATED, *UNIFORM, DENSE, "reward"):
            if new := metrics.get(name, [])[self._lengths.get(name, 0) :]:
                signal[name] = min(new)  # steps without a generation keep the last value
        uniform = next(signal[name] for name in UNIFORM if name in signal) == 1.0 and not signal.get(DENSE, 0.0) > 0
        signal["none_in"] = signal["none_in"] + 1 if uniform or signal[TRUNCATED] == 1.0 else 0
        if signal["none_in"] == PATIENCE and state.is_world_process_zero:
            logger.warning(
                f"There is nothing to learn from in {PATIENCE} optimizer steps in a row: in each of them every group "
                f"had equal rewards or every completion was truncated (now: mean reward {signal['reward']:.2f}, "
                f"truncated share {signal[TRUNCATED]:.2f} with max_completion_length={args.max_completion_length}). "
                "The problems are too hard or too easy, completions are cut off, or the reward function cannot read "
                "them. See docs/troubleshooting.md, 'The reward is flat'."
            )

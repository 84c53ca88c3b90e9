"""Warning for runs without a gradient."""

import logging

from transformers import TrainerCallback


logger = logging.getLogger(__name__)

PATIENCE = 10  # optimizer steps

TRUNCATED = "completions/clipped_ratio"
# Fraction of uniform groups: in the optimizer step (PACS), or in its generation batches.
UNIFORM = ("pacs/uniform_group_fraction", "frac_reward_zero_std")
DENSE = "process/mixed_fraction"  # with process labels, uniform groups have a gradient too


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

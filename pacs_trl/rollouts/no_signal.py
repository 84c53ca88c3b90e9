"""A warning for runs that cannot learn: optimizer steps without any signal, one after the other."""

import logging

from transformers import TrainerCallback


logger = logging.getLogger(__name__)

PATIENCE = 10  # optimizer steps

TRUNCATED = "completions/clipped_ratio"
# Share of uniform groups: of the optimizer step (PACS), or of its generations.
UNIFORM = ("pacs/uniform_group_fraction", "frac_reward_zero_std")
DENSE = "dense/mixed_fraction"  # process labels teach in uniform groups, too


class NoSignalCallback(TrainerCallback):
    """
    Warns once in a run, also if it is resumed, after `PATIENCE` optimizer steps in a row in which all groups were
    uniform or all completions truncated. The metrics that it reads are equal on all processes.

    Args:
        trainer ([`RolloutTrainer`]): Keeps in its checkpoints what is remembered, `signal`: the number of such steps
        (`"none_in"`), and
            the metrics of the last generation.
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
                signal[name] = min(new)  # one per generation; without a generation those of the last one hold
        if TRUNCATED not in signal:  # resumed within a generation, from a checkpoint of an older version
            return
        uniform = next(signal[name] for name in UNIFORM if name in signal) == 1.0 and not signal.get(DENSE, 0.0) > 0
        signal["none_in"] = signal["none_in"] + 1 if uniform or signal[TRUNCATED] == 1.0 else 0
        if signal["none_in"] == PATIENCE and state.is_world_process_zero:
            logger.warning(likely_causes(signal["reward"], signal[TRUNCATED], args.max_completion_length))


def likely_causes(reward: float, truncated: float, max_completion_length: int) -> str:
    """The warning for a mean reward and a share of truncated completions."""
    causes = []
    if truncated >= 0.5:
        causes.append(
            f"completions are cut off at max_completion_length={max_completion_length} (raise it), or the model does "
            "not end its turn (check chat template and end-of-sequence token)"
        )
    if reward == 0:
        causes.append(
            "the answers are not in the form that the reward function reads, or the problems are too hard (read "
            "completions with log_completions: true, and grade them with `pacs-trl audit`)"
        )
    elif reward == 1:
        causes.append("the problems are too easy (take harder ones)")
    else:
        causes.append(
            "the completions of a prompt are alike (raise temperature or num_generations), or the reward function "
            "does not depend on them"
        )
    return (
        f"Nothing to learn from in {PATIENCE} optimizer steps in a row: in each of them, every group had equal "
        "rewards or every completion "
        f"was truncated (at last: mean reward {reward:.2f}, truncated share {truncated:.2f}). Likely causes: "
        f"{'; '.join(causes)}. See docs/troubleshooting.md, 'The reward is flat'."
    )

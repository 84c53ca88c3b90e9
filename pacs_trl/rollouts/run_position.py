"""Position of a run that Trainer does not restore from a checkpoint: the loss since the last log, and the place in a
streaming dataset.

Trainer starts a resumed run with an empty sum of losses, so the first logged `loss` would be the mean of fewer
optimizer steps, and `train_loss` would lack those before the checkpoint. It derives the place in the data from the
number of optimizer steps, which is right for datasets with a length. A stream has none: a run that has read it several
times would continue with its first batches.
"""

from typing import Any

from transformers import TrainerCallback

from .protocols import LossLoggingTrainer, StreamingTrainer


class LoggedLoss(TrainerCallback):
    """Save and restore the sums of losses from which Trainer logs `loss` and `train_loss`."""

    def __init__(self, trainer: LossLoggingTrainer):
        self.trainer = trainer
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the sums of this process as plain values."""
        return {
            "since_last_log": self.trainer._tr_loss.item(),
            "before_last_log": self.trainer._total_loss_scalar,
            "step_of_last_log": self.trainer._globalstep_last_logged,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with these sums when training begins, which is after Trainer has set its sums to zero."""
        self._restored = state

    def on_train_begin(self, args, state, control, **kwargs):
        if self._restored is not None:
            self.trainer._tr_loss.fill_(self._restored["since_last_log"])
            self.trainer._total_loss_scalar = self._restored["before_last_log"]
            self.trainer._globalstep_last_logged = self._restored["step_of_last_log"]
            self._restored = None


class StreamPosition(TrainerCallback):
    """Count the passes over the training data, and the batches of the current pass that have been used, in
    `trainer._data_position`."""

    def __init__(self, trainer: StreamingTrainer):
        self.trainer = trainer

    def _count_batch(self) -> None:
        passes, batches = self.trainer._data_position
        self.trainer._data_position = passes, batches + 1

    def on_substep_end(self, args, state, control, **kwargs):
        self._count_batch()

    def on_step_end(self, args, state, control, **kwargs):
        self._count_batch()

    def on_epoch_end(self, args, state, control, **kwargs):
        passes, _ = self.trainer._data_position
        self.trainer._data_position = passes + 1, 0

"""The state at the start of an optimizer step, to which a trainer goes back if the step cannot be finished."""

from typing import Any

from transformers import TrainerCallback

from .random_numbers import random_states, restore_random_states


class StepStart(TrainerCallback):
    """Store the trainer's state at the start of each optimizer step, which only Trainer knows."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._state: dict | None = None
        self._random_states: Any = None  # after the last optimizer step

    def on_train_begin(self, args, state, control, **kwargs):
        self._state = self._random_states = None

    def on_step_begin(self, args, state, control, **kwargs):
        names = {*self.trainer._saved_attributes, "_buffered_inputs", "_waiting"}
        self._state = {name: value for name, value in vars(self.trainer).items() if name in names}
        self._metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        self._tokens = state.num_input_tokens_seen
        self._loss = self.trainer._tr_loss.clone()

    def on_step_end(self, args, state, control, **kwargs):
        self._state = None
        self._random_states = random_states(self.trainer.accelerator.device)

    def rewind(self) -> None:
        """Restore the state at the start of the current optimizer step, whose completions must be generated again.
        With a lag random states stay: reward functions of batches that are kept may have used them."""
        has_lag = self.trainer.args.rollout_lag or self.trainer.args.has_engine_process
        if self._random_states is not None and not has_lag:
            restore_random_states(self._random_states, self.trainer.accelerator.device)
        for name, value in (self._state or {}).items():
            setattr(self.trainer, name, value)
        if self._state is not None:
            self.trainer.state.num_input_tokens_seen = self._tokens
            self.trainer._tr_loss = self._loss
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["train"].update(self._metrics)

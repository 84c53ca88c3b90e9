"""Stops between two optimizer steps, so that `--resume_from_checkpoint last` loses no work.

On Ctrl-C and SIGTERM, which schedulers send before they preempt a job, the trainer finishes the current optimizer
step, saves a checkpoint, and exits with a distinct exit code. If an engine fails, it goes back to the end of the last
optimizer step and saves that.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback


# In order of precedence for the exit code, which is 128 + the signal number, as in shells.
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StepStart(TrainerCallback):
    """Store the trainer's state at the start of each optimizer step, which only Trainer knows."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._state: dict | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._state = None

    def on_step_begin(self, args, state, control, **kwargs):
        self._state = {name: getattr(self.trainer, name) for name in self.trainer._counters}
        self._metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        self._tokens = state.num_input_tokens_seen

    def on_step_end(self, args, state, control, **kwargs):
        self._state = None

    def rewind(self) -> None:
        """Restore the state at the start of the current optimizer step, whose completions must be generated again."""
        for name, value in (self._state or {}).items():
            setattr(self.trainer, name, value)
        if self._state is not None:
            self.trainer.state.num_input_tokens_seen = self._tokens
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["train"].update(self._metrics)


class StopOnSignal(TrainerCallback):
    """
    Save a checkpoint and stop all processes at the end of the optimizer step in which any process received SIGTERM or
    SIGINT; a due evaluation is skipped. A second SIGINT stops immediately.

    Outside of training the previous signal handlers apply. If SIGINT is ignored, as for background jobs of a shell, it
    stays ignored.

    Attributes:
        stopped (`signal.Signals`, *optional*): Signal that stopped training early.
        received (`list[int]`): Signals that this process has received.
    """

    def __init__(self):
        self.stopped: signal.Signals | None = None
        self.received: list[int] = []
        self._previous: dict[signal.Signals, object] = {}

    def _receive(self, signum, frame):
        if signum == signal.SIGINT:
            if signum in self.received:
                raise KeyboardInterrupt
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # not print: it is not reentrant
                    os.write(2, b"\nCtrl-C: saving after this optimizer step. Press Ctrl-C again to stop at once.\n")
        self.received.append(signum)  # the current step continues

    def on_train_begin(self, args, state, control, **kwargs):
        if self._previous or threading.current_thread() is not threading.main_thread():  # only it can set handlers
            return
        for signum in NAMES:
            if (previous := signal.getsignal(signum)) != signal.SIG_IGN or signum == signal.SIGTERM:
                signal.signal(signum, self._receive)
                self._previous[signum] = previous or signal.SIG_DFL  # None: not installed from Python

    def on_step_end(self, args, state, control, **kwargs):
        received = torch.tensor([float(signum in self.received) for signum in NAMES], device=args.device)
        received = reduce(received, reduction="sum").tolist()
        if not any(received):
            return
        if state.global_step < state.max_steps:
            self.stopped = next(signum for signum, number in zip(NAMES, received, strict=True) if number)
        args.save_only_model = False  # such checkpoints cannot be resumed
        control.should_evaluate = False
        control.should_save = True
        control.should_training_stop = True

    def restore(self) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._previous.clear()


@contextmanager
def stop_on_signal() -> Iterator[StopOnSignal]:
    """Stop training gracefully on SIGTERM and SIGINT inside the context, in the main thread. Yields the callback to
    add to the trainer; after training, its `stopped` is the signal that stopped it, or `None`."""
    callback = StopOnSignal()
    try:
        yield callback
    finally:
        callback.restore()

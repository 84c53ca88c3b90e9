"""Graceful stop on Ctrl-C and SIGTERM, which schedulers send before they preempt a job.

The trainer finishes the current optimizer step, saves a checkpoint, and exits with a distinct exit code, so that
`--resume_from_checkpoint last` loses no work.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainingArguments


# In order of precedence for the exit code, which is 128 + the signal number, as in shells.
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


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


def check_no_jit_checkpoint(args: TrainingArguments) -> None:
    """Raise a `ValueError` for transformers' `enable_jit_checkpoint`, with which each process decides when to save."""
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True may save in the middle of an optimizer step, at another one on each process. "
            "Remove it: `pacs-trl train` saves and stops at the end of a step on SIGTERM and Ctrl-C, and in Python "
            "pacs_trl.rollouts.preemption.stop_on_signal() does."
        )

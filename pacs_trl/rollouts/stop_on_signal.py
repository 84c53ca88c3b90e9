"""Stops by signals: on Ctrl-C and SIGTERM, which schedulers send before they preempt a job, a run saves a checkpoint.

The trainer finishes the current optimizer step, saves, and exits with a distinct exit code. If it cannot finish the
step, it goes back to the end of the last one and saves that. `--resume_from_checkpoint last` loses no work.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

from . import interruption
from .protocols import SourceTrainer


logger = logging.getLogger(__name__)
# In order of precedence for the exit code, which is 128 + the signal number, as in shells.
SIGNAL_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopOnSignal(TrainerCallback):
    """
    Save a checkpoint and stop all processes at the end of the optimizer step in which any process received SIGTERM or
    SIGINT; a due evaluation is skipped. A user's code that does not return in time is interrupted, see
    `interruption.py`. A second SIGINT stops immediately. Works in the main thread, from the start of training until
    `close`; use it with `contextlib.closing`. If SIGINT is ignored, as for background jobs of a shell, it stays
    ignored.

    Attributes:
        stopped (`signal.Signals`, *optional*): Signal that stopped training early.
        received (`list[int]`): Signals that this process has received.
    """

    def __init__(self):
        self.stopped: signal.Signals | None = None
        self.received: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._first_time: float | None = None  # of the first signal
        self._interrupts = False  # whether the next SIGTERM comes from this process

    def _receive(self, signum, frame):
        if self._interrupts and signum == signal.SIGTERM:
            self._interrupts = False
            if interruption.is_overdue(self._first_time):
                raise interruption.Interrupted
            return
        if signum == signal.SIGINT:
            if signum in self.received:
                raise KeyboardInterrupt
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # not print: it is not reentrant
                    os.write(2, b"\nCtrl-C: saving after this optimizer step. Press Ctrl-C again to stop at once.\n")
        self._first_time = self._first_time or time.monotonic()
        self.received.append(signum)  # the current step continues

    def _interrupt_when_overdue(self, main_thread: int) -> None:
        """Send the main thread a signal when it waits too long for a user's code: only a signal ends its sleep. Again
        if that code has caught the exception."""
        while not self._closed.wait(0.2):
            if self._first_time is not None and interruption.is_overdue(self._first_time):
                logger.warning(
                    "A reward function, tool, or rollout function has not returned %g s after the signal to stop. It "
                    "is interrupted, and the state after the last optimizer step is saved.",
                    interruption.PATIENCE,
                )
                self._interrupts = True
                signal.pthread_kill(main_thread, signal.SIGTERM)
                self._closed.wait(interruption.PATIENCE)

    def on_train_begin(self, args, state, control, **kwargs):
        if self._previous or threading.current_thread() is not threading.main_thread():  # only it can set handlers
            return
        for signum in SIGNAL_NAMES:
            if (previous := signal.getsignal(signum)) != signal.SIG_IGN or signum == signal.SIGTERM:
                signal.signal(signum, self._receive)
                self._previous[signum] = previous or signal.SIG_DFL  # None: not installed from Python
        self._closed.clear()
        self._thread = threading.Thread(
            target=self._interrupt_when_overdue, args=(threading.get_ident(),), daemon=True
        )
        self._thread.start()

    def _received_anywhere(self, args) -> signal.Signals | None:
        """Return the signal that any process has received, on all processes."""
        received = torch.tensor([float(signum in self.received) for signum in SIGNAL_NAMES], device=args.device)
        received = reduce(received, reduction="sum").tolist()
        return next((signum for signum, number in zip(SIGNAL_NAMES, received, strict=True) if number), None)

    def stop(self, args) -> None:
        """Note on all processes that a signal has stopped training before the end of its step."""
        self.stopped = self._received_anywhere(args)

    def on_step_end(self, args, state, control, **kwargs):
        signum = self._received_anywhere(args)
        if signum is None:
            return
        if state.global_step < state.max_steps:
            self.stopped = signum
        args.save_only_model = False  # such checkpoints cannot be resumed
        control.should_evaluate = False
        control.should_save = True
        control.should_training_stop = True

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._closed.set()
        if self._thread is not None:  # it must not send a signal to the previous handlers
            self._thread.join()
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._previous.clear()


def is_to_stop(trainer: SourceTrainer) -> bool:
    """Return whether this process has received a signal, or a callback stops training."""
    signal_callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, StopOnSignal)]
    return trainer.control.should_training_stop or any(callback.received for callback in signal_callbacks)

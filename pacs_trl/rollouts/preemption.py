"""An orderly end on Ctrl-C and on SIGTERM, which schedulers send before they take a machine away.

The running optimizer step is finished, its state is saved, and the process ends with a code of its own, so that the
next `--resume_from_checkpoint last` loses nothing.
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


# In the order in which they decide the exit code, 128 + number, as shells report it.
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopOnSignal(TrainerCallback):
    """
    Saves and stops at the end of the optimizer step in which any process received SIGTERM or SIGINT, on all processes
    alike; an evaluation that is due is left out. A second SIGINT stops at once. Before and after training the signals
    do what they did before, and a SIGINT that is ignored (a shell does so in the background) stays ignored.

    Attributes:
        stopped (`signal.Signals`, *optional*): the signal that stopped training before its end.
    """

    def __init__(self):
        self.stopped: signal.Signals | None = None
        self._received: list[int] = []
        self._previous: dict[signal.Signals, object] = {}

    def _receive(self, signum, frame):
        if signum == signal.SIGINT:
            if signum in self._received:
                raise KeyboardInterrupt
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # print may be what was interrupted
                    os.write(2, b"\nCtrl-C: saving after this optimizer step. Press Ctrl-C again to stop at once.\n")
        self._received.append(signum)  # nothing else: the step goes on

    def on_train_begin(self, args, state, control, **kwargs):
        if self._previous or threading.current_thread() is not threading.main_thread():  # no other may handle signals
            return
        for signum in NAMES:
            if (previous := signal.getsignal(signum)) != signal.SIG_IGN or signum == signal.SIGTERM:
                signal.signal(signum, self._receive)
                self._previous[signum] = previous or signal.SIG_DFL  # None: not Python's

    def on_step_end(self, args, state, control, **kwargs):
        received = torch.tensor([float(signum in self._received) for signum in NAMES], device=args.device)
        received = reduce(received, reduction="sum").tolist()
        if not any(received):
            return
        if state.global_step < state.max_steps:
            self.stopped = next(signum for signum, number in zip(NAMES, received, strict=True) if number)
        args.save_only_model = False  # of which nothing could be continued
        control.should_evaluate = False
        control.should_save = True
        control.should_training_stop = True

    def restore(self) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._previous.clear()


@contextmanager
def stop_on_signal() -> Iterator[StopOnSignal]:
    """Let SIGTERM and SIGINT inside the context end training in an orderly way, in the main thread. Yields the
    callback to be added to the trainer; after training, its `stopped` says whether to leave."""
    callback = StopOnSignal()
    try:
        yield callback
    finally:
        callback.restore()


def check_no_jit_checkpoint(args: TrainingArguments) -> None:
    """Refuse transformers' `enable_jit_checkpoint`: each process decides for itself when to save."""
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True may save in the middle of an optimizer step, at another one on each process. "
            "Remove it: `pacs-trl train` saves and stops at the end of a step on SIGTERM and Ctrl-C, and in Python "
            "pacs_trl.rollouts.preemption.stop_on_signal() does."
        )

"""An orderly end on SIGTERM, which schedulers send before they take a machine away (preemption, time limit).

The running optimizer step is finished, its state is saved, and the process ends with a code of its own, so that the next
`--resume_from_checkpoint last` loses nothing. transformers has `enable_jit_checkpoint`, which is refused: each process
decides for itself when to save, possibly in the middle of a step, and the run then ends like a finished one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainingArguments


EXIT_CODE = 128 + signal.SIGTERM  # 143, what shells report for a process that SIGTERM has ended


class StopOnSignal(TrainerCallback):
    """
    Saves and stops at the end of the optimizer step in which any process received SIGTERM, on all processes alike.

    An evaluation that is due at this step is left out: a scheduler waits for seconds or minutes, and what counts is the
    checkpoint. Before and after training SIGTERM does what it did before.

    Attributes:
        stopped (`bool`): whether training was stopped before its end.
    """

    def __init__(self):
        self.stopped = False
        self._received = False
        self._previous = None

    def _receive(self, signum, frame):
        self._received = True  # nothing else: the step goes on, also at the second signal

    def on_train_begin(self, args, state, control, **kwargs):
        in_main_thread = threading.current_thread() is threading.main_thread()  # no other may handle signals
        if self._previous is None and in_main_thread:
            self._previous = signal.signal(signal.SIGTERM, self._receive) or signal.SIG_DFL  # None: not Python's

    def on_step_end(self, args, state, control, **kwargs):
        received = reduce(torch.tensor(float(self._received), device=args.device), reduction="sum")
        if received.item() == 0:
            return
        self.stopped = state.global_step < state.max_steps
        args.save_only_model = False  # of which nothing could be continued
        control.should_evaluate = False
        control.should_save = True
        control.should_training_stop = True

    def restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


@contextmanager
def stop_on_signal() -> Iterator[StopOnSignal]:
    """
    Inside the context SIGTERM ends training in an orderly way, once it has begun. In another thread than the main one it
    does what it did before.

    Yields:
        [`StopOnSignal`]: to be added to the trainer; after training, `stopped` says whether to leave.
    """
    callback = StopOnSignal()
    try:
        yield callback
    finally:
        callback.restore()


def check_no_jit_checkpoint(args: TrainingArguments) -> None:
    """
    Raises:
        `ValueError`: if `enable_jit_checkpoint` is set.
    """
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True may save in the middle of an optimizer step, at another one on each process. "
            "Remove it: `pacs-trl train` saves and stops at the end of a step when it receives SIGTERM, and in Python "
            "pacs_trl.rollouts.preemption.stop_on_signal() does."
        )

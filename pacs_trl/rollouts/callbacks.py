"""Callbacks of a run: console output, experiment trackers, and stops by signals.

- Console: one short line per logged step, instead of Trainer's dict of all metrics, and a warning if there is no
  gradient. With `disable_tqdm=True` Trainer prints its dict, and notebooks show Trainer's table.
  `remove_callback(ProgressCallback)` disables the lines and the progress bar.
- Trackers: TRL and transformers send the metrics. Here are a run id that persists across processes, the recipe, and
  the completions of every logged step under a separate key; under TRL's single key a tracker shows only the latest.
- Signals: on Ctrl-C and SIGTERM, which schedulers send before they preempt a job, the trainer finishes the current
  optimizer step, saves a checkpoint, and exits with a distinct exit code. If an engine fails, it goes back to the end
  of the last optimizer step and saves that. `--resume_from_checkpoint last` loses no work.
"""

import contextlib
import importlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback
from trl import GRPOConfig

from ..errors import UserError
from ..redaction import published, published_recipe
from . import interruption
from .checkpoint import random_states, restore_random_states


logger = logging.getLogger(__name__)

# Console --------------------------------------------------------------------------------------------------------

# Optimizer steps without a signal before the warning: from the start of a run, and after steps with one.
PATIENCE_AT_START, PATIENCE = 3, 10
TRUNCATED = "completions/clipped_ratio"
# Fraction of uniform groups: in the optimizer step (PACS), or in its generation batches.
UNIFORM = ("pacs/uniform_group_fraction", "labels/uniform_group_fraction", "frac_reward_zero_std")
DENSE = "process/mixed_fraction"  # with process labels, uniform groups have a gradient too

# Label, metric, and format of each number, in print order.
NUMBERS = {
    "reward": ("reward", ".2f"),
    "pass@1": ("pass@1", ".3f"),
    "entropy": ("entropy", ".2f"),
    "length": ("completions/mean_length", ".0f"),
    "truncated": (TRUNCATED, ".2f"),
    "grad_norm": ("grad_norm", ".2g"),
    "lag": ("async/lag_updates", ".0f"),
    "tokens/s": ("perf/forwarded_tok_s_wall_clock", ".0f"),
}


class ConsoleCallback(ProgressCallback):
    """Print one line per logged step and evaluation, and the change in reward at the end of training. Terminals also
    show a progress bar."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, dynamic_ncols=True, disable=not sys.stderr.isatty()
            )

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and (line := step_line(logs or {}, state.global_step, state.max_steps)):
            tqdm.write(line)
            sys.stdout.flush()

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero and (line := change_of_reward(state.log_history)):
            print(line, flush=True)


class NoSignalCallback(TrainerCallback):
    """Log a warning after `PATIENCE` consecutive optimizer steps in which all groups were uniform or all completions
    were truncated, after the first `PATIENCE_AT_START` if no step before had a signal; once per run, resumed runs
    included."""

    _none_in, _patience = 0, PATIENCE_AT_START  # of an evaluation before training

    def __init__(self, method: str):
        self.method = method  # its name

    def on_train_begin(self, args, state, control, **kwargs):
        self._none_in = self._last_step = 0
        self._patience = PATIENCE_AT_START
        self._seen: dict[str, Any] = {}  # the last values; steps without a generation log none
        for logs in state.log_history:
            self._count(logs, logs["step"])

    def on_log(self, args, state, control, logs=None, **kwargs):
        before = self._none_in
        self._count(logs or {}, state.global_step)
        if before < self._patience <= self._none_in and state.is_world_process_zero:
            reward = self._seen.get("reward")  # None: no completion had a verdict
            logger.warning(
                f"{self.method} has had little or nothing to learn from in {self._none_in} optimizer steps in a row: "
                "in each of them every group had equal rewards or every completion was truncated (now: mean reward "
                f"{'none' if reward is None else format(reward, '.2f')}, truncated share {self._seen[TRUNCATED]:.2f} "
                f"with max_completion_length={args.max_completion_length}). The problems are too hard or too easy, "
                "completions are cut off, or the reward function cannot read them. See docs/troubleshooting.md, 'The "
                "reward is flat'."
            )

    def _count(self, logs: Mapping[str, Any], step: int) -> None:
        if "loss" not in logs or self._none_in >= self._patience:  # of an evaluation, or after the warning
            return
        self._seen |= {name: logs[name] for name in (TRUNCATED, *UNIFORM, DENSE, "reward") if name in logs}
        uniform_fraction = next((self._seen[name] for name in UNIFORM if name in self._seen), None)
        has_process_labels = (self._seen.get(DENSE) or 0.0) > 0
        all_are_uniform = uniform_fraction == 1.0 and not has_process_labels
        is_flat = all_are_uniform or self._seen.get(TRUNCATED) == 1.0
        self._none_in = self._none_in + step - self._last_step if is_flat else 0
        if not is_flat:
            self._patience = PATIENCE
        self._last_step = step


def shorten_console(callbacks: list[TrainerCallback]) -> None:
    """Replace Trainer's progress bar with [`ConsoleCallback`]. There is none in notebooks or with `disable_tqdm`."""
    places = [place for place, callback in enumerate(callbacks) if type(callback) is ProgressCallback]
    if places:
        callbacks[places[-1]] = ConsoleCallback()  # the last one is Trainer's; earlier ones are the user's


def step_line(logs: Mapping[str, Any], step: int, max_steps: int) -> str | None:
    """Return `step 12/30  reward 0.37  entropy 0.19  ...  1.2 s` for the logs of a step, `None` for other logs."""
    prefix = _prefix_of_evaluation(logs)
    if not prefix and "reward" not in logs:
        return None
    dataset_name = prefix.removeprefix("eval_").removesuffix("_")
    if dataset_name:
        start = f"evaluation of {dataset_name} at "
    elif prefix:
        start = "evaluation at "
    else:
        start = ""
    parts = [f"{start}step {step:{len(str(max_steps))}}/{max_steps}"]
    for name, (metric, digits) in NUMBERS.items():
        key = "eval_pass@1" if prefix and metric == "pass@1" else prefix + metric  # benchmarks belong to no dataset
        value = logs.get(key)
        if value is not None or (name == "reward" and key in logs):  # None: no completion had a verdict
            parts.append(f"{name} {'none' if value is None else format(value, digits)}")
    seconds = logs.get(f"{prefix}runtime" if prefix else "time/total")
    return "  ".join([*parts, f"{seconds:.1f} s"] if seconds is not None else parts)


def _prefix_of_evaluation(logs: Mapping[str, Any]) -> str:
    """Return `eval_`, or `eval_NAME_` for one of several evaluation sets, and an empty prefix for other logs."""
    rewards = [name for name in logs if name.startswith("eval_") and name.endswith("_reward")]
    if rewards:
        return min(rewards, key=len).removesuffix("reward")
    return "eval_" if "eval_pass@1" in logs else ""


def change_of_reward(log_history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a line with the mean rewards of the first and last tenth of the logged steps, or `None` if fewer than two
    steps have a reward."""
    rewards = [log["reward"] for log in log_history if log.get("reward") is not None]
    count = max(1, len(rewards) // 10)
    if len(rewards) < 2:
        return None
    before, after = (sum(part) / count for part in (rewards[:count], rewards[-count:]))
    over = "logged step" if count == 1 else f"{count} logged steps"
    return f"Reward {before:.3f} before, {after:.3f} after (first and last {over} of {len(rewards)})."


# Trackers -------------------------------------------------------------------------------------------------------

_WITH_TABLES = ("wandb", "trackio")  # TensorBoard has no tables


@contextmanager
def tracked_run(training: GRPOConfig, settings: dict[str, Any], *, resuming: bool) -> Iterator["TrackingCallback"]:
    """
    Log to one run of each tracker in `report_to` inside the context; a resumed run continues the previous tracker run.
    Yields the callback to add to the trainer, which must be constructed inside the context.

    The id in `output_dir/run_id` is the wandb run id, part of the trackio run name, and the folder of TensorBoard's
    events. Trackers receive `settings`, the resolved recipe, filtered by [`~redaction.published`]. Raises a
    `ValueError` if wandb has no API key and stdin is not a terminal.
    """
    callback = TrackingCallback(settings)
    if not training.report_to or not PartialState().is_main_process:
        yield callback
        return
    output_dir = Path(str(training.output_dir))
    file = output_dir / "run_id"
    earlier = file.read_text().strip() if resuming and file.is_file() else None
    identity = os.environ.get("WANDB_RUN_ID") or earlier or secrets.token_hex(4)
    output_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(identity + "\n")
    if training.run_name is None:
        training.run_name = f"{output_dir.name}-{identity}"
    wanted = {
        "WANDB_RUN_ID": identity,
        "WANDB_RESUME": "allow",
        "TENSORBOARD_LOGGING_DIR": str(output_dir / "runs" / identity),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    words, sys.argv = sys.argv, sys.argv[:1]  # wandb sends the command line, which may have secrets
    try:
        if "wandb" in training.report_to:
            _require_key(importlib.import_module("wandb"))
        yield callback
    finally:
        sys.argv = words
        for name in added:
            del os.environ[name]
        if "wandb" in training.report_to:
            importlib.import_module("wandb").finish()  # otherwise the next run of this process would continue it


def _require_key(wandb) -> None:
    can_ask = sys.stdin is not None and sys.stdin.isatty()
    if can_ask or wandb.setup().settings.mode != "online":
        return
    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "report_to names wandb, which has no API key here. Run `wandb login`, set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep the run on this machine, or remove wandb from report_to."
        )


class TrackingCallback(TrainerCallback):
    """Send the recipe to wandb and trackio, and the completions of each logged step as a table
    `completions/step_<step>`, those of an evaluation as `eval_completions/step_<step>`. TRL writes completions after
    it calls callbacks, so they are sent with the next log."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = published_recipe(settings)
        self._first_step = 0  # completions of earlier steps were sent before
        self._sent: set[str] = set()  # files of completions

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._sent = state.global_step, set()
        # transformers has already sent the model config, with the path that it was loaded from.
        name = published({"_name_or_path": kwargs["model"].config.name_or_path})
        for tracker in _trackers(args, state):
            tracker.config.update({"recipe": self.settings, **name}, allow_val_change=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for file in sorted((Path(args.output_dir) / "completions").glob("*_*.parquet")):
            kind, _, number = file.stem.rpartition("_")
            step = int(number)
            if not self._first_step < step <= state.global_step or file.name in self._sent:
                continue
            table = _read_table(file, unique_prompts=args.log_unique_prompts)
            name = "completions" if kind == "completions" else f"{kind}_completions"
            for tracker in _trackers(args, state):
                tracker.log({f"{name}/step_{step:05d}": tracker.Table(dataframe=table), "train/global_step": step})
            self._sent.add(file.name)


def _read_table(file: Path, *, unique_prompts: bool) -> pd.DataFrame:
    table = pd.read_parquet(file)
    if unique_prompts:
        table = table[~table["prompt"].astype(str).duplicated()]
    for column in ("prompt", "completion"):  # conversations come back as arrays of messages
        table[column] = [c.tolist() if isinstance(c, np.ndarray) else c for c in table[column]]
    return table


def _trackers(args, state) -> list:
    return [importlib.import_module(n) for n in _WITH_TABLES if n in args.report_to and state.is_world_process_zero]


# Signals --------------------------------------------------------------------------------------------------------

# In order of precedence for the exit code, which is 128 + the signal number, as in shells.
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


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
        if self._random_states is not None and not self.trainer.args.rollout_lag:
            restore_random_states(self._random_states, self.trainer.accelerator.device)
        for name, value in (self._state or {}).items():
            setattr(self.trainer, name, value)
        if self._state is not None:
            self.trainer.state.num_input_tokens_seen = self._tokens
            self.trainer._tr_loss = self._loss
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["train"].update(self._metrics)


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
        for signum in NAMES:
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
        received = torch.tensor([float(signum in self.received) for signum in NAMES], device=args.device)
        received = reduce(received, reduction="sum").tolist()
        return next((signum for signum, number in zip(NAMES, received, strict=True) if number), None)

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

"""Console output of a run: one short line per logged step, instead of Trainer's dict of all metrics, and a warning if
it has no gradient.

With `disable_tqdm=True` Trainer prints its dict, and notebooks show Trainer's table.
`remove_callback(ProgressCallback)` disables the lines and the progress bar.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback


logger = logging.getLogger(__name__)

PATIENCE = 10  # optimizer steps without a signal before the warning
TRUNCATED = "completions/clipped_ratio"
# Fraction of uniform groups: in the optimizer step (PACS), or in its generation batches.
UNIFORM = ("pacs/uniform_group_fraction", "frac_reward_zero_std")
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
    were truncated, once per run, resumed runs included."""

    _none_in = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._none_in = self._last_step = 0
        self._seen: dict[str, Any] = {}  # the last values; steps without a generation log none
        for logs in state.log_history:
            self._count(logs, logs["step"])

    def on_log(self, args, state, control, logs=None, **kwargs):
        before = self._none_in
        self._count(logs or {}, state.global_step)
        if before < PATIENCE <= self._none_in and state.is_world_process_zero:
            reward = self._seen.get("reward")  # None: no completion had a verdict
            logger.warning(
                f"There is nothing to learn from in {self._none_in} optimizer steps in a row: in each of them every "
                "group had equal rewards or every completion was truncated (now: mean reward "
                f"{'none' if reward is None else format(reward, '.2f')}, truncated share {self._seen[TRUNCATED]:.2f} "
                f"with max_completion_length={args.max_completion_length}). The problems are too hard or too easy, "
                "completions are cut off, or the reward function cannot read them. See docs/troubleshooting.md, 'The "
                "reward is flat'."
            )

    def _count(self, logs: Mapping[str, Any], step: int) -> None:
        if "loss" not in logs or self._none_in >= PATIENCE:  # of an evaluation, or after the warning
            return
        self._seen |= {name: logs[name] for name in (TRUNCATED, *UNIFORM, DENSE, "reward") if name in logs}
        uniform = next((self._seen[name] for name in UNIFORM if name in self._seen), None) == 1.0
        uniform = uniform and not (self._seen.get(DENSE) or 0.0) > 0
        is_flat = uniform or self._seen.get(TRUNCATED) == 1.0
        self._none_in = self._none_in + step - self._last_step if is_flat else 0
        self._last_step = step


def shorten_console(callbacks: list[TrainerCallback]) -> None:
    """Replace Trainer's progress bar with [`ConsoleCallback`]. There is none in notebooks or with `disable_tqdm`."""
    places = [place for place, callback in enumerate(callbacks) if type(callback) is ProgressCallback]
    if places:
        callbacks[places[-1]] = ConsoleCallback()  # the last one is Trainer's; earlier ones are the user's


def step_line(logs: Mapping[str, Any], step: int, max_steps: int) -> str | None:
    """Return `step 12/30  reward 0.37  entropy 0.19  ...  1.2 s` for the logs of a step, `None` for other logs."""
    prefix = "eval_" if logs.keys() & {"eval_reward", "eval_pass@1"} else ""
    if not prefix and "reward" not in logs:
        return None
    parts = [f"{'evaluation at ' if prefix else ''}step {step:{len(str(max_steps))}}/{max_steps}"]
    for name, (metric, digits) in NUMBERS.items():
        value = logs.get(prefix + metric)
        if value is not None or name == "reward" and prefix + metric in logs:  # None: no completion had a verdict
            parts.append(f"{name} {'none' if value is None else format(value, digits)}")
    seconds = logs.get("eval_runtime" if prefix else "time/total")
    return "  ".join([*parts, f"{seconds:.1f} s"] if seconds is not None else parts)


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

"""Console output of a run: one short line per logged step, instead of Trainer's dict of all metrics.

With `disable_tqdm=True` Trainer prints its dict, and notebooks show Trainer's table.
`remove_callback(ProgressCallback)` disables the lines and the progress bar.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from .nothing_to_learn import TRUNCATED


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


def shorten_console(callbacks: list[TrainerCallback]) -> None:
    """Replace Trainer's progress bar with [`ConsoleCallback`]. There is none in notebooks or with `disable_tqdm`."""
    places = [place for place, callback in enumerate(callbacks) if type(callback) is ProgressCallback]
    if places:
        callbacks[places[-1]] = ConsoleCallback()  # the last one is Trainer's; earlier ones are the user's


def step_line(logs: Mapping[str, Any], step: int, max_steps: int) -> str | None:
    """Return `step 12/30  reward 0.37  entropy 0.19  ...  1.2 s` for the logs of a step, `None` for other logs. A step
    that generated nothing has numbers of its update alone: `step 13/30  same rollouts  entropy 0.19  ...  0.8 s`."""
    prefix = _prefix_of_evaluation(logs)
    has_rollouts = "reward" in logs
    if not prefix and not has_rollouts and "loss" not in logs:
        return None
    dataset_name = prefix.removeprefix("eval_").removesuffix("_")
    if dataset_name:
        start = f"evaluation of {dataset_name} at "
    elif prefix:
        start = "evaluation at "
    else:
        start = ""
    parts = [f"{start}step {step:{len(str(max_steps))}}/{max_steps}"]
    if not prefix and not has_rollouts:
        parts.append("same rollouts")
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

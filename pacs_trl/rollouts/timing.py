"""Where the time of an optimizer step goes: one clock per process, parts that never overlap, a table at the end.

Only what runs between the begin and the end of an optimizer step is counted; saving, evaluation and the loading of
data lie outside. On a GPU kernels run behind the clock, so a part that ends without waiting for its result gives time
to the next one; all parts here end with a value on the CPU, except the optimizer.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import TrainerCallback


# What the parts are, in the order in which they run. "other" is the rest of the step.
PARTS = {
    "generation": "completions drawn by vLLM or transformers",
    "weight_sync": "weights sent to vLLM",
    "verification": "reward functions",
    "log_probs": "log-probabilities and values for later updates and rewards",
    "update": "forward and backward passes",
    "optimizer": "optimizer",
    "other": "everything else in the step",
}


class StepTimer:
    """
    Seconds per part of the running step and of all steps so far.

    A part inside another one stops the outer one's clock while it runs, so the parts of a step add up to at most its
    total, and "other" is the difference.

    Args:
        clock (`Callable`, *optional*): Returns seconds; `time.perf_counter` by default.

    Attributes:
        parts (`dict`): `PARTS`, to which a trainer may add.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.parts = dict(PARTS)
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.totals: dict[str, float] = defaultdict(float)
        self.num_steps = 0
        self._step: dict[str, float] = defaultdict(float)
        self._began: float | None = None
        self._open: list[str] = []
        self._since = 0.0

    def _charge(self) -> None:
        now = self.clock()
        if self._open and self._began is not None:
            self._step[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what runs inside to `name`, a key of `parts`; `"other"` stops the clock of the part around it."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def begin_step(self) -> None:
        self._step.clear()
        self._began = self.clock()

    def end_step(self) -> dict[str, float]:
        """Seconds of the step: every part and `"total"`."""
        if self._began is None:
            return {}
        total = self.clock() - self._began
        self._began = None
        seconds = {name: self._step[name] for name in self.parts if name != "other"}
        seconds |= {"other": total - sum(seconds.values()), "total": total}
        for name, value in seconds.items():
            self.totals[name] += value
        self.num_steps += 1
        return seconds

    def table(self) -> str:
        """All steps so far: seconds, seconds per step and share of each part."""
        total = self.totals["total"]
        lines = [
            f"Where the time of {self.num_steps} optimizer steps went (this process)",
            f"  {'':13}{'seconds':>10}{'per step':>10}{'share':>8}",
        ]
        for name in (*self.parts, "total"):
            seconds = self.totals[name]
            share = seconds / total if total else 0
            lines.append(
                f"  {name:13}{seconds:10.2f}{seconds / max(self.num_steps, 1):10.3f}{share:8.1%}"
                f"{'  ' + self.parts[name] if name in self.parts else ''}"
            )
        return "\n".join(lines)


class TimingCallback(TrainerCallback):
    """
    Records `time/<part>` in the trainer's metrics once per optimizer step and prints the table after training.

    Args:
        timer ([`StepTimer`]): The clock.
        record (`Callable`): `record(name, seconds)` puts a number into the log of the step.
        show (`Callable`): Prints a text, on the main process only.
    """

    def __init__(self, timer: StepTimer, record: Callable[[str, float], None], show: Callable[[str], None]):
        self.timer, self.record, self.show = timer, record, show
        self._optimizer = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.timer.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.timer.begin_step()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._optimizer = self.timer.part("optimizer")
        self._optimizer.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._optimizer is not None:
            self._optimizer.__exit__(None, None, None)
            self._optimizer = None

    def on_step_end(self, args, state, control, **kwargs):
        for name, seconds in self.timer.end_step().items():
            self.record(f"time/{name}", seconds)

    def on_train_end(self, args, state, control, **kwargs):
        if self.timer.num_steps:
            self.show(self.timer.table())

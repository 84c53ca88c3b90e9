"""Generate again inside a generation, for some of its prompts: what DARS and guidance share.

A generation is first drawn as without any of this: `num_generations` completions of each prompt, on the process that
has it. Then the methods change it. They see the rows of all processes and decide the same on each; a draw is shared
out evenly, whichever process the prompts came from.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSTrainer
from ..rollouts.step_sizes import Step
from ..update.rows import Rollout


# A label above this is a right answer.
RIGHT = 0.5

# Of a later draw these are logged under its own name, and the first draw's means stay what they would be without it.
_OWN_METRICS = {"reward": "reward", "completions/mean_length": "mean_length"}
# Failures of grading count whatever was graded.
_SHARED_METRICS = ("verification/", "num_tokens")


class Redraw:
    """
    A generation on all processes, of whose prompts more can be drawn.

    Args:
        trainer ([`PACSTrainer`]):
            Draws.
        generation_batch (sequence of `dict`):
            This process's rows of the data set.
        rollouts (list of [`Rollout`]):
            What was drawn first, in the order of `generation_batch`.

    Attributes:
        groups (`dict[int, list[Rollout]]`):
            Rows of each prompt, the same on every process.
        inputs (`dict[int, dict]`):
            Of each prompt, the row of the data set.
    """

    def __init__(self, trainer, generation_batch: Sequence[dict[str, Any]], rollouts: list[Rollout]):
        self.trainer = trainer
        self.num_processes, self.process = trainer.accelerator.num_processes, trainer.accelerator.process_index
        own = {row.group: row_of_data for row, row_of_data in zip(rollouts, generation_batch, strict=False)}
        self.inputs: dict[int, dict] = dict(gather_object(list(own.items())))
        self.groups: dict[int, list[Rollout]] = {group: [] for group in sorted(self.inputs)}
        for row in gather_object(rollouts):
            self.groups[row.group].append(row)

    @property
    def rollouts(self) -> list[Rollout]:
        return [row for rows in self.groups.values() for row in rows]

    def draw(self, slots: Sequence[tuple[int, dict]], what: str) -> list[Rollout]:
        """
        Draw one completion for each slot, the same number on every process.

        Args:
            slots (sequence of pairs):
                A group, and the row of the data set that is asked for; the same on every process.
            what (`str`):
                Prefix of its metrics, and its name in completions tables.

        Returns:
            `list[Rollout]`: what all processes have drawn, in the order of the slots.
        """
        if not slots:
            return []
        share = -(-len(slots) // self.num_processes)
        # Processes draw together, so each draws equally many; what is drawn for that alone is dropped.
        padded = [*slots, *[slots[-1]] * (share * self.num_processes - len(slots))]
        groups, inputs = zip(*padded[self.process :: self.num_processes], strict=True)
        metrics = self.trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        self.trainer.draw_name = what
        drawn = gather_object(self.trainer.draw(inputs, 1, groups))
        self.trainer.draw_name = "first"
        for name in [name for name in metrics if not name.startswith(_SHARED_METRICS)]:
            values, known = metrics.pop(name), before.get(name, 0)
            if name in _OWN_METRICS:
                metrics[f"{what}/{_OWN_METRICS[name]}"] += values[known:]
            if known:
                metrics[name] = values[:known]
        return [drawn[i % self.num_processes * share + i // self.num_processes] for i in range(len(slots))]

    def log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(float(value))


def judged_labels(rows: Sequence[Rollout]) -> list[float]:
    """Labels of the rows that have one."""
    return [row.label for row in rows if row.label == row.label]


@dataclass
class RedrawingConfig(PACSConfig):
    """[`PACSConfig`] of a method that generates more completions than the first ones."""

    def most_additional(self, step: Step) -> int:
        """Return the most completions that are generated beside the first ones of a generation, on all processes."""
        return 0


class RedrawingTrainer(PACSTrainer):
    """[`PACSTrainer`] whose generations are changed by `redraw` before anything is learned from them."""

    draw_name = "first"  # what completions tables call the rows of a draw

    def redraw(self, again: Redraw, num_steps: int) -> None:
        """Change a generation, which `num_steps` optimizer steps share; a method calls `super().redraw` first."""

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        again = Redraw(self, generation_batch, rollouts)
        self.redraw(again, num_steps)
        return again.rollouts

    def _prepare_drawing(self) -> None:
        super()._prepare_drawing()
        # Tables of completions, which TRL bounds by a generation, have room for all draws of one.
        step = Step.of(self.args, self.accelerator.num_processes)
        most = step.rows_per_generation + self.args.most_additional(step)
        for name, kept in self._logs.items():
            wide: deque | defaultdict = deque(maxlen=most)
            self._logs[name] = wide if isinstance(kept, deque) else defaultdict(lambda: deque(maxlen=most))

    def _draw_generation(self, generation_batch) -> list[Rollout]:
        for kept in self._logs.values():  # else the last table would fill up this one
            kept.clear()
        return super()._draw_generation(generation_batch)

    def _generate_and_score_completions(self, inputs):
        self._log_completion_extra("draw", [self.draw_name] * len(inputs))
        return super()._generate_and_score_completions(inputs)


def in_equal_shares(number: int, num_processes: int) -> int:
    """Return the completions that are generated where `number` are wanted and all processes generate equally many."""
    return -(-number // num_processes) * num_processes

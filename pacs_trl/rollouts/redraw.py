"""Draw again inside a generation, for some of its prompts.

A generation is first drawn as without any of this: `num_generations` completions of each prompt, on the process that has it. Then
`guidance.py`, `adaptive.py` and `refill.py` change it, in this order. They see the rows of all processes and decide the same on
each; a draw is shared out evenly, whichever process the prompts came from.
"""

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

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

"""Generate more completions for some prompts of a generation: shared by DARS and guidance.

A generation starts as without these methods: `num_generations` completions of each prompt, on the process that has it.
Then the methods change it. They see the completions of all processes and decide the same on each; further completions
are generated in equal shares, whichever process the prompts came from.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from ..pacs_trainer import PACSTrainer
from ..update.rows import Rollout


# A label above this is a correct completion.
CORRECT = 0.5

# Of later completions these are logged under a name of their own; the means of the first ones stay as they are.
_OWN_METRICS = {"reward": "reward", "completions/mean_length": "mean_length"}
# Failures of grading include all completions.
_SHARED_METRICS = ("verification/", "num_tokens")


class Redraw:
    """
    A generation on all processes, which can be extended.

    Args:
        trainer ([`RedrawingTrainer`]): Generates.
        generation_batch (sequence of `dict`): This process's rows of the dataset.
        rollouts (list of [`Rollout`]): The first completions, in the order of `generation_batch`.

    Attributes:
        groups (`dict[int, list[Rollout]]`): Completions of each prompt, the same on every process.
        inputs (`dict[int, dict]`): The dataset row of each prompt.
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
        Generate one completion for each slot, the same number on every process.

        Args:
            slots (sequence of pairs): A group, and the dataset row of the prompt; the same on every process.
            what (`str`): Prefix of metrics, and name in completions tables.

        Returns:
            `list[Rollout]`: completions of all processes, in the order of the slots.
        """
        if not slots:
            return []
        share = -(-len(slots) // self.num_processes)
        # Processes generate together, so each needs equally many slots; padding samples are discarded.
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


def known_labels(rows: Sequence[Rollout]) -> list[float]:
    """Return the labels of the completions that have one."""
    return [row.label for row in rows if row.label == row.label]


class RedrawingTrainer(PACSTrainer):
    """[`PACSTrainer`] whose generations are changed by `redraw` before the updates."""

    draw_name = "first"  # of the completions in tables

    def redraw(self, again: Redraw, num_steps: int) -> None:
        """Change a generation, which `num_steps` optimizer steps share; a method calls `super().redraw` first."""

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        again = Redraw(self, generation_batch, rollouts)
        self.redraw(again, num_steps)
        return again.rollouts

    def _prepare_drawing(self) -> None:
        super()._prepare_drawing()
        for name, kept in self._logs.items():  # TRL bounds tables by a generation of the first completions
            self._logs[name] = deque() if isinstance(kept, deque) else defaultdict(deque)

    def _draw_generation(self, generation_batch) -> list[Rollout]:
        for kept in self._logs.values():
            kept.clear()
        return super()._draw_generation(generation_batch)

    def _generate_and_score_completions(self, inputs):
        self._log_completion_extra("draw", [self.draw_name] * len(inputs))
        return super()._generate_and_score_completions(inputs)

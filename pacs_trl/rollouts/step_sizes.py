"""Sizes of a generation and of an optimizer step: four settings and the number of processes multiply into them.

The arithmetic stands here once, for configurations, `pacs-trl plan` and the line that a run prints at its start.
"""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Step:
    """
    What a generation and an optimizer step consist of; rows are completions.

    Attributes:
        per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation, num_generations, num_iterations
        (`int`):
            As in the configuration.
        num_processes (`int`):
            Number of processes.
    """

    per_device_train_batch_size: int
    num_processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int = 1

    @classmethod
    def of(cls, settings: Any, num_processes: int) -> "Step":
        """The sizes that settings come to: a configuration, or its values before it is made."""
        values = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name != "num_processes"}
        steps = settings.steps_per_generation
        if steps is None and settings.generation_batch_size is not None:
            steps = settings.generation_batch_size // (settings.per_device_train_batch_size * num_processes)
        values["steps_per_generation"] = settings.gradient_accumulation_steps if steps is None else steps
        return cls(num_processes=num_processes, **values)

    @property
    def slot(self) -> int:
        """Rows that all processes take at a time."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def rows_per_generation(self) -> int:
        return self.slot * self.steps_per_generation

    @property
    def rows_per_update(self) -> int:
        return self.slot * self.gradient_accumulation_steps

    @property
    def prompts_per_generation(self) -> float:
        return self.rows_per_generation / self.num_generations

    @property
    def prompts_per_update(self) -> float:
        return self.rows_per_update / self.num_generations

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps that learn from a generation; 1 also where one learns from several."""
        return max(1, self.steps_per_generation // self.gradient_accumulation_steps) * self.num_iterations

    @property
    def generations_per_update(self) -> int:
        """Generations that an optimizer step learns from; 1 also where several learn from one."""
        return max(1, self.gradient_accumulation_steps // self.steps_per_generation)

    def rollouts(self, optimizer_steps: int) -> int:
        """Generations that so many optimizer steps learn from, the last one perhaps in part."""
        return -(-optimizer_steps * self.generations_per_update // self.updates_per_generation)

    def errors(self) -> list[str]:
        """
        What is wrong with the sizes, in words that name the values and the nearest legal ones.

        A generation and an optimizer step must hold whole groups of `num_generations`, and an optimizer step may not
        straddle two generations unless it consumes both whole.
        """
        if self.num_generations < 2:
            return [
                f"num_generations must be at least 2, got {self.num_generations}: the score of a completion compares "
                "it with the other completions of its prompt. The paper uses 8."
            ]
        # the second rule follows from the first when the steps are equal; one remedy at a time
        ragged = self._ragged("steps_per_generation", "generation batch")
        ragged = ragged or self._ragged("gradient_accumulation_steps", "batch of an optimizer step")
        whole_updates = self.steps_per_generation % self.gradient_accumulation_steps == 0
        whole_generations = self.gradient_accumulation_steps % self.steps_per_generation == 0
        if not whole_updates and not whole_generations:
            legal = _either(_around(self.steps_per_generation, self.gradient_accumulation_steps))
            ragged.append(
                f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, so that every optimizer step learns from one generation batch. "
                f"Nearest legal values: steps_per_generation={legal}."
            )
        elif not whole_updates and self.num_iterations > 1:
            ragged.append(
                f"num_iterations={self.num_iterations} repeats a generation batch, but with "
                "gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} > steps_per_generation={self.steps_per_generation} the "
                "repetitions "
                f"would fall into one optimizer step. Set steps_per_generation={self.gradient_accumulation_steps} or "
                "num_iterations=1."
            )
        return ragged

    def _ragged(self, name: str, what: str) -> list[str]:
        """Whether a batch of so many slots cuts a group."""
        steps, groups = getattr(self, name), self.num_generations
        size = self.slot * steps
        if size % groups == 0:
            return []
        unit = next(n for n in range(1, groups + 1) if self.slot * n % groups == 0)
        divisors = [n for n in range(2, min(size, 100 * groups) + 1) if size % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - groups))[:2])
        other_way = f", or num_generations={_either(nearest)}" if nearest else ""
        return [
            f"The {what} must hold whole groups of num_generations={groups} completions, but it has "
            f"per_device_train_batch_size={self.per_device_train_batch_size} x {self.num_processes} processes x "
            f"{name}={steps} = {size}. Nearest legal values: {name}={_either(_around(steps, unit))}{other_way}."
        ]


def step_errors(settings: Any, num_processes: int) -> list[str]:
    """What is wrong with the batch sizes of settings on so many processes, see [`Step.errors`]."""
    rows, slot = settings.generation_batch_size, settings.per_device_train_batch_size * num_processes
    if rows is not None and settings.steps_per_generation is not None:
        return ["generation_batch_size and steps_per_generation say the same thing: give only one of them."]
    if rows is not None and rows % slot:
        return [
            f"generation_batch_size={rows} must be a multiple of per_device_train_batch_size="
            f"{settings.per_device_train_batch_size} x {num_processes} processes = {slot}. Nearest legal values: "
            f"{_either(_around(rows, slot))}."
        ]
    return Step.of(settings, num_processes).errors()


def _around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, at least one `unit`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(str(v) for v in values)

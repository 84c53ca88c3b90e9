"""Batch-size arithmetic: sizes of a generation batch and of an optimizer step, from four settings and the processes.

Shared by configurations, `pacs-trl plan`, and the line that a run prints at its start.
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
        """Return the sizes of a configuration."""
        values = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name != "num_processes"}
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
        Return what is wrong with the sizes, besides what TRL refuses.

        An optimizer step must hold whole groups of `num_generations`, and may not straddle two generations unless it
        consumes both whole.
        """
        if self.rows_per_update % self.num_generations:
            return [
                f"An optimizer step must hold whole groups of num_generations={self.num_generations} completions, but "
                f"has per_device_train_batch_size={self.per_device_train_batch_size} x {self.num_processes} processes "
                f"x gradient_accumulation_steps={self.gradient_accumulation_steps} = {self.rows_per_update}. Change "
                "one of them."
            ]
        several_generations = self.gradient_accumulation_steps % self.steps_per_generation == 0
        if self.steps_per_generation % self.gradient_accumulation_steps == 0:
            return []
        if not several_generations or self.num_iterations > 1:
            return [
                f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, so that an optimizer step learns from one generation batch (or, "
                "with num_iterations=1, from several whole ones). Change one of them."
            ]
        return []

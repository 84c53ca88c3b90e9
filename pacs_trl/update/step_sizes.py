"""Batch-size arithmetic: sizes of generation batches and optimizer steps, from five settings and the process count."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Step:
    """Sizes of a generation batch and of an optimizer step; attributes but `num_processes` are settings."""

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
        """Completions of one `per_device_train_batch_size` over all processes."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def completions_per_generation(self) -> int:
        return self.slot * self.steps_per_generation

    @property
    def completions_per_update(self) -> int:
        return self.slot * self.gradient_accumulation_steps

    @property
    def prompts_per_generation(self) -> float:
        return self.completions_per_generation / self.num_generations

    @property
    def prompts_per_update(self) -> float:
        return self.completions_per_update / self.num_generations

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps per generation batch, with rollout reuse; 1 if a step uses several generation batches."""
        return max(1, self.steps_per_generation // self.gradient_accumulation_steps) * self.num_iterations

    @property
    def generations_per_update(self) -> int:
        """Generation batches per optimizer step; 1 if several optimizer steps share a generation batch."""
        return max(1, self.gradient_accumulation_steps // self.steps_per_generation)

    def rollouts(self, optimizer_steps: int) -> int:
        """Return the number of generation batches for `optimizer_steps`; the last one may be used only in part."""
        return -(-optimizer_steps * self.generations_per_update // self.updates_per_generation)

    def errors(self) -> list[str]:
        """Return error messages about the sizes, in addition to the errors that TRL raises. An optimizer step must
        hold whole groups, and use either a part of one generation batch, or whole generation batches."""
        if self.completions_per_update % self.num_generations:
            return [
                f"An optimizer step must hold whole groups of num_generations={self.num_generations} completions, but "
                f"has per_device_train_batch_size={self.per_device_train_batch_size} x {self.num_processes} processes "
                f"x gradient_accumulation_steps={self.gradient_accumulation_steps} = {self.completions_per_update}. "
                "Change one of them."
            ]
        is_part = self.steps_per_generation % self.gradient_accumulation_steps == 0
        several_generations = self.gradient_accumulation_steps % self.steps_per_generation == 0
        if not is_part and (not several_generations or self.num_iterations > 1):
            return [
                f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, so that an optimizer step learns from one generation batch (or, "
                "with num_iterations=1, from several whole ones). Change one of them."
            ]
        return []

"""Batch-size arithmetic: sizes of generation batches and optimizer steps, from six settings and the process count."""

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """
    Sizes of a generation batch and of an optimizer step; attributes but `num_processes` are settings.

    Trainer accumulates an optimizer step in `gradient_accumulation_steps` accumulation slots, and a generation batch
    has the completions of `steps_per_generation` slots. With `completions_per_step`, processes share an optimizer step
    unevenly, and the other settings say how many completions each of them has room for.
    """

    per_device_train_batch_size: int
    num_processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int = 1
    completions_per_step: int | None = None

    @classmethod
    def of(cls, settings: Any, num_processes: int) -> "BatchSizes":
        """Return the sizes of a configuration."""
        values = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name != "num_processes"}
        return cls(num_processes=num_processes, **values)

    @property
    def settings(self) -> dict[str, int | None]:
        """The settings by name, without the number of processes."""
        return {name: value for name, value in vars(self).items() if name != "num_processes"}

    @property
    def generations_per_step(self) -> Fraction:
        """Generation batches per optimizer step, without reuse."""
        return Fraction(self.gradient_accumulation_steps, self.steps_per_generation)

    def for_processes(self, num_processes: int) -> "BatchSizes":
        """
        Return the sizes with which another number of processes has as many completions in an optimizer step and in a
        generation batch. A slot is at most as large as before, where slots can be filled.

        Raises:
            `ValueError`: if there are fewer completions than processes.
        """
        update, generation = self.completions_per_update, self.completions_per_generation
        largest = self.per_device_train_batch_size
        for size in range(largest, 0, -1):
            slots, rest = divmod(update, size * num_processes)
            slots_per_generation = slots / self.generations_per_step
            if rest == 0 and slots_per_generation.denominator == 1:
                return replace(
                    self,
                    per_device_train_batch_size=size,
                    num_processes=num_processes,
                    gradient_accumulation_steps=slots,
                    steps_per_generation=int(slots_per_generation),
                    completions_per_step=None,
                )
        if generation < num_processes:
            raise UserError(
                f"A generation batch has {generation} completions, fewer than the {num_processes} processes of this "
                f"launch. Launch at most {generation}."
            )
        size = -(-generation // (num_processes * self.steps_per_generation))
        while size * num_processes * self.steps_per_generation % self.num_generations:  # TRL checks it
            size += 1
        return replace(
            self, per_device_train_batch_size=size, num_processes=num_processes, completions_per_step=update
        )

    @property
    def completions_per_slot(self) -> int:
        """Completions of an accumulation slot, `per_device_train_batch_size` of each process."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def completions_per_generation(self) -> int:
        if self.completions_per_step is not None:
            return int(self.completions_per_step / self.generations_per_step)
        return self.completions_per_slot * self.steps_per_generation

    @property
    def completions_per_update(self) -> int:
        if self.completions_per_step is not None:
            return self.completions_per_step
        return self.completions_per_slot * self.gradient_accumulation_steps

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

    @property
    def is_sliced(self) -> bool:
        """Whether optimizer steps take slots of generation batches as they come: they hold no whole groups, or are
        neither equal parts of a generation batch nor whole ones."""
        if self.completions_per_step is not None:
            return False
        is_part = self.steps_per_generation % self.gradient_accumulation_steps == 0
        several_generations = self.gradient_accumulation_steps % self.steps_per_generation == 0
        has_whole_groups = self.completions_per_update % self.num_generations == 0
        return not has_whole_groups or not (is_part or (several_generations and self.num_iterations == 1))

    def num_generation_batches(self, optimizer_steps: int) -> int:
        """Return the number of generation batches for `optimizer_steps`; the last one may be used only in part."""
        slots_per_generation = self.steps_per_generation * self.num_iterations
        return -(-optimizer_steps * self.gradient_accumulation_steps // slots_per_generation)

    def errors(self) -> list[str]:
        """Return error messages about the sizes, in addition to the errors that TRL raises, for updates that need
        whole groups: an optimizer step must hold such, and use either a part of one generation batch, or whole ones.
        """
        if self.completions_per_step is not None:
            return self._uneven_errors(self.completions_per_step)
        if not self.is_sliced:
            return []
        if self.completions_per_update % self.num_generations:
            return [
                f"An optimizer step must hold whole groups of num_generations={self.num_generations} completions, but "
                f"has per_device_train_batch_size={self.per_device_train_batch_size} x {self.num_processes} processes "
                f"x gradient_accumulation_steps={self.gradient_accumulation_steps} = {self.completions_per_update}. "
                "Change one of them."
            ]
        return [
            f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
            f"{self.gradient_accumulation_steps}, so that an optimizer step learns from one generation batch (or, "
            "with num_iterations=1, from several whole ones). Change one of them."
        ]

    def _uneven_errors(self, update: int) -> list[str]:
        """Return error messages about `update` completions per step that processes share unevenly."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        generation = update / self.generations_per_step
        if generation.denominator != 1 or generation % self.num_generations or update % self.num_generations:
            return [
                f"completions_per_step={update} must make whole groups of num_generations={self.num_generations} in "
                f"each optimizer step and each generation batch, which has {generation} completions. Change one of "
                "them."
            ]
        if not self.num_processes <= generation <= rows * self.num_processes:
            return [
                f"completions_per_step={update} makes generation batches of {generation} completions, but "
                f"{self.num_processes} processes have 1 to {rows} (per_device_train_batch_size x "
                "steps_per_generation) each. Change one of them."
            ]
        return []

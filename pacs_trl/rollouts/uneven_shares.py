"""Generation batches whose completions the processes share unevenly.

A run that has lost some of its GPUs keeps its number of completions per optimizer step (`completions_per_step`), which
the remaining processes may not divide. They get shares that differ by at most one. TRL's data loader gives every
process the same number of rows, the most that one needs ([`UnevenSampler`], for datasets with a length);
[`UnevenShares.rows_of`] removes the rest before anything is generated. TRL gathers rewards and lengths of equally many
completions per process, so [`UnevenShares.gathering`] replaces the gathers of a generation batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import gather_object
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from ..update.step_sizes import BatchSizes


@dataclass(frozen=True)
class UnevenShares:
    """
    Shares of a generation batch.

    Args:
        num_completions (`int`): Completions of a generation batch, over all processes.
        num_processes (`int`): Number of processes; the first ones get one completion more than the others.
        rows_per_process (`int`): Rows that TRL's data loader gives to each process.
    """

    num_completions: int
    num_processes: int
    rows_per_process: int

    @classmethod
    def from_batch_sizes(cls, sizes: BatchSizes) -> "UnevenShares | None":
        """Return the shares of an optimizer step with `completions_per_step`, `None` for one without."""
        if sizes.completions_per_step is None:
            return None
        rows_per_process = sizes.per_device_train_batch_size * sizes.steps_per_generation
        return cls(sizes.completions_per_generation, sizes.num_processes, rows_per_process)

    def size(self, process: int) -> int:
        """Return the number of completions of a process."""
        return self.num_completions // self.num_processes + (process < self.num_completions % self.num_processes)

    def first(self, process: int) -> int:
        """Return the index of the first completion of a process among those of all processes."""
        return sum(self.size(earlier) for earlier in range(process))

    def rows_of(self, process: int, rows: list) -> list:
        """Return the rows of a process that are not filled up."""
        return rows[: self.size(process)]

    def fill(self, indices: list[int]) -> list[int]:
        """Spread the indices of a generation batch over the rows of all processes, and fill up the rest."""
        filled = []
        for process in range(self.num_processes):
            first, size = self.first(process), self.size(process)
            filled += indices[first : first + size] + indices[:1] * (self.rows_per_process - size)
        return filled

    @contextmanager
    def gathering(self, accelerator: Any) -> Iterator[None]:
        """Let TRL gather tensors of different sizes inside the context."""
        with patch.object(grpo_trainer, "gather", gather_rows), patch.object(accelerator, "gather", gather_rows):
            yield


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate the rows of a tensor of all processes, whose numbers of rows may differ."""
    parts = gather_object([torch.atleast_1d(tensor.detach()).cpu()])
    return torch.cat(parts).to(tensor.device)


class UnevenSampler(RepeatSampler):
    """
    TRL's sampler of whole generation batches, with the rows of [`UnevenShares`].

    Args:
        shares ([`UnevenShares`]): Shares of a generation batch.
        kwargs: Arguments of [`~trl.trainer.utils.RepeatSampler`]; `batch_size` counts the prompts of a generation
            batch.
    """

    def __init__(self, shares: UnevenShares, **kwargs: Any):
        super().__init__(**kwargs)
        self._shares = shares

    def __iter__(self) -> Iterator[int]:
        repeats, self.repeat_count = self.repeat_count, 1
        indices = list(super().__iter__())
        self.repeat_count = repeats
        size = self._shares.num_completions
        for first in range(0, len(indices), size):
            yield from self._shares.fill(indices[first : first + size]) * repeats

    def __len__(self) -> int:
        num_batches = self.num_samples // self.batch_size
        return num_batches * self._shares.rows_per_process * self._shares.num_processes * self.repeat_count

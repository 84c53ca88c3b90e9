"""Order of the prompts of a run: that of TRL's sampler, epoch after epoch, each computed once."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from .protocols import SamplingTrainer


class EpochSampler(Sampler):
    """
    TRL's sampler with a shuffle order that depends on seed and epoch only. TRL keeps using the generator of the
    previous epoch, so a run that resumes after the first epoch would repeat its order.

    Args:
        sampler ([`~trl.trainer.utils.RepeatSampler`]): TRL's sampler.
        epoch (`Callable`): Returns the number of the current epoch, from 0.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            assert self.sampler.seed is not None  # that of the run
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


@lru_cache(maxsize=2)  # batches that are generated ahead may be of the next epoch
def epoch_order(num_rows: int, seed: int | None) -> torch.Tensor:
    """Return the indices `(num_rows,)` of dataset rows in the order in which TRL's sampler reads them in one epoch,
    with its `seed` in this epoch, or `None` if it does not shuffle."""
    if seed is None:
        return torch.arange(num_rows)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


class PromptOrder:
    """
    Dataset index of each prompt of a run, by its position: the order of [`EpochSampler`], epoch after epoch, without
    the prompts at the end of an epoch that fill no generation batch.

    Args:
        num_rows (`int`): Number of dataset rows.
        batch_size (`int`): Prompts per generation batch.
        shuffle (`bool`), seed (`int`): Whether an epoch is shuffled, with the seed `seed + epoch`.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int):
        self.num_rows, self.batch_size, self.shuffle, self.seed = num_rows, batch_size, shuffle, seed
        self.prompts_per_epoch = num_rows // batch_size * batch_size

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.prompts_per_epoch)
        order = epoch_order(self.num_rows, self.seed + epoch if self.shuffle else None)
        return int(order[index])


def prompt_order(trainer: SamplingTrainer) -> PromptOrder:
    """Return the order of the prompts of a run, which is that of its sampler."""
    sampler = trainer._get_train_sampler().sampler
    return PromptOrder(sampler.num_samples, sampler.batch_size, sampler.shuffle, sampler.seed)


def indices_of_generation(trainer: SamplingTrainer, number: int) -> list[int]:
    """Return the indices of the dataset rows of generation batch `number`, from 0: one per completion of all
    processes."""
    order = prompt_order(trainer)
    first = number * order.batch_size
    indices = [order[position] for position in range(first, first + order.batch_size)]
    return [index for index in indices for _ in range(trainer.num_generations)]

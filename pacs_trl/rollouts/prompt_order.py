"""Order of the prompts of a run: that of TRL's sampler, epoch after epoch, each computed once."""

from functools import lru_cache

import torch


@lru_cache(maxsize=2)  # batches that are generated ahead may be of the next epoch
def epoch_order(num_rows: int, seed: int | None) -> torch.Tensor:
    """Return the indices `(num_rows,)` of dataset rows in the order in which TRL's sampler reads them in one epoch,
    with its `seed` in this epoch, or `None` if it does not shuffle."""
    if seed is None:
        return torch.arange(num_rows)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


class PromptOrder:
    """
    Dataset index of each prompt of a run, by its position: the order of TRL's sampler, epoch after epoch, without the
    prompts at the end of an epoch that fill no generation batch.

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

"""The order of prompts is that of the data loader, and costs as much as its generation batches."""

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import RepeatSampler

from pacs_trl.rollouts.prompt_order import EpochSampler, epoch_order, indices_of_generation


def trainer_with(num_rows, *, shuffle=True, epoch=0):
    """A trainer with 2 prompts per generation batch and 3 completions per prompt, each batch used twice."""

    def sampler():
        batches = RepeatSampler(range(num_rows), 3, batch_size=2, repeat_count=2, shuffle=shuffle, seed=5)
        return EpochSampler(batches, lambda: epoch)

    return SimpleNamespace(num_generations=3, _get_train_sampler=sampler)


@pytest.mark.parametrize("shuffle", [True, False])
def test_generation_batches_have_the_rows_of_the_data_loader(shuffle):
    """Of three epochs; the last prompt of each, the seventh, fills no generation batch."""
    number = 0
    for epoch in range(3):
        trainer = trainer_with(7, shuffle=shuffle, epoch=epoch)
        indices = list(trainer._get_train_sampler())
        for first in range(0, len(indices), 12):
            batch, again = indices[first : first + 6], indices[first + 6 : first + 12]
            assert indices_of_generation(trainer, number) == batch == again
            number += 1
    assert number == 9


def test_an_epoch_is_shuffled_once_for_all_its_generation_batches(monkeypatch):
    shuffle, shuffled = torch.randperm, []
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: shuffled.append(args) or shuffle(*args, **kwargs))
    epoch_order.cache_clear()
    for number in range(5):  # the last two are of the second epoch
        indices_of_generation(trainer_with(6), number)
    assert shuffled == [(6,), (6,)]

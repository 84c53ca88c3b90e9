"""Batch sizes on another number of processes."""

import itertools

import pytest

from pacs_trl.rollouts.uneven_shares import UnevenSampler, UnevenShares
from pacs_trl.update.step_sizes import BatchSizes


# 8 processes, 2 completions per slot, 4 slots per optimizer step, 2 optimizer steps per generation batch
STEP = BatchSizes(2, num_processes=8, gradient_accumulation_steps=4, steps_per_generation=8, num_generations=8)


def sizes(step: BatchSizes) -> tuple:
    return step.per_device_train_batch_size, step.gradient_accumulation_steps, step.steps_per_generation


def test_fewer_processes_accumulate_more():
    assert sizes(STEP.for_processes(4)) == (2, 8, 16)
    assert sizes(STEP.for_processes(1)) == (2, 32, 64)
    assert sizes(STEP.for_processes(16)) == (2, 2, 4)
    assert STEP.for_processes(4).completions_per_step is None


def test_a_number_that_does_not_divide_gets_unequal_shares():
    uneven = STEP.for_processes(6)
    assert uneven.completions_per_step == uneven.completions_per_update == 64
    assert uneven.completions_per_generation == 128
    # 22 of 128 completions, in 8 slots of 3, and 6 x 24 completions are whole groups
    assert sizes(uneven) == (3, 4, 8)
    assert sizes(uneven.for_processes(8)) == (2, 4, 8), "and back"


def test_sizes_keep_the_batches_for_every_number_of_processes():
    for size, accumulation, per_step, group, before, now in itertools.product(
        (1, 2, 3), (1, 2, 4), (1, 2), (2, 4), (1, 2, 8), range(1, 11)
    ):
        step = BatchSizes(size, before, accumulation, accumulation * per_step, group)
        if step.errors():
            continue
        if step.completions_per_generation < now:
            with pytest.raises(ValueError, match=f"fewer than the {now} processes"):
                step.for_processes(now)
            continue
        other = step.for_processes(now)
        assert other.errors() == []
        assert other.completions_per_update == step.completions_per_update
        assert other.completions_per_generation == step.completions_per_generation
        assert other.updates_per_generation == step.updates_per_generation
        # what TRL demands of its own sizes
        assert other.completions_per_slot * other.steps_per_generation % group == 0


def test_several_generation_batches_per_optimizer_step_are_kept_on_more_processes():
    step = BatchSizes(8, 2, gradient_accumulation_steps=4, steps_per_generation=2, num_generations=4)
    other = step.for_processes(8)
    assert sizes(other) == (4, 2, 1)
    assert other.generations_per_update == step.generations_per_update == 2


def test_shares_differ_by_one_and_rows_that_fill_up_are_removed():
    shares = UnevenShares(num_completions=8, num_processes=3, rows_per_process=4)
    assert [shares.size(process) for process in range(3)] == [3, 3, 2]
    assert [shares.first(process) for process in range(3)] == [0, 3, 6]
    filled = shares.fill([10, 11, 12, 13, 14, 15, 16, 17])
    assert filled == [10, 11, 12, 10, 13, 14, 15, 10, 16, 17, 10, 10]
    rows = [shares.rows_of(process, filled[4 * process : 4 * process + 4]) for process in range(3)]
    assert sum(rows, []) == [10, 11, 12, 13, 14, 15, 16, 17]


def test_the_sampler_repeats_whole_generation_batches():
    shares = UnevenShares(num_completions=4, num_processes=3, rows_per_process=2)
    sampler = UnevenSampler(
        shares, data_source=range(5), mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=False
    )
    assert [*sampler] == [0, 0, 1, 0, 1, 0] * 2 + [2, 2, 3, 2, 3, 2] * 2
    assert len(sampler) == 24


def test_errors_of_unequal_shares():
    wrong_groups = BatchSizes(2, 3, 2, 2, num_generations=4, completions_per_step=6)
    assert "whole groups of num_generations=4" in wrong_groups.errors()[0]
    no_room = BatchSizes(1, 3, 2, 2, num_generations=4, completions_per_step=8)
    assert "1 to 2" in no_room.errors()[0]

"""Schedules: every rollout once, within bounds, equal counts, little padding, balanced."""

import random

import pytest
from support.seeds import shifted

from benchmarks.recorded import Size, recorded_rollouts, shape_of
from pacs_trl.update.microbatching import (
    MicroBatchConfig,
    RolloutLengths,
    micro_batch_size,
    schedule_cost,
    schedule_micro_batches,
)


def lengths_of(prompts, completions, texts=None, pair_cost=0.0):
    return RolloutLengths(prompts, completions, texts or range(len(prompts)), pair_cost)


def lognormal_lengths(num_completions, seed=0, num_generations=1):
    """With `num_generations` completions of each prompt."""
    generator = random.Random(shifted(seed))
    completions = [min(768, max(1, round(generator.lognormvariate(5.3, 0.6)))) for _ in range(num_completions)]
    prompts = [generator.randint(5, 40) for _ in range(num_completions)]
    texts = [i // num_generations for i in range(num_completions)]
    return RolloutLengths([prompts[text] for text in texts], completions, texts, 1e-3 * (num_generations > 1))


def scheduled(lengths, units, **limits):
    return schedule_micro_batches(lengths, units, MicroBatchConfig(**limits))


def units(rows, size=1):
    rows = list(rows)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def tokens(indices, lengths, padded=False):
    return micro_batch_size(indices, lengths, padded=padded).tokens


def test_sizes_of_micro_batches_equal_those_worked_by_hand():
    lengths = lengths_of([2, 3], [5, 1])
    assert tokens([0, 1], lengths, padded=True) == 2 * (2 + 5)  # not 2 * (3 + 5): behind the completions
    assert tokens([0, 1], lengths) == 2 + 5 + 3 + 1
    # two processes in lockstep: max(7, 4) + max(0, 4)
    assert schedule_cost([[[0], []], [[1], [1]]], lengths, padded=False) == 7 + 4
    # Rollouts 0 and 1 share a prompt. A tenth of a token for each token that a token sees, itself counted half.
    shared = lengths_of([10] * 3, [4, 2, 4], [0, 0, 1], pair_cost=0.1)
    # 10 + 4 + 2 tokens; pairs: 10 * 10 / 2, 4 * (10 + 2) and 2 * (10 + 1)
    assert micro_batch_size([0, 1], shared, padded=False) == (16, pytest.approx(16 + 0.1 * (50 + 48 + 22)))
    assert micro_batch_size([0, 2], shared, padded=False) == (28, pytest.approx(28 + 0.1 * 2 * (50 + 48)))
    assert micro_batch_size([0, 1], shared, padded=True) == (28, pytest.approx(28 + 0.1 * 2 * 14 * 14 / 2))
    assert micro_batch_size([], shared, padded=False) == micro_batch_size([], shared, padded=True) == (0, 0)


def test_padded_and_packed_schedules_equal_those_worked_by_hand():
    lengths = lengths_of([1] * 4, [9, 1, 8, 2])
    schedule = scheduled(lengths, units(range(4)), num_processes=1, max_rollouts=2, padded=True)
    assert schedule == [[[0, 2], [3, 1]]]  # long with long, short with short: 2*10 + 2*3 tokens instead of 2*10 + 2*9
    assert schedule_cost(schedule, lengths, padded=True) == 26
    schedule = scheduled(lengths, units(range(4)), num_processes=2, max_rollouts=2)
    assert [sorted(batch) for (batch,) in schedule] == [[0, 1], [2, 3]]  # 12 tokens on each process


def test_long_rollouts_are_expensive():
    """Where pairs count, 24 + 24 * 24 / 2 is more than two of 12 + 12 * 12 / 2 and three of 8 + 8 * 8 / 2: 312 and
    288."""
    completions = [24, 12, 12, 8, 8, 8]
    even, with_pairs = (
        scheduled(lengths_of([0] * 6, completions, None, pair_cost), units(range(6)), num_processes=2, max_rollouts=6)
        for pair_cost in (0.0, 1.0)
    )
    assert sorted(sum(completions[i] for i in batch) for (batch,) in even) == [32, 40]
    assert sorted(len(batch) for (batch,) in with_pairs) == [1, 5]


def test_rollouts_of_one_prompt_stay_together_where_that_is_cheaper():
    """Two prompts of 100 tokens with four rollouts each, on two processes: 100 + 100 tokens, or 200 + 100 if
    scattered."""

    def on_two(prompt, completions, texts):
        lengths = lengths_of([prompt] * len(texts), completions, texts)
        schedule = scheduled(lengths, units(range(len(texts))), num_processes=2, max_rollouts=4)
        return sorted(sorted(batch) for (batch,) in schedule)

    assert on_two(100, [40, 10, 20, 30] * 2, [0] * 4 + [1] * 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # One prompt of 2 tokens whose rollouts are four times as long: the balance is worth more than a token or two.
    completions = [40] * 4 + [10] * 4
    short = on_two(2, completions, [0] * 4 + [1] * 4)
    assert [sum(completions[i] for i in batch) for batch in short] == [100, 100]
    # In halves, dealt forth and back: 40 + 10 and 30 + 20 of each prompt
    assert on_two(100, [40, 30, 20, 10], [0] * 4) == [[0, 3], [1, 2]]


def mixed_units(rows):
    """Units of 1 to 9 rollouts."""
    generator, rest, mixed = random.Random(shifted(2)), list(rows), []
    while rest:
        size = generator.randint(1, 9)
        mixed.append(rest[:size])
        rest = rest[size:]
    return mixed


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [dict(max_rollouts=9), dict(max_rollouts=1, max_tokens=8000)])
@pytest.mark.parametrize("cut", [units, lambda rows: units(rows, 2), mixed_units])
@pytest.mark.parametrize("num_completions", [0, 2, 38, 64])
@pytest.mark.parametrize("num_generations", [1, 8])
def test_every_rollout_once_within_bounds_and_in_lockstep(
    padded, num_processes, limit, cut, num_completions, num_generations
):
    lengths = lognormal_lengths(64, num_generations=num_generations)
    groups = cut(random.Random(shifted(1)).sample(range(64), num_completions))
    schedule = scheduled(lengths, groups, num_processes=num_processes, padded=padded, **limit)
    assert len(schedule) == num_processes and len({len(batches) for batches in schedule}) == 1
    batches = [batch for process_batches in schedule for batch in process_batches]
    assert sorted(sum(batches, [])) == sorted(sum(groups, []))
    for batch in batches:
        if "max_tokens" in limit:
            assert tokens(batch, lengths, padded) <= limit["max_tokens"]
        else:
            assert len(batch) <= limit["max_rollouts"]
    home = {row: i for i, batch in enumerate(batches) for row in batch}
    assert all(len({home[row] for row in group}) == 1 for group in groups)


def test_a_small_unit_finds_the_place_that_a_large_one_left():
    """Three rollouts and then one, of two micro-batches with four places each: 3 + 1 and 3 + 1, no third."""
    lengths = lengths_of([0] * 8, [9, 9, 9, 8, 8, 8, 1, 1])
    schedule = scheduled(lengths, [[0, 1, 2], [3, 4, 5], [6], [7]], num_processes=1, max_rollouts=4)
    assert sorted(sorted(batch) for batch in schedule[0]) == [[0, 1, 2, 7], [3, 4, 5, 6]]


@pytest.mark.parametrize("limit", [dict(max_rollouts=3), dict(max_rollouts=8, max_tokens=100)])
def test_groups_that_do_not_fit_give_no_schedule(limit):
    assert scheduled(lengths_of([10] * 8, [40] * 8), units(range(8), 4), num_processes=1, **limit) is None


def test_micro_batches_are_balanced_and_have_little_padding():
    lengths = lognormal_lengths(256)
    schedule = scheduled(lengths, units(range(256)), num_processes=8, max_rollouts=8)
    sizes = [[tokens(batch, lengths) for batch in batches] for batches in schedule]
    assert max(map(max, sizes)) / (sum(map(sum, sizes)) / sum(map(len, sizes))) < 1.05
    totals = [sum(process_sizes) for process_sizes in sizes]
    assert max(totals) / min(totals) < 1.01
    padded = scheduled(lengths, units(range(256)), num_processes=1, max_rollouts=8, padded=True)
    assert schedule_cost(padded, lengths, padded=True) < 1.15 * sum(totals)
    assert schedule_cost([units(range(256), 8)], lengths, padded=True) > 1.7 * sum(totals)


@pytest.mark.parametrize("max_tokens", [None, 1, 4])  # times the longest rollout
@pytest.mark.parametrize("completion_max", [4096, 8192])
@pytest.mark.parametrize("num_processes", [8, 64])
def test_processes_have_equal_work(num_processes, completion_max, max_tokens):
    """32 completions per process, log-normal in length: in lockstep, attention counted, all wait at most 5 % longer
    than for their mean work or the longest completion."""
    size = Size(shape_of("Qwen3-1.7B"), completion_max, 8, num_processes * 4, bf16=True)
    rows = recorded_rollouts(size, size.num_groups, seed=shifted(0))
    prompts, completions = ([len(row[name]) for row in rows] for name in ("prompt_ids", "completion_ids"))
    lengths = RolloutLengths(prompts, completions, [i // 8 for i in range(len(rows))], 1 / (6 * size.shape.hidden))
    limits = MicroBatchConfig(num_processes, 8, max_tokens and max_tokens * (completion_max + 48))
    schedule = schedule_micro_batches(lengths, [[i] for i in range(len(rows))], limits)
    assert schedule is not None
    work = [micro_batch_size(indices, lengths, padded=False).cost for indices in lengths.by_prompt(range(len(rows)))]
    longest = max(micro_batch_size([i], lengths, padded=False).cost for i in range(len(rows)))
    assert schedule_cost(schedule, lengths, padded=False) < 1.05 * max(sum(work) / num_processes, longest)


def test_large_schedule_is_quick_enough_to_run_every_step():
    lengths = lognormal_lengths(8192, num_generations=16)
    schedule = scheduled(lengths, units(range(8192)), num_processes=64, max_rollouts=1, max_tokens=16384)
    assert sorted(row for batches in schedule for batch in batches for row in batch) == list(range(8192))

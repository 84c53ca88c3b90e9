"""Simulated schedules: cases to redo on paper, and properties."""

import itertools
import random

import pytest
from support.seeds import shifted

from pacs_trl.plan import cost
from pacs_trl.plan.schedules import (
    Engine,
    Group,
    Trainer,
    continuous,
    default_slots,
    engine_on,
    generate,
    in_turn,
    one_late,
    typical_groups,
)


TWO_SLOTS = Engine(slots=2, launch_seconds=1.0)
SHORT_AND_LONG = [Group(0, [1]), Group(0, [3])]


def test_seconds_of_generation_equal_those_worked_by_hand():
    """Of lengths 1, 3, 1, 3 the second short one follows the first, and the second long one follows that: 5 steps."""
    assert generate(SHORT_AND_LONG, TWO_SLOTS) == (3.0, pytest.approx(4 / 3))
    assert generate([Group(0, [1, 3])] * 2, TWO_SLOTS) == (5.0, pytest.approx(8 / 5))


def test_cache_is_read_computed_and_limited_as_worked_by_hand():
    """After a prompt of 10 tokens three steps read 10, 11, and 12; the prompt is computed once for both completions.
    If only one of the completions fits into the cache, the other one waits."""
    reading = Engine(slots=2, launch_seconds=0.0, cache_seconds=1.0)
    assert generate([Group(10, [3])], reading)[0] == 33
    assert generate([Group(10, [3, 1])], reading)[0] == 33 + 10
    assert generate([Group(10, [3, 1])], TWO_SLOTS._replace(cache_tokens=20))[0] == 4
    assert generate([Group(10, [3, 1])], TWO_SLOTS._replace(cache_tokens=24))[0] == 3
    computing = TWO_SLOTS._replace(compute_seconds=0.1)
    assert generate([Group(10, [3, 3])], computing)[0] == pytest.approx(10 * 0.1 + 3 * (1 + 2 * 0.1))
    hidden = computing._replace(weight_seconds=0.5)
    assert generate([Group(10, [3, 3])], hidden)[0] == pytest.approx(10 * 0.1 + 3 * (1 + 0.5))


def test_seconds_of_schedules_equal_those_worked_by_hand():
    """A generation of both takes 3 s alternately with 1 s of training. With full slots it takes 2 s."""
    trainer = Trainer(groups=2, update_seconds=1.0)

    def groups():
        return itertools.cycle(SHORT_AND_LONG)

    assert in_turn(groups(), TWO_SLOTS, trainer, 10).seconds == 4
    assert one_late(groups(), TWO_SLOTS, trainer, 10).seconds == 3
    schedule = continuous(groups(), TWO_SLOTS, trainer, 40, max_staleness=2)
    assert schedule.seconds == 2 and schedule.dropped == 0 and schedule.decoding == pytest.approx(2, rel=0.05)
    sending = trainer._replace(transfer_seconds=0.5)
    assert in_turn(groups(), TWO_SLOTS, sending, 10).seconds == 4.5
    assert one_late(groups(), TWO_SLOTS, sending, 10).seconds == 3.5
    # training takes longer than generation: the trainer never waits
    slow = trainer._replace(update_seconds=5.0)
    assert continuous(groups(), TWO_SLOTS, slow, 40, max_staleness=2).seconds == 5
    assert one_late(groups(), TWO_SLOTS, slow, 10).seconds == 5


def test_replaced_weights_cost_what_is_worked_by_hand():
    """One slot, completions of four tokens, and a step of 2 s on each: completions end at 4, 8, 12, ... Without
    recomputation steps end at 6, 10, ... At these moments two tokens of the next completion are there, after a prompt
    of 3, so computing them again with 0.1 s each takes 0.5 s; and each prompt takes 0.3 s."""
    engine, trainer = Engine(slots=1, launch_seconds=1.0), Trainer(groups=1, update_seconds=2.0)
    groups = itertools.repeat(Group(3, [4]))
    assert continuous(groups, engine, trainer, 1, max_staleness=2).total_seconds == 6
    assert continuous(groups, engine, trainer, 3, max_staleness=2).total_seconds == 14
    computing = engine._replace(compute_seconds=0.1, weight_seconds=0.1)
    schedule = continuous(groups, computing, trainer, 20, max_staleness=2)
    assert schedule.seconds == pytest.approx(4 * 1.1 + 0.3 + 0.5)


def test_training_goes_on_while_keys_and_values_are_computed_again():
    """Beside one long completion finished groups wait. After 5 s it has about 250 tokens, whose keys and values take
    2.5 s; the next optimizer step begins at once."""
    engine = Engine(slots=2, launch_seconds=0.01, compute_seconds=0.01)
    groups = itertools.chain([Group(0, [10_000])], itertools.repeat(Group(0, [1])))
    schedule = continuous(groups, engine, Trainer(groups=1, update_seconds=5.0), 3, max_staleness=3)
    assert schedule.seconds == pytest.approx(5, abs=0.1)


def test_stale_groups_are_dropped_by_hand():
    """Beside a completion of 100 tokens others of one token are trained, one in a second: it ends 100 steps late."""
    trainer = Trainer(groups=1, update_seconds=1.0)
    for max_staleness, dropped in ((1, 1), (4, 1), (101, 0)):
        groups = itertools.chain([Group(0, [100])], itertools.repeat(Group(0, [1])))
        schedule = continuous(groups, TWO_SLOTS, trainer, 150, max_staleness)
        assert schedule.dropped == pytest.approx(dropped / (dropped + 150))


def random_groups(seed: int) -> list[Group]:
    generator = random.Random(seed)
    return [Group(5, [round(generator.lognormvariate(3, 1)) + 1 for _ in range(4)]) for _ in range(8)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("update_seconds", [0.5, 50.0, 500.0])
def test_continuous_generation_is_never_slower_than_in_turn_and_not_faster_than_either_side(seed, update_seconds):
    """On the same GPUs, if nothing is dropped. Full slots need the tokens of all groups over the slots."""
    groups = random_groups(shifted(seed))
    engine = Engine(slots=6, launch_seconds=1.0)
    trainer = Trainer(groups=2, update_seconds=update_seconds, transfer_seconds=1.0)
    alternating = in_turn(itertools.cycle(groups), engine, trainer, 40)
    late = one_late(itertools.cycle(groups), engine, trainer, 40)
    schedule = continuous(itertools.cycle(groups), engine, trainer, 40, max_staleness=40)
    assert schedule.dropped == 0
    assert schedule.total_seconds <= late.total_seconds + update_seconds <= alternating.total_seconds + update_seconds
    assert schedule.total_seconds <= alternating.total_seconds
    assert schedule.total_seconds >= 40 * (update_seconds + 1)
    assert schedule.decoding <= 6
    full = sum(sum(group.completions) for group in groups) / len(groups) * trainer.groups / engine.slots
    limits = sorted([full + 1, update_seconds + 1])
    assert schedule.seconds <= 1.15 * limits[1] if limits[1] > 2 * limits[0] else schedule.seconds <= sum(limits)


def test_typical_lengths_have_their_mean_and_squares():
    groups = typical_groups(256, 0.35 * 8192, 8192, 8, seed=shifted(0))
    lengths = [length for group in itertools.islice(groups, 4000) for length in group.completions]
    mean, squared = sum(lengths) / len(lengths), sum(length**2 for length in lengths) / len(lengths)
    assert mean == pytest.approx(0.35 * 8192, rel=0.03) and max(lengths) == 8192 and min(lengths) >= 1
    assert squared == pytest.approx(cost.mean_square_length(0.35 * 8192, 8192), rel=0.05)


def test_an_engine_reads_what_the_cost_model_reads():
    """Completions of equal length, which need no schedule; the cost model has no time for kernels and products."""
    shape = cost.KNOWN_MODELS["Qwen/Qwen3-4B"]
    engine = engine_on(shape, cost.H200)._replace(launch_seconds=0.0, compute_seconds=0.0)
    gpu = cost.H200._replace(bandwidth_share=0.83)
    room = engine.cache_tokens * shape.kv_bytes_per_token
    memory = {"weight_bytes": 2 * shape.parameters, "kv_cache_bytes": room}
    expected = cost.decoding_seconds(shape, 64, 256, 1024, 1024, **memory, gpu=gpu)
    assert generate([Group(256, [1024] * 8)] * 8, engine)[0] == pytest.approx(expected, rel=1e-3)
    assert default_slots(cost.H200) == 1024 and default_slots(cost.GPUS["l40s"]) == 256


def test_two_engines_have_twice_the_slots_and_one_on_two_gpus_half_the_time():
    """Two engines have twice the slots and memory; one engine on two GPUs reads its weights twice as fast."""
    shape = cost.KNOWN_MODELS["Qwen/Qwen3-4B"]
    one, two, split = (engine_on(shape, cost.H200, engines=e, num_gpus=g) for e, g in ((1, 1), (2, 1), (1, 2)))
    assert (two.slots, two.weight_seconds) == (2 * one.slots, one.weight_seconds)
    assert (split.slots, split.weight_seconds) == (one.slots, one.weight_seconds / 2)
    for engine in (two, split):
        assert engine.cache_seconds == one.cache_seconds / 2 and engine.compute_seconds == one.compute_seconds / 2
    assert two.cache_tokens == 2 * one.cache_tokens < split.cache_tokens  # whose weights are there once

"""Seconds of the parts of a step: with a clock that is moved by hand, and in a real run."""

import pytest
from replay import Replay, build_trainer

from pacs_trl.rollouts.timing import PARTS, StepTimer


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def seconds():
    """What the timer has recorded last."""
    return {}


@pytest.fixture
def timer(clock, seconds):
    return StepTimer(clock, record=lambda name, value: seconds.update({name.removeprefix("time/"): value}), show=print)


def test_inner_part_is_not_counted_twice(timer, clock, seconds):
    """10 s of generation with 3 s of weight sync inside, 2 s of nothing, 5 s of update: 7 + 3 + 2 + 5 = 17."""
    timer.on_step_begin()
    with timer.part("generation"):
        clock.pass_(4)
        with timer.part("weight_sync"):
            clock.pass_(3)
        clock.pass_(3)
    clock.pass_(2)
    with timer.part("update"):
        clock.pass_(5)
    timer.on_step_end()
    expected = {"generation": 7.0, "weight_sync": 3.0, "update": 5.0, "other": 2.0, "total": 17.0}
    assert seconds == dict.fromkeys(PARTS, 0.0) | expected


def test_a_new_run_starts_with_an_empty_table(timer, clock, seconds):
    """Also after one that was interrupted inside a part."""
    timer.on_step_begin()
    timer.on_pre_optimizer_step()
    clock.pass_(1)
    timer.on_train_begin()
    timer.on_step_begin()
    clock.pass_(2)
    timer.on_step_end()
    assert seconds["other"] == timer.totals["total"] == 2.0 and timer.num_steps == 1


def test_work_between_steps_is_not_charged(timer, clock, seconds):
    """An evaluation generates too, but between the end of one step and the start of the next."""
    timer.on_step_begin()
    clock.pass_(1)
    timer.on_step_end()
    with timer.part("generation"):
        clock.pass_(100)
    timer.on_step_begin()
    with pytest.raises(KeyError), timer.part("generation"):  # closed by an error, too
        clock.pass_(2)
        raise KeyError
    timer.on_step_end()
    assert seconds["generation"] == 2.0 and timer.totals["total"] == 3.0
    lines = timer.table().splitlines()
    assert lines[0].startswith("Where the time of 2 optimizer steps went")
    rows = {words[0]: words[1:4] for line in lines[2:] if (words := line.split())}
    assert list(rows) == [*PARTS, "total"]
    assert rows["generation"] == ["2.00", "1.000", "66.7%"] and rows["other"] == ["1.00", "0.500", "33.3%"]


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_trainer_logs_the_parts_of_every_step(tmp_path, capsys, steps_per_generation):
    trainer = build_trainer(
        tmp_path, replay=Replay(), steps_per_generation=steps_per_generation, max_steps=3, group_layout="split"
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        parts = [entry[f"time/{name}"] for name in PARTS]
        assert min(parts) >= 0.0 and sum(parts) == pytest.approx(entry["time/total"])
        assert entry["time/update"] > 0.0 and entry["time/optimizer"] > 0.0
        assert entry["time/weight_sync"] == 0.0
    generated = [entry["time/generation"] > 0.0 and entry["time/verification"] > 0.0 for entry in steps]
    assert generated == ([True, True, True] if steps_per_generation == 1 else [True, False, True])
    assert (steps[0]["time/log_probs"] > 0.0) == (steps_per_generation == 2)
    assert "Where the time of 3 optimizer steps went" in capsys.readouterr().out

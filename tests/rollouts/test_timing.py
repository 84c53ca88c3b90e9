"""Where the time of a step goes: with a clock that is moved by hand, and in a real run."""

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
def timer(clock):
    return StepTimer(clock)


def test_inner_part_is_not_counted_twice(timer, clock):
    """10 s of generation with 3 s of weight sync inside, 2 s of nothing, 5 s of update: 7 + 3 + 2 + 5 = 17."""
    timer.begin_step()
    with timer.part("generation"):
        clock.pass_(4)
        with timer.part("weight_sync"):
            clock.pass_(3)
        clock.pass_(3)
    clock.pass_(2)
    with timer.part("update"):
        clock.pass_(5)
    seconds = timer.end_step()
    assert {name: value for name, value in seconds.items() if value} == {
        "generation": 7.0,
        "weight_sync": 3.0,
        "update": 5.0,
        "other": 2.0,
        "total": 17.0,
    }


def test_a_new_run_begins_with_an_empty_table(timer, clock):
    """Also after one that was interrupted inside a part."""
    timer.begin_step()
    timer.part("optimizer").__enter__()
    clock.pass_(1)
    timer.reset()
    timer.begin_step()
    clock.pass_(2)
    assert timer.end_step()["other"] == 2.0 and timer.num_steps == 1 and timer.totals["total"] == 2.0


def test_work_between_steps_is_not_charged(timer, clock):
    """An evaluation generates too, but between the end of one step and the begin of the next."""
    timer.begin_step()
    clock.pass_(1)
    timer.end_step()
    with timer.part("generation"):
        clock.pass_(100)
    timer.begin_step()
    with timer.part("generation"):
        clock.pass_(2)
    assert timer.end_step()["generation"] == 2.0
    assert timer.totals["total"] == 3.0 and timer.num_steps == 2


def test_part_that_fails_is_closed(timer, clock):
    timer.begin_step()
    with pytest.raises(KeyError), timer.part("verification"):
        clock.pass_(2)
        raise KeyError
    clock.pass_(1)
    seconds = timer.end_step()
    assert seconds["verification"] == 2.0 and seconds["other"] == 1.0


def test_table(timer, clock):
    for _ in range(2):
        timer.begin_step()
        with timer.part("generation"):
            clock.pass_(3)
        clock.pass_(1)
        timer.end_step()
    lines = timer.table().splitlines()
    assert lines[0].startswith("Where the time of 2 optimizer steps went")
    rows = {words[0]: words[1:4] for line in lines[2:] if (words := line.split())}
    assert list(rows) == [*PARTS, "total"]
    assert rows["generation"] == ["6.00", "3.000", "75.0%"] and rows["other"] == ["2.00", "1.000", "25.0%"]


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

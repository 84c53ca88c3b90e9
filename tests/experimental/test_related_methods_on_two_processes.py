"""Two processes that train related methods learn what one does: DDP, FSDP2, and ZeRO-3 over gloo."""

import pytest
import torch
from support.models import RELATIVE, relative_error
from support.two_processes import assert_steps_of_one_process, both, launch_fixture, numbers_of
from two_process_scenarios import REPLAYED, SCENARIOS, improbable, probabilities, weighted


pytestmark = [pytest.mark.distributed, pytest.mark.trains, pytest.mark.slow]  # core methods: tests/distributed
TWO_KINDS = ["ddp", "fsdp2"]
ALL_KINDS = [*TWO_KINDS, "zero3"]


ddp = launch_fixture("ddp", SCENARIOS["ddp"])
fsdp2 = launch_fixture("fsdp2", SCENARIOS["fsdp2"])
zero3 = launch_fixture("zero3", SCENARIOS["zero3"])


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_two_processes_equal_one(request, tmp_path, kind, name):
    results = both(request.getfixturevalue(kind), name)
    assert all(result["sharded"] == (kind == "fsdp2") for result in results)
    assert_steps_of_one_process(tmp_path, results, *REPLAYED[name])


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_probabilities_of_reference_answers_are_those_of_one_process(tmp_path, request, kind):
    """Of 32 problems each process scores half; the first step's labels are those of one process."""
    first, second = both(request.getfixturevalue(kind), "probabilities")
    one = probabilities(0, tmp_path, per_device_train_batch_size=8)
    assert first["without"] == second["without"] and first["logs"] == second["logs"]
    assert first["without"] == pytest.approx(one["without"], rel=1e-4) and len(one["without"]) == 32
    assert first["logs"][0] == pytest.approx(one["logs"][0], rel=1e-4)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_token_weights_bonus_and_correction_are_those_of_one_process(tmp_path, request, kind):
    """Extremes and statistics are of all completions."""
    first, second = both(request.getfixturevalue(kind), "weighted")
    one = weighted(0, tmp_path, per_device_train_batch_size=8)
    prefixes = ("sampling/", "steer/", "hidden/", "loss", "grad_norm")
    logs = [numbers_of(run, *prefixes) for run in (first, second, one)]
    for mine, other, expected in zip(*logs, strict=True):
        assert mine == other and mine == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert [len(log) for log in logs[0]] == [12, 7, 12, 7] and logs[0][-1]["hidden/bonus"] > 0.01
    assert relative_error(first["final"], one["final"]) < RELATIVE


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weights_of_a_group_on_both_processes_are_those_of_one(tmp_path, request, kind):
    first, second = both(request.getfixturevalue(kind), "improbable")
    one = improbable(0, tmp_path, per_device_train_batch_size=8)
    norms = [[log["grad_norm"] for log in run["logs"]] for run in (first, second, one)]
    assert norms[0] == norms[1] and norms[0] == pytest.approx(norms[2], rel=1e-4)
    assert relative_error(first["final"], one["final"]) < RELATIVE


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_hard_prompts_of_one_process_are_drawn_by_both(request, kind):
    first, second = both(request.getfixturevalue(kind), "drawn where needed")
    assert first["again"] == second["again"] == {1: True, 2: True}
    assert all(torch.equal(first["final"][n], second["final"][n]) for n in first["final"])
    assert [e["loss"] for e in first["history"]] == [e["loss"] for e in second["history"]]
    assert [len(rows) for _, rows in first["drawn"]] == [len(rows) for _, rows in second["drawn"]]
    # in the first generation groups 2 and 3 are hard, whose prompts the second process has
    for result in (first, second):
        assert {group for step, rows in result["drawn"] if step == 0 for group in rows} & {2, 3}
    additional = [e["adaptive/additional"] for e in first["history"] if "adaptive/additional" in e]
    assert len(additional) == 2 and 0 < max(additional) <= 22
    assert sum(e.get("guidance/attempted", 0) for e in first["history"]) > 0

"""The comparison of two commits fails on any difference that no table explains."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import equality, equality_scenarios
from pacs_trl.methods import method_names
from pacs_trl.recipe import config_class
from pacs_trl.settings.help import choices_of, declared_settings


METRICS = {"policy|1|loss": 0.5, "policy|1|reward": float("nan"), "policy|1|time/update": 1.0}


@pytest.fixture
def sides(tmp_path):
    """Folders of two equal sides, and of the inputs."""
    before, after, inputs = (tmp_path / name for name in ("before", "after", "inputs"))
    for side in (before, after):
        write_weights(side / "weights/policy/model.safetensors", torch.ones(3))
        write(side / "files/grades.jsonl", "1\n")
        write(side / "metrics.json", json.dumps(METRICS))
    write_weights(inputs / "policy/model.safetensors", torch.zeros(3))
    return before, after, inputs


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_weights(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": values}, str(file))


def log(side, **changes):
    """Change logged numbers of step 1; `None` removes one."""
    numbers = METRICS | {f"policy|1|{name}": value for name, value in changes.items()}
    write(side / "metrics.json", json.dumps({key: value for key, value in numbers.items() if value is not None}))


def test_inputs_are_written_when_the_module_is_not_run_as_a_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    equality.make_inputs(tmp_path)
    names = {"policy", "calling", "critic", "problems.jsonl", "benchmark.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_equal_sides_pass(sides):
    result = equality.compare(*sides)
    assert not result.failed
    assert result.compared == 5


def test_other_seconds_pass(sides):
    log(sides[1], **{"time/update": 2.0})
    assert not equality.compare(*sides).failed


def test_another_bit_of_a_weight_fails(sides):
    file = sides[1] / "weights/policy/model.safetensors"
    values = load_file(file)["weight"]
    values[1] = torch.nextafter(values[1], torch.tensor(2.0))
    write_weights(file, values)
    result = equality.compare(*sides)
    assert result.failed and not result.bit_equal
    assert 0 < result.largest < 1e-6


def test_negative_zero_is_another_bit(sides):
    for side, zero in zip(sides, (0.0, -0.0), strict=False):
        write_weights(side / "weights/policy/model.safetensors", torch.tensor([1.0, zero, 1.0]))
    assert not equality.compare(*sides).bit_equal


def test_another_tensor_fails(sides):
    write_weights(sides[1] / "weights/policy/model.safetensors", torch.ones(4))
    assert equality.compare(*sides).problems == ["policy/model.safetensors has other tensors"]


def test_weights_that_did_not_change_fail(sides):
    for side in sides:
        write_weights(side / "policy/model.safetensors", torch.zeros(3))
        write_weights(side / "weights/policy/model.safetensors", torch.zeros(3))
    assert "nothing was learned" in equality.compare(*sides).problems[0]


@pytest.mark.parametrize("file", ["weights/policy/model.safetensors", "files/grades.jsonl", "metrics.json"])
@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_a_file_on_one_side_only_fails(sides, side, file):
    (sides[side] / file).unlink()
    result = equality.compare(*sides)
    assert result.failed
    assert "missing" in result.problems[0] and file.rpartition("/")[2] in result.problems[0]


def test_a_file_with_other_bytes_fails(sides):
    write(sides[1] / "files/grades.jsonl", "0\n")
    assert equality.compare(*sides).problems == ["grades.jsonl differs"]


def test_an_empty_scenario_fails(tmp_path):
    assert equality.compare(tmp_path, tmp_path, tmp_path).problems == ["nothing was compared"]


def test_an_error_fails(sides):
    for side in sides[:2]:
        write(side / "error.txt", "Traceback\nValueError: no model\n")
    assert equality.compare(*sides).problems == ["before: ValueError: no model", "after: ValueError: no model"]


def test_another_number_fails(sides):
    log(sides[1], loss=0.5000000000000001)
    result = equality.compare(*sides)
    assert result.failed and result.metrics == ["policy|1|loss"]


@pytest.mark.parametrize("name", ["loss", "time/update"])
def test_a_number_that_is_no_longer_logged_fails(sides, name):
    log(sides[1], **{name: None})
    assert equality.compare(*sides).problems == [f"policy|1|{name} is missing after"]


def test_a_new_number_fails(sides):
    log(sides[1], entropy=1.0)
    assert equality.compare(*sides).problems == ["policy|1|entropy is missing before"]


def test_a_new_number_in_the_table_passes(sides, monkeypatch):
    monkeypatch.setattr(equality, "ADDED", {"entropy"})
    log(sides[1], entropy=1.0)
    assert not equality.compare(*sides).failed


def test_a_renamed_number_fails_without_the_table(sides):
    log(sides[1], loss=None, objective=0.5)
    assert len(equality.compare(*sides).problems) == 2


@pytest.mark.parametrize("alias", [None, 0.5], ids=["without alias", "with alias"])
def test_a_renamed_number_in_the_table_passes(sides, monkeypatch, alias):
    monkeypatch.setattr(equality, "RENAMED", {"loss": "objective"})
    log(sides[1], loss=alias, objective=0.5)
    assert not equality.compare(*sides).failed


@pytest.mark.parametrize(("alias", "renamed"), [(None, 0.25), (0.5, 0.25), (0.25, 0.5)])
def test_a_renamed_number_with_another_value_fails(sides, monkeypatch, alias, renamed):
    monkeypatch.setattr(equality, "RENAMED", {"loss": "objective"})
    log(sides[1], loss=alias, objective=renamed)
    assert len(equality.compare(*sides).metrics) == 1


def test_a_new_name_that_the_old_side_does_not_explain_fails(sides, monkeypatch):
    monkeypatch.setattr(equality, "RENAMED", {"entropy": "objective"})
    log(sides[1], objective=0.5)
    assert equality.compare(*sides).problems == ["policy|1|objective is missing before"]


def test_scenarios_import_only_what_the_package_exports():
    source = Path(equality_scenarios.__file__).read_text()
    assert re.findall(r"^\s*(?:import|from) (pacs_trl\S*)", source, re.MULTILINE) == ["pacs_trl"]
    folder = Path(equality_scenarios.__file__).parent
    assert "pacs_trl" not in (folder / "equality_inputs.py").read_text()
    assert "pacs_trl" not in (folder / "miniature/tokenizer.py").read_text()  # which the inputs use


def test_scenarios_cover_every_method():
    added = {"ucpo"}  # the commit before does not have it
    methods = {recipe.get("method", "pacs") for recipe in equality_scenarios.RECIPES.values()}
    assert methods == set(method_names()) - added


def test_scenarios_cover_every_choice():
    recipes = equality_scenarios.RECIPES.values()
    covered = {(key, value) for recipe in recipes for key, value in recipe.items() if isinstance(value, str | int)}
    choices = {
        (each.name, choice)
        for method in method_names()
        for part, settings in declared_settings(config_class(method)).items()
        for each in settings
        for choice in choices_of(part, each)
        if choice != each.default
    }
    # The commit before does not have these settings, or has them under a former name.
    names = ("compile_layers", "gradient_checkpointing", "packing", "rollout_schedule")
    added = {(name, value) for name, value in choices if name in names}
    added |= {("scale_rewards", True), ("scale_rewards", False)}
    assert choices - covered - added == {("rollout_engine", "vllm"), ("padding_free", "auto")}

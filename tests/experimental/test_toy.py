"""The method that docs/extending.md writes down is found by its name, and trains."""

import re
from pathlib import Path

import pytest
import torch
from support.models import relative_error
from support.rollouts import Replay
from support.runs import Recorder, build_trainer

from pacs_trl import experimental
from pacs_trl.recipe import config_class, read_recipe, trainer_of_method


PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "prefix.py").write_text(code)
    monkeypatch.setattr(experimental, "__path__", [*experimental.__path__, str(tmp_path / "modules")])
    return config_class("prefix"), trainer_of_method("prefix")


def test_a_recipe_finds_it(toy, tmp_path):
    argv = ["--num_tokens", "3", "--model_name_or_path", "m", "--dataset_name", "addition.jsonl", "--use_cpu"]
    argv += ["--output_dir", str(tmp_path)]
    recipe = read_recipe(["--method", "prefix", *argv])
    assert isinstance(recipe.training, toy[0]) and recipe.training.num_tokens == 3
    with pytest.raises(ValueError, match="num_tokens"):
        read_recipe(argv)  # not a setting of PACS


def test_a_module_with_two_trainers_is_refused(toy, tmp_path):
    module = tmp_path / "modules" / "two.py"
    module.write_text(
        "from pacs_trl import PACSConfig, PACSTrainer\n\nclass A(PACSTrainer): ...\n\nclass B(PACSTrainer): ...\n"
    )
    with pytest.raises(ValueError, match="experimental.two.*A, B"):
        trainer_of_method("two")
    with pytest.raises(ValueError, match="experimental.two.*none"):
        config_class("two")


def test_it_trains(toy, tmp_path):
    """With all tokens it is PACS, with the first ones it is not."""
    gradients = []
    for arguments in ({}, {"trainer_class": toy[1], "num_tokens": 99}, {"trainer_class": toy[1], "num_tokens": 2}):
        recorder = Recorder()
        build_trainer(tmp_path, replay=Replay(), more={"callbacks": [recorder]}, max_steps=1, **arguments).train()
        gradients.append(recorder.gradients[0])
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())
    assert relative_error(gradients[2], gradients[0]) > 0.1

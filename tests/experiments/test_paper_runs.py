"""One training run in this process: its warm start, and that it is trained once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.paper.runs import start_of, train_once


def test_a_run_is_trained_once(tmp_path, monkeypatch, capsys):
    output_dir, calls = tmp_path / "cell" / "model", []

    def main(argv, trainer_class):
        calls.append((argv, trainer_class))
        print("{'reward': 0.5}")
        if len(calls) > 1:  # the first is interrupted
            log = {"log_history": [{"step": 1, "reward": 0.5}]}
            (output_dir / "trainer_state.json").write_text(json.dumps(log))
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("pacs_trl.train.main", main)
    arguments = ["--config", "recipe.yaml"]
    with pytest.raises(KeyboardInterrupt):
        train_once(arguments, Path("start"), output_dir, dict)
    for _ in range(2):
        assert train_once(arguments, Path("start"), output_dir, dict) == [{"step": 1, "reward": 0.5}]
    whole = [*arguments, "--model_name_or_path", "start", "--output_dir", str(output_dir)]
    assert calls == [([*whole, "--resume_from_checkpoint", "last"], dict)] * 2
    assert (output_dir / "train.log").read_text() == "{'reward': 0.5}\n" * 2
    assert "reward" not in capsys.readouterr().out


def test_the_warm_start_of_a_recipe(monkeypatch):
    made = []
    monkeypatch.setattr(
        "pacs_trl.miniature.warm_start.warm_start", lambda task, **settings: made.append((task, settings))
    )
    recipe = SimpleNamespace(
        model=SimpleNamespace(model_name_or_path="miniature/terms/tiny"), training=SimpleNamespace(seed=3)
    )
    start_of(recipe)
    start_of(recipe, seed=0, max_steps=2)
    assert made == [("terms/tiny", {"seed": 3}), ("terms/tiny", {"seed": 0, "max_steps": 2})]

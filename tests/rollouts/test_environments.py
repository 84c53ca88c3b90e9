"""Environments and rollout functions of a recipe: from `module:attribute` to the gradient, and refusals."""

import shutil
from pathlib import Path

import pytest
from support.scripted import play_products, run_recipe

from pacs_trl.rewards import shared_code_verifier


ENVIRONMENT = {"recipe": "environment.yaml"}


@pytest.mark.trains
def test_a_recipe_trains_in_the_miniature_environment(tmp_path, tool_model_path, monkeypatch, confined):
    monkeypatch.chdir(Path(__file__).parents[2])
    asked = play_products(monkeypatch)
    held_out = ["--eval_split_size", "2", "--eval_strategy", "steps", "--eval_steps", "1"]
    trainer = run_recipe(tmp_path / "out", tool_model_path, *held_out, **ENVIRONMENT, max_completion_length=96)
    shared_code_verifier().close()
    groups = [turns[start : start + 4] for turns in asked for start in (0, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    calls = [entry["tools/call_frequency"] for entry in logs]
    assert calls == [entry["rewards/product_reward/mean"] for entry in logs] and 0 < sum(calls) < 2
    assert len({group[0] for group in groups}) == 6  # 4 of training, and the 2 held out in both evaluations
    assert sorted(trainer.train_dataset["seed"][:] + trainer.eval_dataset["seed"][:]) == list(range(6))
    assert "environment: experiments.products:environment" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert "trained in `experiments.products:environment`" in (tmp_path / "out" / "README.md").read_text()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a user in the working directory."""
    name = "environments_of_a_user"
    shutil.copy(Path(__file__).parents[1] / "data" / "environments.txt", tmp_path / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--environment", "nowhere:spec"],
            "environment: 'nowhere:spec' cannot be imported.*Write package.module:name",
        ),
        (["--environment", "MODULE:nothing"], "environment: .*nothing"),
        (["--environment", "MODULE:Environment"], "is no environment, but a type"),
        (["--environment", "MODULE:no_environment"], "no attribute 'reset'"),
        (
            ["--environment", "MODULE:strict"],
            r"The environment failed at `reset` with the columns prompt .TypeError: .*unexpected",
        ),
        (["--environment", "MODULE:down"], "The environment failed at `reset` .*ConnectionError: no server"),
        (["--environment", "MODULE:mute"], "The environment failed .*shout"),
        (["--environment", "MODULE:stream"], "IterableDataset"),
        (["--environment", "MODULE:endless", "--max_steps", "-1"], "Set max_steps"),
        (["--environment", "MODULE:fine", "--dataset_name", "gsm8k"], "dataset_name.* would be ignored"),
        (["--rollout_func", "MODULE:nothing"], "rollout_func: .*nothing"),
        (["--rollout_func", "MODULE:fine"], "rollout_func: .*not callable"),
    ],
)
def test_errors_before_the_model_is_loaded(tmp_path, tool_model_path, module, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "trl.trainer.grpo_trainer.create_model_from_path", lambda *args, **kwargs: pytest.fail("loaded")
    )
    arguments = [a.replace("MODULE", module) for a in arguments]
    recipe = "environment.yaml" if "--environment" in arguments else "pacs.yaml"
    with pytest.raises(ValueError, match=message) as error:
        run_recipe(tmp_path / "out", tool_model_path, *arguments, recipe=recipe)
    assert str(error.value).rstrip(".").count(". ") in (1, 2)


@pytest.mark.trains
def test_recipes_name_a_rollout_function_or_an_environment_with_rewards(tmp_path, tool_model_path, module):
    functions = ["--rollout_func", f"{module}:rollout", "--reward_funcs", f"{module}.seven"]
    trainer = run_recipe(tmp_path / "rollout", tool_model_path, *functions)
    assert [entry["reward"] for entry in trainer.state.log_history if "loss" in entry] == [1.0, 1.0]
    trainer = run_recipe(tmp_path / "own", tool_model_path, "--environment", f"{module}:fine", **ENVIRONMENT)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rewards/Environment/mean"] for entry in logs] == [1.0, 1.0]
    assert trainer.train_dataset.column_names == ["prompt"]

"""Every metric and every column of a completion table has one source."""

import re
from pathlib import Path

import pytest
from support.rollouts import digit_reward
from support.runs import build_trainer

from pacs_trl import GRPOTrainer
from pacs_trl.rollouts.logged_names import check_metric_name, distinct_names


def constant(value):
    def reward(completions, **kwargs):
        return [value] * len(completions)

    return reward


def test_reward_functions_of_one_name_have_metrics_of_their_own(tmp_path):
    rewards = [constant(0.2), constant(0.8)]
    trainer = build_trainer(tmp_path, reward=rewards, trainer_class=GRPOTrainer, max_steps=1)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["rewards/reward/mean"] == pytest.approx(0.2)
    assert logs["rewards/reward_2/mean"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_3", "a_2"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["prompt", "advantage"], ["prompt_2", "advantage_2"]),
    ],
)
def test_distinct_names(names, distinct):
    assert distinct_names(names) == distinct


REFUSED = ["reward", "loss", "completions/mean_length", "rewards/reward/mean", "rewards/reward/std", "eval_reward"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_metric_of_the_trainer_is_not_replaced(tmp_path, name):
    def reward(completions, log_metric, **kwargs):
        log_metric(name, 123.0)
        return digit_reward(completions)

    with pytest.raises(ValueError, match=re.escape(f"log_metric({name!r}")):
        build_trainer(tmp_path, reward=reward, max_steps=1).train()


@pytest.mark.parametrize("column", ["prompt", "advantage", "reward"])
def test_a_column_of_the_table_is_not_replaced(tmp_path, column):
    def reward(completions, log_extra, **kwargs):
        log_extra(column, ["x"] * len(completions))
        return digit_reward(completions)

    with pytest.raises(ValueError, match=re.escape(f"log_extra({column!r}")):
        build_trainer(tmp_path, reward=reward, max_steps=1).train()


def test_every_documented_metric_is_reserved():
    """Besides those that reward functions of the package log themselves, which others may log too."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    checked = [name for name in names if not name.startswith(("verification/", "probability/"))]
    assert len(checked) > 50
    for name in checked:
        with pytest.raises(ValueError, match=re.escape(name)):
            check_metric_name(name, [])


def test_names_beside_those_of_the_trainer_are_logged(tmp_path):
    names = ["rewards/format_rate", "rewards/other/mean", "completions/words", "tools/calls", "probability/mine"]

    def reward(completions, log_metric, **kwargs):
        for i, name in enumerate(names):
            log_metric(name, i)
        return digit_reward(completions)

    trainer = build_trainer(tmp_path, reward=reward, max_steps=1)
    trainer.train()
    assert [trainer.state.log_history[0][name] for name in names] == [0, 1, 2, 3, 4]


def test_every_metric_of_a_run_is_reserved(tmp_path):
    trainer = build_trainer(tmp_path, trainer_class=GRPOTrainer, max_steps=1)
    trainer.train()
    for name in [*trainer.state.log_history[0], *trainer.state.log_history[-1]]:
        with pytest.raises(ValueError):
            check_metric_name(name, trainer.reward_func_names)

"""Metrics of an evaluation are those of all its completions together, whatever its batches."""

import math

import pandas as pd
import pytest
import torch
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.baselines.ppo_trainer import PPOTrainer
from pacs_trl.rollouts.evaluation_metrics import EvaluationMetrics


def evaluation_of(batches, rewards=(), num_completions=None):
    """The metrics of batches of (number of completions, metrics)."""
    evaluation = EvaluationMetrics(num_completions)
    for i, (size, metrics) in enumerate(batches):
        evaluation.begin_batch(size)
        if rewards:
            evaluation.add_rewards(torch.tensor(rewards[i]))
        evaluation.end_batch({name: [value] for name, value in metrics.items()})
    return evaluation.result(["first", "second"], torch.tensor([1.0, 0.5]))


def test_means_are_weighted_by_what_they_cover():
    batches = [
        (8, {"frac_reward_zero_std": 0.5, "completions/mean_length": 10.0, "entropy": 1.0}),
        (2, {"frac_reward_zero_std": 1.0, "completions/mean_length": 20.0, "entropy": 4.0}),
    ]
    batches[0][1].update({"completions/clipped_ratio": 0.5, "completions/mean_terminated_length": 6.0})
    batches[1][1].update({"completions/clipped_ratio": 0.0, "completions/mean_terminated_length": 12.0})
    metrics = evaluation_of(batches)
    assert metrics["frac_reward_zero_std"] == pytest.approx(0.6)
    assert metrics["completions/mean_length"] == pytest.approx(12.0)
    assert metrics["entropy"] == pytest.approx((80 * 1 + 40 * 4) / 120)  # by token
    assert metrics["completions/mean_terminated_length"] == pytest.approx((4 * 6 + 2 * 12) / 6)


def test_failures_of_tools_are_weighted_by_calls():
    batches = [
        (4, {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.25}),
        (4, {"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}),
    ]
    assert evaluation_of(batches)["tools/failure_frequency"] == 0.25


def test_extremes_are_extremes_of_all_batches():
    lengths = {"completions/min_length": 3.0, "completions/max_length": 9.0}
    metrics = evaluation_of([(4, lengths), (4, {"completions/min_length": 5.0, "completions/max_length": 7.0})])
    assert metrics == lengths


def test_rewards_without_a_verdict_are_left_out():
    rewards = [[[1.0, 0.0], [0.0, math.nan]], [[math.nan, math.nan], [1.0, 1.0]]]
    metrics = evaluation_of([(2, {}), (2, {})], rewards)
    assert metrics["rewards/first/mean"] == pytest.approx(2 / 3) and metrics["rewards/second/mean"] == 0.5
    assert metrics["reward"] == pytest.approx((1.0 + 0.0 + 1.5) / 3)
    values = torch.tensor([1.0, 0.0, 1.5])
    assert metrics["reward_std"] == pytest.approx(values.std().item())
    assert evaluation_of([(1, {})], [[[math.nan, math.nan]]])["reward"] is None


def test_a_metric_without_a_value_is_none():
    metrics = evaluation_of([(2, {"a": math.nan, "b": math.nan}), (2, {"a": 1.0, "b": math.nan})])
    assert metrics == {"a": 1.0, "b": None}


def test_repeated_prompts_at_the_end_do_not_count():
    rewards = [[[1.0, 0.0]] * 4, [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]]
    metrics = evaluation_of([(4, {"loss": 1.0}), (4, {"loss": 4.0})], rewards, num_completions=6)
    assert metrics["reward"] == pytest.approx(4 / 6) and metrics["loss"] == pytest.approx((4 * 1 + 2 * 4) / 6)


class Recorded:
    """A reward function that keeps its rewards."""

    __name__ = "recorded"

    def __init__(self):
        self.rewards = []

    def __call__(self, completions, **kwargs):
        rewards = digit_reward(completions)
        self.rewards += rewards
        return rewards


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer, PPOTrainer])
def test_a_short_last_batch_counts_by_its_completions(tmp_path, model_path, trainer_class):
    """Of one dataset, of several with a name each, and of a prediction, after which nothing is left behind."""
    reward, data = Recorded(), {"easy": addition_dataset(3), "hard": addition_dataset(5)}
    arguments = {"model": model_path, "reward": reward, "trainer_class": trainer_class}
    trainer = build_trainer(tmp_path, **arguments, per_device_eval_batch_size=8)
    trainer.predict(addition_dataset(5))
    reward.rewards.clear()
    metrics = trainer.evaluate(data)
    for name, rewards in (("easy", reward.rewards[:12]), ("hard", reward.rewards[12:])):
        values = torch.tensor(rewards)
        assert metrics[f"eval_{name}_reward"] == pytest.approx(values.mean().item())
        assert metrics[f"eval_{name}_rewards/recorded/std"] == pytest.approx(values.std().item())
    assert len(reward.rewards) == 32 and not any(name.startswith("eval_reward") for name in metrics)
    assert trainer.state.log_history[-1]["eval_hard_reward"] == metrics["eval_hard_reward"]
    reward.rewards.clear()
    predicted = trainer.predict(addition_dataset(3)).metrics
    assert predicted["test_reward"] == pytest.approx(sum(reward.rewards) / 12)


def test_tables_of_completions_are_apart_from_those_of_training(tmp_path):
    """Also when an evaluation lies between a generation and the log of its step."""

    def reward(completions, log_extra, **kwargs):
        if len(completions) < 8:
            log_extra("batch", ["short"] * len(completions))
        return digit_reward(completions)

    held_out = addition_dataset(32).select(range(29, 32))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2, "log_completions": True}
    more = {"train_dataset": addition_dataset(16), "eval_dataset": held_out}
    trainer = build_trainer(tmp_path, reward=reward, more=more, per_device_eval_batch_size=8, **settings)
    trainer.train()
    files = sorted(file.name for file in (tmp_path / "completions").iterdir())
    assert files == ["completions_00002.parquet", "eval_00001.parquet", "eval_00002.parquet"]
    held_out_prompts = {str(prompt) for prompt in held_out["prompt"]}
    training, *evaluation_tables = [pd.read_parquet(tmp_path / "completions" / file) for file in files]
    assert len(training) == 8 and not held_out_prompts & {str(list(prompt)) for prompt in training["prompt"]}
    for step, table in enumerate(evaluation_tables, start=1):
        assert {str(list(prompt)) for prompt in table["prompt"]} == held_out_prompts and len(table) == 12
        assert set(table["step"]) == {step} and {"completion", "reward", "advantage"} <= set(table.columns)
        assert list(table["batch"].isna()) == [True] * 8 + [False] * 4


def test_tables_that_are_switched_on_after_construction_stay_on_after_an_evaluation(tmp_path):
    more = {"eval_dataset": addition_dataset(4)}
    trainer = build_trainer(tmp_path, more=more, per_device_eval_batch_size=8, max_steps=1)
    trainer.log_completions = True
    trainer.evaluate()
    trainer.train()
    files = sorted(file.name for file in (tmp_path / "completions").iterdir())
    assert files == ["completions_00001.parquet", "eval_00000.parquet"]

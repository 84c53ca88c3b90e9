"""What PPOConfig refuses, with rule, value and remedy, and the defaults that are the authors'."""

import re

import pytest

from pacs_trl import PPOConfig


def config(**overrides) -> PPOConfig:
    return PPOConfig("unused", use_cpu=True, bf16=False, report_to="none", **overrides)


def test_defaults_are_the_settings_of_the_authors():
    args = config()
    assert (args.critic_learning_rate, args.critic_warmup_steps, args.value_clip_range) == (1e-5, 0, 0.5)
    assert (args.gamma, args.gae_lambda, args.whiten_advantages) == (1.0, 1.0, True)
    assert (args.epsilon, args.epsilon_high, args.delta, args.loss_type) == (0.2, None, 3.0, "dr_grpo")
    assert args.vllm_importance_sampling_correction is False


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("scale_rewards", "batch", "would be ignored"),
        ("importance_sampling_level", "sequence", "ratio of each token"),
        ("multi_objective_aggregation", "normalize_then_sum", "weighted sum"),
        ("off_policy_mask_threshold", 1.0, "one advantage per completion"),
        ("vespo_k_pos", 1.0, "VESPO"),
        ("loss_type", "cispo", "one of dr_grpo, dapo; got 'cispo'"),
        ("gamma", 1.1, "[0, 1]"),
        ("gae_lambda", -0.1, "[0, 1]"),
        ("critic_learning_rate", 0.0, "above 0"),
        ("critic_warmup_steps", -1, "at least 0, got -1"),
        ("value_clip_range", 0.0, "None turns"),
        ("delta", 1.2, "1 + epsilon_high = 1.2"),
        ("fp16", True, "bf16=True"),
        ("temperature", float("nan"), "above 0, got nan"),
        ("critic_learning_rate", float("inf"), "above 0, got inf"),
        ("learning_rate", -1e-6, "at least 0, got -1e-06"),
    ],
)
def test_refused(setting, value, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config(**{setting: value})
    assert setting in str(error.value)

"""Settings that PPOConfig refuses, and defaults that are the authors'."""

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


REFUSED = {
    "scale_rewards": "batch",
    "importance_sampling_level": "sequence",
    "multi_objective_aggregation": "normalize_then_sum",
    "off_policy_mask_threshold": 1.0,
    "vespo_k_pos": 1.0,
    "loss_type": "cispo",
    "fp16": True,
}


@pytest.mark.parametrize("setting", REFUSED)
def test_refused(setting):
    with pytest.raises(ValueError, match=setting):
        config(**{setting: REFUSED[setting]})

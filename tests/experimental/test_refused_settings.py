"""Settings that PPO and experimental methods reject, by the name of the key."""

import pytest
from replay import config

from pacs_trl.recipe import config_class


ET, REFILL, LINEAR = {"adaptive_rollouts": "equal_treatment"}, {"refill_uniform_groups": True}, "linear"


@pytest.mark.parametrize(
    ("method", "settings", "key"),
    [
        ("dars", {}, "adaptive_rollouts"),
        ("dars", ET, "max_generations"),
        ("dars", ET | {"max_generations": 4}, "max_generations=4"),
        ("dars", REFILL | {"max_generations": 32}, "max_generations"),
        ("dars", REFILL | {"adaptive_rollouts_budget": 8}, "adaptive_rollouts_budget"),
        ("dars", ET | {"max_generations": 32, "max_refill_rounds": 5}, "max_refill_rounds"),
        ("guidance", {"max_guided_fraction": 0.1}, "max_guided_fraction"),
        ("guidance", {"class_weighting": "only_negative"}, "class_weighting"),
        ("steer", {"token_weight_max": 1.5}, "token_weight_max"),
        ("steer", {"token_weight_min": 1.1}, "token_weight_min"),
        ("steer", {"token_weight_mapping": LINEAR, "token_weight_min": 1.2}, "token_weight_min"),
        ("verl", {"hidden_state_stride": 8}, "hidden_state_stride"),
        ("process_labels", {"score_estimator": "dr_grpo"}, "score_estimator"),
        ("process_labels", {"actor_term_coef": 0.5}, "actor_term_coef"),
        ("ppo", {"scale_rewards": "batch"}, "scale_rewards"),
        ("ppo", {"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ("ppo", {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ("ppo", {"off_policy_mask_threshold": 1.0}, "off_policy_mask_threshold"),
        ("ppo", {"vespo_k_pos": 1.0}, "vespo_k_pos"),
        ("ppo", {"loss_type": "cispo"}, "loss_type"),
        ("ppo", {"fp16": True}, "fp16"),
    ],
)
def test_refused(method, settings, key):
    with pytest.raises(ValueError, match=key):
        config("out", config_class(method), **settings)

"""What PACSConfig refuses, and that its messages help: they name the value and a remedy that works."""

import itertools
import re
from dataclasses import MISSING, fields

import pytest

from pacs_trl import PACSConfig
from pacs_trl.pacs_config import SHAPES_ONLY_GRPO
from pacs_trl.rollouts.step_sizes import Step


def make(**settings):
    return PACSConfig("out", **({"bf16": False, "use_cpu": True} | settings))


def test_defaults_are_the_authors_objective():
    args = make()
    assert (args.pacs_beta, args.score_estimator, args.class_weighting) == (1.0, "rloo", "balanced")
    assert (args.proxy, args.reference, args.actor_term_coef, args.beta) == ("log_ratio", "rollout", 0.0, 0.0)
    assert args.disable_dropout


OFF_DEFAULT = {
    "delta": 2.0,
    "epsilon": 0.3,
    "epsilon_high": 0.28,
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum",
    "off_policy_mask_threshold": 0.5,
    "entropy_target": 0.4,
    "use_bias_correction_kl": False,
    "use_adaptive_entropy": True,
    "router_aux_loss_coef": 0.001,
}


@pytest.mark.parametrize("name", SHAPES_ONLY_GRPO)
def test_settings_of_grpos_loss_are_refused(name):
    default = next(f.default for f in fields(PACSConfig) if f.name == name)
    assert default is not MISSING
    value = OFF_DEFAULT[name] if name in OFF_DEFAULT else default / 2 + 0.1
    with pytest.raises(ValueError, match=rf"does not take {name}={re.escape(repr(value))}.*method: grpo"):
        make(**{name: value})
    make(**{name: default})


REFUSED = {
    "unknown estimator": ({"score_estimator": "ppo"}, r"score_estimator must be one of rloo, .*'ppo'"),
    "unknown weighting": ({"class_weighting": "focal"}, "class_weighting must be one of .*'focal'"),
    "unknown proxy": ({"proxy": "entropy"}, "proxy must be one of log_ratio, mean_logp; got 'entropy'"),
    "unknown reference": ({"reference": "ema"}, "reference must be one of rollout, snapshot; got 'ema'"),
    "unknown layout": ({"group_layout": "half"}, "group_layout must be one of .*'half'"),
    "unknown packing": ({"padding_free": "yes"}, "padding_free must be one of .*'yes'"),
    "beta 0": ({"pacs_beta": 0.0}, "pacs_beta must be above 0, got 0.0"),
    "NaN beta": ({"pacs_beta": float("nan")}, "pacs_beta must be above 0, got nan"),
    "negative actor term": ({"actor_term_coef": -1.0}, "actor_term_coef must be at least 0, got -1.0"),
    "infinite beta": ({"pacs_beta": float("inf")}, "pacs_beta must be above 0, got inf"),
    "NaN actor term": ({"actor_term_coef": float("nan")}, "actor_term_coef must be at least 0, got nan"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be above 0, got 0.0: logits are divided by it"),
    "two at once": (
        {"adam_beta2": 1.5, "vllm_mode": "sideways"},
        "adam_beta2 must be .* got 1.5.* vllm_mode must be one",
    ),
    "of every kind at once": (
        {"epsilon": 0.3, "proxy": "x", "padding_free": "x", "reference_offload": True, "top_p": 0.0},
        r"^(?=.*epsilon=0\.3)(?=.*proxy must be )(?=.*reference_offload=True would )(?=.*padding_free must be )"
        "(?=.*top_p must be above 0)",
    ),
    "grpo with rollout reference": (
        {"score_estimator": "grpo"},
        "(?s)grpo.*exactly 0.*Use reference='snapshot'.*first_update_score='dr_grpo'",
    ),
    "unknown first score": (
        {"score_estimator": "grpo", "first_update_score": "rloo", "steps_per_generation": 4},
        "first_update_score must be one of dr_grpo; got 'rloo'",
    ),
    "first score of another score": (
        {"first_update_score": "dr_grpo", "steps_per_generation": 4},
        "first_update_score='dr_grpo' would be ignored: .*score_estimator='rloo'.*Remove the key",
    ),
    "first score with a snapshot": (
        {"score_estimator": "grpo", "reference": "snapshot", "first_update_score": "dr_grpo"},
        "first_update_score='dr_grpo' would be ignored: .*reference='snapshot'",
    ),
    "first score without a second update": (
        {"score_estimator": "grpo", "first_update_score": "dr_grpo"},
        "needs a second update on a rollout, but with steps_per_generation=1, gradient_accumulation_steps=1",
    ),
    "snapshot without reference": (
        {"reference": "snapshot", "proxy": "mean_logp"},
        "reference='snapshot' would be ignored with proxy='mean_logp'",
    ),
    "resets without snapshot": ({"reference_reset_steps": 5}, "reference_reset_steps=5 would be ignored"),
    "optimizer reset without snapshot": (
        {"reset_optimizer_on_reference_reset": True},
        "reset_optimizer_on_reference_reset=True would be ignored",
    ),
    "offload without snapshot": ({"reference_offload": True}, "reference_offload=True would be ignored"),
    "reset every 0 steps": (
        {"reference": "snapshot", "reference_reset_steps": 0},
        "reference_reset_steps must be a whole number of at least 1, got 0",
    ),
    "optimizer reset without resets": (
        {"reference": "snapshot", "reset_optimizer_on_reference_reset": True},
        "would never happen",
    ),
    "micro-batch below one completion": (
        {"max_tokens_per_micro_batch": 512, "max_completion_length": 512},
        "max_tokens_per_micro_batch=512 cannot hold one sequence.*max_completion_length=512",
    ),
    "no step may be skipped": (
        {"max_non_finite_steps": 0},
        "max_non_finite_steps must be a whole number of at least 1, got 0",
    ),
    "one generation": ({"num_generations": 1}, "num_generations must be a whole number of at least 2, got 1"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


LEGAL = [
    {"score_estimator": "grpo", "first_update_score": "dr_grpo", "steps_per_generation": 2},
    {"score_estimator": "grpo", "first_update_score": "dr_grpo", "num_iterations": 2},
    {"score_estimator": "grpo", "reference": "snapshot"},
    {"score_estimator": "grpo", "proxy": "mean_logp"},
    {"reference": "snapshot", "reference_reset_steps": 1, "reset_optimizer_on_reference_reset": True},
    {"reference": "snapshot", "reference_offload": True},
    {"max_tokens_per_micro_batch": 513, "max_completion_length": 512},
    {"per_device_train_batch_size": 2, "num_generations": 8, "gradient_accumulation_steps": 4},
    {
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
]


@pytest.mark.parametrize("settings", LEGAL)
def test_legal_combinations(settings):
    make(**settings)


def test_message_on_sizes_by_hand():
    # 6 x 2 x 1 = 12 completions; groups of 8 need a multiple of 2 accumulation steps, of 12's divisors 4 and 6 are
    # nearest
    (message,) = Step(
        per_device_train_batch_size=6,
        num_processes=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=8,
    ).errors()
    assert "num_generations=8" in message and "6 x 2 processes x steps_per_generation=1 = 12" in message
    assert "steps_per_generation=2, or num_generations=4 or 6" in message


SIZES = {
    "per_device_train_batch_size": (1, 3, 4),
    "num_processes": (1, 2),
    "gradient_accumulation_steps": (1, 2, 3, 6),
    "steps_per_generation": (1, 2, 3, 4, 6),
    "num_generations": (2, 4, 5),
    "num_iterations": (1, 2),
}


def follow(message: str, sizes: dict) -> list[dict]:
    """All settings that a message proposes."""
    proposals = []
    for name, values in re.findall(
        r"(\w+)=(\d+(?: or \d+)*)(?=[,.]| or num_)", message.split("Nearest legal values:")[-1]
    ):
        proposals += [{**sizes, name: int(value)} for value in values.split(" or ")]
    if "Set steps_per_generation=" in message:
        proposals.append({**sizes, "num_iterations": 1})
        proposals.append({**sizes, "steps_per_generation": sizes["gradient_accumulation_steps"]})
    return proposals


def test_following_the_message_on_sizes_leads_to_legal_ones():
    """Every proposal of every message: it repairs the rule it speaks of, and repeating that ends with legal sizes."""
    illegal = 0
    for values in itertools.product(*SIZES.values()):
        sizes = dict(zip(SIZES, values, strict=True))
        errors = Step(**sizes).errors()
        if not errors:
            continue
        illegal += 1
        proposals = follow(errors[0], sizes)
        assert proposals, errors[0]
        for proposal in proposals:
            remaining = proposal
            for _ in range(4):
                errors_left = Step(**remaining).errors()
                if not errors_left:
                    break
                assert errors_left[0] != errors[0], (sizes, proposal)
                remaining = follow(errors_left[0], remaining)[0]
            assert not Step(**remaining).errors(), (sizes, proposal, remaining)
    assert illegal > 100


def test_sizes_are_checked_by_the_configuration(monkeypatch):
    with pytest.raises(ValueError, match=r"num_generations=8.*4 x 1 processes.*= 4\."):
        make(per_device_train_batch_size=4, num_generations=8)
    monkeypatch.setenv("WORLD_SIZE", "2")  # 4 x 2 processes hold the group
    with pytest.raises(ValueError, match=r"6 x 2 processes x steps_per_generation=1 = 12"):
        make(per_device_train_batch_size=6, num_generations=8)


def test_generation_batch_size_must_hold_whole_slots():
    with pytest.raises(ValueError, match=r"generation_batch_size=20 must be a multiple.*= 8\. .*: 16 or 24"):
        make(per_device_train_batch_size=8, num_generations=4, generation_batch_size=20)
    assert make(per_device_train_batch_size=8, num_generations=4, generation_batch_size=16).steps_per_generation == 2

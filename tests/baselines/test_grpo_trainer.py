"""GRPO and RLOO on the exact update end with the weights of TRL's trainers on the same completions."""

import math
from contextlib import nullcontext

import pytest
import torch
from support.models import assert_same_models, logps_and_entropies
from support.rollouts import Replay, rows_of_update
from support.runs import assert_resumes, build_trainer
from support.trls_update import (
    EIGHT,
    FOUR_MINIBATCHES,
    OWN,
    REUSED,
    TRLS,
    difference,
    in_double_precision,
    run,
)

from pacs_trl import GRPOTrainer, RLOOTrainer
from pacs_trl.baselines.grpo_trainer import SurrogateObjective
from pacs_trl.surrogate import RatioLoss
from pacs_trl.update.token_weights import TokenValues


pytestmark = pytest.mark.trains

RUNS = {
    "on policy": (EIGHT, {}),
    "four minibatches": (FOUR_MINIBATCHES, {}),
    "reused four times, clipped": (REUSED, {}),
    "rewards of None": (REUSED, {"unverifiable": 0.3, "uniform_groups": 0}),
    "truncated and masked, tools": ({**REUSED, "mask_truncated_completions": True}, {"truncated": 0.4, "tools": True}),
}
LOSSES = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
BY_SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.003, "epsilon_high": 0.004}
MORE = {
    **{f"sequence level, {loss}": BY_SEQUENCE | {"loss_type": loss} for loss in LOSSES},
    "sequence level, delta": BY_SEQUENCE | {"delta": 1.002},
    "delta": {"delta": 1.05},
    "rewards by batch": {"scale_rewards": "batch"},
    "rewards not scaled": {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"},
    "normalized first": {"multi_objective_aggregation": "normalize_then_sum"},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "Adam": {"optim": "adamw_torch", "learning_rate": 1e-3},
}
# Losses that are not divided by a number of tokens have gradients several times as large.
SMALL_STEPS = {"learning_rate": 0.03}
CASES = {
    f"{name}, {loss}": (s | {"loss_type": loss} | (SMALL_STEPS if loss == "luspo" else {}), r)
    for name, (s, r) in RUNS.items()
    for loss in (LOSSES if s.get("num_iterations") and "unverifiable" not in r else LOSSES[::3])
}
CASES |= {name: (REUSED | (SMALL_STEPS if "luspo" in name else {}) | more, {}) for name, more in MORE.items()}


def compare(directory, method, settings, replay, bound=None, **how):
    """In float64, where the weights agree to 1e-10, or with `bound` in float32."""
    with nullcontext() if bound else in_double_precision():
        before, trls, expected = run(directory / "trl", TRLS, method, Replay(**replay), **settings, **how)
        _, ours, logs = run(directory / "ours", OWN, method, Replay(**replay), **settings, **how)
    error = difference(ours, trls, before)
    print(f"{error:.1e}")
    assert len(logs) == len(expected) == 8
    assert error < (bound or 1e-10)
    # a completion without tokens has a constant loss in TRL's RLOO
    # and normalized advantages of uniform groups have the sign of a rounding error
    has_noise = settings.get("normalize_advantages") or "truncated" in replay
    compared = ("grad_norm", "cispo", "vespo", "kl", *(() if has_noise else ("loss", "clip_ratio")))
    for ours_logged, other in zip(logs, expected):
        for name in (name for name in other if name.startswith(compared)):
            assert ours_logged[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    return expected


@pytest.mark.parametrize(("settings", "replay"), CASES.values(), ids=CASES)
def test_weights_are_those_of_trl(tmp_path, settings, replay):
    logs = compare(tmp_path, "grpo", settings, replay)
    if settings.get("num_iterations") and settings.get("loss_type") == "dapo" and not replay:
        assert (
            max(log["clip_ratio/low_mean"] for log in logs) > 0.02 < max(log["clip_ratio/high_mean"] for log in logs)
        )


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_weights_are_those_of_trl_with_shuffled_minibatches(tmp_path, method):
    settings = FOUR_MINIBATCHES | SMALL_STEPS | {"beta": 0.0, "num_iterations": 2}
    compare(tmp_path, method, settings, {}, shuffled=True)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_weights_are_those_of_trl_with_a_kl_term(tmp_path, model_path, loss_type, corrected):
    settings = REUSED | {"beta": 0.3, "loss_type": loss_type, "use_bias_correction_kl": corrected}
    compare(tmp_path, "grpo", settings, {"unverifiable": 0.2}, path=model_path)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    "more", [{}, {"normalize_advantages": True, "reward_clip_range": (0.0, 0.7)}], ids=["", "normalized"]
)
def test_weights_are_those_of_trls_rloo(tmp_path, name, more):
    settings, replay = RUNS[name]
    if replay.get("tools"):
        replay = {k: v for k, v in replay.items() if k != "tools"}  # TRL's RLOO has none
    compare(tmp_path, "rloo", settings | more | SMALL_STEPS | {"beta": 0.0}, replay)


def test_weights_are_those_of_trls_rloo_with_a_kl_penalty(tmp_path, model_path):
    compare(tmp_path, "rloo", REUSED | SMALL_STEPS | {"beta": 0.3}, {}, path=model_path)


VLLM = {
    f"{loss}, {mode}": {"loss_type": loss, "vllm_importance_sampling_mode": mode, **more}
    for loss, more in (("dapo", {}), ("vespo", {}), ("grpo", {"off_policy_mask_threshold": 0.01}))
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(s, marks=() if s["loss_type"] == "dapo" else pytest.mark.slow, id=n) for n, s in VLLM.items()],
)
def test_weights_are_those_of_trl_with_a_mismatch_of_vllm(tmp_path, settings):
    """An engine that reports the same log-prob for every token, near those of the policy."""
    settings = REUSED | SMALL_STEPS | {"vllm_importance_sampling_clip_max": 1.1} | settings
    compare(tmp_path, "grpo", settings, {"logprobs": -5.53}, bound=1e-5, vllm=True)  # TRL keeps them in float32


@pytest.mark.parametrize(("engine_reports", "keeps"), [(True, True), (False, False)])
def test_off_policy_mask_without_any_log_prob_of_the_engine(engine_reports, keeps):
    """TRL keeps a completion whose log-probs an engine does not know. Without an engine the policy at rollout time is
    compared: a mean of log 4 nats is above the threshold of 1."""
    objective = SurrogateObjective(RatioLoss("grpo", lower_bound=0.0, upper_bound=10.0), off_policy_threshold=1.0)
    logps, old_logps = torch.log(torch.tensor([[0.1, 0.1]])), torch.log(torch.tensor([[0.4, 0.4]]))
    tokens = TokenValues(
        logps=logps,
        old_logps=old_logps,
        sampling_logps=torch.full_like(logps, math.nan),
        entropies=logps,
        old_entropies=logps,
        coefficients=torch.tensor([[1.0]]),  # of a negative advantage
        mask=torch.ones_like(logps, dtype=torch.bool),
        has_sampling_logps=torch.tensor([[engine_reports]]),
    )
    assert objective.token_terms(tokens, []).logp_weights.bool().tolist() == [[keeps, keeps]]


def test_kl_penalty_of_rloo_skips_tokens_that_the_policy_did_not_generate(tmp_path, model_path):
    """The reference has other weights, so that the log-ratio of a tool's tokens is not 0."""
    replay = Replay(tools=True)
    trainer = build_trainer(
        tmp_path, model=model_path, replay=replay, trainer_class=RLOOTrainer, beta=0.3, max_steps=1, learning_rate=0.0
    )
    for parameter in trainer.ref_model.parameters():
        parameter.data *= 1.1
    trainer.train()
    _, rows = rows_of_update(replay, trainer.args, 0)
    total, number = 0.0, 0
    for row in rows:
        mask = torch.tensor(row.env_mask).bool()
        policy, reference = (logps_and_entropies(model, row)[0] for model in (trainer.model, trainer.ref_model))
        total += (policy - reference)[mask].sum().item()
        number += int(mask.sum())
    assert number < sum(len(row.completion_ids) for row in rows)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(total / number, rel=1e-4)


def test_weights_of_an_adapter_are_those_of_trl(tmp_path):
    compare(tmp_path, "grpo", REUSED | {"beta": 0.3}, {}, lora=True)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_trl_in_single_precision(tmp_path, name):
    """Rounding grows with the steps, above all where a ratio is at its bound, so these are small."""
    settings, replay = RUNS[name]
    compare(tmp_path, "grpo", settings | SMALL_STEPS, replay, bound=1e-5)


def test_the_tokens_of_the_highest_entropies_are_those_of_trl(tmp_path):
    """Of a model whose entropies differ by much more than rounding, because TRL rounds its quantile to float32."""
    settings = REUSED | {"top_entropy_quantile": 0.4, "learning_rate": 1e-2}
    compare(tmp_path, "grpo", settings, {}, bound=1e-4, sharpness=20.0)  # one token more or less: 1e-2


EVALUATED = {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True, "per_device_eval_batch_size": 16}
EVALUATIONS = {loss: {"loss_type": loss} for loss in ("grpo", "dapo", "cispo", "vespo", "bnpo", "luspo")}
EVALUATIONS |= {"highest entropies": {"top_entropy_quantile": 0.4}, "kl": {"beta": 0.3}}


@pytest.mark.parametrize("settings", EVALUATIONS.values(), ids=EVALUATIONS)
def test_evaluations_are_those_of_trl(tmp_path, model_path, settings):
    """Before, between, and after optimizer steps, of which four share a generation batch."""
    settings = FOUR_MINIBATCHES | SMALL_STEPS | {"learning_rate": 0.01} | EVALUATED | settings
    path = model_path if "beta" in settings else None
    with in_double_precision():
        _, _, expected = run(tmp_path / "trl", TRLS, "grpo", Replay(), path=path, sharpness=20.0, **settings)
        _, _, logs = run(tmp_path / "ours", OWN, "grpo", Replay(), path=path, sharpness=20.0, **settings)
    evaluations = [log for log in expected if "eval_loss" in log]
    our_evaluations = [log for log in logs if "eval_loss" in log]
    assert len(evaluations) == len(our_evaluations) == 3
    for ours, trls in zip(our_evaluations, evaluations, strict=True):
        compared = {name for name in trls if not name.endswith(("_runtime", "_per_second"))}
        assert {"eval_loss", "eval_reward"} <= compared
        for name in compared:
            assert ours[name] == pytest.approx(trls[name], rel=1e-4, abs=1e-7), name


def test_the_last_step_of_an_epoch_with_fewer_generation_batches_has_the_weights_of_trl(tmp_path):
    """Three generation batches per epoch, two per optimizer step: the second step has one."""
    settings = EIGHT | {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_prompts": 12}
    compare(tmp_path, "grpo", settings | {"max_steps": -1, "num_train_epochs": 4}, {})


# Three slots per optimizer step, four per generation batch, each used twice: steps mix batches, uses, and groups.
SLICED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "steps_per_generation": 4}
SLICED |= {"num_iterations": 2, "epsilon": 0.05}
MIXED = {
    **{f"sliced, {loss}": SLICED | {"loss_type": loss} for loss in ("grpo", "dapo", "dr_grpo", "vespo")},
    "sliced, RLOO": SLICED | {"beta": 0.0},
    "several uses in a step": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "parts of groups": {"per_device_train_batch_size": 6, "steps_per_generation": 2},
}


@pytest.mark.parametrize("name", MIXED)
def test_optimizer_steps_that_are_no_equal_parts_of_a_generation_batch(tmp_path, name):
    """Weights and gradients. TRL's clip ratios are means over slots, not tokens."""
    settings, trained = EIGHT | MIXED[name], []
    for trainers in (TRLS, OWN):
        with in_double_precision():
            method = "rloo" if "RLOO" in name else "grpo"
            trained.append(run(tmp_path / str(len(trained)), trainers, method, Replay(), num_prompts=48, **settings))
    (before, trls, expected), (_, ours, logs) = trained
    assert difference(ours, trls, before) < 1e-10
    assert [log["grad_norm"] for log in logs] == pytest.approx([log["grad_norm"] for log in expected])
    assert len(logs) == 8


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_mixed_steps_measure_the_mismatch_once_per_generation(tmp_path, trainer_class):
    """Of all completions with a gradient, under the weights that generated: the first generation has the values of a
    step that takes it whole."""
    sizes = {
        "whole": {"gradient_accumulation_steps": 4, "max_steps": 1},
        "sliced": {"gradient_accumulation_steps": 1, "max_steps": 8},
    }
    logs = {}
    for name, size in sizes.items():
        settings = {"per_device_train_batch_size": 2, "steps_per_generation": 4, **size}
        replay = Replay(logprobs=-5.0, tools=True)
        trainer = build_trainer(tmp_path, trainer_class=trainer_class, replay=replay, **settings)
        trainer.train()
        entries = trainer.state.log_history[:-1]
        logs[name] = [{key: x for key, x in log.items() if key.startswith("sampling/")} for log in entries]
    assert [bool(log) for log in logs["sliced"]] == [True, False, False, False] * 2
    assert len(logs["whole"][0]) == 5 and logs["sliced"][0] == pytest.approx(logs["whole"][0], rel=1e-4)
    assert logs["sliced"][4] != logs["sliced"][0]


def test_mixed_steps_resume_bit_by_bit(tmp_path):
    def build(directory):
        settings = SLICED | {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "shuffle_minibatches": True}
        return build_trainer(directory, trainer_class=GRPOTrainer, replay=Replay(), **settings)

    assert_resumes(build, tmp_path, 1, 3)


def test_completions_need_no_limit(tmp_path):
    """As in TRL, where only `dr_grpo` divides by `max_completion_length`."""
    trainers = [
        build_trainer(tmp_path, trainer_class=GRPOTrainer, replay=Replay(), max_completion_length=limit)
        for limit in (None, 16)
    ]
    for trainer in trainers:
        trainer.train()
    assert_same_models(*trainers)

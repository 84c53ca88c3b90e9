"""An evaluation leaves no trace in training: the same bits with and without one, wherever it is called."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.models import LORA, assert_same_models, trainable_weights
from support.problems import held_out
from support.rollouts import Parity, addition_dataset, digit_reward
from support.runs import Recorder, build_trainer
from transformers import AutoConfig

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.baselines.ppo_trainer import PPOTrainer
from pacs_trl.rollouts import evaluation


BENCHMARKS = {"eval_benchmarks": held_out(), "eval_max_problems": 5, "eval_num_samples": 4}
BENCHMARKS |= {"eval_temperature": 0.7, "eval_top_p": 0.9}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, **BENCHMARKS}


def noisy_reward(completions, **kwargs):
    """A reward function that draws random numbers of its own, from both global generators."""
    return [y * random.random() * np.random.random() for y in digit_reward(completions)]


@pytest.fixture(autouse=True)
def half_are_correct(monkeypatch):
    monkeypatch.setattr(evaluation, "shared_verifier", Parity)


def build(trainer_class, output_dir, model_path, more=None, **settings):
    """A trainer whose completions are sampled by transformers."""
    defaults = {"max_completion_length": 8, "max_steps": 3}
    more = {"eval_dataset": addition_dataset(4)} | (more or {})
    arguments = {"model": model_path, "reward": noisy_reward, "trainer_class": trainer_class, "more": more}
    return build_trainer(output_dir, **arguments, **(defaults | settings))


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer, PPOTrainer])
def test_a_run_with_evaluations_learns_the_same(tmp_path, model_path, trainer_class):
    plain = build(trainer_class, tmp_path, model_path)
    plain.train()
    evaluated = build(trainer_class, tmp_path, model_path, **EVALUATING)
    evaluated.train()
    assert sum("eval_reward" in entry and "eval_pass@4" in entry for entry in evaluated.state.log_history) == 4
    assert_same_models(plain, evaluated)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_prompts_of_an_evaluation_may_be_longer_than_micro_batches_of_training(tmp_path, model_path, trainer_class):
    """An evaluation keeps no activations. The limit of training stays as it is."""
    long_prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": str(n) * 130}]} for n in range(4)])
    settings = {"max_tokens_per_micro_batch": 60, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = build(trainer_class, tmp_path, model_path, {"eval_dataset": long_prompts}, **settings)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2 and np.isfinite(losses).all()
    assert trainer.update.driver.limits.max_tokens == 60


@pytest.mark.parametrize("trainer_class", [PACSTrainer, PPOTrainer])
def test_evaluations_by_hand_before_and_between_runs(tmp_path, model_path, trainer_class):
    plain = build(trainer_class, tmp_path, model_path, max_steps=2)
    plain.train()
    plain.train()
    evaluated = build(trainer_class, tmp_path, model_path, max_steps=2)
    for _ in range(2):
        evaluated.evaluate()
        evaluated.evaluate({"one": addition_dataset(2), "other": addition_dataset(4)})
        evaluated.predict(addition_dataset(2))
        evaluated.train()
    assert_same_models(plain, evaluated)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, pytest.param(GRPOTrainer, marks=pytest.mark.slow)])
def test_a_run_resumed_between_evaluations(tmp_path, model_path, trainer_class):
    """In the middle of a generation; the evaluation at the start comes when the checkpoint is loaded."""
    saving = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2, "max_steps": 4}
    plain = build(trainer_class, tmp_path / "plain", model_path, **saving)
    plain.train()
    for name in ("evaluated", "plain"):  # checkpoints of either kind
        if name == "evaluated":
            build(trainer_class, tmp_path / name, model_path, **saving, **EVALUATING).train()
        resumed = build(
            trainer_class, tmp_path / "resumed", model_path, **saving | {"save_strategy": "no"}, **EVALUATING
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        assert_same_models(plain, resumed)


def test_evaluations_have_random_numbers_of_their_own(tmp_path, model_path):
    """Of another evaluation at the same step others, in another run the same, whatever was drawn before."""

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    results = []
    for _ in range(2):
        trainer = build(PACSTrainer, tmp_path, model_path)
        torch.rand(1)
        before = states()
        results.append([trainer.evaluate()["eval_reward"] for _ in range(2)])
        assert states() == before
    assert results[0] == results[1] and results[0][0] != results[0][1]


def test_benchmarks_alone_have_their_own_sampling(tmp_path, model_path, engine):
    """Generated by the engine of training, without a held-out set; the weights are those without benchmarks."""
    settings, requests = engine
    asked, runs, seeds = set(), [], []
    for more in ({}, EVALUATING | {"eval_benchmarks": [held_out(), held_out("terms")]}):
        trainer = build(PACSTrainer, tmp_path, model_path, {"eval_dataset": None}, **settings, **more)
        generate = trainer._generate_single_turn

        def watched(prompt_ids, *args, trainer=trainer, generate=generate):
            holder = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
            asked.add((trainer.model.training, holder.temperature, holder.top_p))
            return generate(prompt_ids, *args)

        trainer._generate_single_turn = watched
        trainer.train()
        runs.append(trainer)
        seeds.append({seed for _, _, seed in requests(trainer)} if requests else set())
    assert_same_models(*runs)
    assert asked == {(True, 1.0, 1.0), (False, 0.7, 0.9)}
    assert len(seeds[1]) >= 2 * len(seeds[0]) and seeds[0] <= seeds[1]
    logs = [entry for entry in runs[1].state.log_history if "eval_runtime" in entry]
    assert len(logs) == 4 and not any("eval_completions/mean_length" in log for log in logs)
    for log in logs:
        assert 0 <= log["eval_pass@1_lower"] <= log["eval_pass@1"] <= log["eval_pass@1_upper"] <= 1
        values = [log[f"eval_miniature/{task}/pass@4"] for task in ("addition", "terms")]
        assert log["eval_pass@4"] == pytest.approx(sum(values) / 2) and log["eval_pass@4"] >= log["eval_pass@1"]
        shares = [log.get(f"eval_miniature/addition/verification/{outcome}", 0) for outcome in ("correct", "wrong")]
        assert sum(shares) == pytest.approx(1) and shares[0] == pytest.approx(log["eval_miniature/addition/pass@1"])
        assert 0 < log["eval_miniature/addition/mean_length"] <= 8 and log["eval_samples_per_second"] > 0


@pytest.mark.parametrize("lora", [False, True])
def test_the_best_checkpoint_by_pass_at_1(tmp_path, model_path, lora):
    """Also in a run that is resumed after its second step."""
    runs, recorder = [], Recorder()
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "load_best_model_at_end": True}
    for directory, resume in (("straight", None), ("again", tmp_path / "straight" / "checkpoint-2")):
        torch.manual_seed(0)
        more = {"eval_dataset": None, "peft_config": LORA if lora else None, "callbacks": [] if resume else [recorder]}
        settings = EVALUATING | saving | {"eval_on_start": False, "metric_for_best_model": "eval/pass@1"}
        trainer = build(PACSTrainer, tmp_path / directory, model_path, more, **settings)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        runs.append((trainer, [log["eval_pass@1"] for log in trainer.state.log_history if "eval_pass@1" in log]))
    (straight, values), (again, values_again) = runs
    assert values == values_again and len(values) == 4 and straight.state.best_metric == max(values)
    best = 1 + values.index(max(values))
    assert straight.state.best_global_step == again.state.best_global_step == best
    assert_same_models(straight, again)
    expected = [*recorder.weights, {}][best]
    assert all(
        torch.equal(weight, expected[name]) for name, weight in trainable_weights(again.model).items() if expected
    )


def test_greedy_evaluations_repeat_with_the_real_verifier(tmp_path, model_path, monkeypatch):
    monkeypatch.undo()
    trainer = build(PACSTrainer, tmp_path, model_path, **BENCHMARKS | {"eval_temperature": 0.0, "eval_num_samples": 1})
    first, second = (trainer.evaluate() for _ in range(2))
    lengths = [each["eval_miniature/addition/mean_length"] for each in (first, second)]
    assert lengths[0] == lengths[1] and first["eval_pass@1"] == second["eval_pass@1"]
    assert "eval_pass@1" not in trainer.evaluate(addition_dataset(4))
    assert "test_pass@1" not in trainer.predict(addition_dataset(4)).metrics
    trainer.args.eval_max_problems = 4
    with pytest.raises(ValueError, match="eval_max_problems"):
        trainer.evaluate()


def test_prompts_of_benchmarks_are_checked_before_the_model_is_loaded(tmp_path, model_path):
    (tmp_path / "long.jsonl").write_text('{"problem": "' + 600 * "1" + '", "answer": "2"}\n')
    with pytest.raises(ValueError, match="of long has a prompt of"):
        build(PACSTrainer, tmp_path, model_path, eval_benchmarks=[str(tmp_path / "long.jsonl")])
    with pytest.raises(ValueError, match="rollout_func"):
        build_trainer(tmp_path, replay=lambda prompts, trainer: {}, eval_benchmarks=[held_out()])


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_the_best_checkpoint_by_reward_unless_named_otherwise(tmp_path, trainer_class):
    """Rewards rise and fall with the step; the loss of an evaluation does not depend on them."""
    by_step = {1: 0.2, 2: 0.6, 3: 0.4}

    def reward(completions, trainer_state, **kwargs):
        return [by_step.get(trainer_state.global_step, 0.0) + 0.1 * y for y in digit_reward(completions)]

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    more = {"eval_dataset": addition_dataset(4)}
    arguments = {"reward": reward, "trainer_class": trainer_class, "more": more, "load_best_model_at_end": True}
    trainer = build_trainer(tmp_path, **arguments, **settings)
    trainer.train()
    rewards = {log["step"]: log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log}
    assert trainer.state.best_global_step == max(rewards, key=rewards.get) == 2
    assert trainer.state.best_metric == rewards[2]


def test_an_evaluation_without_a_verdict_is_not_the_best(tmp_path):
    def reward(completions, trainer_state, **kwargs):
        return [None] * len(completions) if trainer_state.global_step == 1 else digit_reward(completions)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    more = {"eval_dataset": addition_dataset(4)}
    trainer = build_trainer(tmp_path, reward=reward, more=more, load_best_model_at_end=True, **settings)
    trainer.train()
    assert trainer.state.best_global_step == 2


def test_the_metric_of_the_best_checkpoint_must_be_measured(tmp_path, model_path):
    """Before the model is loaded, of which there are no weights."""
    AutoConfig.from_pretrained(model_path).save_pretrained(tmp_path / "config")
    several = {"easy": addition_dataset(2), "hard": addition_dataset(4)}
    saving = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for examples, more, suggested in (
        (several, {}, "eval_easy_reward"),
        (several, {"metric_for_best_model": "eval_other_reward"}, "eval_easy_reward"),
        (None, {"metric_for_best_model": "eval_reward", **BENCHMARKS}, "eval_pass@1"),
    ):
        arguments = {"model": str(tmp_path / "config"), "more": {"eval_dataset": examples}}
        with pytest.raises(ValueError, match=f"metric_for_best_model=.*{suggested}"):
            build_trainer(tmp_path, **arguments, load_best_model_at_end=True, **saving, **more)

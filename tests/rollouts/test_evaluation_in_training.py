"""An evaluation leaves no trace in training: the same bits with and without one, wherever it is called."""

import random

import numpy as np
import pytest
import torch
from peft import LoraConfig
from replay import TOKENIZER, Parity, Recorder, addition_dataset, build_trainer, digit_reward, trainable_weights

from pacs_trl import PACSTrainer
from pacs_trl.baselines.grpo_trainer import GRPOTrainer
from pacs_trl.baselines.ppo_trainer import PPOTrainer
from pacs_trl.experimental.genac import GenACTrainer
from pacs_trl.rollouts import evaluation


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 0.05,
    "optim": "sgd",
    "max_steps": 3,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
BENCHMARKS = {"eval_benchmarks": "miniature/addition", "eval_max_problems": 5, "eval_num_samples": 4}
BENCHMARKS |= {"eval_temperature": 0.7, "eval_top_p": 0.9}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, **BENCHMARKS}
CRITIC = {"critic_prompt": "miniature", "critic_max_new_tokens": 4, "critic_pretraining_steps": 1}
TRAINERS = [PACSTrainer, GRPOTrainer, PPOTrainer, GenACTrainer]


def noisy_reward(completions, **kwargs):
    """A reward function that draws random numbers of its own, from both global generators."""
    return [y * random.random() * np.random.random() for y in digit_reward(completions)]


@pytest.fixture(autouse=True)
def half_are_correct(monkeypatch):
    monkeypatch.setattr(evaluation, "shared_verifier", Parity)


def build(trainer_class, output_dir, model_path, more=None, **settings):
    """A trainer whose completions are sampled by transformers."""
    config = trainer_class._config_class
    given = SETTINGS | (CRITIC if trainer_class is GenACTrainer else {})
    data = {"train_dataset": addition_dataset(), "eval_dataset": addition_dataset(4), "processing_class": TOKENIZER}
    return trainer_class(
        model_path, noisy_reward, args=config(str(output_dir), **(given | settings)), **(data | (more or {}))
    )


def assert_equal_weights(first, second):
    for name in ("model", "critic") if hasattr(first, "critic") else ("model",):
        expected, found = (trainable_weights(getattr(trainer, name)) for trainer in (first, second))
        assert all(torch.equal(weight, found[key]) for key, weight in expected.items()), name


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_a_run_with_evaluations_learns_the_same(tmp_path, model_path, trainer_class):
    plain = build(trainer_class, tmp_path, model_path)
    plain.train()
    evaluated = build(trainer_class, tmp_path, model_path, **EVALUATING)
    evaluated.train()
    assert sum("eval_reward" in entry and "eval_pass@4" in entry for entry in evaluated.state.log_history) == 4
    assert_equal_weights(plain, evaluated)


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
    assert_equal_weights(plain, evaluated)


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
        assert_equal_weights(plain, resumed)


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


def test_casting_the_weights_for_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bf16_full_eval"):
        build_trainer(tmp_path, bf16_full_eval=True)


def test_benchmarks_alone_have_their_own_sampling(tmp_path, model_path, engine):
    """Generated by the engine of training, without a held-out set; the weights are those without benchmarks."""
    settings, requests = engine
    asked, runs, seeds = set(), [], []
    for more in ({}, EVALUATING | {"eval_benchmarks": ["miniature/addition", "miniature/equation"]}):
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
    assert_equal_weights(*runs)
    assert asked == {(True, 1.0, 1.0), (False, 0.7, 0.9)}
    assert len(seeds[1]) >= 2 * len(seeds[0]) and seeds[0] <= seeds[1]
    logs = [entry for entry in runs[1].state.log_history if "eval_runtime" in entry]
    assert len(logs) == 4 and not any("eval_completions/mean_length" in log for log in logs)
    for log in logs:
        assert 0 <= log["eval_pass@1_lower"] <= log["eval_pass@1"] <= log["eval_pass@1_upper"] <= 1
        values = [log[f"eval_miniature/{task}/pass@4"] for task in ("addition", "equation")]
        assert log["eval_pass@4"] == pytest.approx(sum(values) / 2) and log["eval_pass@4"] >= log["eval_pass@1"]
        shares = [log.get(f"eval_miniature/addition/verification/{outcome}", 0) for outcome in ("correct", "wrong")]
        assert sum(shares) == pytest.approx(1) and shares[0] == pytest.approx(log["eval_miniature/addition/pass@1"])
        assert 0 < log["eval_miniature/addition/mean_length"] <= 8 and log["eval_samples_per_second"] > 0


@pytest.mark.parametrize("lora", [False, True])
def test_the_best_checkpoint_by_pass_at_1(tmp_path, model_path, lora):
    """Also in a run that is resumed after its second step."""
    found, recorder = [], Recorder()
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "load_best_model_at_end": True}
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    for directory, resume in (("straight", None), ("again", tmp_path / "straight" / "checkpoint-2")):
        torch.manual_seed(0)
        more = {"eval_dataset": None, "peft_config": adapter, "callbacks": [] if resume else [recorder]}
        settings = EVALUATING | saving | {"eval_on_start": False, "metric_for_best_model": "eval/pass@1"}
        trainer = build(PACSTrainer, tmp_path / directory, model_path, more, **settings)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        found.append((trainer, [log["eval_pass@1"] for log in trainer.state.log_history if "eval_pass@1" in log]))
    (straight, values), (again, values_again) = found
    assert values == values_again and len(values) == 4 and straight.state.best_metric == max(values)
    best = 1 + values.index(max(values))
    assert straight.state.best_global_step == again.state.best_global_step == best
    assert_equal_weights(straight, again)
    expected = [*recorder.weights, {}][best]
    assert all(
        torch.equal(weight, expected[name]) for name, weight in trainable_weights(again.model).items() if expected
    )


def test_greedy_completions_with_the_real_verifier(tmp_path, model_path, monkeypatch):
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
        build_trainer(tmp_path, replay=lambda prompts, trainer: {}, eval_benchmarks=["miniature/addition"])

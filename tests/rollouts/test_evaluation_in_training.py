"""An evaluation leaves no trace in training: the same bits with and without one, wherever it is called."""

import random

import numpy as np
import pytest
import torch
from replay import TOKENIZER, addition_dataset, build_trainer, digit_reward, trainable_weights

from pacs_trl import PACSTrainer
from pacs_trl.baselines.grpo_trainer import GRPOTrainer
from pacs_trl.baselines.ppo_trainer import PPOTrainer
from pacs_trl.experimental.genac import GenACTrainer


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
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
CRITIC = {"critic_prompt": "miniature", "critic_max_new_tokens": 4, "critic_pretraining_steps": 1}
TRAINERS = [PACSTrainer, GRPOTrainer, PPOTrainer, GenACTrainer]


def noisy_reward(completions, **kwargs):
    """A reward function that draws random numbers of its own, from both global generators."""
    return [y * random.random() * np.random.random() for y in digit_reward(completions)]


def build(trainer_class, output_dir, model_path, **settings):
    """A trainer whose completions are sampled by transformers."""
    config = trainer_class._config_class
    given = SETTINGS | (CRITIC if trainer_class is GenACTrainer else {})
    return trainer_class(
        model_path,
        noisy_reward,
        args=config(str(output_dir), **(given | settings)),
        train_dataset=addition_dataset(),
        eval_dataset=addition_dataset(4),
        processing_class=TOKENIZER,
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
    assert sum("eval_reward" in entry for entry in evaluated.state.log_history) == 4
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


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
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

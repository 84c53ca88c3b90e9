"""Settings that are changed after they have been built into a trainer: rejected by name, never ignored."""

import pytest
from replay import TOKENIZER, Replay, addition_dataset, build_trainer, digit_reward, tiny_model
from transformers import TrainerCallback

from pacs_trl import GRPOConfig, GRPOTrainer, PPOConfig
from pacs_trl.baselines.ppo_trainer import PPOTrainer


BUILT_IN = {
    "pacs_beta": 2.0,
    "class_weighting": "none",
    "score_estimator": "dr_grpo",
    "reference": "snapshot",
    "group_layout": "split",
    "temperature": 0.7,
    "num_iterations": 2,
    "num_generations": 8,
    "max_completion_length": 4,
    "beta": 0.1,
    "reward_weights": [0.5],
    "generation_kwargs": {"min_new_tokens": 2},
    "seed": 1,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "gradient_checkpointing": True,
    "report_to": ["tensorboard"],
}


class Set(TrainerCallback):
    """Sets a setting at an event."""

    def __init__(self, event, name, value):
        setattr(self, event, lambda args, state, control, **kwargs: setattr(args, name, value))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return build_trainer(tmp_path_factory.mktemp("run"), replay=Replay(), more={"eval_dataset": addition_dataset(8)})


@pytest.mark.parametrize("name", BUILT_IN)
def test_changed_before_training_or_evaluation(trainer, monkeypatch, name):
    monkeypatch.setattr(trainer.args, name, BUILT_IN[name])
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*[Cc]onstruct a new trainer"):
            call()


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end", "on_log"])
def test_changed_by_a_callback_during_training(tmp_path, event):
    trainer = build_trainer(tmp_path, replay=Replay(), more={"callbacks": [Set(event, "pacs_beta", 0.5)]})
    with pytest.raises(ValueError, match="pacs_beta"):
        trainer.train()


def test_changed_within_a_dict(tmp_path):
    trainer = build_trainer(tmp_path, generation_kwargs={"min_new_tokens": 1})
    trainer.args.generation_kwargs["min_new_tokens"] = 2
    with pytest.raises(ValueError, match="generation_kwargs"):
        trainer.train()


def test_settings_of_the_optimizer_are_built_in_when_it_is(tmp_path):
    """Trainer keeps its optimizer for a second run, with the rate of the first."""
    trainer = build_trainer(tmp_path, replay=Replay())
    trainer.args.learning_rate = 0.25
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.25
    trainer.args.learning_rate = 0.5
    with pytest.raises(ValueError, match="learning_rate"):
        trainer.train()


def test_settings_that_are_read_when_they_are_needed(tmp_path):
    trainer = build_trainer(tmp_path / "first", replay=Replay(), more={"eval_dataset": addition_dataset(8)})
    for name, value in {
        "max_steps": 3,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "output_dir": str(tmp_path / "second"),
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
    }.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3]
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 1
    assert (tmp_path / "second" / "checkpoint-2").is_dir()
    trainer.args.num_train_epochs, trainer.args.max_steps = 0.25, -1
    trainer.train()
    assert trainer.state.global_step == 4


def test_of_the_baselines(tmp_path, model_path):
    settings = {
        "use_cpu": True,
        "bf16": False,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "report_to": "none",
    }
    data = {"train_dataset": addition_dataset(), "processing_class": TOKENIZER}
    grpo = GRPOTrainer(tiny_model(), digit_reward, args=GRPOConfig(str(tmp_path), **settings), **data)
    ppo = PPOTrainer(model_path, digit_reward, args=PPOConfig(str(tmp_path), **settings), **data)
    # the critic has its optimizer from the start
    for trainer, name in ((grpo, "epsilon"), (grpo, "beta"), (ppo, "value_clip_range"), (ppo, "weight_decay")):
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, 0.01)
        with pytest.raises(ValueError, match=name):
            trainer.train()
        setattr(trainer.args, name, before)

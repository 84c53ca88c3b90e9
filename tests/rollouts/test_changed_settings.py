"""Settings that are changed after they have been built into a trainer: rejected by name, never ignored."""

import pytest
from replay import Replay, addition_dataset, build_trainer
from transformers import TrainerCallback


FIXED = {
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
    "learning_rate": 0.5,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "gradient_checkpointing": True,
    "report_to": ["tensorboard"],
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return build_trainer(tmp_path_factory.mktemp("run"), replay=Replay(), more={"eval_dataset": addition_dataset(8)})


@pytest.mark.parametrize("name", FIXED)
def test_changed_before_training_or_evaluation(trainer, monkeypatch, name):
    monkeypatch.setattr(trainer.args, name, FIXED[name])
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call()


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end", "on_log"])
def test_changed_by_a_callback_within_a_dict(tmp_path, event):
    change = lambda args, state, control, **kwargs: args.generation_kwargs.update(min_new_tokens=2)  # noqa: E731
    more, callback = {"generation_kwargs": {"min_new_tokens": 1}}, TrainerCallback()
    setattr(callback, event, change)
    with pytest.raises(ValueError, match="generation_kwargs"):
        build_trainer(tmp_path, replay=Replay(), more={"callbacks": [callback]}, **more).train()


def test_settings_that_are_read_when_they_are_needed(tmp_path):
    trainer = build_trainer(tmp_path / "first", replay=Replay(), more={"eval_dataset": addition_dataset(8)})
    live = {"max_steps": 3, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "max_grad_norm": 1.0}
    live |= {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "second")}
    for name, value in (live | {"per_device_eval_batch_size": 4, "lr_scheduler_type": "linear"}).items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3]
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 1
    assert (tmp_path / "second" / "checkpoint-2").is_dir()
    trainer.args.num_train_epochs, trainer.args.max_steps = 0.25, -1
    trainer.train()
    assert trainer.state.global_step == 4

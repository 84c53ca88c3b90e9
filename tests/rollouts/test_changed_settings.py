"""Settings that are changed after they have been built into a trainer: rejected by name, never ignored."""

import pytest
from support.rollouts import Replay, addition_dataset
from support.runs import build_trainer


FIXED = {"pacs_beta": 2.0, "class_weighting": "none", "score_estimator": "dr_grpo", "reference": "snapshot"}
FIXED |= {"group_layout": "split", "temperature": 0.7, "num_iterations": 2, "num_generations": 8, "seed": 1}
FIXED |= {"max_completion_length": 4, "beta": 0.1, "reward_weights": [0.5], "optim": "adamw_torch"}
FIXED |= {"generation_kwargs": {"min_new_tokens": 2}, "per_device_train_batch_size": 16}
FIXED |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "report_to": ["tensorboard"]}


def test_settings_changed_before_training_or_evaluation_are_refused(tmp_path, monkeypatch):
    trainer = build_trainer(tmp_path, replay=Replay(), more={"eval_dataset": addition_dataset(8)})
    for name, value in FIXED.items():
        with monkeypatch.context() as changed:
            changed.setattr(trainer.args, name, value)
            for call in (trainer.train, trainer.evaluate):
                with pytest.raises(ValueError, match=rf"\b{name}\b"):
                    call()


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

"""Trainers on the tiny model, and records of their runs.

`Recorder` keeps weights and gradients of every optimizer step. What they should be is in `long_way.py`.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TrainerCallback

from pacs_trl import PACSConfig, PACSTrainer
from support.models import TOKENIZER, assert_same_models, tiny_model, trainable_weights
from support.rollouts import MAX_COMPLETION_LENGTH, addition_dataset, digit_reward, stored_label, stored_steps
from support.seeds import shifted
from support.sharding import full


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": shifted(42),
}


def config(output_dir: str | Path, config_class=PACSConfig, **overrides) -> PACSConfig:
    return config_class(str(output_dir), **(SETTINGS | overrides))


def build_trainer(
    output_dir: str | Path, *, model=None, reward=None, replay=None, trainer_class=None, more=None, **settings
) -> PACSTrainer:
    """A trainer on the tiny model; `settings` go to the configuration, `more` to the trainer."""
    trainer_class = trainer_class or PACSTrainer
    arguments = {"train_dataset": addition_dataset(), "processing_class": TOKENIZER, "rollout_func": replay}
    stored = stored_steps if getattr(replay, "steps", False) else stored_label
    return trainer_class(
        tiny_model() if model is None else model,
        reward or (digit_reward if replay is None else stored),
        args=config(output_dir, trainer_class._config_class, **settings),
        **(arguments | (more or {})),
    )


class Recorder(TrainerCallback):
    """Weights before, and gradients at, every optimizer step."""

    def __init__(self):
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(trainable_weights(model))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            {
                name.removeprefix("module."): None if p.grad is None else full(p.grad)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )


def spy_on(owner, name: str, note: Callable) -> None:
    """Let `note(result, *arguments)` follow each call of a method of `owner`."""
    method = getattr(owner, name)

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def out_of_memory_in(trainer, number: int) -> None:
    """Let a trainer run out of memory in the forward pass `number` with gradient, in its last layer: DDP has sent its
    buffers by then."""
    passes = 0

    def count(*inputs):
        nonlocal passes
        passes += torch.is_grad_enabled()
        if passes == number and torch.is_grad_enabled():
            raise torch.OutOfMemoryError

    trainer.forward_pass.backbone.layers[-1].register_forward_hook(count)


def assert_resumes(build: Callable, directory: Path, *steps: int) -> tuple:
    """Compare runs that go on after each of `steps` with one without a stop, bit by bit. `build(output_dir)` returns a
    trainer that saves every step. Returns the run without a stop and the last other one."""
    straight = build(directory / "straight")
    straight.train()
    for step in steps:
        again = build(directory / "again")
        again.train(resume_from_checkpoint=str(directory / "straight" / f"checkpoint-{step}"))
        assert_same_models(straight, again)
    return straight, again

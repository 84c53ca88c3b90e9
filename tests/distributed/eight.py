"""Scenarios for eight processes, and the same runs on one; see `test_eight_processes.py`.

Each is a run of 32 completions per generation batch, in groups of 8, which is more than a process of eight generates.
"""

import os
from pathlib import Path
from typing import Any

import torch
from scenarios import numbered
from support import actor_critics
from support.long_way import RaggedGroups
from support.models import LORA, trainable_weights
from support.rollouts import Replay, addition_dataset
from support.runs import build_trainer
from support.seeds import shifted
from support.sharding import (
    FSDP_SETTINGS,
    let_accelerate_run_deepspeed_on_cpu,
    let_accelerate_shard_on_cpu,
    zero3_settings,
)

from pacs_trl import GRPOTrainer, PACSTrainer, PPOTrainer, REALTrainer
from pacs_trl.update.step_sizes import BatchSizes


# Weights move by the gradient itself (plain gradient descent), or by one that rounding does not turn around.
ADAM = {"optim": "adamw_torch", "adam_epsilon": 1e-2, "learning_rate": 3e-3}
# Settings for eight processes; `BatchSizes.for_processes` makes those for other numbers.
ONE_UPDATE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
TWO_UPDATES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
FOUR_UPDATES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "steps_per_generation": 4}

Scenario = tuple[type, dict[str, Any], dict[str, Any]]  # trainer, settings, settings of the replay
SCENARIOS: dict[str, Scenario] = {
    "PACS": (PACSTrainer, ONE_UPDATE | {"max_steps": 3}, {"unverifiable": 0.2}),
    "PACS, snapshot": (
        PACSTrainer,
        TWO_UPDATES | ADAM | {"reference": "snapshot", "reference_reset_steps": 2, "max_steps": 4},
        {},
    ),
    "GRPO, four updates": (GRPOTrainer, FOUR_UPDATES | {"epsilon": 0.01, "beta": 0.1, "max_steps": 8}, {}),
    "REAL": (REALTrainer, TWO_UPDATES | {"max_steps": 4}, {}),
    # 8 completions of one group in an optimizer step, with and without a gradient
    "no completion, no gradient": (GRPOTrainer, FOUR_UPDATES | {"max_steps": 4}, {"uniform_groups": 2}),
    "ragged groups": (RaggedGroups, TWO_UPDATES | {"max_tokens_per_micro_batch": 60, "max_steps": 4}, {}),
}
WITH_CRITIC = {"num_iterations": 2, "max_grad_norm": 0.5, "gae_lambda": 0.9, "loss_type": "dapo", "max_steps": 4}


def sized(settings: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """The settings of a scenario for another number of processes."""
    sizes = {name: settings[name] for name in ONE_UPDATE}
    step = BatchSizes(num_processes=8, num_generations=8, **sizes).for_processes(num_processes)
    return settings | {name: getattr(step, name) for name in ONE_UPDATE} | {"num_generations": 8}


def run(
    directory: Path, name: str, num_processes: int, model_path: str, *, lora: bool = False, **more_settings
) -> dict[str, Any]:
    trainer_class, settings, replay_options = SCENARIOS[name]
    torch.manual_seed(shifted(0))  # of the adapter
    trainer = build_trainer(
        directory / name,
        model=model_path,
        trainer_class=trainer_class,
        replay=Replay(num_generations=8, **replay_options),
        more={"peft_config": LORA if lora else None},
        **sized(settings, num_processes) | more_settings,
    )
    start = trainable_weights(trainer.model) if num_processes == 1 else {}
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(directory / name / "saved"))
    return {"start": start, "final": trainable_weights(trainer.model), "losses": [entry["loss"] for entry in logs]}


def run_ppo(directory: Path, num_processes: int, model_path: str, **more_settings) -> dict[str, Any]:
    replay = Replay(num_generations=8, tools=True, unverifiable=0.1)
    settings = sized(ONE_UPDATE | ADAM | WITH_CRITIC, num_processes) | more_settings
    trainer = actor_critics.build(PPOTrainer, directory / "ppo", model_path, replay=replay, **settings)
    start = trainable_weights(trainer.model) if num_processes == 1 else {}
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"start": start, "final": trainable_weights(trainer.model), "losses": [entry["loss"] for entry in logs]}


def evaluate(directory: Path, num_processes: int, **more_settings) -> dict[str, float]:
    """An evaluation on five prompts with four completions each, which eight processes fill up to eight prompts. FSDP2
    shards the model when training begins, with a learning rate of 0 here."""

    def reward(prompts, completion_ids, **kwargs):
        return [(len(str(prompt)) + 3 * len(ids)) % 7 / 7 for prompt, ids in zip(prompts, completion_ids)]

    trainer = build_trainer(
        directory / "evaluation",
        trainer_class=GRPOTrainer,
        reward=reward,
        more={"eval_dataset": addition_dataset(5), "rollout_func": numbered},
        per_device_eval_batch_size=32 // num_processes,
        num_generations_eval=4,
        **sized(ONE_UPDATE, num_processes) | {"max_steps": 1, "learning_rate": 0.0} | more_settings,
    )
    trainer.train()
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("loss", "entropy", "reward", "reward_std")}


def resumed(directory: Path, num_processes: int, checkpoint: str | None, **more_settings) -> dict[str, Any]:
    """A run of six steps with a snapshot that starts, or continues from a checkpoint."""
    step = BatchSizes(num_processes=8, num_generations=8, **TWO_UPDATES).for_processes(num_processes)
    trainer = build_trainer(
        directory,
        replay=Replay(num_generations=8),
        **ADAM | step.settings | {"reference": "snapshot", "reference_reset_steps": 4, "max_steps": 6},
        save_strategy="steps",
        save_steps=1,
        **more_settings,
    )
    start = trainable_weights(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"start": start, "final": trainable_weights(trainer.model), "losses": losses}


def settings_of(kind: str) -> dict[str, Any]:
    """What makes a launch DDP, FSDP2, hybrid sharding over 2 x 4 processes, or ZeRO-3."""
    if kind == "zero3":
        let_accelerate_run_deepspeed_on_cpu()
        return zero3_settings(0)
    if kind in ("fsdp2", "hybrid"):
        let_accelerate_shard_on_cpu()
        return FSDP_SETTINGS
    return {}


def run_all(directory: Path, kind: str, model_path: str) -> dict[str, Any]:
    """All scenarios of a kind, on each process of a launch."""
    settings, number = settings_of(kind), int(os.environ["WORLD_SIZE"])
    if kind == "lora":
        return {
            name: run(directory, name, number, model_path, lora=True)
            for name in ("PACS, snapshot", "GRPO, four updates")
        }
    results = {}
    for name in SCENARIOS:
        print(name, flush=True)
        results[name] = run(directory, name, number, model_path, **settings)
    if kind != "zero3":  # which PPO refuses
        print("PPO", flush=True)
        results["PPO"] = run_ppo(directory, number, model_path, **settings)
    results["evaluation"] = evaluate(directory, number, **settings)
    if kind in ("ddp", "fsdp2"):
        print("saving for another number", flush=True)
        results["straight"] = resumed(directory / "straight", number, None, **settings)
    return results


def continue_all(directory: Path, kind: str, checkpoint: str) -> dict[str, Any]:
    """The run that is resumed, on each process of a launch of another number."""
    number = int(os.environ["WORLD_SIZE"])
    return resumed(directory / f"continued by {number}", number, checkpoint, **settings_of(kind))

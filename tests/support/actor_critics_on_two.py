"""Trainers with a critic on one process and on two: what each saw, and the comparison, for PPO and GenAC.

The rollouts are recorded, so that one process and two learn from the same rows; with two updates on all rows of each
generation, the order in which TRL shuffles them does not matter.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from support.models import trainable_weights
from support.processes import on_two, run_and_save
from support.rollouts import Replay
from support.runs import assert_resumes
from support.sharding import let_accelerate_shard_on_cpu


SETTINGS = {
    "optim": "adamw_torch",  # torch cannot load a full state of shards that is empty, as that of plain descent
    "adam_epsilon": 1e-2,  # or rounding would decide the sign of a step
    "num_iterations": 2,
    "max_grad_norm": 0.5,
    "gae_lambda": 0.9,
    "loss_type": "dapo",  # its denominator counts tokens over processes
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 3,  # in the middle of the second generation
}


def train(build: Callable, directory: Path, num_processes: int) -> dict:
    """Train on each process, and train again from the middle; weights and logs. `build(output_dir, **settings)`
    returns the trainer."""
    if os.environ.get("ACCELERATE_USE_FSDP"):
        let_accelerate_shard_on_cpu()
    settings = SETTINGS | {"per_device_train_batch_size": 8 // num_processes}
    trainer, _ = assert_resumes(
        lambda output_dir: build(output_dir, replay=Replay(tools=True, unverifiable=0.1), **settings), directory, 3
    )
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    sharded = [isinstance(model, FSDPModule) for model in (trainer.model_wrapped, trainer.critic)]
    weights = {name: trainable_weights(getattr(trainer, name)) for name in ("model", "critic")}
    return weights | {"logs": logs, "sharded": sharded}


def assert_two_processes_equal_one(build: Callable, directory: Path, one: dict, metrics: str, mode: dict) -> None:
    """Compare a run on two processes with `one`, which `train` has returned for one: weights, and the losses and the
    metrics whose names begin with `metrics`."""
    on_two(run_and_save, train, (build, directory, 2), directory, outputs=directory, **mode)
    two = torch.load(directory / "result.0")
    assert two["sharded"] == [bool(mode)] * 2
    for name in ("model", "critic"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(two["logs"], one["logs"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in {"loss", *filter(lambda key: key.startswith(metrics), theirs)}:
            expected = None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
            assert mine[key] == expected, key

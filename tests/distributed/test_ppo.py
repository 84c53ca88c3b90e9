"""PPO and GenAC on two processes equal themselves on one: weights of policy and critic, with DDP and with FSDP2, and a
resumed run.

The rollouts are recorded, so that one process and two learn from the same rows; with two updates on all rows of each
generation, the order in which TRL shuffles them does not matter.
"""

import os
from pathlib import Path

import pytest
import torch
from support import actor_critics
from support.models import trainable_weights
from support.problems import CRITIC_PROMPT
from support.processes import on_two, run_and_save
from support.rollouts import Replay
from support.runs import assert_resumes
from support.sharding import let_accelerate_shard_on_cpu
from torch.distributed.fsdp import FSDPModule

from pacs_trl import PPOTrainer
from pacs_trl.experimental.genac import GenACTrainer


pytestmark = pytest.mark.trains

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
CRITIC = {"critic_prompt": CRITIC_PROMPT, "critic_max_new_tokens": 5, "critic_pretraining_steps": 1, "max_segments": 3}
METHODS = {"ppo": (PPOTrainer, {}), "genac": (GenACTrainer, CRITIC)}


def train(output_dir: Path, model_path: str, num_processes: int, method: str):
    """Train, and train again from the middle; weights and logs."""
    trainer_class, more = METHODS[method]
    more = more | SETTINGS | {"per_device_train_batch_size": 8 // num_processes}

    def build(directory):
        replay = Replay(tools=True, unverifiable=0.1)
        trainer = actor_critics.build(trainer_class, directory, model_path, replay=replay, **more)
        if method == "genac":  # an untrained critic writes no tags
            trainer._prompt.parse = lambda text: len(text) % 11 / 10
        return trainer

    trainer, _ = assert_resumes(build, output_dir / method, 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    sharded = [isinstance(model, FSDPModule) for model in (trainer.model_wrapped, trainer.critic)]
    weights = {name: trainable_weights(getattr(trainer, name)) for name in ("model", "critic")}
    return weights | {"logs": logs, "sharded": sharded}


def train_all(output_dir: Path, model_path: str, num_processes: int) -> dict:
    if os.environ.get("ACCELERATE_USE_FSDP"):
        let_accelerate_shard_on_cpu()
    return {method: train(output_dir, model_path, num_processes, method) for method in METHODS}


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, model_path) -> dict:
    return train_all(tmp_path_factory.mktemp("one"), model_path, 1)


@pytest.mark.parametrize("mode", [{}, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.slow
def test_two_processes_equal_one_and_resume(tmp_path, model_path, one_process, mode):
    on_two(run_and_save, train_all, (tmp_path, model_path, 2), tmp_path, outputs=tmp_path, **mode)
    for method, two in torch.load(tmp_path / "result.0").items():
        one = one_process[method]
        assert two["sharded"] == [bool(mode)] * 2
        for name in ("model", "critic"):
            torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(two["logs"], one["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for key in {"loss", *filter(lambda key: key.startswith(f"{method}/"), theirs)}:
                expected = None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
                assert mine[key] == expected, f"{method} {key}"

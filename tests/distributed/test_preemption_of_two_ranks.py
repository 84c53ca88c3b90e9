"""SIGTERM or Ctrl-C that reaches one of two ranks, or their launcher: both save the same step and exit; the next
launch continues."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.models import TOKENIZER, tiny_model
from support.processes import start
from support.rollouts import digit_reward
from support.scripted import run_recipe
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pacs_trl.rollouts.checkpoint_files import last_checkpoint


def reward(completions, trainer_state, **kwargs):
    """In the middle of a step the signal comes."""
    rank, target = os.environ["RANK"], os.environ["STOPPING"]
    if target == "one rank" and rank == "1" and trainer_state.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if target == "launcher" and rank == "0" and trainer_state.global_step == 4:
        os.kill(os.getppid(), signal.SIGTERM)
    if target == "launcher, by Ctrl-C" and rank == "0" and trainer_state.global_step > int(os.environ["AFTER"]) + 1:
        os.kill(os.getppid(), signal.SIGINT)
    return digit_reward(completions)


def train(directory):
    settings = {"reward_funcs": "test_preemption_of_two_ranks.reward", "per_device_train_batch_size": 4}
    settings |= {"steps_per_generation": 2, "max_completion_length": 8, "max_steps": 1000, "disable_tqdm": True}
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "resume_from_checkpoint": "last"}
    run_recipe(directory / "run", directory / "start", **settings)


def launcher(directory):
    """What torchrun does, but for ranks that are forked."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    elastic_launch(config, train)(directory)


def launch(tmp_path, target, after=0) -> str:
    output = tmp_path / "output"
    process = start(launcher, tmp_path, output=output, STOPPING=target, AFTER=str(after), ACCELERATE_USE_CPU="true")
    process.join(600)
    process.kill()
    return output.read_text()


@pytest.mark.slow
def test_both_ranks_stop_after_the_same_step(tmp_path):
    tiny_model().save_pretrained(tmp_path / "start")
    TOKENIZER.save_pretrained(tmp_path / "start")
    # rewards are asked for in the first step of a generation, which has two: the signal comes in the third step
    printed = launch(tmp_path, "one rank")
    assert "Stopped by SIGTERM after optimizer step 3 of 1000" in printed, printed[-3000:]
    assert re.search(r"exitcode *: 143", printed), printed[-3000:]
    checkpoint = Path(last_checkpoint(tmp_path / "run"))
    assert checkpoint.name == "checkpoint-3"
    assert sorted(file.name for file in checkpoint.glob("pacs_state_*")) == ["pacs_state_0.pt", "pacs_state_1.pt"]

    # the launcher sends the signal on to both ranks, at whatever moment of a step
    printed = launch(tmp_path, "launcher")
    second = re.search(r"Stopped by SIGTERM after optimizer step (\d+) of 1000", printed)
    assert second, printed[-3000:]
    state = json.loads((Path(last_checkpoint(tmp_path / "run")) / "trainer_state.json").read_text())
    assert [log["step"] for log in state["log_history"] if "loss" in log] == list(range(1, int(second[1]) + 1))

    # torchrun sends Ctrl-C on, too; the ranks are not in the terminal's process group
    printed = launch(tmp_path, "launcher, by Ctrl-C", after=int(second[1]))
    third = re.search(r"Stopped by Ctrl-C after optimizer step (\d+) of 1000.*Exit code 130", printed)
    assert third, printed[-3000:]
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / f"checkpoint-{third[1]}")

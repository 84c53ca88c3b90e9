"""SIGTERM that reaches one of two ranks, or their launcher: both save the same step and leave; the next launch goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from replay import TOKENIZER, tiny_model

from pacs_trl.rollouts.resume import last_checkpoint


pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent


def launch(tmp_path, target, max_steps):
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "STOPPING": target, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "pacs_trl.train", "--config", str(tmp_path / "recipe.yaml"), "--max_steps", str(max_steps)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_both_ranks_stop_after_the_same_step(tmp_path):
    tiny_model().save_pretrained(tmp_path / "start")
    TOKENIZER.save_pretrained(tmp_path / "start")
    recipe = {
        "method": "pacs",
        "model_name_or_path": str(tmp_path / "start"),
        "output_dir": str(tmp_path / "run"),
        "dataset_name": "miniature/addition",
        "reward_funcs": ["stopping.reward"],
        "use_cpu": True,
        "bf16": False,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "max_completion_length": 8,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "resume_from_checkpoint": "last",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    # rewards are asked for in the first step of a generation, which has two: the signal comes in the third step
    stopped = launch(tmp_path, "one rank", 1000)
    assert "Stopped by SIGTERM after optimizer step 3 of 1000" in stopped.stdout, stopped.stderr[-3000:]
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr[-3000:]
    checkpoint = Path(last_checkpoint(tmp_path / "run"))
    assert checkpoint.name == "checkpoint-3"
    assert sorted(file.name for file in checkpoint.glob("pacs_state_*")) == ["pacs_state_0.pt", "pacs_state_1.pt"]

    # torchrun sends the signal on to both ranks, at whatever moment of a step
    stopped = launch(tmp_path, "launcher", 1000)
    second = re.search(r"Stopped by SIGTERM after optimizer step (\d+) of 1000", stopped.stdout)
    assert second, stopped.stderr[-3000:]
    state = json.loads((Path(last_checkpoint(tmp_path / "run")) / "trainer_state.json").read_text())
    assert [log["step"] for log in state["log_history"] if "loss" in log] == list(range(1, int(second[1]) + 1))

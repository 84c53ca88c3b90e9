"""The scripts of recipes/launch, and the commands that `plan` prints."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import TOKENIZER, tiny_model

from pacs_trl.plan.check import main as plan
from pacs_trl.plan.launch import launch_commands
from pacs_trl.rollouts.checkpoint_files import last_checkpoint


FOLDER = Path("recipes/launch")
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_correct_shell_and_say_how_they_are_used(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(script)], check=True)
    without_recipe = subprocess.run([str(script)], capture_output=True, text=True)
    assert without_recipe.returncode == 2 and without_recipe.stderr.startswith("usage: ")


def test_commands_name_the_script_for_one_node_several_and_a_server():
    assert launch_commands("r.yaml", 8, 1)[0] == "GPUS=8 recipes/launch/accelerate.sh r.yaml"
    torchrun = "NNODES=6 NODE_RANK=$NODE_RANK HEAD=$HEAD GPUS=8 recipes/launch/torchrun.sh r.yaml"
    assert launch_commands("r.yaml", 48, 6)[1] == torchrun
    served = launch_commands("r.yaml", 4, 1, served_model="M")
    assert served[0].startswith("recipes/launch/server.sh M")
    assert served[-1].startswith("recipes/launch/four_plus_four.sh r.yaml M")
    assert '--vllm_server_host "$SERVER"' in served[1]
    with pytest.raises(ValueError, match="--nodes is 3, which does not divide 8 processes"):
        launch_commands("r.yaml", 8, 3)


def test_plan_prints_the_commands(capsys):
    plan(["--config", "recipes/qwen3-8b/pacs.yaml", "--num_processes", "64", "--nodes", "8"])
    printed = capsys.readouterr().out
    assert "  sbatch --nodes 8 --gpus-per-node 8 recipes/launch/slurm.sh recipes/qwen3-8b/pacs.yaml\n" in printed
    assert plan(["--config", "recipes/qwen3-8b/pacs.yaml", "--num_processes", "64", "--nodes", "7"]) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_trains_on_two_nodes(tmp_path, monkeypatch):
    """Two launchers on this machine are the nodes, with one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name, value in {"NNODES": 2, "GPUS": 1, "PORT": port, "SHARDING": "ddp", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, str(value))
    tiny_model().save_pretrained(tmp_path / "start")
    TOKENIZER.save_pretrained(tmp_path / "start")
    arguments = ["--model_name_or_path", str(tmp_path / "start"), "--max_steps", "2"]
    arguments += ["--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(tmp_path / "run")]
    arguments += ["--per_device_train_batch_size", "8"]
    nodes = []
    for number in range(2):
        monkeypatch.setenv("NODE_RANK", str(number))
        command = [str(FOLDER / "torchrun.sh"), "recipes/miniature/pacs.yaml", *arguments]
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    printed = [node.communicate(timeout=280)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed[0][-3000:]
    assert Path(last_checkpoint(tmp_path / "run")).name == "checkpoint-2"

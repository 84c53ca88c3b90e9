"""The scripts of recipes/launch, and the commands that `plan` prints."""

import os
import shutil
import socket
import subprocess
import sys
import time
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


# Adds its process to `started`, and on SIGTERM needs half a second. It ends by itself if a test fails.
PROCESS = """#!/bin/bash
trap 'sleep 0.5; echo {message} >> events; exit 143' TERM
echo $$ >> started
for _ in {{1..600}}; do sleep 0.1; done
"""
# Slurm starts a task in its own session, and on SIGTERM its `srun` sends SIGKILL to the task.
SRUN = """#!/bin/bash
trap 'kill -KILL $(cat started)' TERM
setsid ./task &
wait $!
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> events
kill -TERM $(cat started)
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> events
"""


def end_script(folder, command, programs, num_started):
    """Send a script SIGTERM when its processes have started; return its exit code."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    script = subprocess.Popen(command, cwd=folder, env=os.environ | variables)
    while len(lines_of(folder / "started")) < num_started:
        assert script.poll() is None
        time.sleep(0.02)
    script.terminate()
    return script.wait(timeout=60)


def lines_of(file):
    return file.read_text().splitlines() if file.exists() else []


def test_slurm_job_is_requeued_after_its_checkpoint_is_saved(tmp_path):
    programs = {"task": PROCESS.format(message="saved"), "srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
    assert end_script(tmp_path, [(FOLDER / "slurm.sh").absolute(), "r.yaml"], programs, num_started=1) == 0
    events = lines_of(tmp_path / "events")
    assert events[0] == "scontrol show hostnames node[0-1]"
    assert events[1:] == ["scancel --signal=TERM 7", "saved", "scontrol requeue 7"]


@pytest.mark.parametrize(("variables", "processes"), [({"SLURM_GPUS_ON_NODE": "4"}, 8), ({}, 16), ({"GPUS": "2"}, 4)])
def test_slurm_job_starts_one_process_per_gpu_of_its_nodes(tmp_path, monkeypatch, variables, processes):
    """By default 8, if Slurm does not count them; `GPUS` overrides what it counts."""
    programs = {"accelerate": 'echo "accelerate $*"', "srun": 'SLURM_NODEID=0 exec "$@"', "scontrol": "echo head"}
    for name, command in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("GPUS", "SLURM_GPUS_ON_NODE", "ACCELERATE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_NUM_NODES": "2"} | variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = subprocess.run([FOLDER / "slurm.sh", "r.yaml"], capture_output=True, text=True, check=True)
    assert f" --num_processes {processes} " in job.stdout


def test_server_beside_the_training_ends_after_its_checkpoint_is_saved(tmp_path):
    programs = {"accelerate": PROCESS.format(message="saved"), "vllm": PROCESS.format(message="server has ended")}
    command = [(FOLDER / "four_plus_four.sh").absolute(), "r.yaml", "M"]
    assert end_script(tmp_path, command, programs, num_started=2) == 143
    while len(lines_of(tmp_path / "events")) < 2:
        time.sleep(0.02)
    assert lines_of(tmp_path / "events") == ["saved", "server has ended"]


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

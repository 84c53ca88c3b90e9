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


CONFIGS = Path("recipes/accelerate_configs")
RECIPE = "recipes/qwen3-8b/pacs.yaml"  # for 64 processes
FSDP2 = f"ACCELERATE_FILE={CONFIGS}/fsdp2_8x8.yaml"


@pytest.fixture
def commands(capsys):
    """The commands that `plan` prints for a recipe, by script, each without the words before and after them."""

    def run(recipe: str, *arguments: str) -> dict[str, str]:
        plan(["--config", recipe, *arguments])
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "recipes/launch/" in line]
        return {line.split("recipes/launch/")[1].split()[0]: line for line in lines}

    return run


def test_commands_start_what_was_planned_on_one_node_and_several(commands):
    eight_nodes = commands(RECIPE, "--accelerate_config", f"{CONFIGS}/fsdp2_8x8.yaml", "--nodes", "8")
    place = "NNODES=8 NODE_RANK=$NODE_RANK HEAD=$HEAD GPUS=8"
    assert eight_nodes == {
        "accelerate.sh": f"{FSDP2} {place} recipes/launch/accelerate.sh {RECIPE}",
        "torchrun.sh": f"{place} recipes/launch/torchrun.sh {RECIPE}",
        "slurm.sh": f"{FSDP2} sbatch --nodes 8 --gpus-per-node 8 recipes/launch/slurm.sh {RECIPE}",
    }
    one_node = commands(RECIPE, "--accelerate_config", f"{CONFIGS}/fsdp2.yaml", "--nodes", "1")
    assert one_node["torchrun.sh"] == f"GPUS=8 recipes/launch/torchrun.sh {RECIPE}"
    assert one_node["slurm.sh"].endswith(f"slurm.sh {RECIPE} --keep_global_batch false")  # as planned: a smaller batch


def test_commands_have_the_settings_of_the_command_line(commands):
    words = ["--max_steps", "7", "--system_prompt", "Think first.", "--resume", "last"]
    printed = commands(RECIPE, "--accelerate_config", f"{CONFIGS}/fsdp2_8x8.yaml", "--nodes", "8", *words)
    settings = f"{RECIPE} --max_steps 7 --system_prompt 'Think first.' --resume_from_checkpoint last"
    assert len(printed) == 3 and all(command.endswith(settings) for command in printed.values())


SHARDINGS = [
    ("ddp.yaml", 8, "SHARDING=ddp ACCELERATE_MIXED_PRECISION=bf16 "),
    ("single_gpu.yaml", 1, "SHARDING=ddp ACCELERATE_MIXED_PRECISION=bf16 "),
    ("zero3.yaml", 8, None),
]


@pytest.mark.parametrize(("file", "gpus", "torchrun"), SHARDINGS)
def test_torchrun_shards_as_the_accelerate_file_or_is_not_printed(commands, file, gpus, torchrun):
    printed = commands(RECIPE, "--accelerate_config", f"{CONFIGS}/{file}", "--nodes", "1")
    assert printed["accelerate.sh"].startswith(f"ACCELERATE_FILE={CONFIGS}/{file} GPUS={gpus} ")
    words = None if torchrun is None else f"{torchrun}GPUS={gpus} recipes/launch/torchrun.sh {RECIPE}"
    assert printed.get("torchrun.sh") == words


def test_torchrun_is_not_printed_for_other_fsdp_than_that_of_its_script(commands, tmp_path):
    file = tmp_path / "offload.yaml"
    file.write_text((CONFIGS / "fsdp2.yaml").read_text().replace("offload_params: false", "offload_params: true"))
    assert set(commands(RECIPE, "--accelerate_config", str(file), "--nodes", "1")) == {"accelerate.sh", "slurm.sh"}


def test_without_an_accelerate_file_the_commands_start_ddp(commands):
    printed = commands(RECIPE, "--num_processes", "4", "--nodes", "2")
    assert printed["accelerate.sh"].startswith(f"ACCELERATE_FILE={CONFIGS}/ddp.yaml NNODES=2 ")
    assert printed["torchrun.sh"].startswith("SHARDING=ddp NNODES=2 ")
    in_float32 = commands(RECIPE, "--num_processes", "4", "--nodes", "2", "--bf16", "false")
    assert set(in_float32) == {"torchrun.sh"}  # ddp.yaml sets bfloat16
    on_cpu = commands("recipes/miniature/pacs.yaml", "--nodes", "1", "--use_cpu", "true")
    words = "GPUS=1 recipes/launch/torchrun.sh recipes/miniature/pacs.yaml --use_cpu true"
    assert on_cpu == {"torchrun.sh": f"SHARDING=ddp ACCELERATE_USE_CPU=true {words}"}


def test_commands_of_a_run_with_a_server_start_it(commands):
    file = ("--accelerate_config", f"{CONFIGS}/fsdp2.yaml", "--num_processes")
    printed = commands("recipes/qwen3-4b/pacs_async.yaml", *file, "4", "--nodes", "1")
    assert printed["server.sh"] == "GPUS=4 recipes/launch/server.sh Qwen/Qwen3-4B"
    assert printed["accelerate.sh"].endswith(' --vllm_server_host "$SERVER"')
    both = "recipes/launch/four_plus_four.sh recipes/qwen3-4b/pacs_async.yaml Qwen/Qwen3-4B"
    assert both in printed["four_plus_four.sh"]
    node_more = commands("recipes/qwen3-4b/pacs_async.yaml", *file, "8", "--nodes", "1")
    assert node_more["server.sh"] == "GPUS=8 recipes/launch/server.sh Qwen/Qwen3-4B"
    assert "four_plus_four.sh" not in node_more


@pytest.mark.parametrize(
    ("model", "processes", "gpus"),
    [("Qwen/Qwen3-4B", "12", 4), ("Qwen/Qwen3-4B", "3", 4), ("Qwen/Qwen3-4B", "8", 8)]
    + [("Qwen/Qwen2.5-7B", "8", 4), ("Qwen/Qwen2.5-0.5B-Instruct", "8", 2)],
)
def test_the_server_has_the_gpus_of_the_estimate_over_which_vllm_can_split_it(capsys, model, processes, gpus):
    """vLLM refuses a number that does not divide the heads: 32, 28, and 14."""
    recipe = ["--config", "recipes/qwen3-4b/pacs_async.yaml", "--model_name_or_path", model, "--nodes", "1"]
    plan([*recipe, "--accelerate_config", f"{CONFIGS}/fsdp2.yaml", "--num_processes", processes])
    printed = capsys.readouterr().out
    assert f"GPUS={gpus} recipes/launch/server.sh {model}\n" in printed
    assert f"on the server's {gpus} GPUs (simulated)" in printed


def test_the_server_gets_adapters_where_the_run_sends_them(capsys):
    lora = ["--use_peft", "true", "--lora_r", "16", "--vllm_sync_adapter", "true"]
    plan(["--config", "recipes/qwen3-4b/pacs_async.yaml", "--num_processes", "4", "--nodes", "1", *lora])
    printed = capsys.readouterr().out
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve Qwen/Qwen3-4B --enable-lora --max-lora-rank 16 " in printed
    assert "--tensor-parallel-size 4\n" in printed
    assert "server.sh" not in printed and "four_plus_four.sh" not in printed  # which replace all weights


def test_the_server_listens_where_the_run_looks_for_it(commands):
    recipe = ("recipes/qwen3-4b/pacs_async.yaml", "--num_processes", "4", "--nodes", "1")
    port = commands(*recipe, "--vllm_server_port", "8123")
    assert (
        port["server.sh"].startswith("GPUS=4 PORT=8123 recipes/launch/server.sh ") and "four_plus_four.sh" not in port
    )
    address = commands(*recipe, "--vllm_server_base_url", "http://node9:8123")
    assert "$SERVER" not in address["accelerate.sh"]


@pytest.mark.parametrize("setting", [("host", "10.0.0.5"), ("base_url", "http://10.0.0.5:8000")])
def test_a_server_whose_address_is_set_is_named_once(capsys, setting):
    """A second option would override it; a server on the node of the trainer is another one."""
    option, value = f"--vllm_server_{setting[0]}", setting[1]
    recipe = ["--config", "recipes/qwen3-4b/pacs_async.yaml", "--accelerate_config", f"{CONFIGS}/fsdp2.yaml"]
    plan([*recipe, "--num_processes", "4", "--nodes", "1", option, value])
    printed = capsys.readouterr().out
    assert "This starts the server, on the node 10.0.0.5:\n  GPUS=4 recipes/launch/server.sh " in printed
    assert f"accelerate.sh recipes/qwen3-4b/pacs_async.yaml {option} {value}\n" in printed
    assert "$SERVER" not in printed and "four_plus_four.sh" not in printed


def test_headings_say_where_a_command_is_run(capsys):
    """Those of a scheduler, of the server, and of both on one node are not run on each node."""
    recipe = ["--config", "recipes/qwen3-4b/pacs_async.yaml", "--accelerate_config", f"{CONFIGS}/fsdp2.yaml"]
    headings = {}
    for nodes, processes in (("1", "4"), ("2", "8")):
        plan([*recipe, "--num_processes", processes, "--nodes", nodes])
        heading = ""
        for line in capsys.readouterr().out.splitlines():
            if not line.startswith(" "):
                heading = line
            elif "recipes/launch/" in line:
                headings[nodes, line.split("recipes/launch/")[1].split()[0]] = heading
    server, job = "This starts the server, on the node $SERVER:", "Or this, once, as a job of Slurm:"
    each = "One of these starts the run, on each node, whose number is $NODE_RANK; $HEAD is the address of node 0:"
    assert headings == {
        ("1", "server.sh"): server,
        ("1", "accelerate.sh"): "One of these starts the run, on this node:",
        ("1", "torchrun.sh"): "One of these starts the run, on this node:",
        ("1", "slurm.sh"): job,
        ("1", "four_plus_four.sh"): "Or this, which starts both the server and the run on one node:",
        ("2", "server.sh"): server,
        ("2", "accelerate.sh"): each,
        ("2", "torchrun.sh"): each,
        ("2", "slurm.sh"): job,
    }


def test_continuous_rollouts_have_one_server_on_the_machine_of_the_trainer(capsys):
    plan(["--config", "recipes/qwen3-4b/pacs_continuous.yaml", "--num_processes", "4", "--nodes", "1"])
    printed = capsys.readouterr().out
    assert printed.count("vllm serve") == 1 and "--worker-extension-cls" in printed
    header = Path("recipes/qwen3-4b/pacs_continuous.yaml").read_text()
    gpus = "CUDA_VISIBLE_DEVICES=4,5,6,7 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-4B --tensor-parallel-size 4"
    assert f"  {gpus} --max-model-len 9216 " in printed and f"#   {gpus} --max-model-len 9216 " in header
    assert "server.sh" not in printed and "four_plus_four.sh" not in printed and "$SERVER" not in printed


def test_nodes_that_do_not_divide_the_processes_are_a_conflict(capsys):
    assert plan(["--config", RECIPE, "--num_processes", "64", "--nodes", "7"]) == 1
    assert "--nodes is 7, which does not divide 64 processes" in capsys.readouterr().out


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

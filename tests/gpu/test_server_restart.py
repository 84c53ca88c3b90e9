"""A vLLM server on a second GPU: weights reach it by NCCL; it is killed, and the run continues with a new one.

On the CPU a server without a model takes its place, which receives no weights.
"""

import os
import shlex
import signal
import subprocess
from contextlib import contextmanager

import pytest
from support.vllm_server import LoopbackVLLM, play_installed, server_settings

from benchmarks.gpu import save_model, trainer_on
from pacs_trl.rollouts.server_command import serve_command


pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PORT = 8021
KILLED_AFTER, STEPS = 4, 6
MAX_MISMATCH = 0.05  # nats, of bfloat16


def train(directory, device: str, checkpoint: str, server: dict, pid: int | None) -> dict:
    """Train from the last checkpoint if there is one; the server's process group is killed after four steps."""
    if device == "cpu":
        play_installed(setattr)
    resume = directory / "run" / f"checkpoint-{KILLED_AFTER}"
    trainer = trainer_on(checkpoint, directory / "run", device, max_steps=STEPS, **server)
    generate = trainer.vllm_generation.generate

    def kill_and_generate(**kwargs):
        if pid is not None and trainer.state.global_step == KILLED_AFTER:
            os.killpg(pid, signal.SIGKILL)
        return generate(**kwargs)

    trainer.vllm_generation.generate = kill_and_generate
    message = ""
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume.is_dir() else None)
    except RuntimeError as error:
        message = str(error)
    name = "sampling/sampling_logp_difference/mean"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    return {"steps": trainer.state.global_step, "mean difference": max(differences), "message": message}


@contextmanager
def serve_on_gpu(checkpoint: str, log):
    """Start the command of docs/vllm.md on the second GPU; the trainer waits until it is ready."""
    words = [word for word in shlex.split(serve_command(checkpoint)) if word != "VLLM_SERVER_DEV_MODE=1"]
    words += f"--port {PORT} --host 127.0.0.1 --max-model-len 64 --gpu-memory-utilization 0.3".split()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpu}
    server = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    settings = {"vllm_server_base_url": f"http://127.0.0.1:{PORT}", "vllm_server_timeout": 300.0}
    try:
        yield {"use_vllm": True, "vllm_mode": "server"} | settings, server.pid
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def serve_on_cpu(checkpoint: str, is_killed: bool):
    with LoopbackVLLM(checkpoint) as server:
        server.fail_generation = KILLED_AFTER if is_killed else None
        yield server_settings(server.url), None


@pytest.mark.needs(num_gpus=2)
def test_a_run_continues_with_a_new_server(alone, device, tmp_path, record_property):
    if device == "cuda":
        pytest.importorskip("vllm")
    checkpoint, rows = save_model(tmp_path / "model", "small" if device == "cuda" else "tiny"), []
    for is_killed in (True, False):
        with (tmp_path / f"server-{is_killed}.log").open("w") as log:
            server = serve_on_gpu(checkpoint, log) if device == "cuda" else serve_on_cpu(checkpoint, is_killed)
            with server as (settings, pid):
                rows.append(alone(train, tmp_path, device, checkpoint, settings, pid if is_killed else None))
    record_property("rows", rows)
    killed, resumed = rows
    assert f"after optimizer step {KILLED_AFTER}" in killed["message"]
    assert (tmp_path / "run" / f"checkpoint-{KILLED_AFTER}").is_dir()
    assert resumed["steps"] == STEPS and not resumed["message"]
    if device == "cuda":
        assert max(row["mean difference"] for row in rows) < MAX_MISMATCH

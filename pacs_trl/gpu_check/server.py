"""A vLLM server on a second GPU: weights that reach it by NCCL, its death in the middle of a run, and the run that goes on after it."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

from ..rollouts.vllm_checks import serve_command
from ..settings.command_line import FailedRun
from .engine import MAX_MISMATCH
from .ranks import start
from .replay import shape_of
from .results import Found
from .training import logged, save_model, trainer_of


PORT = 8021
LAST_STEP, STEPS = 4, 6  # after which the server is killed; of the whole run


def server(*, device: str, directory: Path, model: str) -> Found:
    """Six steps; the server is killed after four of them and started again."""
    checkpoint, rows = save_model(directory / "model", shape_of(model), device), []
    first_gpu, second_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    for name in ("killed", "resumed"):
        output = directory / f"{name}.json"
        with (directory / f"{name}.log").open("w") as log:
            serving = _serve(checkpoint, second_gpu, log)
            settings = {"checkpoint": checkpoint, "run": str(directory / "run"), "url": f"http://127.0.0.1:{PORT}"}
            settings |= {"server": serving.pid if name == "killed" else None, "output": str(output)}
            try:
                start(
                    f"{__name__}:train", 1, directory / name, device, {"CUDA_VISIBLE_DEVICES": first_gpu}, **settings
                )
            finally:
                serving.kill()
                serving.wait()
        rows.append({"run": name, **json.loads(output.read_text())})
    return judged(rows, directory / "run")


def _serve(checkpoint: str, gpu: str, log) -> subprocess.Popen:
    """The command of docs/vllm.md; the trainer waits until it is healthy."""
    words = [word for word in shlex.split(serve_command(checkpoint)) if word != "VLLM_SERVER_DEV_MODE=1"]
    more = f"--port {PORT} --host 127.0.0.1 --max-model-len 64 --gpu-memory-utilization 0.3".split()
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpu}
    return subprocess.Popen([*words, *more], env=env, stdout=log, stderr=subprocess.STDOUT)


def train(
    *,
    device: str,
    directory: Path,
    checkpoint: str,
    run: str,
    url: str,
    server: int | None,
    output: str,
    **settings: Any,
) -> None:
    """Train with the server at `url`, going on if there is something to go on with; kill the process `server` after four steps."""
    where = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 300.0}
    resume = Path(run) / f"checkpoint-{LAST_STEP}"
    trainer = trainer_of(Path(run), checkpoint, device, max_steps=STEPS, **(where | settings))
    generate = trainer.vllm_generation.generate

    def generate_or_kill(**kwargs):
        if server is not None and trainer.state.global_step == LAST_STEP:
            os.kill(server, signal.SIGKILL)
        return generate(**kwargs)

    trainer.vllm_generation.generate = generate_or_kill
    said = ""
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume.is_dir() else None)
    except FailedRun as error:
        said = str(error)
    differences = logged(trainer, "sampling/sampling_logp_difference/mean")
    found = {"steps": trainer.state.global_step, "mean difference": max(differences, default=None), "said": said}
    Path(output).write_text(json.dumps(found))


def judged(rows: list[dict[str, Any]], run: Path) -> Found:
    killed, resumed = rows
    differences = [row["mean difference"] for row in rows if row["mean difference"] is not None]
    bars = {
        f"weights arrive: mean difference below {MAX_MISMATCH['auto']}": max(differences, default=1.0)
        < MAX_MISMATCH["auto"],
        "the run stops in words when the server dies": f"after optimizer step {LAST_STEP}" in killed["said"],
        "its state is saved": (run / f"checkpoint-{LAST_STEP}").is_dir(),
        "with a new server it goes on to its end": resumed["steps"] == STEPS and not resumed["said"],
    }
    return Found(rows, bars, "a run outlives its server" if all(bars.values()) else "")

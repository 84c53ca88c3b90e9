"""A real vLLM server for CPUs, in a process group of its own, that a trainer with continuous rollouts can use."""

import os
import signal
import socket
import subprocess
import sys
import time

import requests

from pacs_trl.rollouts.server_command import EXTENSION


CONTEXT = 128  # tokens
ALL_WEIGHTS = ("--worker-extension-cls", EXTENSION)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_server(
    checkpoint: str, output, options=ALL_WEIGHTS, *, port: int | None = None, slots: int = 1
) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port, or on `port`; with one slot generation takes much longer than its messages to the
    trainer."""
    port = free_port() if port is None else port
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(slots), "--max-num-batched-tokens", str(CONTEXT * slots)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", *options]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


def wait_until_ready(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=1).ok:
                return
        except requests.RequestException:
            time.sleep(0.5)
    raise RuntimeError("The server did not start.")


def end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

"""vLLM checks before weights are loaded: version, ports, and the server in server mode.

These cases would otherwise hang, or fail late or in a subprocess. What TRL and vLLM reject readably is not checked.
"""

import logging
import os
import socket
import time

import torch
from huggingface_hub.utils import httpx
from trl import GRPOConfig

from ..settings.names import require_vllm


logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TRIES = 2.0


def server_url(args: GRPOConfig) -> str:
    """Return the server URL of a run in server mode, without a trailing slash."""
    return (args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}").rstrip("/")


def serve_command(model: str, lora_rank: int | None = None) -> str:
    """Return the shell command that starts a vLLM server to which TRL can send weights, or LoRA adapters."""
    loading = f'vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\''
    if lora_rank is not None:
        loading = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {lora_rank}"
    return f"VLLM_SERVER_DEV_MODE=1 {loading} --logprobs-mode processed_logprobs --max-logprobs -1"


def check_vllm(args: GRPOConfig, model: str, lora_rank: int | None = None) -> None:
    """Raise a `ValueError` if the vLLM version, a port, or the server is unsuitable for the policy with the name or
    path `model`."""
    require_vllm("set use_vllm=False to generate with transformers")
    if args.process_index != 0:
        return
    if args.vllm_mode == "server":
        check_port(args.vllm_group_port, "vllm_group_port", "Set vllm_group_port to a free one.")
        check_server(args, model, lora_rank)
        return
    is_own = torch.distributed.is_initialized() or torch.distributed.is_torchelastic_launched()
    if (port := os.environ.get("MASTER_PORT", "")).isdigit() and not is_own:
        remedy = "Unset MASTER_PORT, or start with `accelerate launch --main_process_port 0`."
        check_port(int(port), "MASTER_PORT", remedy)


def check_port(port: int, setting: str, remedy: str) -> None:
    """Raise a `ValueError` if another process listens on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"{setting}={port} cannot be used on this machine ({error.strerror}): another process, perhaps "
                f"another run, holds the port. {remedy}"
            ) from error


def check_server(args: GRPOConfig, model: str, lora_rank: int | None = None) -> None:
    """Wait up to `vllm_server_timeout` seconds for the server. Raises a `ValueError` if none answers, where TRL may
    wait forever, or if it serves another model."""
    url, command = server_url(args), serve_command(model, lora_rank)
    deadline = time.monotonic() + args.vllm_server_timeout
    with httpx.Client(base_url=url, timeout=10.0) as client:
        while isinstance(served := _served_model(client), str):
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"No vLLM server answers at {url} after {args.vllm_server_timeout:g} s (vllm_server_timeout; "
                    f"{served}). Start it with: {command} or correct vllm_server_base_url, or vllm_server_host and "
                    "vllm_server_port."
                )
            logger.warning("Waiting for the vLLM server at %s (%s).", url, served)
            time.sleep(_SECONDS_BETWEEN_TRIES)
        if model not in (served["id"], served.get("root")):
            raise ValueError(
                f"The vLLM server at {url} serves {served['id']!r}, but this run trains {model!r} (for the same "
                f"weights under another name, add --served-model-name {model}). Start it with: {command}"
            )


def _served_model(client: httpx.Client) -> dict | str:
    """Return the model that the server has, or why it does not answer."""
    try:
        for path in ("/health", "/v1/models"):
            if (answer := client.get(path)).status_code != 200:
                return f"GET {path} has status {answer.status_code}"
        return answer.json()["data"][0]
    except (httpx.TransportError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"

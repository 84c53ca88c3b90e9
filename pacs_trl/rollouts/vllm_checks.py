"""vLLM checks before weights are loaded: version, ports, and the server in server mode.

These cases would otherwise fail late, in a subprocess, or as a hang. Errors that vLLM reports clearly are not checked.
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
_ADDRESS = "vllm_server_base_url, or vllm_server_host and vllm_server_port"  # in errors


def server_url(args: GRPOConfig) -> str:
    """Return the server URL of a run in server mode, without a trailing slash."""
    return (args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}").rstrip("/")


def serve_command(model: str, lora_rank: int | None = None) -> str:
    """Return the shell command that starts a vLLM server to which TRL can send weights, or LoRA adapters."""
    loading = f'vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\''
    if lora_rank is not None:
        loading = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {lora_rank}"
    return f"VLLM_SERVER_DEV_MODE=1 {loading} --logprobs-mode processed_logprobs --max-logprobs -1"


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


def check_server(args: GRPOConfig, model: str, lora_rank: int | None = None) -> None:
    """Wait up to `vllm_server_timeout` seconds for the server. Raises a `ValueError` if none answers, or if it serves
    another model, has too short a context, or does not support weight transfer."""
    url, command = server_url(args), serve_command(model, lora_rank)
    with httpx.Client(base_url=url, timeout=10.0) as client:
        _wait_for_server(client, url, args.vllm_server_timeout, command)
        answer = client.get("/v1/models")
        try:
            (served, *_) = answer.json()["data"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"Something answers at {url}, but it is no vLLM server (GET /v1/models: status {answer.status_code}). "
                f"Set {_ADDRESS} to the address of: {command}"
            ) from error
        if wrong := _defect_of_server(client, served, args, model, lora_rank):
            raise ValueError(f"The vLLM server at {url} {wrong}. Start it with: {command}")


def _defect_of_server(
    client: httpx.Client, served: dict, args: GRPOConfig, model: str, lora_rank: int | None
) -> str | None:
    """Return why a run cannot use the server, and warn of what makes its log-probs differ from the trainer's."""
    if model not in (served["id"], served.get("root")):
        return (
            f"serves {served['id']!r}, but this run trains {model!r} (for the same weights under another name, add "
            f"--served-model-name {model})"
        )
    length, longest = served.get("max_model_len"), args.max_completion_length
    if length is not None and longest is not None and length <= longest:
        return f"has max_model_len={length}, which cannot hold a prompt and max_completion_length={longest} tokens"
    info = client.get("/server_info", params={"config_format": "json"})
    if info.status_code != 200:
        return f"does not open its development endpoints (GET /server_info: status {info.status_code})"
    config = info.json()["vllm_config"]
    if lora_rank is not None:
        served_rank = (config["lora_config"] or {"max_lora_rank": 0})["max_lora_rank"]
        if served_rank < lora_rank or client.get("/v1/load_lora_adapter").status_code == 404:
            return f"does not load LoRA adapters of rank {lora_rank}"
    elif config["weight_transfer_config"] is None:
        return "has no weight-transfer engine"
    weights, cache = config["model_config"]["quantization"], config["cache_config"]["cache_dtype"]
    differing = [f"quantized weights ({weights})"] * bool(weights)
    differing += [f"a quantized cache ({cache})"] * (cache not in ("auto", "bfloat16", "float16", "float32"))
    if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
        differing.append(f"{mode} (start it with --logprobs-mode processed_logprobs)")
    if differing:
        logger.warning(
            "The vLLM server has %s, so its log-probs differ from the trainer's. Monitor `sampling/*`, and set "
            "vllm_importance_sampling_correction=True if the mismatch grows.",
            ", ".join(differing),
        )
    return None


def _wait_for_server(client: httpx.Client, url: str, timeout: float, command: str) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            status = client.get("/health").status_code
            if status == 200:
                return
            reason = f"GET /health has status {status}"
            if 400 <= status < 500:
                break  # not a vLLM server: waiting will not help
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            break
        logger.warning("Waiting for the vLLM server at %s (%s).", url, reason)
        time.sleep(_SECONDS_BETWEEN_TRIES)
    raise ValueError(
        f"No vLLM server answers at {url} after {timeout:g} s (vllm_server_timeout; {reason}). Start it with: "
        f"{command} and wait until `curl --fail {url}/health` succeeds, or correct {_ADDRESS}."
    )

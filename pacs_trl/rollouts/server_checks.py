"""Checks of vLLM before the model is loaded: its version, ports, and server, which would hang or fail late."""

import json
import logging
import os
import socket
import time
from functools import partial
from typing import Any

import torch
from huggingface_hub.utils import httpx

from ..errors import UserError
from ..settings.names import require_vllm
from .model_config import name_of
from .process_checks import check_on_first_process
from .rollout_config import RolloutConfig
from .server_command import EXTENSION, num_adapters, serve_command, server_url, training_dtype


logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_TRIES = 2.0  # of questions to a vLLM server
_SECONDS_TO_ANSWER = 180.0  # of a vLLM server that may be busy
_CONTINUOUS_VERSIONS = ("0.31.",)  # of vLLM, tested with `rollout_schedule: continuous`


def check_vllm(args: RolloutConfig, model: str, lora_rank: int | None = None) -> None:
    """Raise a `ValueError` if the vLLM version, a port, or the server is unsuitable for the policy with the name or
    path `model`."""
    require_vllm("set use_vllm=False to generate with transformers")
    check_on_first_process(partial(_check_ports_and_server, args, model, lora_rank))


def _check_ports_and_server(args: RolloutConfig, model: str, lora_rank: int | None) -> None:
    if args.vllm_mode == "server":
        check_port(args.vllm_group_port, "vllm_group_port", "Set vllm_group_port to a free one.")
        check_server(args, model, lora_rank)
        return
    port_is_of_launcher = torch.distributed.is_initialized() or torch.distributed.is_torchelastic_launched()
    if (port := os.environ.get("MASTER_PORT", "")).isdigit() and not port_is_of_launcher:
        remedy = "Unset MASTER_PORT, or start with `accelerate launch --main_process_port 0`."
        check_port(int(port), "MASTER_PORT", remedy)


def check_port(port: int, setting: str, remedy: str) -> None:
    """Raise a `ValueError` if another process listens on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{setting}={port} cannot be used on this machine ({error.strerror}): another process, perhaps "
                f"another run, holds the port. {remedy}"
            ) from error


def check_server(args: RolloutConfig, model: str, lora_rank: int | None = None) -> None:
    """Wait up to `vllm_server_timeout` seconds for the server. Raises a `ValueError` if none answers, where TRL may
    wait forever, or if it serves another model."""
    url, command = server_url(args), serve_command(model, lora_rank, args)
    deadline = time.monotonic() + args.vllm_server_timeout
    with httpx.Client(base_url=url, timeout=10.0) as client:
        served: dict = {}
        while not served:
            try:
                client.get("/health").raise_for_status()
                served = client.get("/v1/models").raise_for_status().json()["data"][0]
            except (httpx.HTTPError, ValueError, LookupError) as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"No vLLM server answers at {url} after {args.vllm_server_timeout:g} s (vllm_server_timeout; "
                        f"{reason}). Start it with: {command} or correct vllm_server_base_url, or vllm_server_host "
                        "and vllm_server_port."
                    ) from error
                logger.warning("Waiting for the vLLM server at %s (%s).", url, reason)
                time.sleep(_SECONDS_BETWEEN_TRIES)
        if model not in (served["id"], served.get("root")):
            raise UserError(
                f"The vLLM server at {url} serves {served['id']!r}, but this run trains {model!r} (for the same "
                f"weights under another name, add --served-model-name {model}). Start it with: {command}"
            )


def server_config(url: str) -> dict[str, Any]:
    """Return the configuration of a vLLM server. TRL's client would wait forever for one that hangs."""
    answer = httpx.get(f"{url}/server_info", params={"config_format": "json"}, timeout=_SECONDS_TO_ANSWER)
    return answer.raise_for_status().json()["vllm_config"]


def shares_memory(config: dict[str, Any], url: str) -> bool:
    """Return whether a server can load weights from memory of this process: it has our worker extension, and its
    address is one of this machine. Others get weights by NCCL."""
    address = httpx.URL(url)
    try:
        family, kind, _, _, place = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)  # to any port
    except OSError:
        return False
    return config["parallel_config"].get("worker_extension_cls") == EXTENSION


def check_server_of_continuous(
    args: RolloutConfig, model: Any, longest: int | None, lora_rank: int | None = None
) -> None:
    """
    Raise a [`UserError`] unless the vLLM server of a run, which answers, can generate continuously.

    Args:
        longest (`int`, *optional*): Tokens of the longest prompt and a completion of it, if they are known.
        lora_rank (`int`, *optional*): Rank of adapters, if they are sent instead of all weights.
    """
    dtype = training_dtype(args, model)
    url, command = server_url(args), serve_command(name_of(model), lora_rank, args, dtype, longest)

    def refuse(problem: str, remedy: str = "Start it with") -> None:
        raise UserError(f"The vLLM server at {url} {problem}. {remedy}: {command}")

    answer = httpx.get(f"{url}/version", timeout=10)
    version = answer.json().get("version", "") if answer.is_success else ""
    if not version.startswith(_CONTINUOUS_VERSIONS):
        refuse(f"has version {version or 'unknown'}, and rollout_schedule: continuous is tested with 0.31 only")
    try:
        config = server_config(url)
    except httpx.HTTPStatusError:
        refuse("has no development endpoints, with which weights are replaced")
    except httpx.TimeoutException:
        refuse(f"has not answered within {_SECONDS_TO_ANSWER:g} seconds", "Restart it with")
    parallel, scheduler, served = config["parallel_config"], config["scheduler_config"], config["model_config"]
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if lora_rank is not None:
        if (problem := _problem_with_adapters(config, args, lora_rank)) is not None:
            refuse(problem)
        if httpx.post(f"{url}/v1/load_lora_adapter", json={}, timeout=10).status_code == 404:
            refuse("does not load adapters while it runs")
    elif not shares_memory(config, url):
        if parallel.get("worker_extension_cls") != EXTENSION and backend != "nccl":
            refuse("cannot get weights: it has neither our worker extension nor the NCCL backend")
        if backend != "nccl":
            refuse(
                "is on another machine, where its worker extension cannot read the memory of this one",
                f"Add --weight-transfer-config '{json.dumps({'backend': 'nccl'})}' to",
            )
        if args.device.type != "cuda":
            refuse("gets weights by NCCL, and this process has no GPU")
    if served["dtype"].removeprefix("torch.") != dtype:
        refuse(f"computes in {served['dtype'].removeprefix('torch.')}, and training in {dtype}")
    if served.get("logprobs_mode") != "processed_logprobs":
        refuse(f"reports {served.get('logprobs_mode')}, and the loss needs the log-probs of the sampled distribution")
    if scheduler.get("stream_interval", 1) != 1:
        refuse("sends several tokens at once (--stream-interval), whose weights could not be told apart")
    context, needed = served["max_model_len"], longest or (args.max_completion_length or 0) + 1
    if context < needed:
        refuse(f"has a context of {context} tokens, and prompts with completions have {needed}")
    slots = min(scheduler["max_num_seqs"], (args.max_staleness + 1) * args.generation_batch_size)
    room = slots * context
    if config["device_config"]["device"] == "cpu" and scheduler["max_num_batched_tokens"] < room:
        refuse(
            f"on CPUs needs --max-num-batched-tokens of {room}, for {slots} completions of {context} tokens, and has "
            f"{scheduler['max_num_batched_tokens']}: it would end after weights are replaced",
            f"Add --max-num-batched-tokens {room} to",
        )


def _problem_with_adapters(config: dict[str, Any], args: RolloutConfig, rank: int) -> str | None:
    """Return why a server with this configuration cannot get an adapter for each version of the weights."""
    lora, replicas = config.get("lora_config"), config["parallel_config"].get("data_parallel_size", 1)
    if lora is None:
        return "serves no adapters, which vllm_sync_adapter sends"
    if lora["max_lora_rank"] < rank:
        return f"serves adapters of at most rank {lora['max_lora_rank']}, and this run needs {rank}"
    if lora["max_loras"] < num_adapters(args):
        return (
            f"generates with {lora['max_loras']} adapters at the same time (--max-loras), and max_staleness="
            f"{args.max_staleness} needs {num_adapters(args)}"
        )
    if replicas > 1:
        return f"has {replicas} replicas (--data-parallel-size), of which one would load an adapter"
    return None

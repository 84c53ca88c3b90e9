"""A vLLM server on this machine that speaks the calls of TRL's client, without a model.

Completions are a pure function of prompt and seed, so that a resumed run can be compared with one that was not
stopped. It can be told to fail.
"""

import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import urlparse

import torch
from requests.adapters import HTTPAdapter
from safetensors.torch import load_file
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from trl.experimental.async_grpo import async_rollout_worker
from trl.generation import vllm_client, vllm_generation

from pacs_trl.rollouts import server_checks
from pacs_trl.rollouts.server_command import EXTENSION
from pacs_trl.rollouts.vllm_extension import SharedWeights
from pacs_trl.settings import names
from support.models import TOKENIZER
from support.servers import Call, Loopback


def play_installed(patch: Callable) -> None:
    """
    As if a vLLM were installed that this TRL drives, and weights went to its server without NCCL.

    `patch(owner, name, value)` is `setattr`, or that of a monkeypatch.
    """
    patch(names, "installed_vllm", lambda: "0.31.0")
    patch(server_checks, "_SECONDS_BETWEEN_TRIES", 0.05)
    for module in (vllm_client, vllm_generation, async_rollout_worker):
        patch(module, "is_vllm_available", lambda: True)
    patch(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)

    def update_named_params(self, metadata, named_params):
        assert [name for name, _, _ in metadata] == [name for name, _ in named_params]
        self._start_weight_update()
        self._finish_weight_update()

    patch(vllm_client.VLLMClient, "update_named_params", update_named_params)
    patch(vllm_client, "HTTPAdapter", lambda **kwargs: HTTPAdapter(max_retries=0))


def draw_tokens(prompt_ids: list[int], seed: int, index: int, max_tokens: int) -> list[int]:
    """A completion, which depends on nothing else."""
    rng = random.Random(f"{prompt_ids}/{seed}/{index}")
    return [*(rng.randrange(256) for _ in range(rng.randrange(1, max_tokens))), TOKENIZER.eos_token_id]


def server_settings(url: str) -> dict:
    """Settings of a run with the server at `url`."""
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 0.2,
        "vllm_group_port": 0,
    }


class LoopbackVLLM(Loopback):
    """
    Start with `with LoopbackVLLM("model") as server`; `server.url` is its address.

    - `fail_generation` is the number of the generation (from 0) that is answered with status 500; `dead` lets /health
      fail.
    - `wait` is called before each answer to a generation, with its number.
    - `calls` lists the paths of all calls in order, `seeds` and `requests` what the generations asked for.
    - `loaded` are the directories of LoRA adapters by name; `prompt_logps(ids, directory)` answers for one of them.
      `adapters` are the weights of all that were ever loaded.
    - `models`, `info` and `answers` are what the three questions before a run get.
    - `weights` are those that it got through shared memory, `version` their name, `paused` whether it waits. The
      log-prob of a token that is streamed is -1 minus the number of weights that the server had got before it;
      `seconds_per_token` slows streams down.
    """

    def __init__(self, model: str, *, max_model_len: int = 512):
        self.models = {"data": [{"id": model, "root": model, "max_model_len": max_model_len}]}
        self.info = {
            "vllm_config": {
                "weight_transfer_config": {"backend": "nccl"},
                "model_config": {
                    "logprobs_mode": "processed_logprobs",
                    "dtype": "torch.float32",
                    "max_model_len": max_model_len,
                },
                "parallel_config": {"worker_extension_cls": EXTENSION},
                "lora_config": {"max_lora_rank": 16, "max_loras": 8},
                "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 16 * max_model_len},
                "device_config": {"device": "cpu"},
            }
        }
        self.weights: dict[str, torch.Tensor] = {}
        self.vllm_version = "0.31.0"
        self.version, self.paused, self.seconds_per_token = "default", False, 0.0
        self.answers: dict[str, int] = {}  # path -> status, instead of an answer
        self.calls: list[str] = []
        self.seeds: list[int] = []
        self.requests: list[dict] = []
        self.fail_generation: int | None = None
        self.wait: Callable[[int], object] = lambda number: None
        self.dead = False
        self.num_updates = 0
        self.loaded: dict[str, str] = {}
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.prompt_logps: Callable | None = None
        super().__init__()

    def answer(self, call: Call) -> None:
        path, body = urlparse(call.path).path, json.loads(call.body() or b"{}")
        if body.get("stream"):
            self._stream(call, body)
        else:
            call.reply(*self._answer(path, body))

    def _stream(self, call: Call, body: dict) -> None:
        self.calls.append(call.path)
        self.seeds.append(body["seed"])
        self.requests.append(body)
        call.send_response(200)
        call.end_headers()
        call.close_connection = True
        ids = draw_tokens(body["prompt"], body["seed"], 0, body["max_tokens"])
        for i, token in enumerate(ids):
            time.sleep(self.seconds_per_token)
            while self.paused:
                time.sleep(0.001)
            if self.dead:
                return
            logps = {"token_logprobs": [-1.0 - self.num_updates]}
            reason = "stop" if i == len(ids) - 1 else None
            choice = {"token_ids": [token], "logprobs": logps, "finish_reason": reason}
            call.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        call.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, path: str, body: dict) -> tuple[int, dict]:
        self.calls.append(path)
        if path in self.answers:
            return self.answers[path], {"error": "as told"}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/version":
            return 200, {"version": self.vllm_version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            assert self.paused
            runner = SimpleNamespace(get_model=lambda: SimpleNamespace(load_weights=self._load_weights))
            result = SharedWeights.load_shared_weights(SimpleNamespace(model_runner=runner), *body["args"])
            return 200, {"results": [result]}
        if path == "/health":
            return (503 if self.dead else 200), {}
        if path == "/v1/models":
            return 200, self.models
        if path == "/server_info":
            return 200, self.info
        if path == "/finish_weight_update":
            self.num_updates += 1
        if path == "/v1/load_lora_adapter" and body:
            self.loaded[body["lora_name"]] = body["lora_path"]
            self.adapters[body["lora_name"]] = load_file(f"{body['lora_path']}/{ADAPTER_SAFE_WEIGHTS_NAME}")
        if path == "/v1/unload_lora_adapter":
            del self.loaded[body["lora_name"]]
        if path == "/v1/completions" and "prompt_logprobs" in body:
            (ids,) = body["prompt"]
            logps = zip(ids[1:], self.prompt_logps(ids, self.loaded.get(body["model"])), strict=True)
            known = [None, *({str(token): {"logprob": logp, "rank": 1}} for token, logp in logps)]
            return 200, {"choices": [{"prompt_logprobs": known}]}
        if path == "/v1/completions":
            return self._complete(body)
        return 200, {"success": True, "world_size": 1}

    def _load_weights(self, weights) -> set[str]:
        self.weights = {name: weight.clone() for name, weight in weights}
        self.num_updates += 1
        return set(self.weights)

    def _complete(self, body: dict) -> tuple[int, dict]:
        number = len(self.seeds)
        self.seeds.append(body["seed"])
        self.requests.append(body)
        if number == self.fail_generation:
            self.dead = True
            return 500, {"error": "the engine is dead"}
        self.wait(number)
        choices = []
        for i, prompt in enumerate(body["prompt"]):
            for j in range(body["n"]):
                ids = draw_tokens(prompt, body["seed"], i * body["n"] + j, body["max_tokens"])
                tokens = [f"token_id:{token}" for token in ids]
                logprobs = [-5.5] * len(ids)
                choices.append(
                    {
                        "prompt_token_ids": prompt,
                        "token_ids": ids,
                        "logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": [None] * len(ids)},
                    }
                )
        return 200, {"choices": choices}

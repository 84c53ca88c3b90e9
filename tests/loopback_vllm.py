"""A vLLM server on this machine that speaks the calls of TRL's client, without a model.

Completions are a pure function of prompt and seed, so that a resumed run can be compared with one that was not
stopped. It can be told to fail.
"""

import json
import random
from collections.abc import Callable
from urllib.parse import urlparse

from loopback import Call, Loopback
from replay import TOKENIZER
from requests.adapters import HTTPAdapter
from trl.generation import vllm_client, vllm_generation

from pacs_trl.rollouts import checks
from pacs_trl.settings import names


def play_installed(patch: Callable) -> None:
    """
    As if a vLLM were installed that this TRL drives, and weights went to its server without NCCL.

    `patch(owner, name, value)` is `setattr`, or that of a monkeypatch.
    """
    patch(names, "installed_vllm", lambda: "0.31.0")
    patch(checks, "_SECONDS_BETWEEN_TRIES", 0.05)
    for module in (vllm_client, vllm_generation):
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
    - `models`, `info` and `answers` are what the three questions before a run get.
    """

    def __init__(self, model: str, *, max_model_len: int = 512):
        self.models = {"data": [{"id": model, "root": model, "max_model_len": max_model_len}]}
        self.info = {
            "vllm_config": {
                "weight_transfer_config": {"backend": "nccl"},
                "model_config": {"logprobs_mode": "processed_logprobs"},
            }
        }
        self.answers: dict[str, int] = {}  # path -> status, instead of an answer
        self.calls: list[str] = []
        self.seeds: list[int] = []
        self.requests: list[dict] = []
        self.fail_generation: int | None = None
        self.wait: Callable[[int], object] = lambda number: None
        self.dead = False
        self.num_updates = 0
        self.loaded: dict[str, str] = {}
        self.prompt_logps: Callable | None = None
        super().__init__()

    def answer(self, call: Call) -> None:
        call.reply(*self._answer(urlparse(call.path).path, json.loads(call.body() or b"{}")))

    def _answer(self, path: str, body: dict) -> tuple[int, dict]:
        self.calls.append(path)
        if path in self.answers:
            return self.answers[path], {"error": "as told"}
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
        if path == "/v1/completions" and "prompt_logprobs" in body:
            (ids,) = body["prompt"]
            logps = zip(ids[1:], self.prompt_logps(ids, self.loaded.get(body["model"])), strict=True)
            known = [None, *({str(token): {"logprob": logp, "rank": 1}} for token, logp in logps)]
            return 200, {"choices": [{"prompt_logprobs": known}]}
        if path == "/v1/completions":
            return self._complete(body)
        return 200, {"success": True, "world_size": 1}

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

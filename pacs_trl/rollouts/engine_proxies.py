"""Proxies of vLLM's engine and of TRL's client of a vLLM server: seeds of requests, counts of completions, adapters.

An adapter is loaded from a directory, each time under a new name, because vLLM keeps its prefix cache per name.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation

from .background import in_background


_PER_COMPLETION = ("completion_ids", "logprobs", "logprob_token_ids")  # in an answer of TRL's client
_adapter_numbers = itertools.count(1)  # an engine ignores an adapter that it has loaded under this number


class SeededLLM:
    """Proxy of vLLM's `LLM` whose `generate` sets the seed of each request that has none. `next_seeds(prompts)`
    returns the seeds of the next requests, and `record(completions)` receives their completions. What is awake is not
    woken again, which vLLM warns of; in sleep mode `llm` sleeps at first. All other attributes are those of `LLM`."""

    def __init__(
        self,
        llm,
        next_seeds: Callable[[list[list[int]]], list[int]],
        record: Callable[[list[list[int]]], None] = lambda completions: None,
    ):
        self.llm = llm
        self.lora_request: Any = None  # of every request
        self._next_seeds = next_seeds
        self._record = record
        self._awake: set[str] = set()  # tags of memory that is mapped, of those of `wake_up`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: list, sampling_params, **kwargs) -> list:
        """Generate completions of a list of prompts; other arguments and the result are those of
        `vllm.LLM.generate`."""
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)
        params = [request_params.clone() for request_params in sampling_params]
        seedless = [i for i, request_params in enumerate(params) if request_params.seed is None]
        seeds = self._next_seeds([prompts[i]["prompt_token_ids"] for i in seedless])
        for i, seed in zip(seedless, seeds, strict=True):
            params[i].seed = seed
        if self.lora_request is not None:
            kwargs = {"lora_request": self.lora_request} | kwargs
        outputs = self.llm.generate(prompts, sampling_params=params, **kwargs)
        self._record([list(outputs[i].outputs[0].token_ids) for i in seedless])
        return outputs

    def wake_up(self, tags: list[str]) -> None:
        """Map the memory of weights or KV cache (`tags`) if it sleeps."""
        asleep = [tag for tag in tags if tag not in self._awake]
        if asleep:
            self.llm.wake_up(tags=asleep)
            self._awake.update(asleep)

    def sleep(self, level: int) -> None:
        """Free the memory of weights and KV cache; level 2 drops the weights."""
        self._awake.clear()
        self.llm.sleep(level=level)

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        from vllm.lora.request import LoRARequest

        number = next(_adapter_numbers)
        self.lora_request = LoRARequest(f"adapter-{number}", number, path)

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        params = vllm_generation.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = self.llm.generate(
            [{"prompt_token_ids": prompt_ids}], sampling_params=params, use_tqdm=False, lora_request=self.lora_request
        )
        # vLLM returns, for each token, a dict of candidates by their ids; the first token has none.
        tokens_and_candidates = zip(prompt_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([candidates[token].logprob for token, candidates in tokens_and_candidates])


class CountingClient:
    """Proxy of TRL's vLLM client that supports a different number of completions per prompt. The caller repeats each
    prompt once per completion. A server would return equal completions for equal prompts of a request with a seed, so
    prompts with the same count are sent as one request for `n` completions each, all requests concurrently."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    @property
    def model(self) -> str:
        """Name of the model, or of the adapter, that requests ask for."""
        return self.client.model

    @model.setter
    def model(self, name: str) -> None:
        self.client.model = name

    def generate(self, prompts, features=None, n: int = 1, **kwargs) -> dict:
        """Generate completions; arguments and result are those of TRL's `VLLMClient.generate`."""
        rows_by_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, ids in enumerate(prompts):
            rows_by_prompt.setdefault(tuple(ids), []).append(row)
        has_repeated_prompts = len(rows_by_prompt) < len(prompts)
        if n > 1 or features is not None or not has_repeated_prompts:
            return self.client.generate(prompts=prompts, features=features, n=n, **kwargs)
        # A request for each number of completions; it has a list of rows per prompt.
        requests: dict[int, list[list[int]]] = {}
        for rows in rows_by_prompt.values():
            requests.setdefault(len(rows), []).append(rows)
        merged: dict[str, list] = {name: [None] * len(prompts) for name in _PER_COMPLETION}

        def request(num_completions: int) -> None:
            rows_of_prompts = requests[num_completions]
            distinct_prompts = [prompts[rows[0]] for rows in rows_of_prompts]
            answer = self.client.generate(prompts=distinct_prompts, features=None, n=num_completions, **kwargs)
            # The completions of a prompt follow each other in the answer.
            for name in _PER_COMPLETION:
                for row, value in zip(itertools.chain(*rows_of_prompts), answer[name], strict=True):
                    merged[name][row] = value

        for answer in [in_background(request, num_completions) for num_completions in requests]:
            answer.result()
        return merged | {"prompt_ids": list(prompts)}

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        name = f"{Path(path).name}-{next(_adapter_numbers)}"
        body = {"lora_name": name, "lora_path": path}
        response = self.client.session.post(f"{self.client.base_url}/v1/load_lora_adapter", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}, {response.text:.300}")
        self.model = name

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        response = self.client.get_sequence_logprobs([prompt_ids], prompt_lengths=[1], top_logprobs=1)
        return torch.tensor(response["actual_logprobs"][0])[:, 0]

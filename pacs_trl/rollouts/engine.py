"""TRL's vLLM engine with per-request seeds, coordinated failures, and timing.

- Every request has a seed. TRL seeds a colocated engine once, and its random state is not part of a checkpoint.
- If a server stops answering, all processes raise the same exception. TRL raises it on the main process only, while
  the others wait for completions forever.
- Equal prompts in one call to a server become one request for several completions.
- The time to send weights to vLLM is measured.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ..errors import FailedRun
from .adapter_sync import AdapterSync
from .checkpoint import next_seeds
from .checks import max_lora_rank
from .timing import StepTimer
from .vllm_checks import serve_command, server_url


logger = logging.getLogger(__name__)

_PER_COMPLETION = ("completion_ids", "logprobs", "logprob_token_ids")  # in an answer of TRL's client
_adapter_numbers = itertools.count(1)  # an engine ignores an adapter that it has loaded under this number


class ServerFailure(RuntimeError):
    """Failure of a vLLM server, raised on all processes. `state` completes the sentence "The vLLM server ..."; `cause`
    is the server's response or the exception."""

    def __init__(self, state: str, cause: str):
        super().__init__(f"The vLLM server {state} ({cause}).")
        self.state, self.cause = state, cause


class SeededLLM:
    """Proxy of vLLM's `LLM` whose `generate` sets the seed of each request that has none. `next_seeds(n)` returns the
    seeds of the next `n` requests. All other attributes are those of `LLM`."""

    def __init__(self, llm, next_seeds: Callable[[int], list[int]]):
        self.llm = llm
        self._next_seeds = next_seeds
        self.lora_request: Any = None  # of every request

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: list, sampling_params, **kwargs) -> list:
        """Generate completions of a list of prompts; other arguments and the result are those of
        `vllm.LLM.generate`."""
        given = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        params = [each.clone() for each in given]
        seedless = [each for each in params if each.seed is None]
        for request, seed in zip(seedless, self._next_seeds(len(seedless)), strict=True):
            request.seed = seed
        if self.lora_request is not None:
            kwargs = {"lora_request": self.lora_request} | kwargs
        return self.llm.generate(prompts, sampling_params=params, **kwargs)

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        from vllm.lora.request import LoRARequest

        number = next(_adapter_numbers)
        self.lora_request = LoRARequest(f"adapter-{number}", number, path)

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        params = vllm_generation.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = {"sampling_params": params, "use_tqdm": False, "lora_request": self.lora_request}
        (output,) = self.llm.generate([{"prompt_token_ids": prompt_ids}], **request)
        known = zip(prompt_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([candidates[token].logprob for token, candidates in known])


class CountingClient:
    """Proxy of TRL's vLLM client that supports a different number of completions per prompt. The caller repeats each
    prompt once per completion. A server would return equal completions for equal prompts of a request with a seed, so
    prompts with the same count are sent as one request for `n` completions each, all requests concurrently."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def generate(self, prompts, features=None, n: int = 1, **kwargs) -> dict:
        """Generate completions; arguments and result are those of TRL's `VLLMClient.generate`."""
        indices: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(prompts):
            indices.setdefault(tuple(ids), []).append(i)
        if n > 1 or features is not None or len(indices) == len(prompts):
            return self.client.generate(prompts=prompts, features=features, n=n, **kwargs)
        by_number: dict[int, list[list[int]]] = {}
        for of_prompt in indices.values():
            by_number.setdefault(len(of_prompt), []).append(of_prompt)
        merged: dict[str, list] = {name: [None] * len(prompts) for name in _PER_COMPLETION}

        def request(number: int) -> None:
            own = [prompts[of_prompt[0]] for of_prompt in by_number[number]]
            answer = self.client.generate(prompts=own, features=None, n=number, **kwargs)
            for name in _PER_COMPLETION:
                for i, row in zip(itertools.chain(*by_number[number]), answer[name], strict=True):
                    merged[name][i] = row

        with ThreadPoolExecutor(max_workers=len(by_number)) as executor:
            list(executor.map(request, by_number))
        return merged | {"prompt_ids": list(prompts)}

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        name = f"{Path(path).name}-{next(_adapter_numbers)}"
        body = {"lora_name": name, "lora_path": path}
        response = self.client.session.post(f"{self.client.base_url}/v1/load_lora_adapter", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}, {response.text:.300}")
        self.client.model = name

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        known = self.client.get_sequence_logprobs([prompt_ids], prompt_lengths=[1], top_logprobs=1)
        return torch.tensor(known["actual_logprobs"][0])[:, 0]


class Engine(VLLMGeneration):
    """Drop-in replacement for TRL's vLLM engine `generation`. `next_seeds(n)` returns the seeds of the next `n`
    requests of this process; `timer` records the time of weight synchronization."""

    adapter_sync: AdapterSync | None = None  # sends the adapter instead of merged weights

    def __init__(self, generation: VLLMGeneration, *, next_seeds: Callable[[int], list[int]], timer: StepTimer):
        vars(self).update(vars(generation))
        self._next_seeds = next_seeds
        self._timer = timer
        if self.mode == "colocate":
            self.llm = SeededLLM(self.llm, next_seeds)
        elif self.accelerator.is_main_process:
            self.vllm_client = CountingClient(self.vllm_client)

    @contextmanager
    def using_weights_of(self, model, **sampling: Any) -> Iterator[None]:
        """Generate with the weights of another model of the same architecture inside the context, and with the
        sampling settings `sampling`. The weights of the engine's own model are sent again before the next
        generation."""
        own = {name: getattr(self, name) for name in ("model", "_weight_metadata", *sampling)}
        vars(self).update(sampling, model=model, _weight_metadata=None)
        try:
            self.sync_weights()
            yield
        finally:
            vars(self).update(own)

    def sync_weights(self) -> None:
        """Send the weights to vLLM. Raises a [`ServerFailure`] if a server does not answer. If a server dies during
        the transfer, NCCL may still hang waiting for its peer."""
        with self._timer.part("weight_sync"):
            if self.mode == "server":
                health = self._ask_health()
                if health is not None:
                    raise ServerFailure("stopped answering", health)
            if self.adapter_sync is None:
                super().sync_weights()
            else:
                self.adapter_sync.send()

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Generate completions; arguments and result are those of TRL's engine. Raises a [`ServerFailure`] if a server
        fails or returns fewer completions than requested."""
        if self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        given, cause = self.generation_kwargs, None
        if "seed" not in given:  # one per call: vLLM adds the completion index to it
            self.generation_kwargs = {**given, "seed": self._next_seeds(len(prompts))[0]}
        try:
            generated = super().generate(prompts, images, num_generations, profiler)
        except Exception as error:  # TRL's client raises bare exceptions
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server failed to generate.")
            cause = f"{type(error).__name__}: {error}"
            generated = ([], [], [], [])
            broadcast_object_list([generated], from_process=0)  # the others wait for this in TRL's `generate`
        finally:
            self.generation_kwargs = given
        if len(generated[1]) < len(prompts):
            health = self._ask_health()
            state = "is healthy, but did not generate" if health is None else "stopped answering"
            raise ServerFailure(state, cause or health or "it returned too few completions")
        return generated

    def _ask_health(self) -> str | None:
        """Return why the server is unhealthy, or `None` if it is healthy; the result is the same on all processes.
        Retries as TRL's client does."""
        found: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                status = self.vllm_client.session.get(f"{self.vllm_client.base_url}/health").status_code
                found = [None if status == 200 else f"GET /health has status {status}"]
            except OSError as error:  # base class of the exceptions of requests
                found = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(found, from_process=0)
        return found[0]


def create_engine(trainer: Any) -> Engine:
    """Create the engine that replaces TRL's. With `vllm_sync_adapter` it sends adapters."""
    engine = Engine(trainer.vllm_generation, next_seeds=partial(next_seeds, trainer), timer=trainer.timer)
    if trainer.args.vllm_sync_adapter:
        text = "The sum of 12 and 30 is 42. Their product is 360, so the difference of the two results is 318."
        ids = trainer._tokenizer(text)["input_ids"][:32]
        parent = trainer.args.output_dir if engine.mode == "server" else None  # by default not shared
        os.makedirs(parent or ".", exist_ok=True)
        engine.adapter_sync = AdapterSync(engine, trainer.create_forward_pass(trainer.model, 1.0), ids, parent)
    return engine


def failed_run(failure: ServerFailure, trainer: Any) -> FailedRun:
    """Return the [`FailedRun`] for a failed vLLM server, or for the engine process of a run without vLLM."""
    step, engine, remedy = trainer.state.global_step, "engine process", " (an error above, or memory)"
    saved = f"The state after it is in {trainer.args.output_dir}/checkpoint-{step}"
    if trainer.use_vllm:
        command = serve_command(trainer.model.name_or_path, max_lora_rank(trainer.args, trainer.model, None))
        engine, remedy = f"vLLM server at {server_url(trainer.args)}", f", start the server if it is down: {command}"
    return FailedRun(
        f"The {engine} {failure.state} after optimizer step {step} ({failure.cause}). "
        f"{saved if step > 0 else 'No optimizer step had been taken yet'}; fix the problem{remedy} and continue with "
        "`--resume_from_checkpoint last`."
    )

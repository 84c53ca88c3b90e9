"""TRL's vLLM engine with what a run needs to be repeated and to end in order, and checks of what engines return.

- Every request has a seed. TRL seeds a colocated engine once, and its random state is not part of a checkpoint.
- When a server stops answering, all processes raise the same exception. TRL raises it on the main process while the
  others wait for its completions forever.
- Equal prompts of one call to a server become one request for that many completions.
- The time that weights take to reach vLLM is measured.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from ..errors import FailedRun
from .timing import StepTimer
from .vllm_checks import serve_command, server_url


logger = logging.getLogger(__name__)


class ServerFailure(RuntimeError):
    """A vLLM server that does not answer as it should, raised on all processes alike. `state` is what is known of the
    server, as the end of a sentence that begins with it; `cause` what it answered, or the exception."""

    def __init__(self, state: str, cause: str):
        super().__init__(f"The vLLM server {state} ({cause}).")
        self.state, self.cause = state, cause


class SeededLLM:
    """vLLM's `LLM`, whose `generate` gives a seed to each request that has none; `next_seeds(n)` returns the seeds of
    the next `n` requests. Everything else is vLLM's."""

    def __init__(self, llm, next_seeds: Callable[[int], list[int]]):
        self.llm = llm
        self._next_seeds = next_seeds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts, sampling_params=None, **kwargs) -> list:
        """Generate as vLLM does, with the same arguments."""
        single = isinstance(prompts, str | dict) or isinstance(prompts[0], int)  # text, mapping or token ids
        prompts = [prompts] if single else prompts
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        given = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        params = [each.clone() for each in given]
        seedless = [each for each in params if each.seed is None]
        for request, seed in zip(seedless, self._next_seeds(len(seedless)), strict=True):
            request.seed = seed
        return self.llm.generate(prompts, sampling_params=params, **kwargs)


class CountingClient:
    """
    TRL's client of a vLLM server, for calls with another number of completions of each prompt. Such a call has each
    prompt as often as completions are wanted. The server gives the same answer to equal prompts of a request with a
    seed, so they are counted, and each number is a request of its own; they run at the same time.
    """

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def generate(self, prompts, features=None, n: int = 1, **kwargs) -> dict:
        """Generate as TRL's client does, with the same arguments."""
        indices: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(prompts):
            indices.setdefault(tuple(ids), []).append(i)
        if n > 1 or features is not None or len(indices) == len(prompts):
            return self.client.generate(prompts=prompts, features=features, n=n, **kwargs)
        by_number: dict[int, list[list[int]]] = {}
        for of_prompt in indices.values():
            by_number.setdefault(len(of_prompt), []).append(of_prompt)

        def request(number: int) -> dict:
            own = [prompts[of_prompt[0]] for of_prompt in by_number[number]]
            return self.client.generate(prompts=own, features=None, n=number, **kwargs)

        with ThreadPoolExecutor(max_workers=len(by_number)) as executor:
            answers = list(executor.map(request, by_number))
        order = [i for several in by_number.values() for of_prompt in several for i in of_prompt]
        merged = {"prompt_ids": list(prompts)}
        for name in ("completion_ids", "logprobs", "logprob_token_ids"):
            rows = [row for answer in answers for row in answer[name]]
            merged[name] = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
        return merged


class Engine(VLLMGeneration):
    """
    Drop-in replacement for the engine that TRL has built, `generation`.

    Args:
        next_seeds (`Callable`): `next_seeds(n)` returns the seeds of the next `n` requests of this process. Called for
            requests without a seed in `generation_kwargs`.
        timer ([`StepTimer`]): Gets the time of weight synchronization.
    """

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
        """Generate inside with the weights of another model of the same architecture, and with other settings.
        Afterwards those of its own model have to be sent again. A second engine would need more memory: vLLM lets one
        engine of a process sleep, and weights are sent before every generation anyway."""
        own = {name: getattr(self, name) for name in ("model", "_weight_metadata", *sampling)}
        vars(self).update(sampling, model=model, _weight_metadata=None)
        try:
            self.sync_weights()
            yield
        finally:
            vars(self).update(own)

    def sync_weights(self) -> None:
        """Send the weights, or raise a [`ServerFailure`] if a server does not answer. One that dies while weights are
        being sent can leave NCCL waiting for its peer."""
        with self._timer.part("weight_sync"):
            if self.mode == "server":
                health = self._ask_health()
                if health is not None:
                    raise ServerFailure("stopped answering", health)
            super().sync_weights()

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Generate as TRL does, with the same arguments, or raise a [`ServerFailure`] if a server has returned fewer
        completions than requested."""
        if self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        given, cause = self.generation_kwargs, None
        if "seed" not in given:  # one for the call: vLLM adds the index of the completion to it
            self.generation_kwargs = {**given, "seed": self._next_seeds(len(prompts))[0]}
        try:
            generated = super().generate(prompts, images, num_generations, profiler)
        except Exception as error:  # TRL's client raises bare exceptions for refused requests
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server failed to generate.")
            cause = f"{type(error).__name__}: {error}"
            generated = ([], [], [], [])
            broadcast_object_list([generated], from_process=0)  # what the others wait for in TRL's `generate`
        finally:
            self.generation_kwargs = given
        if len(generated[1]) < len(prompts):
            health = self._ask_health()
            state = "is healthy, but did not generate" if health is None else "stopped answering"
            raise ServerFailure(state, cause or health or "it gave no completions")
        return generated

    def _ask_health(self) -> str | None:
        """Return what is wrong with the server, on all processes. Retries as TRL's client does."""
        found: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                status = self.vllm_client.session.get(f"{self.vllm_client.base_url}/health").status_code
                found = [None if status == 200 else f"GET /health has status {status}"]
            except OSError as error:  # of which requests' exceptions are subclasses
                found = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(found, from_process=0)
        return found[0]


def end_empty_completions(eos_token_id: int, completion_ids, logprobs, env_mask=None) -> float:
    """Give completions without a token, which an engine that strips the end-of-sequence token returns, this token.
    Returns their share."""
    empty = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
    for i in empty:
        completion_ids[i] = [eos_token_id]
        if logprobs is not None:
            logprobs[i] = [None]
        if env_mask is not None:
            env_mask[i] = [1]
    return len(empty) / max(len(completion_ids), 1)


def checked_rollouts(rollout_func: Callable, eos_token_id: int, log_empty: Callable[[float], None]) -> Callable:
    """Return a rollout function whose number of completions is checked, and none of them empty."""

    def call(prompts, trainer):
        output = rollout_func(prompts, trainer)
        completion_ids = output.get("completion_ids", [])  # TRL names missing keys
        if "completion_ids" in output and len(completion_ids) != len(prompts):
            raise ValueError(
                f"rollout_func returned {len(completion_ids)} completions for {len(prompts)} prompts. The batch "
                "contains each prompt once per generation already; return exactly one completion for each."
            )
        empty = end_empty_completions(eos_token_id, completion_ids, output.get("logprobs"), output.get("env_mask"))
        log_empty(empty)
        return output

    return call


def failed_run(failure: ServerFailure, trainer: Any, engine: Engine | None) -> FailedRun:
    """Return the error of a run whose server failed, that of `engine` or by default the policy's."""
    url, model = server_url(trainer.args), trainer.model
    if engine is not None:
        url, model = engine.server_base_url, engine.model
    step = trainer.state.global_step
    saved = "No optimizer step had been taken yet"
    if step > 0:
        saved = f"The state after it is in {trainer.args.output_dir}/checkpoint-{step}"
    return FailedRun(
        f"The vLLM server at {url} {failure.state} after optimizer step {step} ({failure.cause}). {saved}. Fix the "
        f"problem, start the server again if it is down: {serve_command(model.name_or_path)} and continue with "
        "`--resume_from_checkpoint last`."
    )

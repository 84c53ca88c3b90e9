"""TRL's vLLM engine with what a run needs to be repeated and to end in order.

- Every request has a seed. TRL seeds a colocated engine once, and its random state is not part of a checkpoint; with a
  seed per request a resumed run asks for what the first would have asked for.
- When a server stops answering, all processes learn of it, by the same exception. TRL's is raised on the main process
  while the others wait for its completions for ever.
- A prompt that stands in a draw several times is asked of a server once, for so many completions.
- The time that weights take to reach vLLM is measured.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from .timing import StepTimer


logger = logging.getLogger(__name__)


class ServerFailure(RuntimeError):
    """
    A vLLM server that does not answer, or not as it should; raised on all processes alike.

    Args:
        state (`str`): What is known of the server, as the end of a sentence that begins with it.
        cause (`str`): What it answered, or the exception.
    """

    def __init__(self, state: str, cause: str):
        super().__init__(f"The vLLM server {state} ({cause}).")
        self.state, self.cause = state, cause


class SeededLLM:
    """
    vLLM's `LLM`, whose `generate` gives a seed to each request that has none. All else is its own.

    Args:
        llm (`vllm.LLM`):
            The engine.
        next_seeds (`Callable`):
            `next_seeds(n)` returns the seeds of the next `n` requests.
    """

    def __init__(self, llm, next_seeds: Callable[[int], list[int]]):
        self.llm = llm
        self._next_seeds = next_seeds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts, sampling_params=None, **kwargs) -> list:
        """That of vLLM, with the same arguments."""
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
    TRL's client of a vLLM server, for draws with another number of completions of each prompt. All else is its own.

    Such a draw has each prompt as often as it is wanted, one completion each. The server gives the same answer to
    equal prompts of a request with a seed, so they are counted, and each number is a request of its own; they run at
    the same time.
    """

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def generate(self, prompts, features=None, n: int = 1, **kwargs) -> dict:
        """That of TRL, with the same arguments."""
        places: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(prompts):
            places.setdefault(tuple(ids), []).append(place)
        if n > 1 or features is not None or len(places) == len(prompts):
            return self.client.generate(prompts=prompts, features=features, n=n, **kwargs)
        by_number: dict[int, list[list[int]]] = {}
        for own in places.values():
            by_number.setdefault(len(own), []).append(own)

        def ask(number: int) -> dict:
            asked = [prompts[own[0]] for own in by_number[number]]
            return self.client.generate(prompts=asked, features=None, n=number, **kwargs)

        with ThreadPoolExecutor(max_workers=len(by_number)) as executor:
            answers = list(executor.map(ask, by_number))
        order = [place for several in by_number.values() for own in several for place in own]
        merged = {"prompt_ids": list(prompts)}
        for name in ("completion_ids", "logprobs", "logprob_token_ids"):
            rows = [row for answer in answers for row in answer[name]]
            merged[name] = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
        return merged


class Engine(VLLMGeneration):
    """
    Takes the place of the engine that TRL has built, and is it otherwise.

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            The one that TRL has built.
        next_seeds (`Callable`):
            `next_seeds(n)` returns the seeds of the next `n` requests of this process. Asked for requests without a
            seed in `generation_kwargs`.
        timer ([`StepTimer`]):
            Gets the time of weight synchronization.
    """

    def __init__(
        self,
        generation: VLLMGeneration,
        *,
        next_seeds: Callable[[int], list[int]],
        timer: StepTimer,
    ):
        vars(self).update(vars(generation))
        self._next_seeds = next_seeds
        self._timer = timer
        if self.mode == "colocate":
            self.llm = SeededLLM(self.llm, next_seeds)
        elif self.accelerator.is_main_process:
            self.vllm_client = CountingClient(self.vllm_client)

    @contextmanager
    def lent_to(self, model, **sampling: Any) -> Iterator[None]:
        """
        Inside, the engine has the weights of another model of the same architecture, and draws by other settings.
        Afterwards those of its own model have to be sent again.

        Two engines would share a GPU worse: vLLM lets one engine of a process sleep, and weights are sent before every
        generation anyway.
        """
        own = {name: getattr(self, name) for name in ("model", "_weight_metadata", *sampling)}
        vars(self).update(sampling, model=model, _weight_metadata=None)
        try:
            self.sync_weights()
            yield
        finally:
            vars(self).update(own)

    def sync_weights(self) -> None:
        """
        Raises:
            [`ServerFailure`]: if a server does not answer. One that dies later, while weights are being sent, can
            leave NCCL
                waiting for its peer.
        """
        with self._timer.part("weight_sync"):
            if self.mode == "server":
                health = self._ask_health()
                if health is not None:
                    raise ServerFailure("stopped answering", health)
            super().sync_weights()

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """
        That of TRL, with the same arguments.

        Raises:
            [`ServerFailure`]: if a server has given fewer completions than it was asked for.
        """
        if self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        given, cause = self.generation_kwargs, None
        if "seed" not in given:  # one for the call: vLLM adds the index of the completion to it
            self.generation_kwargs = {**given, "seed": self._next_seeds(len(prompts))[0]}
        try:
            drawn = super().generate(prompts, images, num_generations, profiler)
        except Exception as error:  # TRL's client raises bare exceptions for refused requests
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server failed to generate.")
            cause = f"{type(error).__name__}: {error}"
            drawn = ([], [], [], [])
            broadcast_object_list([drawn], from_process=0)  # what the others wait for in TRL's `generate`
        finally:
            self.generation_kwargs = given
        if len(drawn[1]) < len(prompts):
            health = self._ask_health()
            state = "is healthy, but did not generate" if health is None else "stopped answering"
            raise ServerFailure(state, cause or health or "it gave no completions")
        return drawn

    def _ask_health(self) -> str | None:
        """What is wrong with the server, asked by the main process and known to all. Retries as TRL's client does."""
        found: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                status = self.vllm_client.session.get(f"{self.vllm_client.base_url}/health").status_code
                found = [None if status == 200 else f"GET /health has status {status}"]
            except OSError as error:  # of which requests' exceptions are subclasses
                found = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(found, from_process=0)
        return found[0]

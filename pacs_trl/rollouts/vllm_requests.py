"""What `RolloutTrainer` adds to TRL's vLLM engine: a seed for each request, and an orderly end when a server dies.

TRL seeds a colocated engine once, and its random state is not part of a checkpoint; with a seed per request a resumed run
asks for what the first would have asked for. When a server stops answering, TRL's exception is raised on the main process
while the others wait for its completions for ever. Here all processes learn of it and can save together.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration


logger = logging.getLogger(__name__)


def seed_requests(engine: VLLMGeneration, next_seeds: Callable[[int], list[int]]) -> None:
    """
    Give every request of a colocated engine a seed of its own.

    Args:
        engine ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            Its `llm.generate` is replaced.
        next_seeds (`Callable`):
            `next_seeds(n)` returns the seeds of the next `n` requests.
    """
    generate = engine.llm.generate

    def generate_seeded(prompts, sampling_params=None, **kwargs):
        single = isinstance(prompts, str | dict) or isinstance(prompts[0], int)  # text, mapping or token ids
        prompts = [prompts] if single else prompts
        if sampling_params is None:
            sampling_params = engine.llm.get_default_sampling_params()
        given = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        params = [each.clone() for each in given]
        for request, seed in zip(params, next_seeds(len(prompts)), strict=True):
            request.seed = seed
        return generate(prompts, sampling_params=params, **kwargs)

    engine.llm.generate = generate_seeded


class ServerGuard:
    """
    Turns the failure of a vLLM server into something all processes notice: no completions.

    Only the main process speaks to the server. A failure while weights are being sent is outside: NCCL may then wait for
    the dead peer.

    Args:
        engine ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            In server mode; on the main process, the `generate` of its client is replaced.
        accelerator ([`~accelerate.Accelerator`]):
            Tells the other processes.
    """

    def __init__(self, engine: VLLMGeneration, accelerator: Accelerator):
        self.accelerator = accelerator
        self.failure: str | None = None  # the first one, on the main process
        self._is_watching = False
        if accelerator.is_main_process:
            self.client = engine.vllm_client
            self._generate = engine.vllm_client.generate
            engine.vllm_client.generate = self._generate_or_nothing

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What fails in here gives no completions instead of an exception, which only the main process would see."""
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def _generate_or_nothing(self, *args, **kwargs) -> dict:
        try:
            return self._generate(*args, **kwargs)
        except Exception as error:  # TRL's client raises bare exceptions for refused requests
            if not self._is_watching:  # a `rollout_func` that speaks to the server itself
                raise
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception("The vLLM server failed to generate.")
            return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}

    def answers(self) -> bool:
        """Whether the server is healthy, asked by the main process and known to all. Retries as TRL's client does."""
        found = [None]
        if self.accelerator.is_main_process:
            try:
                status = self.client.session.get(f"{self.client.base_url}/health").status_code
                found = [None if status == 200 else f"GET /health has status {status}"]
            except OSError as error:  # of which requests' exceptions are subclasses
                found = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(found, from_process=0)
        self.failure = self.failure or found[0]
        return found[0] is None

"""The vLLM server of a run as the engine of late batches, with one copy of the weights."""

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_client import VLLMClient

from .engine_proxies import CountingClient
from .protocols import ServedTrainer
from .server_command import server_url


_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs", "structured_outputs_regex")


class ServerRequests:
    """Requests of each process to the server. The methods are those of [`EngineProcess`]."""

    def __init__(self, trainer: ServedTrainer):
        self.trainer = trainer
        self.vllm = trainer.vllm_generation  # TRL's engine, with the settings of generation
        self.sent_step = -1  # optimizer step of the weights that the server has
        if trainer.accelerator.is_main_process:
            self.client = self.vllm.vllm_client
        else:
            self.client = CountingClient(VLLMClient(server_url(trainer.args)))

    def write_weights(self, weight_copy: int, weights: None) -> None:
        """Send the current weights. All processes must call this, and none may have a request in flight."""
        if self.sent_step == self.trainer.state.global_step:
            return
        self.vllm.sync_weights()
        # With `vllm_sync_adapter` this is an adapter under a new name, which the first process has given it.
        (model_name,) = broadcast_object_list([self.client.model], from_process=0)
        self.client.model = model_name
        self.sent_step = self.trainer.state.global_step

    def generate(self, weight_copy: int, prompt_ids: list[list[int]], seed: int) -> dict[str, list[list]]:
        """Return `completion_ids`, and `logprobs` in nats. Raises a `RuntimeError` if a completion is missing."""
        output = self.client.generate(
            prompts=prompt_ids,
            min_p=self.vllm.min_p or 0.0,
            max_tokens=self.vllm.max_completion_length,
            generation_kwargs={**self.vllm.generation_kwargs, "seed": seed},
            **{name: getattr(self.vllm, name) for name in _SAMPLING},
        )
        if len(output["completion_ids"]) < len(prompt_ids):
            raise RuntimeError("it returned too few completions")
        # The server returns a list per token, with the log-prob of the sampled token first.
        logprobs = [[candidates[0] for candidates in completion] for completion in output["logprobs"]]
        return {"completion_ids": output["completion_ids"], "logprobs": logprobs}

    def weights_of(self, weight_copy: int) -> None:
        """Return nothing: a run that resumes requests the batch again, with newer weights."""

    def close(self) -> None:
        """Leave the server running; a request in flight ends with this process."""

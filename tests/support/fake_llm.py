"""A colocated vLLM without a model, as far as TRL drives one: completions are a pure function of prompt and seed.

`play_colocated` puts it where TRL looks for vLLM.
"""

import os
from types import SimpleNamespace

import torch
from trl.generation import vllm_generation

from support.models import tiny_model
from support.vllm_server import draw_tokens, play_installed


FOR_VLLM = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # TRL sets these


class SamplingParams(SimpleNamespace):
    def __init__(self, **settings):
        super().__init__(**({"seed": None, "max_tokens": 16} | settings))

    def clone(self):
        return SamplingParams(**vars(self))


class FakeLLM:
    """`requests` lists what was asked for, in order: prompt ids and sampling parameters."""

    def __init__(self, **settings):
        for name in FOR_VLLM:
            os.environ.pop(name, None)  # or the next trainer would begin a process group
        weights = SimpleNamespace(load_weights=list)  # iterates over the weights
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=weights))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.requests: list[tuple[list[int], SamplingParams]] = []

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm=True):
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            prompt_ids = prompt["prompt_token_ids"]
            self.requests.append((prompt_ids, params))
            ids = draw_tokens(prompt_ids, params.seed, 0, params.max_tokens)
            logprobs = [{token: SimpleNamespace(logprob=-5.5, rank=1)} for token in ids]
            drawn = SimpleNamespace(token_ids=ids, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[drawn]))
        return outputs


class SleepingLLM(FakeLLM):
    """An engine with a model, whose weights sleep mode drops. `loads` are the weights of each call."""

    keeps = True  # what it is sent

    def __init__(self, **settings):
        super().__init__(**settings)
        self.model, self.loads, self.calls = tiny_model(), [], []
        self.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = self.load

    @torch.no_grad()
    def load(self, weights):
        self.loads.append([])
        for name, weight in weights:
            self.loads[-1].append(name)
            if self.keeps:
                self.model.get_parameter(name).copy_(weight)

    @torch.no_grad()
    def sleep(self, level):
        self.calls.append("sleep")
        for parameter in self.model.parameters():
            parameter.zero_()

    def wake_up(self, tags):
        self.calls += tags

    def generate(self, prompts, sampling_params, use_tqdm=True, lora_request=None):
        if isinstance(sampling_params, list):
            return super().generate(prompts, sampling_params)
        (ids,) = [prompt["prompt_token_ids"] for prompt in prompts]
        with torch.no_grad():
            logps = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [
            SimpleNamespace(
                prompt_logprobs=[None, *({i: SimpleNamespace(logprob=v[i].item())} for i, v in zip(ids[1:], logps))]
            )
        ]


def play_colocated(monkeypatch) -> dict:
    """As if vLLM were installed; returns the settings of a run with an engine of its own."""
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    for name in FOR_VLLM:
        monkeypatch.setenv(name, "")  # so that they are put back afterwards
        monkeypatch.delenv(name)
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}

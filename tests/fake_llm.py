"""A colocated vLLM without a model, as far as TRL drives one: completions are a pure function of prompt and seed.

`play_colocated` puts it where TRL looks for vLLM. Requests finish in another order than they were added, one per step.
"""

import itertools
import os
from enum import Enum
from types import SimpleNamespace

from loopback_vllm import draw_tokens, play_installed
from trl.generation import vllm_generation


FOR_VLLM = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # TRL sets these


class OutputKind(Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2


class SamplingParams(SimpleNamespace):
    def __init__(self, **settings):
        super().__init__(**({"seed": None, "max_tokens": 16, "output_kind": OutputKind.CUMULATIVE} | settings))

    def clone(self):
        return SamplingParams(**vars(self))


class FakeEngine:
    def __init__(self):
        weights = SimpleNamespace(load_weights=lambda weights: None)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=weights))
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.waiting: dict[str, tuple[list[int], SamplingParams]] = {}

    def add_request(self, request_id, prompt, params):
        if len(prompt["prompt_token_ids"]) > 100:
            raise ValueError("The prompt is too long")
        self.waiting[request_id] = (prompt["prompt_token_ids"], params)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        (first, *_), last = self.waiting, next(reversed(self.waiting))
        running = [SimpleNamespace(request_id=first, finished=False)] if first != last else []
        prompt_ids, params = self.waiting.pop(last)
        return [*running, self._finished(last, prompt_ids, params)]

    def _finished(self, request_id, prompt_ids, params):
        ids = draw_tokens(prompt_ids, params.seed, 0, params.max_tokens)
        logprobs = [{token: SimpleNamespace(logprob=-5.5, rank=1)} for token in ids]
        drawn = SimpleNamespace(token_ids=ids, logprobs=logprobs)
        return SimpleNamespace(request_id=request_id, finished=True, prompt_token_ids=prompt_ids, outputs=[drawn])


class FakeLLM:
    """`requests` lists what was asked for, in order: prompt ids and sampling parameters."""

    def __init__(self, **settings):
        for name in FOR_VLLM:
            os.environ.pop(name, None)  # or the next trainer would begin a process group
        self.request_counter = itertools.count()
        self.llm_engine = FakeEngine()
        self.requests: list[tuple[list[int], SamplingParams]] = []
        add = self.llm_engine.add_request

        def add_and_note(request_id, prompt, params):
            add(request_id, prompt, params)
            self.requests.append((prompt["prompt_token_ids"], params))

        self.llm_engine.add_request = add_and_note

    def get_default_sampling_params(self):
        return SamplingParams(max_tokens=1)

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm=True):
        for prompt, params in zip(prompts, sampling_params, strict=True):
            self.llm_engine.add_request(str(next(self.request_counter)), prompt, params)
        outputs = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))


def play_colocated(monkeypatch) -> dict:
    """As if vLLM were installed; returns the settings of a run with an engine of its own."""
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    for name in FOR_VLLM:
        monkeypatch.setenv(name, "")  # so that they are put back afterwards
        monkeypatch.delenv(name)
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}

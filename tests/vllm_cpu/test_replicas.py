"""vLLM starts processes, and none of them may stay behind."""

import multiprocessing

from pacs_trl.evaluation.engines import VLLMEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings


def test_vllm_draws_what_is_asked_and_leaves(checkpoint):
    before = {process.pid for process in multiprocessing.active_children()}
    engine = VLLMEngine(checkpoint, dtype="float32", max_model_len=64, enforce_eager=True)
    try:
        prompt = [{"role": "user", "content": "1+1"}]
        requests = [Request("p", sample, 1000 + sample, prompt) for sample in range(3)]
        settings = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=5)
        drawn = list(engine.generate(requests, settings))
        again = list(engine.generate(requests, settings))
    finally:
        engine.close()
    assert sorted(request.sample for request, _ in drawn) == [0, 1, 2]
    assert all(0 < completion.num_tokens <= 5 for _, completion in drawn)
    assert {r.sample: c.text for r, c in drawn} == {r.sample: c.text for r, c in again}
    assert {process.pid for process in multiprocessing.active_children()} <= before

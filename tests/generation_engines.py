"""A tiny model on disk, and the engines that runs may draw from."""

import pytest
from fake_llm import play_colocated
from loopback_vllm import LoopbackVLLM, play_installed, server_settings


@pytest.fixture(params=["colocate", "server", "transformers"])
def engine(request, model_path, monkeypatch):
    """Settings of a run, and what its engine has been asked for: number of completions, prompt and seed of each
    request."""
    if request.param == "transformers":
        yield {}, None
    elif request.param == "colocate":
        settings = play_colocated(monkeypatch)
        yield settings, lambda trainer: [(1, ids, p.seed) for ids, p in trainer.vllm_generation.llm.requests]
    else:
        play_installed(monkeypatch.setattr)
        with LoopbackVLLM(model_path) as server:

            def requests(trainer):
                asked, server.requests = server.requests, []
                return [(body["n"], ids, body["seed"]) for body in asked for ids in body["prompt"]]

            yield server_settings(server.url), requests

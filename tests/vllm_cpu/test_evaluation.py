"""Evaluation with vLLM on the CPU: offline, and through its server, spoken to as to any OpenAI-compatible one.

The server is started by its module: the command `vllm serve` asks for the version of a distribution named vllm, which
the CPU build does not have. It is the same server.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import time

import pytest
from huggingface_hub.utils import httpx

from pacs_trl.evaluation.engines import ServerEngine, TransformersEngine, VLLMEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings


# generous: starting takes about half a minute on a free core
SECONDS_TO_START = 240
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=8)
PROMPTS = [[{"role": "user", "content": f"{a}+{b}"}] for a, b in ((3, 4), (12, 30), (7, 7))]


def requests():
    return [Request(f"problem {i}", 0, i, prompt) for i, prompt in enumerate(PROMPTS)]


def texts(engine):
    return {request.seed: completion.text for request, completion in engine.generate(requests(), GREEDY)}


@pytest.fixture(scope="module")
def expected(checkpoint):
    return texts(TransformersEngine.load(checkpoint, dtype="float32"))


@pytest.fixture(scope="module")
def base_url(checkpoint, tmp_path_factory):
    """A server of the tiny model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    options = f"--served-model-name tiny --port {port} --host 127.0.0.1 --dtype float32 --max-model-len 64 --enforce-eager".split()  # noqa: E501
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    with log.open("w") as output:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        server = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)


def test_served_completions_are_those_of_transformers(base_url, expected):
    engine = ServerEngine(base_url, "tiny", concurrency=2)
    assert texts(engine) == expected
    engine.close()


def test_a_server_that_offers_another_model_is_refused(base_url):
    with pytest.raises(ValueError, match="'other'"):
        ServerEngine(base_url, "other")


def test_offline_completions_are_those_of_transformers(checkpoint, expected):
    """vLLM starts processes, and none of them stays."""
    before = {process.pid for process in multiprocessing.active_children()}
    engine = VLLMEngine(checkpoint, dtype="float32", max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.3)
    assert texts(engine) == expected
    sampled = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=5)
    drawn, again = ({r.seed: c.text for r, c in engine.generate(requests(), sampled)} for _ in range(2))
    assert drawn == again and len(drawn) == len(PROMPTS)
    engine.close()
    for process in multiprocessing.active_children():
        if process.pid not in before:
            process.join(60)  # it was told to end
    assert {process.pid for process in multiprocessing.active_children()} <= before

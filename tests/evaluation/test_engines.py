"""The engine of an OpenAI-compatible server, on this machine."""

import json

import pytest
from support.servers import Loopback

from pacs_trl.evaluation.engines import ServerEngine
from pacs_trl.evaluation.requests import Completion, Request, SamplingSettings, sample_seed


SETTINGS = SamplingSettings(0.7, 0.9, 5, 8)


REQUESTS = [
    Request(f"p{i}", j, sample_seed(0, f"p{i}", j), [{"role": "user", "content": f"{i}+2"}])
    for i in range(4)
    for j in range(3)
]


class Server(Loopback):
    """Answers like `vllm serve`: the text repeats what was asked. `failures` statuses are sent first."""

    def __init__(self):
        self.failures: list[int] = []
        self.bodies: list[dict] = []
        super().__init__()
        self.url += "/v1"

    def answer(self, call):
        body = json.loads(call.body() or b"{}")
        if call.command == "GET":
            return call.reply(200, {"data": [{"id": "tiny"}]})
        if self.failures:
            return call.reply(self.failures.pop(), {"error": "busy"})
        self.bodies.append({**body, "authorization": call.headers["Authorization"]})
        if call.path.endswith("/v1/completions"):
            choice = {"text": f"{body['prompt']} {body['seed']}", "finish_reason": "length"}
            return call.reply(200, {"choices": [choice], "usage": {"completion_tokens": 8}})
        text = f"{body['messages'][-1]['content']} {body['seed']}"
        message = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        call.reply(200, {"choices": [message], "usage": {"completion_tokens": 7}})


@pytest.fixture
def server():
    with Server() as server:
        yield server


def test_server_engine_sends_seed_and_settings_of_each_request(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    engine = ServerEngine(server.url, "tiny", concurrency=4, chat_template_kwargs={"enable_thinking": False})
    answers = {request[:2]: completion for request, completion in engine.generate(REQUESTS, SETTINGS)}
    engine.close()
    assert answers == {r[:2]: Completion(f"{r.prompt[0]['content']} {r.seed}", 7, "stop") for r in REQUESTS}
    bodies = {body["seed"]: body for body in server.bodies}
    assert bodies[REQUESTS[5].seed] == {
        "model": "tiny",
        "messages": REQUESTS[5].prompt,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 8,
        "seed": REQUESTS[5].seed,
        "chat_template_kwargs": {"enable_thinking": False},
        "authorization": "Bearer secret",
    }


def test_server_engine_repeats_what_can_pass_and_gives_up_with_the_reason(server, monkeypatch):
    server.failures = [503, 429, 500]
    monkeypatch.setattr(ServerEngine, "waits_seconds", (0.001,) * 4)
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    assert len(list(engine.generate(REQUESTS, SETTINGS))) == 12
    assert server.failures == []
    server.failures = [503] * 5
    with pytest.raises(RuntimeError, match="503"):
        list(engine.generate(REQUESTS[:1], SETTINGS))
    server.failures = [400]
    with pytest.raises(ValueError, match="400.*busy"):
        list(engine.generate(REQUESTS[:1], SETTINGS))


def test_server_engine_checks_the_address_and_the_model(server):
    with pytest.raises(ValueError, match="'huge'.*tiny"):
        ServerEngine(server.url, "huge")
    with pytest.raises(ValueError, match="base_url"):
        ServerEngine("http://127.0.0.1:9/v1", "tiny")


def test_text_is_completed_without_a_chat_template(server):
    engine = ServerEngine(server.url, "tiny", concurrency=1, chat_template_kwargs={"enable_thinking": False})
    ((_, completion),) = engine.generate([Request("p", 0, 3, "1+2=")], SETTINGS)
    engine.close()
    assert completion == Completion("1+2= 3", 8, "length")
    assert server.bodies[0]["prompt"] == "1+2=" and not server.bodies[0].keys() & {"messages", "chat_template_kwargs"}

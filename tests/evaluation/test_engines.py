"""The engine of an OpenAI-compatible server, on this machine."""

import json

import pytest
from support.servers import Loopback

from pacs_trl.evaluation.requests import Completion, Request, SamplingSettings, sample_seed
from pacs_trl.evaluation.server_engine import ServerEngine


SETTINGS = SamplingSettings(0.7, 0.9, 5, 8)


REQUESTS = [
    Request(f"p{i}", j, sample_seed(0, f"p{i}", j), [{"role": "user", "content": f"{i}+2"}])
    for i in range(4)
    for j in range(3)
]


class Server(Loopback):
    """Answers like `vllm serve`: the text repeats what was asked. `failures` statuses are sent first, keys in
    `unknown_keys` are rejected with status `rejection` and, if it `names_keys`, their names, and `message` has more
    entries of a message, `...` for one that it lacks."""

    def __init__(self):
        self.failures: list[int] = []
        self.unknown_keys: set[str] = set()
        self.rejection, self.names_keys = 400, True
        self.message: dict = {}
        self.bodies: list[dict] = []
        super().__init__()
        self.url += "/v1"

    def answer(self, call):
        body = json.loads(call.body() or b"{}")
        if call.command == "GET":
            return call.reply(200, {"data": [{"id": "tiny"}]})
        if self.failures:
            return call.reply(self.failures.pop(), {"error": "busy"})
        if unknown := sorted(self.unknown_keys & body.keys()):
            names = f": {', '.join(unknown)}" if self.names_keys else ""
            return call.reply(self.rejection, {"error": f"Unrecognized request arguments{names}"})
        self.bodies.append({**body, "authorization": call.headers["Authorization"]})
        if call.path.endswith("/v1/completions"):
            choice = {"text": f"{body['prompt']} {body['seed']}", "finish_reason": "length"}
            return call.reply(200, {"choices": [choice], "usage": {"completion_tokens": 8}})
        text = f"{body['messages'][-1]['content']} {body['seed']}"
        message = {"role": "assistant", "content": text} | self.message
        message = {name: value for name, value in message.items() if value is not ...}
        choice = {"message": message, "finish_reason": "stop"}
        call.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})


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
        "min_p": 0.0,
        "repetition_penalty": 1.0,
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
    server.failures = [400, 400]  # also without neutral settings
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


NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def test_neutral_settings_are_sent_so_that_a_server_takes_none_from_its_checkpoint(server):
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    list(engine.generate([REQUESTS[0], Request("p", 0, 3, "1+2=")], SamplingSettings(1.0, 1.0, 0, 8)))
    assert [{key: body[key] for key in NEUTRAL} for body in server.bodies] == [NEUTRAL] * 2


def test_a_server_that_knows_no_extensions_gets_no_neutral_ones(server, caplog):
    server.unknown_keys = set(NEUTRAL)
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    assert len(list(engine.generate(REQUESTS, SamplingSettings(1.0, 1.0, 0, 8)))) == 12
    assert not any(body.keys() & NEUTRAL.keys() for body in server.bodies)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "top_k" in warning and "default values of its own" in warning
    with pytest.raises(ValueError, match="400.*Unrecognized request arguments: top_k"):
        list(engine.generate(REQUESTS, SETTINGS))  # a setting of the user is not dropped


@pytest.mark.parametrize("rejection", [400, 422])
def test_a_server_that_does_not_name_the_keys_it_rejects_gets_no_neutral_ones(server, caplog, rejection):
    server.unknown_keys, server.rejection, server.names_keys = {"min_p"}, rejection, False
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    answers = [completion for _, completion in engine.generate(REQUESTS, SETTINGS)]
    assert all(completion.more == {"settings_not_sent": ["min_p", "repetition_penalty"]} for completion in answers)
    assert {body["top_k"] for body in server.bodies} == {5} and len(answers) == 12  # set by the user
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert not any(body.keys() & {"min_p", "repetition_penalty"} for body in server.bodies)


def test_a_request_that_is_rejected_for_another_reason_is_not_repeated(server):
    server.unknown_keys, server.rejection = {"min_p"}, 403
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    with pytest.raises(ValueError, match="403"):
        list(engine.generate(REQUESTS[:1], SETTINGS))
    assert not server.bodies


def test_a_rejected_request_is_reported_as_the_server_does(server, caplog):
    server.unknown_keys = {"messages"}
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    with pytest.raises(ValueError, match="400.*messages"):
        list(engine.generate(REQUESTS, SETTINGS))
    assert not caplog.records


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", [None, "", ...])
def test_reasoning_that_a_parser_took_out_of_the_answer_is_refused(server, key, content):
    server.message = {"content": content, key: r"1+2 is \boxed{3}"}
    engine = ServerEngine(server.url, "tiny", concurrency=1)
    with pytest.raises(ValueError, match="reasoning parser.*Start it without"):
        list(engine.generate(REQUESTS, SETTINGS))
    server.message = {"content": content, key: None}
    assert {completion.text for _, completion in engine.generate(REQUESTS, SETTINGS)} == {""}
    server.message = {key: "1+2"}
    assert all(completion.text for _, completion in engine.generate(REQUESTS, SETTINGS))

"""A critic of another size on a vLLM server of its own: what each server gets, how a run ends without one, and what is
refused."""

import socket

import pytest
import torch
from loopback_vllm import LoopbackVLLM, play_installed, server_settings
from replay import TOKENIZER, tiny_model, trainable_weights
from test_genac_trainer import SETTINGS, build
from trl.generation import vllm_client

from pacs_trl import GenACConfig
from pacs_trl.settings.command_line import FailedRun


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("critic"))
    tiny_model(hidden_size=16).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def servers(model_path, critic_path, monkeypatch):
    """Settings of a run, the servers of policy and critic, and the widths of the weights that each has got."""
    play_installed(monkeypatch.setattr)
    update, sent = vllm_client.VLLMClient.update_named_params, {}

    def note(self, metadata, named_params):
        named = list(named_params)
        sent.setdefault(self.base_url, []).append({weight.size(-1) for name, weight in named if "embed" in name})
        update(self, metadata, named)

    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", note)
    with LoopbackVLLM(model_path) as policy, LoopbackVLLM(critic_path) as critic:
        own = {"critic_vllm_server_base_url": f"{critic.url}/", "critic_model_name_or_path": critic_path}
        yield server_settings(policy.url) | own | {"vllm_group_port": free_port() - 1}, policy, critic, sent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_each_server_has_the_weights_of_its_model(tmp_path, model_path, servers):
    """The policy's are sent once for each generation; both draw by their own settings, with seeds that never
    repeat."""
    settings, policy, critic, sent = servers
    trainer = build(tmp_path, model_path, **settings)
    critic_before = trainable_weights(trainer.critic)
    trainer.train()
    assert sent == {policy.url: [{32}] * 2, critic.url: [{16}] * 2}
    assert [body["max_tokens"] for body in policy.requests] == [16] * 2 and "stop" not in policy.requests[0]
    assert {(body["max_tokens"], *body["stop"]) for body in critic.requests} == {(6, ">")}
    assert len({*policy.seeds, *critic.seeds}) >= 4  # equal questions of a call share theirs
    assert not {*policy.seeds} & {*critic.seeds}
    log = trainer.state.log_history[0]
    assert log["time/weight_sync"] > 0 and log["time/critic"] > 0
    assert any(not torch.equal(weight, trainer.critic.get_parameter(n)) for n, weight in critic_before.items())


def test_a_run_ends_in_order_when_the_critics_server_dies_and_goes_on(tmp_path, model_path, servers):
    """The state after the last optimizer step is saved, and a run that goes on comes to the same weights."""
    settings, policy, critic, _ = servers
    whole = build(tmp_path / "whole", model_path, **settings)
    whole.train()
    in_first = critic.seeds.count(critic.seeds[0])  # requests of a generation share their seed
    critic.fail_generation = len(critic.seeds) + in_first  # in the second generation of the next run
    trainer = build(tmp_path / "run", model_path, **settings)
    with pytest.raises(FailedRun) as stopped:
        trainer.train()
    message = str(stopped.value)
    assert f"The vLLM server at {critic.url} stopped answering after optimizer step 1" in message
    assert f"vllm serve {settings['critic_model_name_or_path']}" in message
    critic.dead, critic.fail_generation = False, None
    resumed = build(tmp_path / "run", model_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for mine, theirs in ((resumed.model, whole.model), (resumed.critic, whole.critic)):
        for name, weight in theirs.named_parameters():
            assert torch.equal(weight, mine.get_parameter(name)), name


class TestBadInput:
    def test_settings(self):
        own = {"critic_vllm_server_base_url": "http://critic:8000"}
        with pytest.raises(ValueError, match="would be ignored without a server of the policy"):
            GenACConfig("unused", **SETTINGS, **own)
        one = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "critic"}
        with pytest.raises(ValueError, match="is the policy's server, which serves both in turn without the key"):
            GenACConfig("unused", **SETTINGS, **own, **one)

    @pytest.mark.parametrize(
        ("broken", "message"),
        [
            ({"answers": {"/health": 404}}, "No vLLM server answers .*or correct critic_vllm_server_base_url"),
            ({"models": {"data": [{"id": "m", "max_model_len": 512}]}}, r"serves 'm', but this run trains '.*critic"),
            ({"max_model_len": 22}, r"max_model_len=22, which cannot hold .*max_completion_length=22"),
        ],
    )
    def test_server(self, tmp_path, model_path, servers, monkeypatch, broken, message):
        monkeypatch.setattr("pacs_trl.baselines.actor_critic.create_model_from_path", None)  # nothing is loaded
        settings, _, critic, _ = servers
        if "max_model_len" in broken:
            critic.models["data"][0] |= broken
        else:
            vars(critic).update(broken)
        with pytest.raises(ValueError, match=message):
            build(tmp_path, model_path, **settings)

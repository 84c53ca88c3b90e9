"""Adapters instead of merged weights for vLLM: what is rejected, and which answers of an engine stop a run."""

from types import SimpleNamespace

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from support.models import tiny_model
from support.rollouts import addition_dataset
from support.runs import build_trainer, config
from support.seeds import shifted
from support.vllm_server import LoopbackVLLM, play_installed, server_settings
from transformers import AutoModelForCausalLM

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.adapter_checks import max_lora_rank
from pacs_trl.rollouts.engine import AdapterSync
from pacs_trl.update.forward_pass import ForwardPass


LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
SYNC = {"use_vllm": True, "vllm_sync_adapter": True}


@pytest.mark.parametrize(
    ("lora", "settings", "words"),
    [
        (None, {}, "all weights"),
        (AdaLoraConfig(total_step=10), {}, "AdaLoraConfig"),
        (LORA, {"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode: true"),
    ],
)
def test_whole_weights_other_adapters_and_sleeping_engines_get_no_adapters(tmp_path, lora, settings, words):
    with pytest.raises(ValueError, match=f"vllm_sync_adapter.*{words}"):
        max_lora_rank(config(tmp_path, **SYNC, **settings), None, lora)


def test_the_largest_rank_is_the_next_one_that_vllm_allows(tmp_path):
    ranks = [max_lora_rank(config(tmp_path, **SYNC), None, LoraConfig(r=r)) for r in (1, 8, 9, 512)]
    assert ranks == [8, 8, 16, 512]
    assert max_lora_rank(config(tmp_path), None, None) is None


def answers(model, ids):
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


class Target:
    """An engine that generates with what `kept` holds: the newest answer by default; `error` is added to each."""

    def __init__(self, model, loses=False, error=0.0):
        self.model, self.loses, self.error, self.kept, self.loaded = model, loses, error, None, []

    def load_adapter(self, path):
        self.loaded.append(path)
        if not self.loses:
            self.kept = None

    def prompt_logps(self, ids):
        if self.kept is None:
            self.kept = answers(self.model, ids) + self.error
        return self.kept


def changed(model, by):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=by)


@pytest.mark.parametrize(
    ("target", "change", "message"),
    [
        ({}, 0.1, None),
        ({"error": 0.03}, 0.1, None),
        ({"loses": True}, 0.1, "does not generate with the trained adapter"),
        ({"loses": True, "error": 0.03}, 1.0, "does not generate with the trained adapter"),
        ({"error": 0.3}, 0.1, "without the adapter by 0.3 "),
    ],
)
def test_an_engine_must_answer_as_the_trainer(target, change, message):
    torch.manual_seed(shifted(0))
    model = get_peft_model(tiny_model(shifted(0)), LORA)
    target = Target(model, **target)
    engine = SimpleNamespace(model=model, mode="colocate", llm=target)
    sync = AdapterSync(engine, ForwardPass(model, torch.device("cpu")), list(range(60, 80)), None)
    changed(model, 1e-7)

    def send_changes():
        for _ in range(3):
            sync.send()
            changed(model, change)

    if message is None:
        send_changes()
        assert len(target.loaded) == 3
        target.loses = True  # an outdated adapter: its log-probs are the last
    with pytest.raises(FailedRun, match=message or "does not generate with the trained adapter"):
        send_changes()


def test_a_run_with_a_server(tmp_path, monkeypatch):
    """The server reads each adapter. One that answers with the base model, or rejects an adapter, stops the run, whose
    last step is saved."""
    play_installed(monkeypatch.setattr)
    path = str(tmp_path / "model")
    tiny_model().save_pretrained(path)
    load = lambda: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # noqa: E731

    def prompt_logps(ids, adapter):
        return answers(load() if adapter is None else PeftModel.from_pretrained(load(), adapter), ids).tolist()

    with LoopbackVLLM(path) as server:
        settings = server_settings(server.url) | SYNC | {"learning_rate": 3e-2, "optim": "adamw_torch", "max_steps": 3}
        server.info["vllm_config"]["weight_transfer_config"] = None
        server.prompt_logps = prompt_logps

        def train():
            more = {"train_dataset": addition_dataset(64), "peft_config": LORA}
            build_trainer(tmp_path / "run", model=load(), more=more, **settings).train()

        train()
        assert len(server.loaded) == 3 and server.requests[-1]["model"] == list(server.loaded)[-1]
        server.prompt_logps = lambda ids, adapter: prompt_logps(ids, None)
        with pytest.raises(FailedRun, match="does not generate with the trained adapter"):
            train()
        assert (tmp_path / "run" / "checkpoint-1").is_dir()
        server.prompt_logps, last = prompt_logps, len(server.seeds) + 1  # generation of the second step
        server.wait = lambda number: number == last and server.answers.update({"/v1/load_lora_adapter": 400})
        with pytest.raises(FailedRun, match="did not answer with the trained adapter .status 400.*as told"):
            train()
        assert (tmp_path / "run" / "checkpoint-2").is_dir()

"""Continuous rollouts on two processes: the first one has the worker, and both train on its groups."""

import copy
import os
import re

import pytest
import torch
from peft import get_peft_model
from support.models import LORA, load_weights, trainable_weights
from support.optional_packages import require
from support.processes import on_two, run_and_save
from support.rollouts import addition_dataset
from support.runs import Recorder, build_trainer
from support.scripted_worker import play_worker, server_of
from support.sharding import (
    FSDP_SETTINGS,
    let_accelerate_run_deepspeed_on_cpu,
    let_accelerate_shard_on_cpu,
    zero3_settings,
)
from support.tolerances import rounding_atol
from support.two_processes import DEEPSPEED
from support.vllm_server import server_settings
from transformers import AutoModelForCausalLM, TrainerCallback

from pacs_trl.errors import FailedRun, UserError
from pacs_trl.rewards import VerificationArguments
from pacs_trl.rollouts import exact_trainer, server_connection
from pacs_trl.rollouts.weight_transfer import SharedMemoryTransfer
from pacs_trl.update.reference import is_sharded


class Taken(TrainerCallback):
    def __init__(self):
        self.positions: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.positions += [group.position for group in self.trainer._source._taken]


def trainer_of(directory, model, url, callbacks=(), lora=None, **settings):
    settings = {"rollout_schedule": "continuous", "max_staleness": 2} | server_settings(url) | settings
    more = {"train_dataset": addition_dataset(12), "callbacks": list(callbacks), "peft_config": lora}
    return build_trainer(directory, model=model, more=more, **settings)


def train(directory, model, url, batch_size, max_steps, resume=None, patch=setattr):
    play_worker(patch)
    taken = Taken()
    settings = {"per_device_train_batch_size": batch_size, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(directory, model, url, [taken], max_steps=max_steps, **settings)
    taken.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return {"weights": trainable_weights(trainer.model), "positions": taken.positions}


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on(tmp_path, model_path, monkeypatch):
    # This process resumes; other tests may have changed its settings.
    monkeypatch.setattr("pacs_trl.rewards._arguments", VerificationArguments())
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with server_of(model) as server:
        on_two(
            run_and_save,
            train,
            (tmp_path / "two", model_path, server.url, 4, 4),
            tmp_path,
            outputs=tmp_path,
        )
        first, second = (torch.load(tmp_path / f"result.{rank}") for rank in range(2))
        server_weights = dict(server.weights)
        alone = train(tmp_path / "one", model_path, server.url, 8, 4, patch=monkeypatch.setattr)
        checkpoint = str(tmp_path / "two" / "checkpoint-3")
        rest = train(tmp_path / "two", model_path, server.url, 8, 6, checkpoint, patch=monkeypatch.setattr)
    assert first["positions"] == alone["positions"] == list(range(8))
    assert second["positions"] == []
    assert rest["positions"] == list(range(6, 12))
    assert server_weights.keys() == first["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
        assert torch.allclose(weight, alone["weights"][name], atol=rounding_atol(10_000, 1.0)), name


def train_sharded(directory, model, url, kind):
    """Return the weights before each of three steps that train LoRA, sent alone, all weights, and LoRA, merged."""
    if kind == "fsdp2":
        let_accelerate_shard_on_cpu()
    else:
        let_accelerate_run_deepspeed_on_cpu()
    play_worker(setattr)
    weights = []
    for name, lora, sends_adapter in (("adapter", LORA, True), ("all", None, False), ("merged", LORA, False)):
        torch.manual_seed(0)  # the same adapter on both processes
        recorder = Recorder()
        settings = {"per_device_train_batch_size": 4, "max_steps": 3, "optim": "adamw_torch", "learning_rate": 3e-3}
        settings |= {"vllm_sync_adapter": sends_adapter, **(FSDP_SETTINGS if kind == "fsdp2" else zero3_settings(0))}
        trainer = trainer_of(directory / name, model, url, [recorder], lora, **settings)
        trainer.train()
        assert is_sharded(trainer.model)
        weights.append(recorder.weights)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_a_server_gets_the_full_weights_of_shards_after_every_step(tmp_path, model_path, kind):
    """The adapter, all of them, or those with LoRA merged into them."""
    if kind == "zero3":
        require("deepspeed")
    sent: list[dict[str, torch.Tensor]] = []
    base = AutoModelForCausalLM.from_pretrained(model_path)
    with server_of(base) as server:
        load = server._load_weights

        def load_weights_of_server(weights):
            names = load(weights)
            sent.append(server.weights)
            return names

        server._load_weights = load_weights_of_server
        arguments, environment = (tmp_path, model_path, server.url, kind), DEEPSPEED if kind == "zero3" else {}
        on_two(run_and_save, train_sharded, arguments, tmp_path, outputs=tmp_path, **environment)
    adapters, all_weights, merged_adapters = torch.load(tmp_path / "result.0")
    expected = list(all_weights)
    for adapter in merged_adapters:
        model = get_peft_model(copy.deepcopy(base), LORA)
        load_weights(model, adapter)
        expected.append(dict(model.merge_and_unload().named_parameters()))
    assert len(sent) == len(expected) == 6
    assert not torch.equal(*(expected[step]["model.layers.0.self_attn.q_proj.weight"] for step in (3, 5)))
    for weights, server_weights in zip(expected, sent, strict=True):
        assert server_weights.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.allclose(server_weights[name], weight, atol=1e-6), name
    assert len(server.adapters) == 3
    for adapter, server_adapter in zip(adapters, server.adapters.values(), strict=True):
        by_name = {name.replace(".default", ""): weight for name, weight in adapter.items()}
        assert server_adapter.keys() == by_name.keys()
        assert all(torch.equal(server_adapter[name], weight) for name, weight in by_name.items())


FAILURES = {
    "no answer": "vLLM server at .* did not answer after optimizer step 0 .*500",
    "full memory": "vLLM server at .* did not take the weights after optimizer step 0 .*OSError: no space",
    "no worker": "rollout worker failed to start after optimizer step 0 .*RuntimeError: no room",
}


def start_and_fail(directory, model, url):
    """What fails on the first process, which the second one does not see."""
    let_accelerate_shard_on_cpu()
    worker = play_worker(setattr)
    is_main = os.environ["RANK"] == "0"

    def fail(error):
        def raise_error(*args, **kwargs):
            raise error

        return raise_error

    messages = {}
    for failure in FAILURES:
        settings = {"per_device_train_batch_size": 4, "max_steps": 2, **FSDP_SETTINGS}
        trainer = trainer_of(directory / failure, model, url, **settings)
        with pytest.MonkeyPatch.context() as patch:
            if failure == "no answer" and is_main:
                patch.setattr(server_connection, "server_config", fail(Exception("Request failed: 500")))
            if failure == "full memory" and is_main:
                patch.setattr(SharedMemoryTransfer, "stage", fail(OSError("no space")))
            if failure == "no worker" and is_main:
                patch.setattr(worker, "start", fail(RuntimeError("no room")))
            with pytest.raises(FailedRun) as stopped:
                trainer.train()
        messages[failure] = str(stopped.value)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as refused:
        patch.setattr(exact_trainer, "check_server_of_continuous", fail(UserError("It has no adapters. Start it.")))
        trainer_of(directory / "refused", model, url)
    messages["refused"] = str(refused.value)
    return messages


@pytest.mark.slow
def test_what_fails_at_the_start_on_the_first_process_stops_all_with_the_same_message(tmp_path, model_path):
    with server_of(AutoModelForCausalLM.from_pretrained(model_path)) as server:
        on_two(run_and_save, start_and_fail, (tmp_path, model_path, server.url), tmp_path, outputs=tmp_path)
    first, second = (torch.load(tmp_path / f"result.{rank}") for rank in range(2))
    assert first == second
    for failure, words in FAILURES.items():
        assert re.search(words, first[failure])
    assert first["refused"] == "It has no adapters. Start it."

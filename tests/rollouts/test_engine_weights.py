"""Weights for vLLM: merged into copies, one layer at a time, in one call; engines without them are noticed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from support.fake_llm import SleepingLLM, play_colocated
from support.models import tiny_model
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.seeds import shifted
from trl.generation import vllm_generation

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.engine_weights import WakeCheck, merged_parameters
from pacs_trl.update.forward_pass import ForwardPass


CPU = torch.device("cpu")
ALL_LINEAR = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


def gathers_nothing(parameters):
    return nullcontext()


def with_adapter(**settings):
    """A model with an adapter of random weights, in the precision of its base."""
    torch.manual_seed(shifted(0))
    model = get_peft_model(tiny_model(tie_word_embeddings=False), LoraConfig(**(ALL_LINEAR | settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.normal_(std=0.1)
    return model


def sent_by(model) -> dict[str, torch.Tensor]:
    weights = merged_parameters(model.get_base_model(), CPU, gathers_nothing)
    return {name: weight.clone() for name, weight in weights}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_merged_by_the_definition_of_lora(dora):
    """W + (alpha / r) B A; with DoRA its rows are scaled to the magnitudes."""
    model = with_adapter(use_dora=dora)
    plain = dict(tiny_model(tie_word_embeddings=False).named_parameters())
    sent = sent_by(model)
    assert list(sent) == list(plain)
    layers = {name: layer for name, layer in model.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    assert len(layers) == 14
    for name, layer in layers.items():
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        expected = plain[f"{name}.weight"] + 16 / 4 * product
        if dora:
            norms = expected.norm(dim=1, keepdim=True)
            expected = layer.lora_magnitude_vector["default"].weight[:, None] * expected / norms
        assert torch.allclose(sent.pop(f"{name}.weight"), expected, atol=1e-6)
    assert all(torch.equal(weight, plain[name]) for name, weight in sent.items())


def test_base_weights_keep_every_bit_in_half_precision():
    """Adding and subtracting an adapter would not: that is what `merge_adapter` and `unmerge_adapter` do."""
    model = with_adapter().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for _ in range(3):
        sent_by(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    model.merge_adapter()
    model.unmerge_adapter()
    assert not all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_one_layer_at_a_time_is_merged_also_after_an_error():
    model = with_adapter()
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    before = list(model.parameters())
    weights = merged_parameters(model.get_base_model(), CPU, gathers_nothing)
    merged = [sum(layer.merged for layer in layers) for _ in weights]
    assert set(merged) == {0, 1} and sum(merged) == len(layers)
    weights = merged_parameters(model.get_base_model(), CPU, gathers_nothing)
    while not any(layer.merged for layer in layers):
        next(weights)
    weights.close()
    assert not any(layer.merged for layer in layers)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_copies_that_peft_trains_are_sent():
    """`modules_to_save` under the name of the module, and rows of the embedding."""
    model = with_adapter(modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": [5, 7]})
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.fill_(3.0)
    sent = sent_by(model)
    plain = dict(tiny_model(tie_word_embeddings=False).named_parameters())
    assert list(sent) == list(plain)
    assert sent["lm_head.weight"].eq(3.0).all()
    changed = (sent["model.embed_tokens.weight"] != plain["model.embed_tokens.weight"]).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [5, 7]


def test_tied_weights_are_sent_once():
    model = get_peft_model(tiny_model(), LoraConfig(**ALL_LINEAR))
    assert list(sent_by(model)) == [name for name, _ in tiny_model().named_parameters()]


def sleeping_run(tmp_path, monkeypatch, peft_config=None):
    """A run that learns in every step, and its engine."""
    settings = play_colocated(monkeypatch) | {"vllm_enable_sleep_mode": True, "max_steps": 3}
    settings |= {"learning_rate": 3e-2, "optim": "adamw_torch"}
    monkeypatch.setattr(vllm_generation, "LLM", SleepingLLM)
    model, more = tiny_model(), {"train_dataset": addition_dataset(64), "peft_config": peft_config}
    trainer = build_trainer(tmp_path, model=model, more=more, **settings)
    return trainer, trainer.vllm_generation.llm.llm


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**ALL_LINEAR)])
def test_an_engine_wakes_once_with_all_weights_in_one_call(tmp_path, monkeypatch, peft_config):
    trainer, engine = sleeping_run(tmp_path, monkeypatch, peft_config)
    checks = []
    run = WakeCheck.run
    monkeypatch.setattr(WakeCheck, "run", lambda *arguments: checks.append(run(*arguments)))
    trainer.train()
    assert engine.calls == ["sleep", *["weights", "kv_cache", "sleep"] * 3]
    assert engine.loads == [[name for name, _ in tiny_model().named_parameters()]] * 3
    assert len(checks) == 3


@pytest.mark.parametrize("lost_in", [1, 2])
def test_an_engine_that_wakes_without_its_weights_stops_the_run(tmp_path, monkeypatch, lost_in):
    trainer, engine = sleeping_run(tmp_path, monkeypatch)
    load = engine.load

    def lose(weights):
        engine.keeps = len(engine.loads) + 1 < lost_in
        load(weights)

    engine.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = lose
    with pytest.raises(FailedRun, match="after sleep mode.*vllm_enable_sleep_mode: false"):
        trainer.train()
    assert trainer.state.global_step == lost_in - 1


def test_an_engine_with_outdated_weights_is_noticed():
    """Its log-probs are those of the last time, bit by bit, and near the trainer's."""
    torch.manual_seed(shifted(0))
    model = tiny_model()
    check = WakeCheck(ForwardPass(model, CPU), range(60, 80))
    outdated = check.trainer_logps(model)
    engine = SimpleNamespace(prompt_logps=lambda ids: outdated)
    check.run(engine, model)
    check.run(engine, model)  # nothing was learned
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    change = (check.trainer_logps(model) - outdated).abs().mean()
    assert change < 0.02
    with pytest.raises(FailedRun, match="does not generate with the trained weights"):
        check.run(engine, model)


def test_rounding_that_grows_with_learning_stops_no_run():
    """Lost weights differ by more than 0.1 nats a token."""
    torch.manual_seed(shifted(0))
    model = tiny_model()
    check = WakeCheck(ForwardPass(model, CPU), range(60, 80))
    error = 1e-4
    engine = SimpleNamespace(prompt_logps=lambda ids: check.trainer_logps(model) + error)
    check.run(engine, model)
    error = 0.09
    check.run(engine, model)
    error = 0.11
    with pytest.raises(FailedRun, match="by 0.11 nats per token, and after the first start by 0.0001"):
        check.run(engine, model)


def test_turns_that_processes_have_alone_are_not_compared(tmp_path, monkeypatch):
    """With tools a process generates again only for its own completions; the others would wait for it."""
    trainer, _ = sleeping_run(tmp_path, monkeypatch)
    engine = trainer.vllm_generation
    assert engine._is_shared_turn()
    trainer.tools = [len]
    assert engine._is_shared_turn()  # the first turn of a step
    trainer._last_loaded_step = trainer.state.global_step
    assert not engine._is_shared_turn()

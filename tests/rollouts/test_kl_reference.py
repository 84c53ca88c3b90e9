"""The reference of the KL term is the model that was given, with its weights in memory."""

from types import SimpleNamespace

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from support.models import LORA, tiny_model
from support.rollouts import Replay
from support.runs import build_trainer
from torch import nn

from pacs_trl import GRPOTrainer, RLOOTrainer
from pacs_trl.rollouts import kl_reference
from pacs_trl.rollouts.kl_reference import check_reference, copied_model


def saved(tmp_path):
    """A model that knows a path with other weights."""
    tiny_model(1).save_pretrained(tmp_path / "model")
    model = tiny_model(2)
    model.config.name_or_path = str(tmp_path / "model")
    return model


def kl_of(trainer) -> list[float]:
    return [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]


@pytest.mark.parametrize("trainer_class", [None, GRPOTrainer, RLOOTrainer])
def test_the_first_step_has_no_kl(tmp_path, trainer_class):
    model = saved(tmp_path)
    trainer = build_trainer(tmp_path, model=model, trainer_class=trainer_class, replay=Replay(), beta=0.1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    first, second = kl_of(trainer)
    assert abs(first) < 1e-6 < abs(second)
    for name, weight in trainer.ref_model.named_parameters():
        assert torch.equal(weight, before[name]) and not torch.equal(weight, model.get_parameter(name))


def test_a_model_without_a_path_can_be_the_reference(tmp_path):
    trainer = build_trainer(tmp_path, model=tiny_model(), replay=Replay(), beta=0.1, max_steps=1)
    trainer.train()
    assert abs(kl_of(trainer)[0]) < 1e-6


def test_a_model_that_another_trainer_has_trained(tmp_path):
    """Its forward method is a wrapper that would call the trained model, not the copy."""
    model = tiny_model()
    build_trainer(tmp_path / "first", model=model, replay=Replay(), max_steps=1).train()
    assert "forward" in vars(model)
    trainer = build_trainer(tmp_path / "second", model=model, replay=Replay(), beta=0.1)
    trainer.ref_pass.fused = False  # the model's own forward method
    trainer._forward_passes_are_chosen = True
    trainer.train()
    first, second = kl_of(trainer)
    assert abs(first) < 1e-6 < abs(second)


def test_trls_loading_is_restored(tmp_path):
    load = trl.trainer.grpo_trainer.create_model_from_path
    build_trainer(tmp_path, replay=Replay(), beta=0.1)
    assert trl.trainer.grpo_trainer.create_model_from_path is load


def settings(beta=0.1) -> SimpleNamespace:
    return SimpleNamespace(beta=beta)


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_change_the_base_weights_are_refused(initialization):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=initialization)
    model = tiny_model()
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    adapted = get_peft_model(model, config)
    assert not torch.equal(before, adapted.get_base_model().model.layers[0].self_attn.q_proj.weight)
    for model_or_path, peft_config in ((tiny_model(), config), ("a/path", config), (adapted, None)):
        with pytest.raises(ValueError, match=f"init_lora_weights='{initialization}'.*beta=0.1"):
            check_reference(model_or_path, settings(), peft_config)
        check_reference(model_or_path, settings(beta=0), peft_config)
    check_reference(tiny_model(), settings(), LORA)


def test_models_that_cannot_be_copied_are_refused(monkeypatch):
    model = tiny_model()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda states: forward(states)
    with pytest.raises(ValueError, match="beta=0.1: model.norm has a forward method"):
        check_reference(model, settings(), None)
    monkeypatch.setattr(kl_reference, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="beta=0.1.*ZeRO-3"):
        check_reference(tiny_model(), settings(), None)
    check_reference("a/path", settings(), None)


def test_a_copy_keeps_changes_and_shares_no_weights():
    model = tiny_model().train()
    model.model.norm = nn.Identity()
    copied = copied_model(model)
    assert isinstance(copied.model.norm, nn.Identity) and not copied.training and model.training
    assert copied.lm_head.weight is copied.model.embed_tokens.weight  # still tied
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}

"""Models of which nothing would be trained, or which are split over processes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from support.architectures import build
from support.models import LORA, TOKENIZER, tiny_model
from support.runs import build_trainer

from pacs_trl import GRPOConfig, PACSTrainer, PPOTrainer
from pacs_trl.errors import UserError
from pacs_trl.rollouts.model_checks import check_trainable
from pacs_trl.rollouts.recomputation_checks import check_recomputation_of_shared_keys


def frozen():
    return tiny_model().requires_grad_(False)


def adapter_for_inference(tmp_path):
    get_peft_model(tiny_model(), LORA).save_pretrained(tmp_path / "adapter")
    return PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")


def disabled_adapter():
    model = get_peft_model(tiny_model(), LORA)
    model.disable_adapter_layers()
    return model


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_run_that_would_train_nothing_is_refused(tmp_path, beta):
    with pytest.raises(ValueError, match="is_trainable=True"):
        build_trainer(tmp_path, model=adapter_for_inference(tmp_path), beta=beta)


def test_frozen_weights_are_refused():
    for model in (frozen(), disabled_adapter(), get_peft_model(tiny_model(), LORA).merge_and_unload()):
        with pytest.raises(ValueError, match="requires_grad"):
            check_trainable(model, None)
    with pytest.raises(ValueError, match="inference_mode=True"):
        check_trainable(tiny_model(), LoraConfig(inference_mode=True))
    check_trainable(frozen(), LORA)
    check_trainable(tiny_model(), None)
    check_trainable("a/path", None)


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "sp_size"])
def test_processes_that_split_a_model_or_its_sequences_are_refused(tmp_path, monkeypatch, size):
    """Also those of `accelerate launch`, which sets variables."""
    with pytest.raises(UserError, match=f"{size}=2"):
        GRPOConfig(str(tmp_path), bf16=False, parallelism_config=ParallelismConfig(**{size: 2}))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    GRPOConfig(str(tmp_path), bf16=False)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    GRPOConfig(str(tmp_path), bf16=False)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{size.upper()}", "2")
    with pytest.raises(UserError, match=f"{size}=2"):
        GRPOConfig(str(tmp_path), bf16=False)


def test_a_model_that_is_split_over_processes_is_refused(tmp_path):
    model = tiny_model()
    model._tp_size = 2  # as `from_pretrained(..., tp_plan="auto")` sets it
    with pytest.raises(UserError, match="tp_plan"):
        build_trainer(tmp_path, model=model)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_reentrant_recomputation_loses_the_gradient_of_shared_keys_and_is_refused(model_type, num_shared):
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model, ids = build(model_type, **layers, num_kv_shared_layers=num_shared).train(), torch.arange(5, 25)[None]
    gradients = []
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing is not None:
            model.gradient_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole, not_reentrant, reentrant = gradients
    assert (not_reentrant - whole).norm() < 1e-5 * whole.norm()
    is_lost = (reentrant - whole).norm() > 0.05 * whole.norm()
    assert is_lost == (num_shared > 0)
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="2 layers read the keys") if is_lost else nullcontext():
        check_recomputation_of_shared_keys(model.config, args)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, PPOTrainer])
def test_trainers_refuse_reentrant_recomputation_of_shared_keys(tmp_path, trainer_class):
    model = tiny_model()
    model.config.num_kv_shared_layers = 1
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="Set use_reentrant: false, or gradient_checkpointing: false"):
        build_trainer(tmp_path, model=str(tmp_path / "model"), trainer_class=trainer_class, **settings)

"""Models of which nothing would be trained, or which are split over processes."""

import pytest
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import LORA, tiny_model
from support.runs import build_trainer

from pacs_trl import GRPOConfig
from pacs_trl.errors import UserError
from pacs_trl.rollouts.model_checks import check_trainable


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

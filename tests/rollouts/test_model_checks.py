"""Models of which nothing would be trained."""

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import LORA, tiny_model
from support.runs import build_trainer

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

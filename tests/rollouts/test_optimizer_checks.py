"""Optimizers of other weights, schedulers of other optimizers, and steps inside the backward pass."""

import logging

import pytest
import torch
from support.models import LORA, tiny_model
from support.runs import build_trainer
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from pacs_trl.rollouts.optimizer_checks import check_optimizers, missing_optimizer


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def test_an_optimizer_without_the_trained_weights_is_refused(tmp_path, caplog):
    model = tiny_model()
    with pytest.raises(ValueError, match="optimizers.*none of the weights"):
        build_trainer(tmp_path, model=model, more={"optimizers": (adamw(tiny_model()), None)})
    for model_or_path, peft_config in ((model, LORA), ("a/path", None)):
        with pytest.raises(ValueError, match="optimizers: .*later"):
            check_optimizers(model_or_path, peft_config, (adamw(model), None))
    check_optimizers(model, None, (adamw(model), None))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_optimizers(model, None, (adamw(model.lm_head), None))
    assert "1 of" not in caplog.text and "not in the optimizer" in caplog.text


def test_a_scheduler_of_another_optimizer_is_refused():
    model = tiny_model()
    scheduler = torch.optim.lr_scheduler.ConstantLR(adamw(model))
    for optimizer in (None, adamw(model)):
        with pytest.raises(ValueError, match="scheduler belongs to another optimizer"):
            check_optimizers(model, None, (optimizer, scheduler))
    check_optimizers(model, None, (scheduler.optimizer, scheduler))


def test_steps_inside_the_backward_pass_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="LayerWiseDummyOptimizer uses gradients inside"):
        check_optimizers(model, None, (LayerWiseDummyOptimizer(optimizer_dict={}, lr=0.1), None))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="embed_tokens.weight has a hook"):
        check_optimizers(model, None, (None, None))


def test_an_optimizer_whose_package_is_not_installed_is_refused_before_loading(tmp_path, model_path, monkeypatch):
    def without_bitsandbytes(args, model=None):
        raise ImportError("You need to install `bitsandbytes`")

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(without_bitsandbytes))
    with pytest.raises(ValueError, match="paged_adamw_8bit needs a package.*bitsandbytes.*Install it"):
        build_trainer(tmp_path, model=model_path, optim="paged_adamw_8bit")
    assert missing_optimizer(TrainingArguments(tmp_path)) is None

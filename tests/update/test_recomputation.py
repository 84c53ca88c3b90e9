"""Selective recomputation: the gradients of no recomputation, without computing attention again."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import LORA, RELATIVE, relative_error, tiny_model
from support.rollouts import Replay
from support.runs import build_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from pacs_trl.rollouts.memory import MemoryPlan
from pacs_trl.rollouts.step_memory import largest_micro_batch
from pacs_trl.update import compiled_layers, packed_attention
from pacs_trl.update.compiled_layers import CompiledLayers
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.recomputation import keep_attention, set_recomputation


class AttentionCalls(TorchDispatchMode):
    """Count the calls of attention kernels, without those of the backward pass."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += "attention" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def gradients_of(recomputation: str, packing: str = "auto", *, compiled: bool = False) -> dict[str, torch.Tensor]:
    model = tiny_model()
    set_recomputation(model, recomputation)
    forward_pass = ForwardPass(model.train(), torch.device("cpu"), packing=packing)
    if compiled:
        forward_pass.compiled_layers = CompiledLayers(model)
    prompts = [np.array([5, 6, 7]), np.array([5, 6, 7]), np.array([8, 9])]
    completions = [np.array([10, 11, 12]), np.array([13]), np.array([14, 15])]
    with fused_head(model), forward_pass.attention():
        torch.cat(forward_pass.compute_logps(model, prompts, completions).logps).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("packing", ["auto", "never"])
def test_selective_recomputation_keeps_attention(packing):
    calls, gradients = {}, {}
    for recomputation in ("none", "selective", "full"):
        with AttentionCalls() as counter:
            gradients[recomputation] = gradients_of(recomputation, packing)
        calls[recomputation] = counter.number
        assert relative_error(gradients[recomputation], gradients["none"]) < RELATIVE
    assert 0 < calls["none"] == calls["selective"] and calls["full"] == 2 * calls["none"]


@pytest.mark.slow
def test_selective_recomputation_keeps_attention_of_compiled_layers(monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    kernel_of, calls = packed_attention.kernel_of, Counter()

    def counted(*inputs):
        kernel = kernel_of(*inputs)

        def forward(*arguments):
            calls[recomputation] += 1
            return kernel.forward(*arguments)

        return SimpleNamespace(forward=forward, backward=kernel.backward)

    monkeypatch.setattr(packed_attention, "kernel_of", counted)
    expected = gradients_of(recomputation := "none")
    for recomputation in ("selective", "full"):
        assert relative_error(gradients_of(recomputation, compiled=True), expected) < RELATIVE
    assert 0 < calls["none"] == calls["selective"] and calls["full"] == 2 * calls["none"]


def test_recomputation_can_be_changed():
    model = tiny_model()
    for recomputation in ("full", "selective", "none", "selective", "full", "none"):
        set_recomputation(model, recomputation)
        assert model.is_gradient_checkpointing == (recomputation != "none")
        assert ("gradient_checkpointing_enable" in vars(model)) == (recomputation == "selective")


def test_only_attention_kernels_are_kept():
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    computed = [torch.ops.aten.mm.default, torch.ops.aten.silu.default]
    assert all(keep_attention(None, op) == CheckpointPolicy.MUST_SAVE for op in kept)
    assert all(keep_attention(None, op) == CheckpointPolicy.PREFER_RECOMPUTE for op in computed)


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["all weights", "LoRA"])
def test_training_with_selective_recomputation_has_the_same_weights(tmp_path, monkeypatch, peft_config):
    """The trainer turns it on where Trainer turns on gradient checkpointing, and generation turns it off."""
    weights = []
    for recomputation in ("none", "selective"):
        trainer = build_trainer(tmp_path, replay=Replay(), more={"peft_config": peft_config})
        trainer.memory.plan = MemoryPlan(trainer.memory.choice._replace(recomputation=recomputation))
        trainer.memory.is_automatic = True
        trainer.train()
        assert trainer.model.is_gradient_checkpointing == (recomputation == "selective")
        weights.append({name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert relative_error(weights[1], weights[0]) < RELATIVE


def test_the_largest_micro_batch_has_the_lengths_worked_by_hand():
    """33 tokens as 10 + 4, 10 + 4, and 1 + 4; prompts differ."""
    rollouts = largest_micro_batch(33, prompt=10, completion=4)
    assert [(len(r.prompt_ids), len(r.completion_ids)) for r in rollouts] == [(10, 4), (10, 4), (1, 4)]
    assert len({r.prompt_ids.tobytes() for r in rollouts}) == 3

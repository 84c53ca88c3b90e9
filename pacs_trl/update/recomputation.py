"""Recomputation in the backward pass: none, all but attention, or whole layers.

transformers calls it gradient checkpointing. Selective recomputation keeps the outputs of attention, whose cost grows
with the square of the length: one tensor per layer more than whole layers need.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel


def keep_attention(ctx: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy of selective recomputation for an operator: outputs of attention kernels are kept."""
    is_attention = "attention" in str(op) or "attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def enable_selectively(model: PreTrainedModel) -> None:
    """Let `model.gradient_checkpointing_enable()`, which Trainer and TRL call, keep the outputs of attention. The
    method of this object is replaced, as in TRL's SFTTrainer, because the arguments of a trainer must be
    serializable. `model` has no PEFT wrapper."""
    if "gradient_checkpointing_enable" in vars(model):
        return
    enable: Callable = model.gradient_checkpointing_enable
    contexts = partial(create_selective_checkpoint_contexts, keep_attention)

    def gradient_checkpointing_enable(gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        settings = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": contexts}
        enable(gradient_checkpointing_kwargs=settings, **kwargs)

    vars(model)["gradient_checkpointing_enable"] = gradient_checkpointing_enable


def set_recomputation(model: PreTrainedModel, recomputation: str, settings: dict | None = None) -> None:
    """Change what the backward pass of a model without PEFT wrapper computes again: `"none"`, `"selective"`, or
    `"full"`. `settings` are Trainer's `gradient_checkpointing_kwargs`."""
    vars(model).pop("gradient_checkpointing_enable", None)
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    if recomputation == "selective":
        enable_selectively(model)
    if recomputation != "none":
        settings = dict(settings or {})
        every_n_layers, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        model.gradient_checkpointing_enable(settings or None, every_n_layers=every_n_layers, offload=offload)

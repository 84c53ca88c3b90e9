"""Whether the completions of a micro-batch are packed or padded, from the configuration of a model."""

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from ..recipe import Recipe
from ..update.packing import packing_backend
from .cost import KNOWN_MODELS


class Packing(NamedTuple):
    """Whether completions are packed, and why, as a phrase."""

    is_packed: bool
    reason: str

    def __str__(self) -> str:
        return f"{'packed' if self.is_packed else 'padded'}: {self.reason}"


def packing_of(recipe: Recipe) -> Packing | None:
    """Return how the trainer of a recipe lays out completions, or `None` if the configuration of the model is not on
    this machine. Nothing is downloaded. The check at the start of a run may still find that a model must be padded."""
    if recipe.training.packing == "never":
        return Packing(False, "packing is never")
    init_kwargs = recipe.training.model_init_kwargs or {}
    implementation = init_kwargs.get("attn_implementation", recipe.model.attn_implementation)
    config = _local_config(recipe)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError, AttributeError):  # an architecture that is not in transformers
        return None
    default = model.config.get_text_config()._attn_implementation
    if implementation is not None:
        model.config.get_text_config()._attn_implementation = implementation
    if packing_backend(model) is not None:
        return Packing(True, "no padding is computed, and the prompt of a group once")
    model.config.get_text_config()._attn_implementation = "sdpa"
    if packing_backend(model) is not None:
        return Packing(False, f"attn_implementation={implementation or default} is not packed, sdpa is")
    return Packing(False, f"the attention of {config.model_type!r} models is not packed")


def _local_config(recipe: Recipe) -> Any:
    """Return the configuration of the model, if it is on this machine or one of a known model."""
    name, training = recipe.model.model_name_or_path, recipe.training
    given = {"trust_remote_code": training.trust_remote_code, **(training.model_init_kwargs or {})}
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, **given)
    except (OSError, ValueError):
        shape = KNOWN_MODELS.get(name)
    if shape is None:
        return None
    return Qwen3Config(num_hidden_layers=1) if shape.qk_norm else Qwen2Config(num_hidden_layers=1)

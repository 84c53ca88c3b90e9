"""Whether the completions of a micro-batch are packed or padded, from the configuration of a model."""

from typing import NamedTuple

from transformers import PreTrainedModel

from ..recipe import Recipe
from ..update.packing import packing_backend


class Packing(NamedTuple):
    """Whether completions are packed, and why, as a phrase."""

    is_packed: bool
    reason: str

    def __str__(self) -> str:
        return f"{'packed' if self.is_packed else 'padded'}: {self.reason}"


def packing_of(recipe: Recipe, model: PreTrainedModel | None) -> Packing | None:
    """Return how the trainer of a recipe lays out completions of a model without weights, or `None` if the model is
    not known. The check at the start of a run may still find that it must be padded."""
    if recipe.training.packing == "never":
        return Packing(False, "packing is never")
    if model is None:
        return None
    init_kwargs = recipe.training.model_init_kwargs or {}
    implementation = init_kwargs.get("attn_implementation", recipe.model.attn_implementation)
    config = model.config.get_text_config()
    default = config._attn_implementation
    if implementation is not None:
        config._attn_implementation = implementation
    if packing_backend(model) is not None:
        return Packing(True, "no padding is computed, and the prompt of a group once")
    config._attn_implementation = "sdpa"
    if packing_backend(model) is not None:
        return Packing(False, f"attn_implementation={implementation or default} is not packed, sdpa is")
    return Packing(False, f"the layers of {model.config.model_type!r} models are not packed")

"""Faster generation with transformers: adapters merged, prompts read once, weights in a lower precision.

Log-probs differ from those of the trained policy by rounding. Training gets the same tensors back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft import LoraModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import DynamicCache

from .packing import packing_backend


@dataclass
class GenerationSettings:
    """
    Settings of generation with transformers, a base of the training configurations.

    Parameters:
        fast_generation (`bool`, *optional*, defaults to `False`):
            Whether to generate with LoRA's weights added to those of the model, and to read each prompt once instead
            of once per completion, where the model allows it. Completions differ from those without it by rounding.
        generation_dtype (`str`, *optional*):
            `"bfloat16"` generates with weights rounded to bfloat16 whatever the trained ones are. The mismatch with
            the trained policy is larger than that of rounding in float32, and not corrected.
    """

    fast_generation: bool = False
    generation_dtype: Literal["bfloat16"] | None = None

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]
        if self.use_vllm and (self.fast_generation or self.generation_dtype):  # type: ignore[attr-defined]
            raise ValueError(
                "`fast_generation` and `generation_dtype` would be ignored with use_vllm: true, which always merges "
                "adapters and shares prompts. Remove them, or set use_vllm: false."
            )


@contextmanager
def faster_generation(model: Any, *, fast: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Let `model.generate` run faster inside the context.

    Args:
        model: The model without wrappers, its parameters not sharded.
        fast (`bool`): Merge adapters and share prompts.
        dtype (`torch.dtype`, *optional*): Of the weights.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    can_merge = fast and isinstance(getattr(model, "base_model", None), LoraModel)
    can_merge = can_merge and not getattr(base, "is_quantized", False)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)] if can_merge else []
    try:
        if layers:
            model.merge_adapter(safe_merge=True)  # into copies of the weights
        if dtype is not None:
            for parameter, _ in kept:
                parameter.data = parameter.data.to(dtype)
        if fast:
            model.generate = partial(generate_sharing_prompts, base, model.generate)
        yield
    finally:
        vars(model).pop("generate", None)
        for layer in layers:
            layer.merged_adapters.clear()
        for parameter, data in kept:
            parameter.data = data


def generate_sharing_prompts(
    base: Any, generate: Callable, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any
) -> Any:
    """Call `generate` on prompts padded on the left, `(B, P)`, with a cache of all but their last tokens, computed
    once for equal prompts; `base` is the model without PEFT. Models with other than plain causal attention generate as
    always."""
    rows = torch.cat([input_ids, attention_mask], dim=1)  # padding and an end token may have one id
    different, of_row = rows.unique(dim=0, return_inverse=True)
    if len(different) < len(rows) and input_ids.shape[1] > 1 and packing_backend(base) is not None:
        ids, mask = different.tensor_split([input_ids.shape[1]], dim=1)
        cache = DynamicCache(config=base.config)
        with torch.no_grad():
            base.base_model(
                input_ids=ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
                past_key_values=cache,
                use_cache=True,
            )
        cache.batch_select_indices(of_row)
        more["past_key_values"] = cache
    return generate(input_ids=input_ids, attention_mask=attention_mask, **more)

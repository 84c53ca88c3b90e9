"""Faster generation with transformers: merged adapters, shared prompt prefill, and lower-precision weights.

Sampling log-probs differ from those of the trained policy by rounding. The original weights are restored afterwards.
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
    Settings of generation, and of the check before training; a base class of the training configurations.

    Parameters:
        fast_generation (`bool`, *optional*, defaults to `False`):
            Whether to merge LoRA weights into the model for generation, and to prefill each prompt once instead of
            once per completion, where the model supports it. Log-probs differ from those without it by rounding.
        generation_dtype (`str`, *optional*):
            `"bfloat16"` generates with weights rounded to bfloat16, whatever the dtype of the trained weights. The
            mismatch with the trained policy is larger than float32 rounding, and is not corrected.
        vllm_sync_adapter (`bool`, *optional*, defaults to `False`):
            Whether to send vLLM the LoRA adapter alone, instead of all weights with the adapter merged, and to check
            that vLLM generates with it. A server reads it from `output_dir`.
        rollout_lag (`int`, *optional*, defaults to `0`):
            Generation batches by which generation runs ahead of training, 0 to 2: an engine generates batch `n + lag`
            with the weights from before the updates on batch `n`, while these run. Without vLLM the engine is a
            process on the CPU; with `vllm_mode="server"` the largest lag is 1. Bits do not depend on timing.
        startup_check (`bool`, *optional*, defaults to `True`):
            Whether to compare the log-probs of three short sequences, computed as in training, with each model's own
            logits before training. If they differ, training uses a slower forward pass that agrees and logs a warning,
            or fails if there is none.
    """

    fast_generation: bool = False
    generation_dtype: Literal["bfloat16"] | None = None
    vllm_sync_adapter: bool = False
    rollout_lag: Literal[0, 1, 2] = 0
    startup_check: bool = True

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]
        use_vllm: bool = self.use_vllm  # type: ignore[attr-defined]
        names = ("fast_generation", "generation_dtype") if use_vllm else ("vllm_sync_adapter",)
        if ignored := [name for name in names if getattr(self, name)]:
            raise ValueError(
                f"{' and '.join(ignored)} would be ignored with use_vllm: {str(use_vllm).lower()}. Remove the key, or "
                f"set use_vllm: {str(not use_vllm).lower()}."
            )
        if self.rollout_lag and (error := self._lag_error()):
            raise ValueError(f"rollout_lag={self.rollout_lag} {error}, or remove the key.")

    def _lag_error(self) -> str | None:
        """Return the middle of an error message if the settings do not allow generation ahead of training."""
        given: Any = self
        refused = ("pacs_trl.experimental", "pacs_trl.baselines.ppo")
        if any(base.__module__.startswith(refused) for base in type(self).__mro__):  # also in subclasses
            reason = "the method generates again, or reads the current policy. Use pacs, grpo, rloo, maxrl, or real"
            return f"is not supported by {type(self).__name__}: {reason}"
        if given.use_vllm and given.vllm_mode == "colocate":
            reason = "vllm_mode: colocate generates on the GPUs that train"
            return f"needs an engine beside training, and {reason}. Set vllm_mode: server and start a server"
        if given.use_vllm and self.rollout_lag > 1:
            return "is for the engine process; a server holds the weights of one batch. Set rollout_lag: 1"
        if given.gradient_accumulation_steps > given.steps_per_generation:
            reason = "counts generation batches, and an optimizer step learns from several"
            return f"{reason}. Set steps_per_generation={given.gradient_accumulation_steps} or a multiple"
        return None


@contextmanager
def faster_generation(model: Any, *, fast: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Speed up `model.generate` inside the context; restore the weights on exit.

    Args:
        model: The unwrapped model; its parameters must not be sharded.
        fast (`bool`): Whether to merge adapters and prefill equal prompts once.
        dtype (`torch.dtype`, *optional*): Dtype of the weights during generation; by default their own.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    has_virtual_tokens = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
    can_merge = fast and isinstance(getattr(model, "base_model", None), LoraModel)
    can_merge = can_merge and not getattr(base, "is_quantized", False)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)] if can_merge else []
    try:
        if layers:
            model.merge_adapter(safe_merge=True)  # `safe_merge` merges into copies of the weights
        if dtype is not None:
            for parameter, _ in kept:
                parameter.data = parameter.data.to(dtype)
        if fast and not has_virtual_tokens:  # the cache of a prompt would lack them
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
    """Call `generate` on left-padded prompts `(B, P)` with a KV cache that is computed once per distinct prompt and
    covers all but its last token. `base` is the model without PEFT. Models without plain causal attention generate
    without the shared cache."""
    rows = torch.cat([input_ids, attention_mask], dim=1)  # padding and EOS may share an id
    different, of_completion = rows.unique(dim=0, return_inverse=True)
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
        cache.batch_select_indices(of_completion)
        more["past_key_values"] = cache
    return generate(input_ids=input_ids, attention_mask=attention_mask, **more)

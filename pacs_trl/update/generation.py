"""Faster generation with transformers: merged adapters, shared prompt prefill, and lower-precision weights.

Sampling log-probs differ from those of the trained policy by rounding. The original weights are restored afterwards.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import DynamicCache

from .context_length import attention_windows
from .packed_states import state_modules
from .packing import packing_backend
from .peft_models import reads_whole_rows, without_peft


@contextmanager
def faster_generation(model: Any, *, fast: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Speed up `model.generate` inside the context; restore the weights on exit.

    Args:
        model: The unwrapped model; its parameters must not be sharded.
        fast (`bool`): Whether to merge LoRA adapters, except into weights that several layers share, and to prefill
            equal prompts once. Adapters that read whole rows ([`reads_whole_rows`]) generate without either.
        dtype (`torch.dtype`, *optional*): Dtype of the weights during generation, to which they are
            [`rounded`]; by default that of the weights.
    """
    trained_weights = [(parameter, parameter.data) for parameter in model.parameters()]
    base = without_peft(model)
    fast = fast and not reads_whole_rows(model)  # no weights hold such an adapter, and no cache of the base model
    layers = _mergeable_layers(model, base) if fast else []
    try:
        for layer in layers:
            layer.merge(safe_merge=True)  # `safe_merge` merges into copies of the weights
        if dtype is not None:
            for seed, (parameter, _) in enumerate(trained_weights):
                if parameter.is_floating_point():  # quantized weights are packed into integers
                    parameter.data = rounded(parameter.data, dtype, seed)
        if fast:
            model.generate = partial(generate_sharing_prompts, base, model.generate)
        yield
    finally:
        vars(model).pop("generate", None)
        for layer in layers:
            layer.merged_adapters.clear()
        for parameter, data in trained_weights:
            parameter.data = data


def _mergeable_layers(model: Any, base: Any) -> list[BaseTunerLayer]:
    """Return the LoRA layers whose adapter can be merged into their weights. Weights that other layers use too, such
    as embeddings tied to the head, would carry it there."""
    if not isinstance(getattr(model, "base_model", None), LoraModel) or getattr(base, "is_quantized", False):
        return []
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        and all(uses[id(parameter)] == 1 for parameter in module.get_base_layer().parameters())
    ]


def rounded(weights: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Round weights; float32 to bfloat16 up or down by random thresholds, which depend on `seed` alone and make the
    mean right. Rounding to nearest hides small updates of weights that were loaded in bfloat16."""
    if (weights.dtype, dtype) != (torch.float32, torch.bfloat16):
        return weights.to(dtype)
    bits, generator = weights.view(torch.int32), torch.Generator(weights.device).manual_seed(seed)
    lower = torch.randint(1 << 16, bits.shape, generator=generator, dtype=torch.int32, device=bits.device)
    return ((bits + lower) & -(1 << 16)).view(torch.float32).to(dtype)  # bfloat16 has the upper 16 of 32 bits


def generate_sharing_prompts(
    base: Any, generate: Callable, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any
) -> Any:
    """Call `generate` on left-padded prompts `(B, P)` with a KV cache that is computed once per distinct prompt and
    covers all but its last token. `base` is the model without PEFT. Models that are not packed, or whose layers attend
    within a window or have a state, generate without the shared cache."""
    rows = torch.cat([input_ids, attention_mask], dim=1)  # padding and EOS may share an id
    distinct_rows, distinct_indices = rows.unique(dim=0, return_inverse=True)
    reads_images = any(torch.is_tensor(value) for value in more.values())  # equal tokens stand for other images
    is_shared = len(distinct_rows) < len(rows) and input_ids.shape[1] > 1 and not reads_images
    has_keys_only = (
        packing_backend(base) is not None and not attention_windows(base.config) and not state_modules(base)
    )
    if is_shared and has_keys_only:
        ids, mask = distinct_rows.tensor_split([input_ids.shape[1]], dim=1)
        cache = DynamicCache(config=base.config)
        with torch.no_grad():
            base.base_model(
                input_ids=ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
                past_key_values=cache,
                use_cache=True,
            )
        cache.batch_select_indices(distinct_indices)
        more["past_key_values"] = cache
    return generate(input_ids=input_ids, attention_mask=attention_mask, **more)


@contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Run without gradients, and restore training modes and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training

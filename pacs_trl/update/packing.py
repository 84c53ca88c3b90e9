"""Attention over packed rows: the rows of a micro-batch as one long row, each attending to itself only.

Attention over packed rows is done by FlashAttention's variable-length kernels if the model was loaded with them.
Models loaded with `attn_implementation="sdpa"` use the implementation registered here, which calls PyTorch's causal
attention once per row, on any device. Everything else (eager, flex, sliding windows, soft-capped logits, models with
state) is not packed: see [`packing_backend`].
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel


PACKED_SDPA = "pacs_packed_sdpa"

# Causal models whose layers build a further mask from the data; packing would leave it out.
_MASKED_BY_THEIR_LAYERS = ("doge",)


def _packed_sdpa(
    module,
    query: torch.Tensor,  # (1, H, N, D), N tokens of all rows
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_lengths: list[int] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    grouped_query = query.shape[1] != key.shape[1]
    rows = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped_query
        )
        for q, k, v in zip(*(x.split(packed_lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2).contiguous(), None


# Registered without a mask function on purpose: transformers then builds no mask, which for N packed tokens would be a
# dense (N, N) matrix.
AttentionInterface.register(PACKED_SDPA, _packed_sdpa)


def packing_backend(model: PreTrainedModel) -> str | None:
    """How rows of a model, unwrapped (no PEFT, DDP or FSDP), can be packed: `"flash"` for models loaded with
    FlashAttention, `"sdpa"` for models whose attention is plain causal attention run by SDPA, `None` if the rows have
    to be padded."""
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    full_attention = (
        set(layer_types) == {"full_attention"} if layer_types else getattr(config, "sliding_window", None) is None
    )
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if not full_attention or soft_capped or config.model_type in _MASKED_BY_THEIR_LAYERS:
        return None
    if not model._supports_attention_backend:
        return None
    implementation = config._attn_implementation
    if implementation in ("flash_attention_2", "flash_attention_3"):
        return "flash"
    return "sdpa" if implementation == "sdpa" else None


@contextmanager
def packed_attention(config: PreTrainedConfig, backend: str | None):
    """Let `config`'s model attend to packed rows inside the context. Wrap the backward pass too: gradient
    checkpointing runs the forward again there."""
    if backend != "sdpa":
        yield
        return
    previous = config._attn_implementation
    config._attn_implementation = PACKED_SDPA
    try:
        yield
    finally:
        config._attn_implementation = previous

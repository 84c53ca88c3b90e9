"""Padding-free forward passes: the rows of a micro-batch as one long row, each attending to itself only.

The contract is that of TRL's `_get_per_token_logps_and_entropies`: padded `(B, L)` ids and mask in, padded
`(B, logits_to_keep)` log-probabilities and entropies out. What happens in between has no padding.

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
    """
    How rows of this model can be packed.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The unwrapped model (not a PEFT, DDP or FSDP wrapper).

    Returns:
        `"flash"` for models loaded with FlashAttention, `"sdpa"` for models whose attention is plain causal attention
        run by SDPA, `None` if the rows have to be padded.
    """
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


def packed_logps_and_entropies(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    backend: str,
    compute_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Log-probabilities of completion tokens without computing any padding.

    Must run inside [`packed_attention`]. `model` is called with TRL's fused LM head.

    Args:
        model:
            The possibly wrapped model.
        input_ids (`torch.Tensor` of shape `(B, L)`), attention_mask (`torch.Tensor` of shape `(B, L)`):
            Prompts and completions, padded anywhere.
        logits_to_keep (`int`):
            Number of trailing columns that belong to completions.
        backend (`str`):
            `"flash"` or `"sdpa"`, see [`packing_backend`].
        compute_entropy (`bool`, *optional*, defaults to `False`):
            Whether to return entropies.

    Returns:
        Log-probabilities and entropies (or `None`), float32 of shape `(B, logits_to_keep)` in nats, 0 at padding.
    """
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1).tolist()  # the only synchronization with the device
    lengths_tensor = torch.tensor(lengths, device=input_ids.device)
    starts = lengths_tensor.cumsum(0) - lengths_tensor

    is_completion = torch.zeros_like(mask)
    is_completion[:, -logits_to_keep:] = True
    packed_ids = input_ids[mask]  # (N,)
    labels = packed_ids.masked_fill(~is_completion[mask], -100)
    labels[starts] = -100  # the first token of a row is not predicted by the last token of the row before it
    position_ids = torch.arange(len(packed_ids), device=input_ids.device) - starts.repeat_interleave(lengths_tensor)

    if backend == "flash":
        boundaries = F.pad(lengths_tensor.cumsum(0), (1, 0)).to(torch.int32)
        attention_kwargs = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    else:
        attention_kwargs = {"packed_lengths": lengths}
    outputs = model(
        input_ids=packed_ids.unsqueeze(0),
        attention_mask=None,
        position_ids=position_ids.unsqueeze(0),
        labels=labels.unsqueeze(0),
        fused_lm_head=True,
        **attention_kwargs,
    )

    def unpack(packed: torch.Tensor) -> torch.Tensor:  # (1, N - 1): the value for token j stands at j - 1
        values = F.pad(packed[0], (1, 0))
        return values.new_zeros(mask.shape).masked_scatter(mask, values)[:, -logits_to_keep:]

    return unpack(outputs.log_probs), unpack(outputs.entropy) if compute_entropy else None

"""Sequence packing: concatenate the rollouts of a micro-batch into one sequence without padding, with block-diagonal
attention.

A shared prompt is computed once and precedes its completions. Last completion tokens predict nothing and are left out,
unless the loss reads more than log-probs (the routers of a mixture of experts):

    [prompt] [completion 1 without its last token] [completion 2 without its last token] ...

Positions in each of these branches continue from the prompt; a branch attends to the prompt and to itself.

Models loaded with FlashAttention use its variable-length kernels. Models loaded with SDPA or eager attention use the
operator of `packed_attention.py`: PyTorch's variable-length kernel where it is available (CUDA, half precision), and
otherwise calls per segment. Each layer passes its sliding window, soft cap, and attention sinks. Convolutions and
recurrences run on segments: see `packed_states.py`. All other models (flex attention, chunked attention, other
recurrent states) are padded: see [`packing_backend`], and [`choose_forward_pass`], which detects cases that the config
does not reveal.
"""

import logging
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from ..errors import UserError
from .context_length import WINDOW_KEYS
from .packed_attention import Bounds, LogitRule, attend_packed
from .packed_states import CONVOLUTION, RECURRENCES, state_modules
from .prompt_images import PromptImages


logger = logging.getLogger(__name__)

PACKED = "pacs_packed_"  # prefix of the attention implementation that the model was loaded with

# Types of layers that packed attention computes, and that compute each token alone. Layers with a window pass it to
# their attention.
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention", "mlp", "moe"}

# Causal models whose layers build an additional mask from the data. Packing would drop this mask, and log-probs would
# not change as long as the mask has its constant initial value.
_MASKED_BY_THEIR_LAYERS = ("doge",)

# Models that attend in both directions inside an image, or to a prefix with an image. Gemma 4 has a setting for it.
_BIDIRECTIONAL_IN_IMAGES = ("gemma3", "git", "paligemma")


class PackedRollouts:
    """
    The rollouts of a micro-batch packed into one sequence of `N` tokens.

    Args:
        prompts, completions (sequences of `B` int64 `np.ndarray`): Token ids of each rollout. Prompts need at least
            one token; completions may be empty.
        images (sequence of `B` [`PromptImages`] or `None`, *optional*): Images of the prompts. A prompt is shared by
            rollouts with the same tokens and the same images.
        prompt_positions (sequence of `B` int64 `np.ndarray`, *optional*): Position ids `(..., P)` of the prompts; by
            default they count from 0. A completion continues after the largest one of its prompt, in all dimensions.
        keeps_last_tokens (`bool`): Whether to keep the last tokens of completions, which predict nothing.

    Attributes:
        ids, positions (int64 `np.ndarray` of shapes `(N,)` and `(..., N)`): Token ids and position ids.
        images (list of [`PromptImages`] or `None`): Images of the distinct prompts, in the order of their tokens.
        starts (`list[int]`): Index of the first token of each distinct prompt.
        blocks (`list[list[int]]`): Segment lengths in order, one list per attention block: a shared prompt followed by
            its branches, or a single segment of one prompt and its completion.
        groups (`list[tuple[int, list[int]]]`): Lengths in order of each prompt and of the branches behind it.
        flat_indices (int64 `np.ndarray`): Indices of the positions that predict the completion tokens, in the order
            of the rollouts.
        multiplicities (int64 `np.ndarray` of shape `(N,)`): Number of rollouts that each token belongs to.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        *,
        images: Sequence[PromptImages | None] | None = None,
        prompt_positions: Sequence[np.ndarray] | None = None,
        keeps_last_tokens: bool = False,
    ):
        if images is None:
            images = [None] * len(prompts)
        self.images: list[PromptImages | None] = []
        self.starts: list[int] = []
        self.blocks: list[list[int]] = []
        self.groups: list[tuple[int, list[int]]] = []
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        multiplicities: list[np.ndarray] = []
        predicting_indices: dict[int, np.ndarray] = {}  # by rollout
        end = 0  # of the tokens that are packed already
        for rollouts in _rollouts_by_prompt(prompts, images):
            first = rollouts[0]
            prompt = prompts[first]
            if prompt_positions is None:
                positions_in_prompt = np.arange(len(prompt))
            else:
                positions_in_prompt = prompt_positions[first]
            self.images.append(images[first])
            self.starts.append(end)
            ids.append(prompt)
            positions.append(positions_in_prompt)
            multiplicities.append(np.full(len(prompt), len(rollouts)))
            end += len(prompt)
            last_of_prompt = end - 1
            branch_lengths: list[int] = []
            for i in rollouts:
                branch = completions[i] if keeps_last_tokens else completions[i][:-1]
                if len(branch) > 0:
                    branch_lengths.append(len(branch))
                positions_in_branch = positions_in_prompt.max() + 1 + np.arange(len(branch))
                branch_shape = (*positions_in_prompt.shape[:-1], len(branch))
                ids.append(branch)
                positions.append(np.broadcast_to(positions_in_branch, branch_shape))
                multiplicities.append(np.ones(len(branch), dtype=np.int64))
                # A token is predicted one position earlier, the first one of a completion at the end of its prompt.
                previous_indices = np.array([last_of_prompt, *range(end, end + len(branch))])
                predicting_indices[i] = previous_indices[: len(completions[i])]
                end += len(branch)
            self.groups.append((len(prompt), branch_lengths))
            is_shared = len(rollouts) > 1
            self.blocks.append([len(prompt), *branch_lengths] if is_shared else [len(prompt) + sum(branch_lengths)])
        self.ids = np.concatenate(ids)
        self.positions = np.concatenate(positions, axis=-1)
        self.multiplicities = np.concatenate(multiplicities)
        self.flat_indices = np.concatenate([predicting_indices[i] for i in range(len(prompts))])

    def kernel_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of variable-length kernels under the names of transformers, and `key_indices`,
        the flat indices of the keys of all segments: those of a shared prompt once per branch."""
        lengths: list[int] = []
        key_lengths: list[int] = []
        key_indices: list[np.ndarray] = []
        start = 0
        for first, *branches in self.blocks:
            prompt = np.arange(start, start + first)
            lengths.append(first)
            key_lengths.append(first)
            key_indices.append(prompt)
            start += first
            for branch in branches:
                lengths.append(branch)
                key_lengths.append(first + branch)
                key_indices += [prompt, np.arange(start, start + branch)]
                start += branch
        return {
            "cu_seq_lens_q": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
            "cu_seq_lens_k": torch.tensor(np.cumsum([0, *key_lengths]), dtype=torch.int32),
            "max_length_q": max(lengths),
            "max_length_k": max(key_lengths),
            "key_indices": torch.from_numpy(np.concatenate(key_indices)),
        }


def _rollouts_by_prompt(prompts: Sequence[np.ndarray], images: Sequence[PromptImages | None]) -> list[list[int]]:
    """Return the indices of the rollouts of each distinct prompt: with the same tokens and the same images."""
    rollouts: dict[tuple[bytes, bytes | None], list[int]] = {}
    for i, (prompt, prompt_images) in enumerate(zip(prompts, images, strict=True)):
        digest = None if prompt_images is None else prompt_images.digest
        rollouts.setdefault((prompt.tobytes(), digest), []).append(i)
    return list(rollouts.values())


def _packed_eager(
    module,
    query: torch.Tensor,  # (1, H, N, D), N packed tokens
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    key_indices: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    query, key, value = _autocast(query, key, value)  # as F.scaled_dot_product_attention does by itself
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bounds = Bounds(cu_seq_lens_q, cu_seq_lens_k, key_indices, max_length_q, max_length_k)
    if dropout:
        if sliding_window or softcap or s_aux is not None:
            raise UserError(
                "Packed attention has no dropout with a window, a soft cap, or sinks. Set disable_dropout=True or "
                'packing="never".'
            )
        return _with_dropout(query, key, value, bounds, scale, dropout), None
    return attend_packed(query, key, value, bounds, LogitRule(scale, sliding_window, softcap), s_aux), None


def _packed_sdpa(*args, softcap: float | None = None, s_aux: torch.Tensor | None = None, **kwargs):
    """Ignore soft caps and sinks, as SDPA in transformers does: log-probs are those of the model as it was loaded."""
    return _packed_eager(*args, **kwargs)


def _autocast(*states: torch.Tensor) -> list[torch.Tensor]:
    """Cast to the dtype of autocast, if it is enabled."""
    device = states[0].device.type
    if torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in states]
    return list(states)


def _with_dropout(query, key, value, bounds: Bounds, scale: float, dropout: float) -> torch.Tensor:
    """Call SDPA once per segment, which recomputes the prompt's queries for each branch."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    outputs: list[torch.Tensor] = []
    lengths = bounds.cu_seq_lens_q.diff().tolist()
    key_indices = bounds.key_indices.split(bounds.cu_seq_lens_k.diff().tolist())
    for length, indices in zip(lengths, key_indices, strict=True):
        queries, keys, values = (x.index_select(2, indices) for x in (query, key, value))
        whole = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout, scale=scale)
        outputs.append(whole[:, :, -length:])  # without the queries of the prompt in front
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _packed_flash(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    implementation: str,
    key_indices: torch.Tensor,
    seq_idx=None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Run FlashAttention, which aligns the causal mask to the last query and key, as a branch after its prompt
    requires."""
    query, key, value = _autocast(query, key, value)  # transformers would cast as well, but log in the compiled layer
    key, value = key.index_select(2, key_indices), value.index_select(2, key_indices)
    config = module.config
    packed_implementation = config._attn_implementation
    config._attn_implementation = implementation  # transformers selects the kernel by this name
    try:
        return AttentionInterface()[implementation](module, query, key, value, None, **kwargs)
    finally:
        config._attn_implementation = packed_implementation


# Attention implementations that the operator of packed attention replaces. No mask function is registered for its
# names, so that transformers builds no mask: for N packed tokens it would be a dense (N, N) matrix.
_REPLACED = {"sdpa": _packed_sdpa, "eager": _packed_eager, "flash_attention_4": _packed_eager}
for _implementation, _attention in _REPLACED.items():
    AttentionInterface.register(PACKED + _implementation, _attention)


def packing_backend(model: PreTrainedModel) -> str | None:
    """Return the packing backend of an unwrapped model (no PEFT, DDP or FSDP): `"flash"` for models loaded with
    FlashAttention 2 or 3, or a FlashAttention of the Hub, `"sdpa"` for models loaded with SDPA, eager attention, or
    FlashAttention 4, and `None` if rollouts must be padded."""
    if not has_packed_layers(model):
        return None
    implementation = model.config.get_text_config()._attn_implementation
    if implementation in _REPLACED:
        return "sdpa"
    is_flash = is_flash_attention_requested(requested_attention_implementation=implementation)
    return "flash" if is_flash else None


def has_packed_layers(model: PreTrainedModel) -> bool:
    """Return whether the layers of an unwrapped model can be packed, with some attention implementation."""
    config = model.config.get_text_config()
    functions = {name for module in state_modules(model) for name in vars(module)}
    has_recurrence = not functions.isdisjoint(RECURRENCES)
    # Models with a recurrence do not declare the attention interface, which they use.
    uses_attention_interface = model._supports_attention_backend or has_recurrence
    if not uses_attention_interface or config.model_type in _MASKED_BY_THEIR_LAYERS:
        return False
    packed_layer_types = set(_PACKED_LAYER_TYPES)
    if CONVOLUTION in functions:
        packed_layer_types |= {"conv"}
    if has_recurrence:
        packed_layer_types |= {"linear_attention", "hybrid"}
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return packed_layer_types.issuperset(layer_types) and not _has_windows_by_layer_config(config)


def packs_images(config: PreTrainedConfig) -> bool:
    """Return whether a model is causal inside images, so that prompts with images can be packed where text can."""
    in_both_directions = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return config.model_type not in _BIDIRECTIONAL_IN_IMAGES and not in_both_directions


@cache
def warn_of_padding(cause: str) -> None:
    """Warn, once, that rollouts are padded although the layers of the model can be packed."""
    logger.warning(
        f"Completions are padded, although the layers of this model can be packed, which is faster. {cause}"
    )


@cache
def warn_of_soft_cap(model_type: str, softcap: float) -> None:
    """Warn, once, that transformers computes a model without its soft cap."""
    logger.warning(
        f"SDPA in transformers leaves out the soft cap of {model_type!r} models (attn_logit_softcapping={softcap}), "
        "which vLLM applies. Set attn_implementation to eager to train with it; completions stay packed."
    )


def _has_windows_by_layer_config(config: PreTrainedConfig) -> bool:
    """Return whether windows are settings of single layers (`per_layer_config`): only masks follow them."""
    attributes = config.per_layer_attributes
    return config.is_heterogeneous and attributes is not None and not attributes.isdisjoint(WINDOW_KEYS)


@contextmanager
def packed_attention(config: PreTrainedConfig, backend: str | None):
    """Enable packed attention for the model of `config` inside the context, but not for its image encoder. The context
    must include the backward pass, because gradient checkpointing repeats the forward pass there."""
    config = config.get_text_config()
    previous = config._attn_implementation
    if backend is None or previous.startswith(PACKED):
        yield
        return
    if PACKED + previous not in AttentionInterface():
        AttentionInterface.register(PACKED + previous, partial(_packed_flash, implementation=previous))
    config._attn_implementation = PACKED + previous
    try:
        yield
    finally:
        config._attn_implementation = previous

"""Sequence packing: concatenate the rollouts of a micro-batch into one sequence without padding, with block-diagonal
attention.

A shared prompt is computed once and precedes its completions. Last completion tokens predict nothing and are left out:

    [prompt] [completion 1 without its last token] [completion 2 without its last token] ...

Positions in each of these branches continue from the prompt; a branch attends to the prompt and to itself.

Models loaded with FlashAttention use its variable-length kernels. Models loaded with `attn_implementation="sdpa"` use
PyTorch's variable-length kernel where it is available (CUDA, half precision), and otherwise one SDPA call per segment.
All other models (eager or flex attention, sliding windows, soft-capped logits, recurrent state) are padded: see
[`packing_backend`], and [`choose_forward_pass`], which detects cases that the config does not reveal.
"""

import inspect
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel


PACKED = "pacs_packed_"  # prefix of the attention implementation that the model was loaded with

# Causal models whose layers build an additional mask from the data. Packing would drop this mask, and log-probs would
# not change as long as the mask has its constant initial value.
_MASKED_BY_THEIR_LAYERS = ("doge",)


class PackedRollouts:
    """
    The rollouts of a micro-batch packed into one sequence of `N` tokens.

    Args:
        prompts, completions (sequences of `B` int64 `np.ndarray`): Token ids of each rollout. Prompts need at least
            one token; completions may be empty.

    Attributes:
        ids, positions (int64 `np.ndarray` of shape `(N,)`): Token ids and position ids.
        texts (`list[list[int]]`): Segment lengths in order, one list per attention block: a shared prompt followed by
            its branches, or a single segment of one prompt and its completion.
        flat_indices (int64 `np.ndarray`): Indices of the positions that predict the completion tokens, in the order
            of the rollouts.
    """

    def __init__(self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]):
        self.texts: list[list[int]] = []
        pieces: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        predicting: dict[int, np.ndarray] = {}
        same: dict[bytes, list[int]] = {}
        for i, prompt in enumerate(prompts):
            same.setdefault(prompt.tobytes(), []).append(i)
        end = 0
        for rows in same.values():
            prompt = prompts[rows[0]]
            pieces.append(prompt)
            positions.append(np.arange(len(prompt)))
            end += len(prompt)
            last, lengths = end - 1, [len(prompt)]
            for i in rows:
                branch = completions[i][:-1]
                pieces.append(branch)
                lengths += [len(branch)] if len(branch) else []
                positions.append(np.arange(len(branch)) + len(prompt))
                predicting[i] = np.array([last, *range(end, end + len(branch))])[: len(completions[i])]
                end += len(branch)
            self.texts.append(lengths if len(rows) > 1 else [sum(lengths)])
        self.ids, self.positions = np.concatenate(pieces), np.concatenate(positions)
        self.flat_indices = np.concatenate([predicting[i] for i in range(len(prompts))])

    def kernel_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of variable-length kernels under the names of transformers, and `key_indices`
        (flat indices of the keys) for shared prompts."""
        lengths = [length for text in self.texts for length in text]
        behind = [text[0] if piece else 0 for text in self.texts for piece in range(len(text))]  # shared prompt length
        seen = [prompt + length for prompt, length in zip(behind, lengths, strict=True)]
        bounds = [torch.tensor(np.cumsum([0, *n]), dtype=torch.int32) for n in (lengths, seen)]
        inputs = {"cu_seq_lens_q": bounds[0], "cu_seq_lens_k": bounds[1]}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(seen)}
        if any(behind):
            flat_indices, start = [], 0
            for text in self.texts:
                prompt, ends = np.arange(start, start + text[0]), start + np.cumsum(text)
                flat_indices.append(prompt)
                for length, end in zip(text[1:], ends[1:], strict=True):
                    flat_indices += [prompt, np.arange(end - length, end)]
                start = ends[-1]
            inputs["key_indices"] = torch.from_numpy(np.concatenate(flat_indices))
        return inputs


class SegmentedAttention(torch.autograd.Function):
    """
    CPU attention of packed rollouts, tensors of shape `(1, H, N, D)`. One kernel call per segment attends to its own
    keys, and one call per shared prompt attends from the queries of all branches to the prompt's keys; the results
    are merged by their log-sum-exps. The backward kernels receive the merged output and log-sum-exp.
    """

    @staticmethod
    def forward(ctx, query, key, value, texts: list[list[int]], scale: float | None):
        attend = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=scale)
        out = _empty_like(query)
        log_sum = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in _segments(texts):
            attended = attend(query[:, :, part], key[:, :, part], value[:, :, part], 0.0, True)
            out[:, :, part], log_sum[:, :, part] = attended
        for prompt, branches in _shared_prompts(texts):
            prompt_out, prompt_sum = attend(query[:, :, branches], key[:, :, prompt], value[:, :, prompt])
            branch_sum = log_sum[:, :, branches]
            share = torch.sigmoid(prompt_sum - branch_sum)[..., None]
            merged = torch.lerp(out[:, :, branches].to(share.dtype), prompt_out.to(share.dtype), share)
            out[:, :, branches], log_sum[:, :, branches] = merged, torch.logaddexp(prompt_sum, branch_sum)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.texts, ctx.scale = texts, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, log_sum = ctx.saved_tensors

        def gradients(part: slice, keys: slice, causal: bool):
            grad, q, o, sums = (x[:, :, part] for x in (gradient, query, out, log_sum))
            k, v = (x[:, :, keys] for x in (key, value))
            attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return attend_backward(grad, q, k, v, o, sums, 0.0, causal, scale=ctx.scale)

        input_gradients = [_empty_like(x) for x in (query, key, value)]
        for part in _segments(ctx.texts):
            for whole, segment in zip(input_gradients, gradients(part, part, True), strict=True):
                whole[:, :, part] = segment
        for prompt, branches in _shared_prompts(ctx.texts):
            parts = branches, prompt, prompt
            shared = gradients(branches, prompt, False)
            for whole, part, shared_gradient in zip(input_gradients, parts, shared, strict=True):
                whole[:, :, part] += shared_gradient
        return *input_gradients, None, None


def _empty_like(states: torch.Tensor) -> torch.Tensor:
    batch, heads, num_tokens, width = states.shape  # in memory, tokens come before heads, as in the layers around
    return states.new_empty(batch, num_tokens, heads, width).transpose(1, 2)


def _segments(texts: list[list[int]]) -> list[slice]:
    ends = np.cumsum([length for text in texts for length in text]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _shared_prompts(texts: list[list[int]]) -> list[tuple[slice, slice]]:
    """Return the slices of each shared prompt and of its branches together."""
    starts = np.cumsum([0, *map(sum, texts)]).tolist()
    bounds = [(start, start + text[0], start + sum(text)) for start, text in zip(starts, texts, strict=False)]
    return [(slice(start, middle), slice(middle, end)) for start, middle, end in bounds if middle < end]


def _packed_sdpa(
    module,
    query: torch.Tensor,  # (1, H, N, D), N packed tokens
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRollouts | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    device = query.device.type
    if torch.is_autocast_enabled(device):  # F.scaled_dot_product_attention would cast by itself
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if takes_varlen(query, key, value, dropout):
        return _packed_varlen(query, key, value, scaling, **kwargs), None
    if device == "cpu" and not dropout and query.shape[-1] == value.shape[-1]:
        return SegmentedAttention.apply(query, key, value, packed.texts, scaling).transpose(1, 2), None
    # With `enable_gqa`, CUDA has only a kernel that stores all attention weights, without FlashAttention.
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    attend = partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=dropout, scale=scaling)
    outputs, end = [], 0
    for first, *branches in packed.texts:
        start, end = end, end + first
        prompt = [x[:, :, start:end] for x in (query, key, value)]
        outputs.append(attend(*prompt))
        for length in branches:  # recomputes the prompt's queries for each branch
            branch = (x[:, :, end : end + length] for x in (query, key, value))
            whole = (torch.cat(pair, dim=2) for pair in zip(prompt, branch, strict=True))
            outputs.append(attend(*whole)[:, :, first:])
            end += length
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


# `varlen_attn` of PyTorch 2.11 does not support grouped-query attention.
_VARLEN_IS_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether PyTorch's variable-length attention supports these tensors."""
    grouped = query.shape[1] != key.shape[1]
    if query.device.type != "cuda" or dropout or query.shape[-1] % 8:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, grouped))


def _packed_varlen(
    query, key, value, scaling, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, key_indices=None, **kwargs
) -> torch.Tensor:
    """Run PyTorch's variable-length attention, a FlashAttention kernel; for its mask, see [`_packed_flash`]."""
    if key_indices is not None:
        key, value = key.index_select(2, key_indices), value.index_select(2, key_indices)
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if grouped and not _VARLEN_IS_GROUPED:
        groups, grouped = query.shape[1] // key.shape[1], {}
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    return varlen_attn(*tokens, *bounds, scale=scaling, window_size=(-1, 0), **grouped)[None]


def _packed_flash(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    implementation: str,
    key_indices: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Run FlashAttention, which aligns the causal mask to the last query and key, as a branch after its prompt
    requires."""
    if key_indices is not None:
        key, value = key.index_select(2, key_indices), value.index_select(2, key_indices)
    config = module.config
    packed_implementation = config._attn_implementation
    config._attn_implementation = implementation  # transformers selects the kernel by this name
    try:
        return AttentionInterface()[implementation](module, query, key, value, None, **kwargs)
    finally:
        config._attn_implementation = packed_implementation


# No mask function is registered, so that transformers does not build a mask: for N packed tokens it would be a dense
# (N, N) matrix.
AttentionInterface.register(f"{PACKED}sdpa", _packed_sdpa)
for _implementation in ("flash_attention_2", "flash_attention_3"):
    AttentionInterface.register(f"{PACKED}{_implementation}", partial(_packed_flash, implementation=_implementation))


def packing_backend(model: PreTrainedModel) -> str | None:
    """Return the packing backend of an unwrapped model (no PEFT, DDP or FSDP): `"flash"` for models loaded with
    FlashAttention, `"sdpa"` for models with plain causal attention loaded with SDPA, and `None` if rollouts must be
    padded."""
    config = model.config.get_text_config()
    if config.is_heterogeneous or _restricts_attention(config):
        return None
    if not model._supports_attention_backend:
        return None
    implementation = config._attn_implementation
    if implementation in ("flash_attention_2", "flash_attention_3"):
        return "flash"
    return "sdpa" if implementation == "sdpa" else None


def _restricts_attention(config: PreTrainedConfig) -> bool:
    """Return whether a layer of the model may attend to less than all earlier tokens."""
    if layer_types := getattr(config, "layer_types", None):
        full_attention = set(layer_types) == {"full_attention"}
    else:
        full_attention = getattr(config, "sliding_window", None) is None
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return not full_attention or soft_capped or config.model_type in _MASKED_BY_THEIR_LAYERS


@contextmanager
def packed_attention(config: PreTrainedConfig, backend: str | None):
    """Enable packed attention for the model of `config` inside the context. The context must include the backward
    pass, because gradient checkpointing repeats the forward pass there. Image encoders keep their own attention."""
    config = config.get_text_config()
    previous = config._attn_implementation
    if backend is None or previous.startswith(PACKED):
        yield
        return
    config._attn_implementation = PACKED + previous
    try:
        yield
    finally:
        config._attn_implementation = previous

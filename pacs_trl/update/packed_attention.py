"""Attention of packed rollouts as one registered operator, so that compiled layers contain it without a graph break.

All bounds are tensors in the format of variable-length kernels: segment `i` of the packed sequence has
`cu_seq_lens_q[i + 1] - cu_seq_lens_q[i]` queries and attends to `cu_seq_lens_k[i + 1] - cu_seq_lens_k[i]` keys: those
of its tokens and, in front of them, those of a shared prompt. The causal mask aligns the last query of a segment with
its last key, and a window of `W` lets a query attend to `W` keys, of which the last one is that of its token. For a
prompt of 3 tokens with branches of 2 and 4 tokens:

    segment     tokens of its queries     tokens of its keys
    prompt      0 1 2                     0 1 2
    branch 1    3 4                       0 1 2  3 4
    branch 2    5 6 7 8                   0 1 2  5 6 7 8

    cu_seq_lens_q = [0, 3, 5, 9],  cu_seq_lens_k = [0, 3, 8, 15],  key_indices = the last column

The operator chooses a kernel by device, dtype, and head size ([`kernel_of`]). All kernels return the log-sum-exp of
the logits beside the output, and their backward passes start from these two. An attention sink is therefore the same
for all kernels: it is one more logit without a value, which scales the output by `sigmoid(log_sum - sink)`.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import is_flash_attn_4_available


class Bounds(NamedTuple):
    """Segments of `N` packed tokens, in the format of variable-length kernels; see the docstring of this module."""

    cu_seq_lens_q: torch.Tensor  # int32 (S + 1,)
    cu_seq_lens_k: torch.Tensor  # int32 (S + 1,)
    key_indices: torch.Tensor  # int64 (cu_seq_lens_k[-1],): flat indices of the keys of all segments
    max_length_q: int
    max_length_k: int

    @property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Bounds as variable-length kernels take them."""
        return self.cu_seq_lens_q, self.cu_seq_lens_k, self.max_length_q, self.max_length_k


class LogitRule(NamedTuple):
    """The rule by which logits follow from queries and keys."""

    scale: float
    window: int | None = None  # number of keys that a query attends to, with that of its token
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)


# The operator and its gradient ---------------------------------------------------------------------------------------


@torch.library.custom_op("pacs_trl::packed_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    key_indices: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    bounds = Bounds(cu_seq_lens_q, cu_seq_lens_k, key_indices, max_length_q, max_length_k)
    rule = LogitRule(scale, window, softcap)
    out, log_sum = kernel_of(query, key, value, rule).forward(query, key, value, bounds, rule)
    if sinks is not None:
        sink = sinks.to(log_sum.dtype)[None, :, None]
        out.mul_(torch.sigmoid(log_sum - sink)[..., None])
        log_sum = torch.logaddexp(log_sum, sink)
    return out, log_sum


@_attend.register_fake
def _(query, key, value, *settings) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_tokens_first(query, value.shape[-1]), _empty_log_sum(query)


@torch.library.custom_op("pacs_trl::packed_attention_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    key_indices: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    bounds = Bounds(cu_seq_lens_q, cu_seq_lens_k, key_indices, max_length_q, max_length_k)
    rule = LogitRule(scale, window, softcap)
    kernel = kernel_of(query, key, value, rule)
    gradients = kernel.backward(gradient, query, key, value, out, log_sum, bounds, rule)
    if sinks is None:
        return *gradients, query.new_empty(0)
    # A sink has a weight like a key, and the value 0.
    share = torch.exp(sinks.to(log_sum.dtype)[None, :, None] - log_sum)
    sink_gradient = -(share * (gradient * out).sum(dim=-1, dtype=log_sum.dtype)).sum(dim=(0, 2))
    return *gradients, sink_gradient.to(sinks.dtype)


@_attend_backward.register_fake
def _(gradient, query, key, value, sinks, *settings) -> tuple[torch.Tensor, ...]:
    sink_gradient = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(_empty_tokens_first(x, x.shape[-1]) for x in (query, key, value)), sink_gradient


def _save_for_backward(ctx, inputs, output) -> None:
    query, key, value, sinks, cu_seq_lens_q, cu_seq_lens_k, key_indices, *numbers = inputs
    out, log_sum = output
    ctx.save_for_backward(query, key, value, sinks, out, log_sum, cu_seq_lens_q, cu_seq_lens_k, key_indices)
    ctx.numbers = numbers
    ctx.num_inputs = len(inputs)


def _differentiate(ctx, gradient, log_sum_gradient):
    query, key, value, sinks, *others = ctx.saved_tensors  # once, because checkpointing frees them
    gradients = _attend_backward(gradient, query, key, value, sinks, *others, *ctx.numbers)
    query_gradient, key_gradient, value_gradient, sink_gradient = gradients
    if sinks is None:
        sink_gradient = None
    bounds_and_rule = [None] * (ctx.num_inputs - 4)  # have no gradient
    return query_gradient, key_gradient, value_gradient, sink_gradient, *bounds_and_rule


_attend.register_autograd(_differentiate, setup_context=_save_for_backward)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    rule: LogitRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Compute the causal attention of packed rollouts.

    Args:
        query (`torch.Tensor` of shape `(1, H, N, D)`), key (`(1, H_kv, N, D)`), value (`(1, H_kv, N, D_v)`): States of
            the packed tokens, of the same floating-point dtype; `H` is a multiple of `H_kv`.
        bounds ([`Bounds`]), rule ([`LogitRule`]): Which keys a query attends to, and how.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): One more logit per head that takes attention from the keys.

    Returns:
        `torch.Tensor` of shape `(1, N, H, D_v)`, differentiable with respect to the states and `sinks`.
    """
    out, _ = _attend(query, key, value, sinks, *bounds, *rule)
    return out.transpose(1, 2)


def _empty_tokens_first(states: torch.Tensor, width: int) -> torch.Tensor:
    """Return an empty tensor `(1, H, N, width)`. In memory, tokens come before heads, as in the layers around."""
    batch, heads, num_tokens, _ = states.shape
    return states.new_empty(batch, num_tokens, heads, width).transpose(1, 2)


def _empty_log_sum(query: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: LogitRule):
    """Return the kernel for these tensors: on CUDA in half precision FlashAttention 4 where it is installed, or
    PyTorch's variable-length FlashAttention, on CPUs one call of its FlashAttention for CPUs per tile, and otherwise
    explicit matrix products per tile."""
    if query.is_cuda and flash_attention_4() is not None:
        capability, _ = torch.cuda.get_device_capability(query.device)
        if has_flash_attention_4(capability, query.dtype, query.shape[-1], value.shape[-1], rule):
            return FlashAttention4
    if takes_varlen(query, key, value) and rule.softcap is None:
        return VarlenKernel
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and rule.softcap is None:
        return FlashTiles
    return ExplicitTiles


# Tiles --------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries and consecutive keys of the packed tokens. The first query is `offset` positions behind the first key,
    and the causal mask and the window apply; with an `offset` of `None`, every query attends to every key."""

    queries: slice
    keys: slice
    offset: int | None


class Tiles(NamedTuple):
    """
    All tiles of packed attention.

    Attributes:
        same_segment (`list[Tile]`): Queries and keys of the same segment; they contain each query once.
        shared_prompt (`list[Tile]`): Queries of branches and keys of their prompt.
    """

    same_segment: list[Tile]
    shared_prompt: list[Tile]


def tiles_of(bounds: Bounds, window: int | None, block: int = sys.maxsize) -> Tiles:
    """
    Split packed attention into tiles of at most `block` queries. Keys that a window puts out of reach are left out.

    In the example of this module, the tiles of the same segment are those of tokens 0 to 2, 3 to 4, and 5 to 8 with
    their own keys, and one tile has the queries of both branches, tokens 3 to 8, and the keys of the prompt.
    """
    lengths = tuple(bounds.cu_seq_lens_q.diff().tolist())
    key_lengths = tuple(bounds.cu_seq_lens_k.diff().tolist())
    return _tiles(lengths, key_lengths, window or sys.maxsize, block)


@lru_cache(maxsize=8)  # for all layers of a forward and backward pass
def _tiles(lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int, block: int) -> Tiles:
    # Small blocks at a window: a tile has up to window + windowed_block keys, of which each query sees `window`.
    windowed_block = min(block, window, max(64, window // 4))
    tiles = Tiles([], [])
    for prompt, branches in _segments_by_prompt(lengths, key_lengths):
        for segment in [prompt, *branches]:
            fits_window = _length(segment) <= window
            tiles.same_segment.extend(_segment_tiles(segment, window, block if fits_window else windowed_block))
        if all(_length(prompt) + _length(branch) <= window for branch in branches):
            # No window hides a key: the queries of all branches together, which follow the prompt.
            end = branches[-1].stop if branches else prompt.stop
            all_branches = slice(prompt.stop, end)
            tiles.shared_prompt.extend(Tile(queries, prompt, None) for queries in _blocks(all_branches, block))
        else:
            for branch in branches:
                tiles.shared_prompt.extend(_prompt_tiles(prompt, branch, window, windowed_block))
    return tiles


def _segments_by_prompt(lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> list[tuple[slice, list[slice]]]:
    """Return each prompt and its branches. A segment that shares no prompt is one without branches."""
    groups: list[tuple[slice, list[slice]]] = []
    start = 0
    for length, num_keys in zip(lengths, key_lengths, strict=True):
        segment = slice(start, start + length)
        attends_to_prompt = num_keys > length
        if attends_to_prompt:
            _, branches = groups[-1]
            branches.append(segment)
        else:
            groups.append((segment, []))
        start += length
    return groups


def _segment_tiles(segment: slice, window: int, block: int) -> Iterator[Tile]:
    """Yield tiles of at most `block` queries of a segment, and of its keys that a window lets them see."""
    for queries in _blocks(segment, block):
        first_key = max(segment.start, queries.start + 1 - window)
        yield Tile(queries, slice(first_key, queries.stop), offset=queries.start - first_key)


def _prompt_tiles(prompt: slice, branch: slice, window: int, block: int) -> Iterator[Tile]:
    """Yield tiles of at most `block` queries of a branch, and of the keys of its prompt that a window lets them
    see."""
    # Only the first `window - 1` tokens of a branch still see its prompt.
    seeing = slice(branch.start, min(branch.stop, branch.start + window - 1))
    for queries in _blocks(seeing, block):
        # Positions of the first and the last query, and of the first key, counted from the start of the prompt.
        first_query = _length(prompt) + queries.start - branch.start
        last_query = first_query + _length(queries) - 1
        first_key = max(0, first_query + 1 - window)
        needs_no_mask = last_query - first_key < window  # the last query still sees the first key
        keys = slice(prompt.start + first_key, prompt.stop)
        yield Tile(queries, keys, offset=None if needs_no_mask else first_query - first_key)


def _blocks(part: slice, size: int) -> Iterator[slice]:
    for start in range(part.start, part.stop, size):
        yield slice(start, min(start + size, part.stop))


def _length(part: slice) -> int:
    return part.stop - part.start


# Kernels ------------------------------------------------------------------------------------------------------------

# Classes with the functions `forward` and `backward`, see `TiledKernel`.


class TiledKernel:
    """A kernel that attends tile by tile, and merges the results of the same queries by their log-sum-exps. The
    backward pass of a tile starts from the merged output and log-sum-exp."""

    block = sys.maxsize  # largest number of queries per tile

    @classmethod
    def forward(cls, query, key, value, bounds: Bounds, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output `(1, H, N, D_v)`, tokens first in memory, and the log-sum-exps `(1, H, N)`."""
        out = _empty_tokens_first(query, value.shape[-1])
        log_sum = _empty_log_sum(query)
        tiles = tiles_of(bounds, rule.window, cls.block)

        def attend(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
            queries, keys = tile.queries, tile.keys
            return cls.attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], tile.offset, rule)

        for tile in tiles.same_segment:
            out[:, :, tile.queries], log_sum[:, :, tile.queries] = attend(tile)
        for tile in tiles.shared_prompt:
            prompt_out, prompt_sum = attend(tile)
            branch_out, branch_sum = out[:, :, tile.queries], log_sum[:, :, tile.queries]
            # In the softmax over all keys, those of the prompt have the weight
            # exp(prompt_sum) / (exp(prompt_sum) + exp(branch_sum)).
            prompt_share = torch.sigmoid(prompt_sum - branch_sum)[..., None]
            dtype = prompt_share.dtype
            out[:, :, tile.queries] = torch.lerp(branch_out.to(dtype), prompt_out.to(dtype), prompt_share)
            log_sum[:, :, tile.queries] = torch.logaddexp(prompt_sum, branch_sum)
        return out, log_sum

    @classmethod
    def backward(cls, gradient, query, key, value, out, log_sum, bounds: Bounds, rule: LogitRule):
        """Return the gradients with respect to query, key, and value, tokens first in memory."""
        query_gradient, key_gradient, value_gradient = (
            _empty_tokens_first(states, states.shape[-1]).zero_() for states in (query, key, value)
        )
        tiles = tiles_of(bounds, rule.window, cls.block)
        for tile in [*tiles.same_segment, *tiles.shared_prompt]:
            queries, keys = tile.queries, tile.keys
            tile_query, tile_key, tile_value = cls.attend_backward(
                gradient[:, :, queries],
                query[:, :, queries],
                out[:, :, queries],
                log_sum[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                tile.offset,
                rule,
            )
            query_gradient[:, :, queries].add_(tile_query)
            key_gradient[:, :, keys].add_(tile_key)
            value_gradient[:, :, keys].add_(tile_value)
        return query_gradient, key_gradient, value_gradient

    @staticmethod
    def attend(query, key, value, offset: int | None, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exps of a [`Tile`]."""
        raise NotImplementedError

    @staticmethod
    def attend_backward(gradient, query, out, log_sum, key, value, offset: int | None, rule: LogitRule):
        """Return the gradients of a [`Tile`] with respect to query, key, and value."""
        raise NotImplementedError


class FlashTiles(TiledKernel):
    """PyTorch's FlashAttention for CPUs, for queries, keys, and values of equal width."""

    @staticmethod
    def attend(query, key, value, offset, rule):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask, is_causal = _flash_mask(query, key, offset, rule)
        dropout = 0.0
        return kernel(query, key, value, dropout, is_causal, attn_mask=mask, scale=rule.scale)

    @staticmethod
    def attend_backward(gradient, query, out, log_sum, key, value, offset, rule):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        mask, is_causal = _flash_mask(query, key, offset, rule)
        states = gradient, query, key, value, out, log_sum
        dropout = 0.0
        return kernel(*states, dropout, is_causal, attn_mask=mask, scale=rule.scale)


def _flash_mask(query, key, offset: int | None, rule: LogitRule) -> tuple[torch.Tensor | None, bool]:
    """Return the mask to add to the logits, and whether the kernel's causal mask replaces it."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if offset is None:
        return None, False
    is_square = offset == 0 and num_queries == num_keys
    is_inside_window = not rule.window or num_keys <= rule.window
    if is_square and is_inside_window:
        return None, True
    visible = visible_keys(num_queries, num_keys, offset, rule.window, query.device)
    return torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -math.inf), False


def visible_keys(num_queries: int, num_keys: int, offset: int, window: int | None, device) -> torch.Tensor:
    """Return the mask, bool `(num_queries, num_keys)`, of a causal [`Tile`]."""
    queries = torch.arange(offset, offset + num_queries, device=device)
    distances = queries[:, None] - torch.arange(num_keys, device=device)
    is_causal = distances >= 0
    return is_causal & (distances < window) if window else is_causal


class ExplicitTiles(TiledKernel):
    """Matrix products and softmax in float32 (float64 for float64), for any device, dtype, width, and soft cap."""

    block = 128

    @staticmethod
    def attend(query, key, value, offset, rule):
        capped, _ = _capped_logits(query, key, offset, rule)
        log_sum = capped.logsumexp(dim=-1)
        weights = (capped - log_sum[..., None]).exp_()
        out = _product(weights.to(value.dtype), value[0])
        return _ungrouped(out, query), _ungrouped(log_sum, query)

    @staticmethod
    def attend_backward(gradient, query, out, log_sum, key, value, offset, rule):
        # With weights w, values v, the output o, and its gradient g, a logit has the gradient w * (g . v - g . o).
        capped, slope = _capped_logits(query, key, offset, rule)
        weights = (capped - _grouped(log_sum, key)[..., None]).exp_()
        out_gradient = _grouped(gradient, key)
        gradient_dot_out = _grouped((gradient * out).sum(dim=-1, dtype=log_sum.dtype), key)[..., None]
        logit_gradient = weights * (_product(out_gradient, value[0].mT) - gradient_dot_out)
        product_gradient = (logit_gradient * slope * rule.scale).to(query.dtype)  # of query . key
        query_gradient = _ungrouped(_product(product_gradient, key[0]), query)
        key_gradient = _product(product_gradient.mT, _grouped(query, key))
        value_gradient = _product(weights.to(value.dtype).mT, out_gradient)
        return query_gradient, key_gradient[None], value_gradient[None]


def _capped_logits(query, key, offset: int | None, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the logits `(H_kv, H / H_kv * n, m)`, and their derivative with respect to those without the cap."""
    logits = _product(_grouped(query, key), key[0].mT) * rule.scale
    slope: torch.Tensor | float = 1.0
    if rule.softcap is not None:
        ratio = torch.tanh(logits / rule.softcap)
        logits = rule.softcap * ratio
        slope = 1 - ratio.square()
    if offset is not None:
        visible = visible_keys(query.shape[2], key.shape[2], offset, rule.window, query.device)
        visible_of_group = visible.repeat(query.shape[1] // key.shape[1], 1)
        logits = logits.masked_fill(~visible_of_group, -math.inf)
    return logits, slope


def _grouped(states: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Reshape `(1, H, n, ...)` to `(H_kv, H / H_kv * n, ...)`: all queries of the same keys."""
    return states[0].reshape(key.shape[1], -1, *states.shape[3:])


def _ungrouped(values: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Undo [`_grouped`]: reshape `(H_kv, H / H_kv * n, ...)` to `(1, H, n, ...)`."""
    return values.reshape(1, *query.shape[1:3], *values.shape[2:])


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply batches of matrices, with a result in float32, or float64 for float64."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def takes_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether PyTorch's variable-length FlashAttention supports these tensors."""
    grouped = query.shape[1] != key.shape[1]
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, grouped))


# `varlen_attn` of PyTorch 2.11 does not support grouped-query attention.
_VARLEN_IS_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters


class VarlenKernel:
    """PyTorch's variable-length FlashAttention."""

    @staticmethod
    def forward(query, key, value, bounds: Bounds, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`TiledKernel.forward`]."""
        tokens = _segment_states(query, key, value, bounds, grouped=_VARLEN_IS_GROUPED)
        out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            *tokens, *bounds.varlen, 0.0, rule.window is None, False, **_varlen_settings(rule)
        )
        return out.transpose(0, 1)[None], log_sum[None]

    @staticmethod
    def backward(gradient, query, key, value, out, log_sum, bounds: Bounds, rule: LogitRule):
        """See [`TiledKernel.backward`]."""
        tokens = _segment_states(query, key, value, bounds, grouped=_VARLEN_IS_GROUPED)
        gradient, out = (x[0].transpose(0, 1).contiguous() for x in (gradient, out))
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # without dropout it is not used
        query_gradient, *key_gradients = torch.ops.aten._flash_attention_backward(
            gradient,
            *tokens,
            out,
            log_sum[0],
            *bounds.varlen,
            0.0,
            rule.window is None,
            random_state,
            torch.empty(0, device=query.device),
            **_varlen_settings(rule),
        )
        return query_gradient.transpose(0, 1)[None], *_sum_of_copies(key_gradients, key, bounds)


@cache
def flash_attention_4() -> ModuleType | None:
    """Return the module of FlashAttention 4 (package flash-attn-4), if it is installed."""
    return importlib.import_module("flash_attn.cute.interface") if is_flash_attn_4_available() else None


def _installed_flash_attention_4() -> ModuleType:
    module = flash_attention_4()
    assert module is not None  # kernel_of chooses it where it is installed
    return module


def has_flash_attention_4(capability: int, dtype: torch.dtype, head: int, value_head: int, rule: LogitRule) -> bool:
    """Return whether FlashAttention 4 computes such heads, forward and backward, on a GPU of a major compute
    capability: Hopper (9) and Blackwell (10)."""
    if dtype not in (torch.float16, torch.bfloat16) or head % 8 or value_head % 8:
        return False
    if capability == 10:
        return max(head, value_head) <= 128 or (head == value_head == 256 and rule.softcap is None)
    return capability == 9 and max(head, value_head) <= 256


class FlashAttention4:
    """FlashAttention 4. It is not tested on GPU."""

    @staticmethod
    def forward(query, key, value, bounds: Bounds, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`TiledKernel.forward`]."""
        tokens = _segment_states(query, key, value, bounds, grouped=True)
        left, right = _flash_4_window(rule)
        with torch.no_grad():
            out, log_sum = _installed_flash_attention_4().flash_attn_varlen_func(
                *tokens,
                **_flash_4_settings(bounds, rule),
                window_size=(left, right),
                return_lse=True,
            )
        return out.transpose(0, 1)[None], log_sum[None]

    @staticmethod
    def backward(gradient, query, key, value, out, log_sum, bounds: Bounds, rule: LogitRule):
        """See [`TiledKernel.backward`]. The public function would compute output and log-sum-exps again."""
        tokens = _segment_states(query, key, value, bounds, grouped=True)
        gradient, out = (x[0].transpose(0, 1).contiguous() for x in (gradient, out))
        left, right = _flash_4_window(rule)
        query_gradient, *key_gradients = _installed_flash_attention_4()._flash_attn_bwd(
            *tokens,
            out,
            gradient,
            log_sum[0],
            **_flash_4_settings(bounds, rule),
            window_size_left=left,
            window_size_right=right,
        )
        return query_gradient.transpose(0, 1)[None], *_sum_of_copies(key_gradients, key, bounds)


def _flash_4_settings(bounds: Bounds, rule: LogitRule) -> dict[str, Any]:
    """Return what both passes of FlashAttention 4 take."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    settings = dict(zip(names, bounds.varlen, strict=True))
    return settings | {"softmax_scale": rule.scale, "causal": True, "softcap": rule.softcap or 0.0}


def _flash_4_window(rule: LogitRule) -> tuple[int | None, int | None]:
    return (None, None) if rule.window is None else (rule.window - 1, 0)


def _varlen_settings(rule: LogitRule) -> dict[str, float | int]:
    left = -1 if rule.window is None else rule.window - 1
    return {"scale": rule.scale, "window_size_left": left, "window_size_right": 0}


def _segment_states(query, key, value, bounds: Bounds, grouped: bool) -> list[torch.Tensor]:
    """Return queries, keys, and values of all segments, `(tokens, heads, width)`: those of a prompt once per branch
    and, if the kernel is not `grouped`, those of a head of keys once per head of queries."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if len(bounds.key_indices) > len(query):
        key, value = (x.index_select(0, bounds.key_indices) for x in (key, value))
    if not grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return [x.contiguous() for x in (query, key, value)]


def _sum_of_copies(gradients: list[torch.Tensor], key: torch.Tensor, bounds: Bounds) -> list[torch.Tensor]:
    """Sum the gradients of the copies that [`_segment_states`] makes: `(1, H_kv, N, width)`."""
    heads, num_tokens = key.shape[1:3]
    sums: list[torch.Tensor] = []
    for copies in gradients:  # (tokens, heads, width)
        if copies.shape[1] > heads:  # one copy for each head of queries
            copies = copies.unflatten(1, (heads, -1)).sum(dim=2)
        if len(copies) > num_tokens:  # one copy of a prompt for each branch
            whole = copies.new_zeros(num_tokens, *copies.shape[1:])
            copies = whole.index_add_(0, bounds.key_indices, copies)
        sums.append(copies.transpose(0, 1)[None])
    return sums

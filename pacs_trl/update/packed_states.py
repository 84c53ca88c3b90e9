"""Convolutions and recurrences of packed rollouts: linear attention and state-space layers.

Layers with a state run along the sequence, and would carry it from one packed rollout into the next. Modeling files of
transformers call a function for each convolution and recurrence (a kernel of causal-conv1d, flash-linear-attention, or
mamba-ssm where it is installed, and otherwise one in PyTorch). During packed passes these functions are called on
segments, see [`Segments`]: on prompts from an empty state, and on completions from the last state of their prompt,
which is therefore computed once per group, whatever the kernel.

- A convolution reads the last tokens of the prompt in front of a completion, and zeros in front of a prompt.
- A recurrence takes segments of similar length as one batch. Prompts are padded on the left with zeros, which leave
  an empty state empty, and completions on the right, behind all that is read.

Each token is in the same chunk of a recurrence whatever else is in its micro-batch, so that gradients depend on the
split into micro-batches by the rounding of sums only.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


# Length of the chunks in which recurrences are computed on a CPU. PyTorch's functions in transformers have chunks of
# 64 to 256 tokens, which cost more operations per token, and more padding.
CPU_CHUNK = 16

KERNEL_CHUNK = 64  # of recurrences whose call does not say it


class SegmentBatch(NamedTuple):
    """
    `B` segments of similar length, padded to `T` tokens.

    Attributes:
        indices (int64, shape `(B, T)`): Index in the micro-batch of each token; 0 for padding.
        is_padding (bool, shape `(B, T)`): Whether a position is padding.
        first_states (int64, shape `(B,)`): State that each completion starts from: its index among the last states of
            all prompts, in the order of [`RecurrenceBatches.prompts`]. Empty for prompts, which start from no state.
    """

    indices: torch.Tensor
    is_padding: torch.Tensor
    first_states: torch.Tensor


class RecurrenceBatches(NamedTuple):
    """
    All segments of a micro-batch of `N` tokens.

    Attributes:
        prompts, completions (`list[SegmentBatch]`): Batches of prompts, and batches of completions.
        outputs (int64, shape `(N,)`): Where the output of each token is, if the outputs of all batches, prompts first,
            are flattened and concatenated.
    """

    prompts: list[SegmentBatch]
    completions: list[SegmentBatch]
    outputs: torch.Tensor


class PrecededSegments(NamedTuple):
    """
    A sequence of `M` tokens in which each segment of a micro-batch of `N` tokens follows the tokens before it.

    Attributes:
        inputs (int64, shape `(M,)`): Index in the micro-batch of each token of the sequence.
        is_zero (bool, shape `(M,)`): Which tokens of the sequence are zeros, because nothing is before them.
        outputs (int64, shape `(N,)`): Index in the sequence of each token of the micro-batch.
    """

    inputs: torch.Tensor
    is_zero: torch.Tensor
    outputs: torch.Tensor


class Segments:
    """
    Prompts and completions of a packed micro-batch, in which each completion continues its prompt.

    Args:
        groups (`list[tuple[int, list[int]]]`): Number of tokens of each prompt, and of each completion behind it, in
            the order of the micro-batch.
        device (`torch.device`): Device of the indices.

    Attributes:
        num_tokens (`int`): `N`, the number of tokens of the micro-batch.
        prompts, completions (`list[np.ndarray]`): Indices in the micro-batch of the tokens of each segment.
        prompt_of (`list[int]`): Index in `prompts` of the prompt of each completion.
    """

    def __init__(self, groups: list[tuple[int, list[int]]], device: torch.device):
        self.device = device
        self.num_tokens = sum(prompt + sum(completions) for prompt, completions in groups)
        self.prompts: list[np.ndarray] = []
        self.completions: list[np.ndarray] = []
        self.prompt_of: list[int] = []
        start = 0
        for number, (prompt, completions) in enumerate(groups):
            self.prompts.append(np.arange(start, start + prompt))
            start += prompt
            for length in completions:
                self.completions.append(np.arange(start, start + length))
                self.prompt_of.append(number)
                start += length
        # Of all layers of a pass, by the arguments of the methods below.
        self._preceded: dict[int, PrecededSegments] = {}
        self._batches: dict[int, RecurrenceBatches] = {}

    def with_previous(self, num_previous: int) -> PrecededSegments:
        """Return the sequence in which each segment is preceded by the `num_previous` tokens before it: for a
        completion the last ones of its prompt, and zeros where there are none."""
        if num_previous not in self._preceded:
            self._preceded[num_previous] = self._with_previous(num_previous)
        return self._preceded[num_previous]

    def _with_previous(self, num_previous: int) -> PrecededSegments:
        zeros = np.full(num_previous, -1)
        preceded = [(zeros, prompt) for prompt in self.prompts]
        for completion, number in zip(self.completions, self.prompt_of, strict=True):
            before = np.concatenate([zeros, self.prompts[number]])
            preceded.append((before[len(before) - num_previous :], completion))
        inputs = np.concatenate([part for pair in preceded for part in pair])
        outputs = np.empty(self.num_tokens, dtype=np.int64)
        end = 0
        for previous, segment in preceded:
            start = end + len(previous)
            end = start + len(segment)
            outputs[segment] = np.arange(start, end)
        return PrecededSegments(self._tensor(inputs.clip(min=0)), self._tensor(inputs < 0), self._tensor(outputs))

    def batches(self, chunk: int) -> RecurrenceBatches:
        """Return the segments in batches. Prompts are padded to multiples of `chunk`, in front, so that their last
        token ends one."""
        if chunk not in self._batches:
            self._batches[chunk] = self._in_batches(chunk)
        return self._batches[chunk]

    def _in_batches(self, chunk: int) -> RecurrenceBatches:
        prompts_by_length = _by_length(self.prompts, chunk)
        completions_by_length = _by_length(self.completions, min(chunk, KERNEL_CHUNK))
        flat_indices, flat_padding = [], []

        # Prompts start from empty states.
        prompts: list[SegmentBatch] = []
        no_states = np.empty(0, dtype=np.int64)
        for length, numbers in prompts_by_length:
            indices, is_padding = _padded([self.prompts[i] for i in numbers], length, left=True)
            prompts.append(self._segment_batch(indices, is_padding, no_states))
            flat_indices.append(indices.ravel())
            flat_padding.append(is_padding.ravel())

        # Completions start from the last states of their prompts, which are in the order of the batches.
        completions: list[SegmentBatch] = []
        state_of_prompt = np.argsort([number for _, numbers in prompts_by_length for number in numbers])
        first_states = state_of_prompt[np.array(self.prompt_of, dtype=np.int64)]
        for length, numbers in completions_by_length:
            indices, is_padding = _padded([self.completions[i] for i in numbers], length)
            completions.append(self._segment_batch(indices, is_padding, first_states[numbers]))
            flat_indices.append(indices.ravel())
            flat_padding.append(is_padding.ravel())

        # Where the outputs of the tokens are, among those of all batches with their padding.
        occupied = np.flatnonzero(~np.concatenate(flat_padding))
        outputs = np.empty(self.num_tokens, dtype=np.int64)
        outputs[np.concatenate(flat_indices)[occupied]] = occupied
        return RecurrenceBatches(prompts, completions, self._tensor(outputs))

    def _segment_batch(self, indices: np.ndarray, is_padding: np.ndarray, first_states: np.ndarray) -> SegmentBatch:
        return SegmentBatch(self._tensor(indices), self._tensor(is_padding), self._tensor(first_states))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _by_length(segments: list[np.ndarray], chunk: int) -> list[tuple[int, list[int]]]:
    """Return the lengths of padded batches, multiples of `chunk`, and which segments are in them. Beyond eight chunks,
    a batch holds all segments whose numbers of chunks have the same three leading bits."""
    batches: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        num_chunks = math.ceil(len(segment) / chunk)
        step = 1 << max(num_chunks.bit_length() - 3, 0)
        padded_chunks = math.ceil(num_chunks / step) * step
        batches.setdefault(padded_chunks * chunk, []).append(number)
    return sorted(batches.items())


def _padded(segments: list[np.ndarray], length: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of padded segments, `(B, length)`, and which of them are padding."""
    indices = np.zeros((len(segments), length), dtype=np.int64)
    is_padding = np.ones(indices.shape, dtype=bool)
    for row, segment in enumerate(segments):
        start = length - len(segment) if left else 0
        indices[row, start : start + len(segment)] = segment
        is_padding[row, start : start + len(segment)] = False
    return indices, is_padding


def _convolve(
    function: Callable,
    segments: Segments,
    hidden_states: torch.Tensor,  # (1, C, N)
    weight: torch.Tensor,  # (C, kernel size)
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute the causal convolution of each channel."""
    inputs, is_zero, outputs = segments.with_previous(weight.shape[-1] - 1)
    tokens = hidden_states[0].T.index_select(0, inputs).masked_fill(is_zero[:, None], 0)
    convolved = function(tokens.T[None], weight, bias, activation=activation)
    return convolved[0].T.index_select(0, outputs).T[None]


def _delta_rule(
    function: Callable,
    segments: Segments,
    query: torch.Tensor,  # (1, N, H, K)
    key: torch.Tensor,
    value: torch.Tensor,  # (1, N, H, V)
    g: torch.Tensor,  # (1, N, H), or (1, N, H, K)
    beta: torch.Tensor,  # (1, N, H)
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute linear attention with a gated delta rule: of Gated DeltaNet, or of Kimi Delta Attention."""
    chunk = KERNEL_CHUNK
    settings: dict[str, bool | int] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if query.device.type == "cpu":
        chunk = settings["chunk_size"] = CPU_CHUNK

    def attend(tokens: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        key, value, query, g, beta = tokens
        return function(query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True, **settings)

    return _recur(attend, [key, value], [query, g, beta], segments.batches(chunk)), None


def _scan(
    function: Callable,
    segments: Segments,
    hidden_states: torch.Tensor,  # (1, N, H, P)
    dt: torch.Tensor,  # (1, N, H)
    A: torch.Tensor,  # (H,)
    B: torch.Tensor,  # (1, N, groups, S)
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> torch.Tensor:
    """Compute the state-space recurrence of Mamba 2."""
    chunk = min(chunk_size, CPU_CHUNK) if hidden_states.device.type == "cpu" else chunk_size
    settings = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "chunk_size": chunk}

    def scan(tokens: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, dt, B, C = tokens
        return function(hidden_states, dt, A, B, C, initial_states=state, return_final_states=True, **settings)

    return _recur(scan, [hidden_states], [dt, B, C], segments.batches(chunk))


def _recur(
    function: Callable[[list[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
    written: list[torch.Tensor],
    others: list[torch.Tensor],
    batches: RecurrenceBatches,
) -> torch.Tensor:
    """
    Run a recurrence over all segments.

    Args:
        function (`Callable`): Takes tokens `(B, T, ...)` and their first states, or `None` for empty ones; returns its
            output `(B, T, ...)` and the last states.
        written (`list[torch.Tensor]`): Inputs `(1, N, ...)` without which an empty state stays empty.
        others (`list[torch.Tensor]`): More inputs `(1, N, ...)`.
    """
    outputs: list[torch.Tensor] = []
    states_of_batches: list[torch.Tensor] = []
    for batch in batches.prompts:
        written_tokens = [_without_padding(_take(x, batch.indices), batch.is_padding) for x in written]
        other_tokens = [_take(x, batch.indices) for x in others]
        output, last_states = function(written_tokens + other_tokens, None)
        outputs.append(output)
        states_of_batches.append(last_states)
    states_of_prompts = torch.cat(states_of_batches)
    for batch in batches.completions:
        tokens = [_take(x, batch.indices) for x in written + others]
        first_states = states_of_prompts.index_select(0, batch.first_states)
        output, _ = function(tokens, first_states)
        outputs.append(output)
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, batches.outputs)[None]


def _take(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the states `(1, N, ...)` of some tokens, `(B, T, ...)`."""
    return states[0].index_select(0, indices.flatten()).unflatten(0, indices.shape)


def _without_padding(states: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """Return states `(B, T, ...)` with 0 where `is_padding`, `(B, T)`, is True."""
    other_dimensions = [1] * (states.ndim - 2)
    return states.masked_fill(is_padding.view(*is_padding.shape, *other_dimensions), 0)


def _nothing_fused(function: Callable, segments: Segments, *args: Any, **kwargs: Any) -> None:
    """Let a Mamba layer call its convolution and its recurrence, as it does without mamba-ssm."""


# Functions of modeling files in transformers, and what computes them on segments.
RECURRENCES: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
CONVOLUTION = "causal_conv1d_fn"
_ON_SEGMENTS: dict[str, Callable] = {
    CONVOLUTION: _convolve,
    "mamba2_split_conv1d_scan_combined": _nothing_fused,
    **RECURRENCES,
}


@torch.compiler.disable
def _not_compiled(on_segments: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call outside of graphs of compiled layers, which would depend on the number of segments."""
    return on_segments(*args, **kwargs)


class _OnSegments:
    """A function of a modeling file that computes [`Segments`] with another one. Layers pass them as `seq_idx`, the
    only argument of packed sequences that LFM2 hands on to its convolution in transformers 5.17."""

    def __init__(self, function: Callable, on_segments: Callable):
        self.function = function
        self.on_segments = on_segments

    def __call__(self, *args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        if isinstance(seq_idx, Segments):
            return _not_compiled(self.on_segments, self.function, seq_idx, *args, **kwargs)
        return self.function(*args, seq_idx=seq_idx, **kwargs)


def state_modules(model: nn.Module) -> list[ModuleType]:
    """Return the modeling files of a model whose layers have a convolution or recurrence that runs on segments."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted(names)]
    return [module for module in modules if not _ON_SEGMENTS.keys().isdisjoint(vars(module))]


@contextmanager
def packed_states(modules: list[ModuleType]) -> Iterator[None]:
    """Let layers of these modeling files compute packed rollouts on segments inside the context, which may be nested.
    It must include the backward pass, because gradient checkpointing repeats the forward pass there."""
    functions = [
        (module, name, vars(module)[name]) for module in modules for name in _ON_SEGMENTS if name in vars(module)
    ]
    for module, name, function in functions:
        if not isinstance(function, _OnSegments):
            setattr(module, name, _OnSegments(function, _ON_SEGMENTS[name]))
    try:
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)

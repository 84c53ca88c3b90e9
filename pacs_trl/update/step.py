"""The completions of one optimizer step, and which of them go through the model together."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .groups import Groups
from .microbatching import RowLengths, Schedule, schedule_cost, schedule_micro_batches
from .rows import Rollout


# Stands in where a process has no row left for a forward pass that the others run: two tokens, weight zero.
FILLER = Rollout(
    prompt_ids=np.zeros(1, dtype=np.int32),
    completion_ids=np.zeros(1, dtype=np.int32),
    loss_mask=np.zeros(1, dtype=bool),
    label=float("nan"),
)


@dataclass
class StepRollouts:
    """
    All completions of one optimizer step, the same on every process, and the micro-batches of their forward passes.

    Attributes:
        rollouts (`list[Rollout]`), groups ([`Groups`]): Whole groups; their labels.
        schedule (`Schedule`): Micro-batches of every forward pass over all completions, the same for reference and
            policy: with equal weights they then give equal bits, also in half precision.
        whole_groups (`bool`): Whether the micro-batches of `schedule` hold whole groups.
        on_policy (`bool`): Whether the weights are still those that generated. The forward pass itself then yields
            `old_logps`, and tells how far the engine is from the trainer.
        coefficients, scales (`torch.Tensor` of shape `(B,)`, *optional*): See [`Objective.known_coefficients`].
    """

    rollouts: list[Rollout]
    groups: Groups
    schedule: Schedule
    whole_groups: bool
    on_policy: bool = False
    coefficients: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def places(self, rows: list[int]) -> list[int]:
        """Return the indices of the proxies and coefficients of some completions among those of the step."""
        return rows

    @property
    def num_places(self) -> int:
        """Number of proxies of the step: one for each completion."""
        return len(self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return sum(int(row.loss_mask.sum()) for row in self.rollouts)


class MicroBatchConfig(NamedTuple):
    """Bounds on micro-batches: settings of [`PACSConfig`] by other names, and whether rows are padded. `backward_cost`
    is that of a backward pass in forward passes, `pair_cost` that of [`RowLengths`]."""

    num_processes: int
    max_rows: int
    max_tokens: int | None = None
    padded: bool = False
    group_layout: str = "auto"
    backward_cost: int = 2
    pair_cost: float = 0.0

    @property
    def of_schedule(self) -> dict:
        return {name: getattr(self, name) for name in ("num_processes", "max_rows", "max_tokens", "padded")}


def schedule_step(
    rollouts: list[Rollout], limits: MicroBatchConfig, takes_part: torch.Tensor | None = None
) -> StepRollouts:
    """
    Decide the composition of the forward passes over the completions of an optimizer step, whole groups, from their
    lengths. `takes_part` is which completions can have a gradient, bool `(B,)`: by default the scorable ones.

    Raises:
        `ValueError`: if a completion with its prompt is longer than `max_tokens`, or `group_layout` is `"whole"` and a
            group does not fit into a micro-batch.
    """
    groups = Groups(torch.tensor([row.label for row in rollouts]), [row.group for row in rollouts])
    takes_part = groups.scorable if takes_part is None else takes_part
    lengths, layout = row_lengths(rollouts, limits.pair_cost), limits.group_layout
    split = schedule_micro_batches(lengths, takes_part.nonzero().tolist(), **limits.of_schedule)
    if split is None:
        longest = max(p + c for p, c in zip(lengths.prompts, lengths.completions, strict=True))
        raise ValueError(
            f"max_tokens_per_micro_batch={limits.max_tokens} cannot hold the longest sequence of this "
            f"generation batch, which has {longest} tokens (prompt and completion). Raise it to at least {longest}, "
            "or leave out longer prompts (in a recipe: max_prompt_length) and lower max_completion_length."
        )
    units = [rows for rows in groups.members if takes_part[rows].any()]
    whole = schedule_micro_batches(lengths, units, **limits.of_schedule)
    if layout == "whole" and whole is None:
        bound = f"per_device_train_batch_size={limits.max_rows}"
        if limits.max_tokens:
            bound = f"max_tokens_per_micro_batch={limits.max_tokens}"
        raise ValueError(
            f"group_layout='whole' needs a group of num_generations={groups.size} completions to fit into one "
            f"micro-batch, but {bound} is too small. Raise it, or use group_layout='auto' or 'split'."
        )
    if layout == "auto" and whole is not None:
        # In forward passes: the pass for the proxies comes on top where groups are split.
        whole_cost, split_cost = (schedule_cost(s, lengths, padded=limits.padded) for s in (whole, split))
        cost = 1 + limits.backward_cost
        layout = "whole" if cost * whole_cost <= (cost + 1) * split_cost else "split"
    if layout == "whole" and whole is not None:
        return StepRollouts(rollouts, groups, whole, whole_groups=True)
    return StepRollouts(rollouts, groups, split, whole_groups=False)


def schedule_rows(rollouts: list[Rollout], rows: list[int], limits: MicroBatchConfig) -> Schedule:
    """Return micro-batches of some completions of a step. One without a gradient may be longer than `max_tokens`."""
    lengths, bounds = row_lengths(rollouts, limits.pair_cost), limits.of_schedule
    if limits.max_tokens is not None:
        bounds["max_tokens"] = max([limits.max_tokens, *(lengths.prompts[i] + lengths.completions[i] for i in rows)])
    schedule = schedule_micro_batches(lengths, [[row] for row in rows], **bounds)
    assert schedule is not None  # every single row fits
    return schedule


def row_lengths(rollouts: list[Rollout], pair_cost: float = 0.0) -> RowLengths:
    """Return the lengths of completions and prompts; equal prompts are found by their tokens."""
    texts: dict[bytes, int] = {}
    same = [texts.setdefault(row.prompt_ids.tobytes(), len(texts)) for row in rollouts]
    lengths = [len(r.prompt_ids) for r in rollouts], [len(r.completion_ids) for r in rollouts]
    return RowLengths(*lengths, same, pair_cost)


@dataclass
class MicroBatch:
    """Values of the completion tokens of `B` rows, `(B, T)`, padded on the right to the longest of these completions:
    `loss_mask` (bool), `ref_logps`, `old_logps` and `old_entropies` (0 where a row has none) and `sampling_logps` (NaN
    where a row has none) in PyTorch's default dtype, see [`Rollout`]."""

    rollouts: list[Rollout]
    loss_mask: torch.Tensor
    ref_logps: torch.Tensor
    old_logps: torch.Tensor
    old_entropies: torch.Tensor
    sampling_logps: torch.Tensor


def collate(rollouts: list[Rollout], device: torch.device) -> MicroBatch:
    """Pad rows to their own longest completion and move them to `device`."""

    def padded(name: str, missing: float, dtype: torch.dtype) -> torch.Tensor:
        rows = [getattr(row, name) for row in rollouts]
        out = torch.full((len(rows), max(len(row.completion_ids) for row in rollouts)), missing, dtype=dtype)
        for i, values in enumerate(rows):
            if values is not None:
                out[i, : len(values)] = torch.from_numpy(values)
        return out.to(device)

    return MicroBatch(
        rollouts,
        loss_mask=padded("loss_mask", False, torch.bool),
        ref_logps=padded("ref_logps", 0.0, torch.get_default_dtype()),
        old_logps=padded("old_logps", 0.0, torch.get_default_dtype()),
        old_entropies=padded("old_entropies", 0.0, torch.get_default_dtype()),
        sampling_logps=padded("sampling_logps", math.nan, torch.get_default_dtype()),
    )

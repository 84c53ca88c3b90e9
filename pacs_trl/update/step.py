"""Rollouts of one optimizer step and their micro-batch schedule."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from .groups import Groups
from .microbatching import MicroBatchConfig, RolloutLengths, Schedule, schedule_cost, schedule_micro_batches
from .rollout import Rollout


# Filler for a process without completions in a forward pass that other processes run: two tokens, weight zero.
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
        rollouts (`list[Rollout]`), groups ([`Groups`]): Rollouts of whole groups, and their labels by group.
        schedule (`Schedule`): Micro-batches of every forward pass over all completions. Reference and policy use the
            same schedule, so that equal weights give bitwise equal log-probs, also in half precision.
        whole_groups (`bool`): Whether the micro-batches of `schedule` hold whole groups.
        on_policy (`bool`): Whether the weights are still those at rollout time. The forward pass of the update then
            yields `old_logps`, and the mismatch metrics are computed.
        is_late (`bool`): Whether `old_logps` are always those stored in the rollouts, of an earlier policy.
        coefficients, scales (`torch.Tensor` of shape `(B,)`, *optional*): See [`Objective.known_coefficients`].
    """

    rollouts: list[Rollout]
    groups: Groups
    schedule: Schedule
    whole_groups: bool
    on_policy: bool = False
    is_late: bool = False
    coefficients: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def flat_indices(self, indices: list[int]) -> list[int]:
        """Return the indices of some completions in the proxies and coefficients of the step."""
        return indices

    @property
    def num_proxies(self) -> int:
        """Number of proxies of the step: one per completion."""
        return len(self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a True loss mask."""
        return sum(int(rollout.loss_mask.sum()) for rollout in self.rollouts)


def schedule_step(
    rollouts: list[Rollout], limits: MicroBatchConfig, takes_part: torch.Tensor | None = None
) -> StepRollouts:
    """Schedule the forward passes over the completions of an optimizer step, which must form whole groups.
    `takes_part`, bool `(B,)`, marks those that can have a gradient, by default the scorable ones. Raises a
    `ValueError` if a prompt with its completion is longer than `max_tokens`."""
    groups = Groups(torch.tensor([rollout.label for rollout in rollouts]), [rollout.group for rollout in rollouts])
    takes_part = groups.scorable if takes_part is None else takes_part
    lengths, layout = rollout_lengths(rollouts, limits.pair_cost), limits.group_layout
    split = schedule_micro_batches(lengths, takes_part.nonzero().tolist(), limits)
    if split is None:
        longest = max(p + c for p, c in zip(lengths.prompts, lengths.completions, strict=True))
        raise ValueError(
            f"max_tokens_per_micro_batch={limits.max_tokens} cannot hold the longest sequence of this "
            f"generation batch, which has {longest} tokens (prompt and completion). Raise it to at least {longest}, "
            "or leave out longer prompts (in a recipe: max_prompt_length) and lower max_completion_length."
        )
    units = [members for members in groups.members if takes_part[members].any()]
    whole = schedule_micro_batches(lengths, units, limits)
    if layout == "auto" and whole is not None:
        # Costs are in forward passes; split groups need an extra forward pass for the proxies.
        whole_cost, split_cost = (schedule_cost(s, lengths, padded=limits.padded) for s in (whole, split))
        cost = 1 + limits.backward_cost
        layout = "whole" if cost * whole_cost <= (cost + 1) * split_cost else "split"
    if layout == "whole" and whole is not None:
        return StepRollouts(rollouts, groups, whole, whole_groups=True)
    return StepRollouts(rollouts, groups, split, whole_groups=False)


def rollout_lengths(rollouts: list[Rollout], pair_cost: float = 0.0) -> RolloutLengths:
    """Return the lengths of prompts and completions; prompts with equal token ids share an id."""
    texts: dict[bytes, int] = {}
    same = [texts.setdefault(rollout.prompt_ids.tobytes(), len(texts)) for rollout in rollouts]
    lengths = [len(r.prompt_ids) for r in rollouts], [len(r.completion_ids) for r in rollouts]
    return RolloutLengths(*lengths, same, pair_cost)


@dataclass
class MicroBatch:
    """Tensors of `B` completions, `(B, T)`, padded on the right; see [`Rollout`]. `loss_mask` is bool; the others have
    PyTorch's default dtype. Missing `sampling_logps` are NaN, other missing values 0."""

    rollouts: list[Rollout]
    loss_mask: torch.Tensor
    ref_logps: torch.Tensor
    old_logps: torch.Tensor
    old_entropies: torch.Tensor
    sampling_logps: torch.Tensor


def collate(rollouts: list[Rollout], device: torch.device) -> MicroBatch:
    """Pad rollouts to the longest completion among them, and move the tensors to `device`."""

    def padded(name: str, missing: bool | float = 0.0) -> torch.Tensor:
        given = [getattr(rollout, name) for rollout in rollouts]
        out = torch.full((len(given), max(len(rollout.completion_ids) for rollout in rollouts)), missing)
        for i, values in enumerate(given):
            if values is not None:
                out[i, : len(values)] = torch.from_numpy(values)
        return out.to(device)

    return MicroBatch(
        rollouts,
        loss_mask=padded("loss_mask", False),
        ref_logps=padded("ref_logps"),
        old_logps=padded("old_logps"),
        old_entropies=padded("old_entropies"),
        sampling_logps=padded("sampling_logps", math.nan),
    )

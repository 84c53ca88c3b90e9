"""The completions of one optimizer step (a minibatch), and the tensors of one forward pass (a micro-batch)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from .groups import Groups
from .microbatching import (
    MicroBatchConfig,
    RolloutLengths,
    Schedule,
    schedule_cost,
    schedule_micro_batches,
    split_micro_batches,
)
from .rollout import Rollout


@dataclass
class Minibatch:
    """
    All completions of one optimizer step, the same on every process, and the micro-batches of their forward passes.

    Attributes:
        rollouts (`list[Rollout]`), groups ([`Groups`]): Rollouts, of whole groups for a group loss, and their labels
            by group.
        schedule (`Schedule`): Micro-batches of every forward pass over all completions. Reference and policy use the
            same schedule, so that equal weights give bitwise equal log-probs, also in half precision.
        whole_groups (`bool`): Whether the micro-batches of `schedule` hold whole groups.
    """

    rollouts: list[Rollout]
    groups: Groups
    schedule: Schedule
    whole_groups: bool

    # A completion has one proxy. A subclass may give it several, as process labels do: one for each labeled prefix.

    def proxy_indices(self, indices: list[int]) -> list[int]:
        """Return the positions of the proxies of some completions among all proxies and coefficients of the
        minibatch."""
        return indices

    @property
    def num_proxies(self) -> int:
        """Number of proxies, and of coefficients, of the minibatch."""
        return len(self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Number of counted tokens."""
        return sum(rollout.num_counted for rollout in self.rollouts)

    @property
    def num_scorable(self) -> int:
        """Number of scorable completions, the divisor of most group losses; at least 1."""
        return max(int(self.groups.scorable.sum()), 1)

    @property
    def counted(self) -> list[int]:
        """Indices of the completions with a counted token."""
        return [i for i, rollout in enumerate(self.rollouts) if rollout.num_counted > 0]

    @property
    def scheduled(self) -> set[int]:
        """Indices of the completions in `schedule`."""
        return scheduled_completions(self.schedule)

    @property
    def has_sampling_logps(self) -> bool:
        """Whether the engine reported log-probs for a completion."""
        return any(rollout.sampling_logps is not None for rollout in self.rollouts)


@dataclass(frozen=True)
class UpdateTiming:
    """
    How the current weights relate to those that generated a minibatch, and therefore where its log-probs come from:

    | | `old_logps` | `ref_logps`, reference `rollout` |
    | --- | --- | --- |
    | first update | of the forward pass of the update | not needed, the proxies are 0 |
    | later updates | stored before the first update | stored before the first update |
    | with a lag, ratio losses | always stored: of the engine, or recomputed | - |
    | with a lag, group losses | as without a lag | always stored: of the engine, or recomputed |

    Those of a snapshot reference are stored before each update.

    Attributes:
        is_first_update (`bool`): Whether the weights have not changed since the generation batch was taken.
        old_logps_are_stored (`bool`): Whether `old_logps` are those stored in the rollouts in any case, because an
            earlier policy generated (`rollout_lag`).
        proxies_are_zero (`bool`): Whether policy and reference are identical, so that the proxies need no forward
            pass.
    """

    is_first_update: bool = False
    old_logps_are_stored: bool = False
    proxies_are_zero: bool = False


def scheduled_completions(schedule: Schedule) -> set[int]:
    """Return the indices of all completions in a schedule, of all processes."""
    return {i for micro_batches in schedule for indices in micro_batches for i in indices}


def split_into_minibatches(
    rollouts: Sequence[Rollout], num_minibatches: int, shuffle_seed: int | None = None
) -> list[list[Rollout]]:
    """Split a generation batch into minibatches of about equal size: of whole groups, in order, or of completions at
    random, with a `shuffle_seed`."""
    if shuffle_seed is not None:
        order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(shuffle_seed))
        return [[rollouts[i] for i in sorted(part.tolist())] for part in order.tensor_split(num_minibatches)]
    group_ids = sorted({rollout.group for rollout in rollouts})
    minibatch_of_group = {group: i * num_minibatches // len(group_ids) for i, group in enumerate(group_ids)}
    minibatches: list[list[Rollout]] = [[] for _ in range(num_minibatches)]
    for rollout in rollouts:
        minibatches[minibatch_of_group[rollout.group]].append(rollout)
    return minibatches


def schedule_minibatch(
    rollouts: list[Rollout], limits: MicroBatchConfig, takes_part: torch.Tensor | None = None
) -> Minibatch:
    """Schedule the forward passes over the completions of an optimizer step. `takes_part`, bool `(B,)`, marks those
    that can have a gradient, by default the scorable ones. Raises a `ValueError` if a prompt with its completion is
    longer than `max_tokens`."""
    groups = Groups(torch.tensor([rollout.label for rollout in rollouts]), [rollout.group for rollout in rollouts])
    if takes_part is None:
        takes_part = groups.scorable
    lengths = rollout_lengths(rollouts, limits.pair_cost)
    if limits.is_adaptive and limits.max_tokens is not None:
        limits = limits._replace(max_tokens=max(limits.max_tokens, longest_rollout(rollouts)))
    split = schedule_micro_batches(lengths, takes_part.nonzero().tolist(), limits)
    if split is None:
        longest = longest_rollout(rollouts)
        raise UserError(
            f"max_tokens_per_micro_batch={limits.max_tokens} cannot hold the longest sequence of this "
            f"generation batch, which has {longest} tokens (prompt and completion). Raise it to at least {longest}, "
            "or leave out longer prompts (in a recipe: max_prompt_length) and lower max_completion_length."
        )
    if limits.group_layout != "split":
        groups_that_take_part = [members for members in groups.members if takes_part[members].any()]
        whole = schedule_micro_batches(lengths, groups_that_take_part, limits)
        if whole is not None and _prefers_whole_groups(whole, split, lengths, limits):
            return Minibatch(rollouts, groups, whole, whole_groups=True)
    return Minibatch(rollouts, groups, split, whole_groups=False)


def split_minibatch(minibatch: Minibatch, max_tokens: int, *, padded: bool) -> None:
    """Split the micro-batches of a minibatch, in place, that have more than `max_tokens` tokens, see
    [`split_micro_batches`]."""
    lengths = rollout_lengths(minibatch.rollouts)
    schedule = split_micro_batches(minibatch.schedule, lengths, max_tokens, padded=padded)
    if schedule == minibatch.schedule:
        return
    minibatch.schedule = schedule
    if minibatch.whole_groups:
        minibatch.whole_groups = _holds_whole_groups(schedule, minibatch.groups)


def _holds_whole_groups(schedule: Schedule, groups: Groups) -> bool:
    """Return whether the scheduled completions of each group are in one micro-batch."""
    number_of_completion: dict[int, int] = {}  # number of the micro-batch of each scheduled completion
    micro_batches = [indices for process in schedule for indices in process]
    for number, indices in enumerate(micro_batches):
        number_of_completion |= dict.fromkeys(indices, number)
    for members in groups.members:
        numbers = {number_of_completion[i] for i in members if i in number_of_completion}
        if len(numbers) > 1:
            return False
    return True


def _prefers_whole_groups(whole: Schedule, split: Schedule, lengths: RolloutLengths, limits: MicroBatchConfig) -> bool:
    """Return whether micro-batches of whole groups are asked for, or cost less: split groups need an additional
    forward pass for the proxies."""
    if limits.group_layout == "whole":
        return True
    whole_cost = schedule_cost(whole, lengths, padded=limits.padded)
    split_cost = schedule_cost(split, lengths, padded=limits.padded)
    passes = 1 + limits.backward_cost  # forward and backward, in forward passes
    return passes * whole_cost <= (passes + 1) * split_cost


def longest_rollout(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens of the longest prompt with its completion; 0 without rollouts."""
    return max((len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts), default=0)


def rollout_lengths(rollouts: list[Rollout], pair_cost: float = 0.0) -> RolloutLengths:
    """Return the lengths of prompts and completions; prompts with equal token ids and images share an id."""
    number_of_prompt: dict[tuple, int] = {}
    prompt_numbers: list[int] = []
    for rollout in rollouts:
        digest = None if rollout.images is None else rollout.images.digest
        prompt = rollout.prompt_ids.tobytes(), digest
        prompt_numbers.append(number_of_prompt.setdefault(prompt, len(number_of_prompt)))
    prompts = [len(rollout.prompt_ids) for rollout in rollouts]
    completions = [len(rollout.completion_ids) for rollout in rollouts]
    return RolloutLengths(prompts, completions, prompt_numbers, pair_cost)


# Filler for a process without completions in a forward pass that other processes run, with weight zero. Its last token
# predicts nothing, and a packed sequence of one token would be another graph of compiled layers.
FILLER = Rollout(
    prompt_ids=np.zeros(1, dtype=np.int32),
    completion_ids=np.zeros(2, dtype=np.int32),
    loss_mask=np.zeros(2, dtype=bool),
    label=float("nan"),
)


@dataclass
class MicroBatch:
    """
    The completions of one forward pass on this process, `B` completions of at most `T` tokens.

    Attributes:
        indices (`list[int]`): Indices of the completions in the minibatch; empty for the filler of a process without
            completions.
        rollouts (`list[Rollout]`): The completions, at least one.
        loss_mask (bool, shape `(B, T)`): See [`Rollout`]; padded on the right, like all tensors.
        ref_logps, old_logps, old_entropies (shape `(B, T)`): See [`Rollout`]; 0 where they are missing.
        sampling_logps (shape `(B, T)`): See [`Rollout`]; NaN where they are missing.
        has_sampling_logps (bool, shape `(B, 1)`): Whether the engine reports log-probs at all, perhaps none for this
            completion.
    """

    indices: list[int]
    rollouts: list[Rollout]
    loss_mask: torch.Tensor
    ref_logps: torch.Tensor
    old_logps: torch.Tensor
    old_entropies: torch.Tensor
    sampling_logps: torch.Tensor
    has_sampling_logps: torch.Tensor


def collate(minibatch_rollouts: Sequence[Rollout], indices: list[int], device: torch.device) -> MicroBatch:
    """Pad some rollouts of a minibatch to the longest completion among them, and move the tensors to `device`."""
    rollouts = [minibatch_rollouts[i] for i in indices] or [FILLER]
    num_tokens = max(len(rollout.completion_ids) for rollout in rollouts)

    def pad(rows: list[np.ndarray | None], missing: bool | float) -> torch.Tensor:
        padded = torch.full((len(rows), num_tokens), missing)
        for row, values in zip(padded, rows, strict=True):
            if values is not None:
                row[: len(values)] = torch.from_numpy(values)
        return padded.to(device)

    return MicroBatch(
        indices,
        rollouts,
        loss_mask=pad([rollout.loss_mask for rollout in rollouts], False),
        ref_logps=pad([rollout.ref_logps for rollout in rollouts], 0.0),
        old_logps=pad([rollout.old_logps for rollout in rollouts], 0.0),
        old_entropies=pad([rollout.old_entropies for rollout in rollouts], 0.0),
        sampling_logps=pad([rollout.sampling_logps for rollout in rollouts], math.nan),
        has_sampling_logps=torch.tensor([[rollout.sampling_logps is not None] for rollout in rollouts]).to(device),
    )

"""Rollouts of one optimizer step: their groups, the interface of a loss on them, and their micro-batch schedule.

`objective.py` works on `P` groups of `G` completions each. `Groups` scatters the completions of an optimizer step, in
any order, into a `(P, G)` grid, where `G` is the size of the largest group, and gathers the results. Empty cells have
the label NaN, which the objective excludes from every mean. A completion without a verdict also has the label NaN, but
is included in the KL term, the entropy, and the metrics.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..objective import scorable_completions
from ..surrogate import RatioTerms, kl_terms
from .microbatching import MicroBatchConfig, RolloutLengths, Schedule, schedule_cost, schedule_micro_batches
from .rollout import Rollout
from .token_weights import TokenValues


class Groups:
    """
    Map between a flat list of completions and the grid of groups that `objective.py` expects.

    Args:
        labels (`torch.Tensor` of shape `(B,)`): Labels in [0, 1], NaN for completions without a verdict.
        group_of_rollout (sequence of `B` `int`): Group id of each completion.

    Attributes:
        members (list of `P` `list[int]`): Indices of the completions of each group, in order of first appearance.
        size (`int`): `G`, the number of completions of the largest group, at least 2.
        scorable (bool `torch.Tensor` of shape `(B,)`): See [`objective.scorable_completions`].
        labeled, mixed (bool `torch.Tensor` of shape `(P,)`): Groups with scorable completions, and those among them
            whose labels differ. Groups that are labeled but not mixed are *uniform*.
    """

    def __init__(self, labels: torch.Tensor, group_of_rollout: Sequence[int]):
        by_group: dict[int, list[int]] = {}
        for i, group in enumerate(group_of_rollout):
            by_group.setdefault(group, []).append(i)
        self.members = list(by_group.values())
        self.size = max([2, *map(len, self.members)])
        self._cells = torch.zeros(len(labels), dtype=torch.long)  # index of each completion in the flattened grid
        for group, members in enumerate(self.members):
            self._cells[members] = group * self.size + torch.arange(len(members))
        self.labels = labels
        self._grid_labels = self._to_grid(labels, empty=math.nan)
        in_grid = scorable_completions(self._grid_labels, self.size)
        self.scorable = in_grid[self._cells]
        shape, in_grid = (-1, self.size), in_grid.view(-1, self.size)
        lowest = self._grid_labels.view(shape).masked_fill(~in_grid, math.inf).amin(dim=1)
        highest = self._grid_labels.view(shape).masked_fill(~in_grid, -math.inf).amax(dim=1)
        self.labeled = in_grid.any(dim=1)
        self.mixed = self.labeled & (highest > lowest)

    def _to_grid(self, values: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        grid = values.new_full((len(self.members) * self.size,), empty)
        grid[self._cells] = values
        return grid

    def rows_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Expand a bool mask over groups, `(P,)`, to a bool mask over their completions, `(B,)`."""
        return groups.repeat_interleave(self.size)[self._cells]

    def take(self, indices: Sequence[int]) -> "Groups":
        """Return the `Groups` of some completions, which must form whole groups and are renumbered 0, 1, ... in this
        order."""
        return Groups(self.labels[indices], (self._cells[indices] // self.size).tolist())

    def apply(self, function: Callable, *values: torch.Tensor, **kinds):
        """Call `function(*values, labels, num_generations=..., **kinds)` of `objective.py` on the grid. `values` have
        shape `(B,)`; results of shape `(P * G,)` are gathered to `(B,)`, and scalars are returned unchanged."""
        results = function(*map(self._to_grid, values), self._grid_labels, num_generations=self.size, **kinds)
        several = results if isinstance(results, tuple) else (results,)
        found = tuple(result if result.dim() == 0 else result[self._cells] for result in several)
        return found if isinstance(results, tuple) else found[0]


class Objective:
    """
    Base class of losses. A group loss such as that of PACS implements [`proxies`], [`coefficients`], [`size`], and
    [`summarize`]. A loss whose coefficients do not depend on log-probs, such as that of GRPO, implements
    [`known_coefficients`], [`token_terms`], and [`token_metrics`].

    Attributes:
        kl_coef (`float`): Weight of the KL term.
        needs_all_completions (`bool`): Whether metrics need a forward pass of completions without a gradient too.
        has_reference (`bool`): Whether the proxies read `ref_logps`.
        has_ratio (`bool`): Whether the token weights read `old_logps`.
    """

    kl_coef = 0.0
    needs_all_completions = False
    has_reference = False
    has_ratio = False

    def known_coefficients(
        self, rollouts: list[Rollout], *, is_evaluation: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the coefficients of the completions of an optimizer step, and the factors on the KL terms of their
        tokens, both `(B,)`; `None` if they depend on log-probs (the KL term is then a mean over all tokens). The
        rollouts of an evaluation are a whole generation batch."""
        return None

    def token_terms(self, tokens: TokenValues, factors: Sequence[torch.Tensor]) -> RatioTerms:
        """Return the weights and values of a micro-batch; `factors` are the `(B, T)` factors of [`TokenWeights`]."""
        raise NotImplementedError

    def token_metrics(
        self, num_tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor, phi: torch.Tensor
    ) -> dict[str, float]:
        """Return metrics from the number of counted tokens and `low`, `high`, and `phi` of [`RatioTerms`], all
        `(B,)`."""
        return {}

    def kl(self, logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor):
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        return kl_terms(logps, ref_logps, mask)

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the proxy of each completion, `(B,)` without gradient, from tensors `(B, T)`. Coefficients depend on
        log-probs only through the proxies."""
        return logps.new_zeros(len(logps))

    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the loss of some groups with respect to the log-prob of one counted token of each
        completion, `(B,)`; it is the same for all counted tokens of a completion. `proxies` and `num_tokens` (counted
        tokens) have shape `(B,)`."""
        raise NotImplementedError

    def size(self, groups: Groups) -> int:
        """Return the divisor of the loss of some groups."""
        return int(groups.scorable.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss without the KL term, and the metrics of the objective."""
        raise NotImplementedError


def split_into_steps(
    rollouts: Sequence[Rollout], num_steps: int, shuffle_seed: int | None = None
) -> list[list[Rollout]]:
    """Split a generation batch into `num_steps` optimizer steps of about equal size: of whole groups, in order, or of
    completions at random, with a `shuffle_seed`."""
    if shuffle_seed is not None:
        order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(shuffle_seed))
        return [[rollouts[i] for i in sorted(part.tolist())] for part in order.tensor_split(num_steps)]
    groups = sorted({rollout.group for rollout in rollouts})
    step_of = {group: i * num_steps // len(groups) for i, group in enumerate(groups)}
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        steps[step_of[rollout.group]].append(rollout)
    return steps


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

    def padded(name: str, missing: bool | float) -> torch.Tensor:
        given = [getattr(rollout, name) for rollout in rollouts]
        out = torch.full((len(given), max(len(rollout.completion_ids) for rollout in rollouts)), missing)
        for i, values in enumerate(given):
            if values is not None:
                out[i, : len(values)] = torch.from_numpy(values)
        return out.to(device)

    missing = {"loss_mask": False, "sampling_logps": math.nan}
    missing |= dict.fromkeys(("ref_logps", "old_logps", "old_entropies"), 0.0)
    return MicroBatch(rollouts, **{name: padded(name, value) for name, value in missing.items()})

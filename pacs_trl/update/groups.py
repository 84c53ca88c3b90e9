"""Groups of completions of one optimizer step, which may differ in size, and the interface of a loss on them.

`objective.py` works on `P` groups of `G` completions each. `Groups` scatters the completions of an optimizer step, in
any order, into a `(P, G)` grid, where `G` is the size of the largest group, and gathers the results. Empty cells have
the label NaN, which the objective excludes from every mean. A completion without a verdict also has the label NaN, but
is included in the KL term, the entropy, and the metrics.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..objective import scorable_completions
from ..surrogate import RatioTerms, kl_terms
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
        self.scorable = self._from_grid(in_grid)
        shape, in_grid = (-1, self.size), in_grid.view(-1, self.size)
        lowest = self._grid_labels.view(shape).masked_fill(~in_grid, math.inf).amin(dim=1)
        highest = self._grid_labels.view(shape).masked_fill(~in_grid, -math.inf).amax(dim=1)
        self.labeled = in_grid.any(dim=1)
        self.mixed = self.labeled & (highest > lowest)

    def _to_grid(self, values: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        grid = values.new_full((len(self.members) * self.size,), empty)
        grid[self._cells] = values
        return grid

    def _from_grid(self, grid: torch.Tensor) -> torch.Tensor:
        return grid[self._cells]

    def rows_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Expand a bool mask over groups, `(P,)`, to a bool mask over their completions, `(B,)`."""
        return self._from_grid(groups.repeat_interleave(self.size))

    def take(self, indices: Sequence[int]) -> "Groups":
        """Return the `Groups` of some completions, which must form whole groups and are renumbered 0, 1, ... in this
        order."""
        return Groups(self.labels[indices], (self._cells[indices] // self.size).tolist())

    def apply(self, function: Callable, *values: torch.Tensor, **kinds):
        """Call `function(*values, labels, num_generations=..., **kinds)` of `objective.py` on the grid. `values` have
        shape `(B,)`; results of shape `(P * G,)` are gathered to `(B,)`, and scalars are returned unchanged."""
        results = function(*map(self._to_grid, values), self._grid_labels, num_generations=self.size, **kinds)
        found = [
            result if result.dim() == 0 else self._from_grid(result)
            for result in (results if isinstance(results, tuple) else (results,))
        ]
        return tuple(found) if isinstance(results, tuple) else found[0]


class Objective:
    """
    Base class of losses. A group loss such as that of PACS implements [`proxies`], [`coefficients`], [`size`], and
    [`summarize`]. A loss whose coefficients do not depend on log-probs, such as that of GRPO, implements
    [`known_coefficients`], [`token_terms`], and [`token_metrics`].

    Attributes:
        kl_coef (`float`): Weight of the KL term.
        has_reference (`bool`): Whether the proxies read `ref_logps`.
        has_ratio (`bool`): Whether the token weights read `old_logps`.
    """

    kl_coef = 0.0
    has_reference = False
    has_ratio = False

    def known_coefficients(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the coefficients of the completions of an optimizer step, and the factors on the KL terms of their
        tokens, both `(B,)`; `None` if they depend on log-probs (the KL term is then a mean over all tokens)."""
        return None

    def token_terms(self, tokens: TokenValues, factors: Sequence[torch.Tensor]) -> RatioTerms:
        """Return the weights and values of a micro-batch; `factors` are the `(B, T)` factors of [`TokenWeights`]."""
        raise NotImplementedError

    def token_metrics(self, num_tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> dict[str, float]:
        """Return metrics from the number of counted tokens and `low` and `high` of [`RatioTerms`], all `(B,)`."""
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


def split_into_steps(rollouts: Sequence[Rollout], num_steps: int) -> list[list[Rollout]]:
    """Split a generation batch into `num_steps` optimizer steps of whole groups, in order and of about equal size."""
    groups = sorted({rollout.group for rollout in rollouts})
    step_of = {group: i * num_steps // len(groups) for i, group in enumerate(groups)}
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        steps[step_of[rollout.group]].append(rollout)
    return steps

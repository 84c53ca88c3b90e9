"""The completions of an optimizer step as groups, which may differ in size.

`objective.py` works on `P` groups of `G` completions each. Here the completions of a step, in any order, are laid into
a `(P, G)` grid with `G` the size of the largest group, and results are taken out again. An empty cell has the label
NaN, which the objective leaves out of every mean. So has a completion without a verdict, but it counts for the KL
term, the entropy, and the metrics.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..objective import scorable_rows
from .rows import Rollout


class Groups:
    """
    Args:
        labels (`torch.Tensor` of shape `(B,)`): Labels in [0, 1], NaN for rows without a verdict.
        group_of_row (sequence of `B` `int`): The group of each row; equal numbers are one group.

    Attributes:
        members (list of `P` `list[int]`): Rows of each group, groups and rows in the order of the rows.
        size (`int`): `G`: rows of the largest group, at least 2.
        scorable (bool `torch.Tensor` of shape `(B,)`): See [`objective.scorable_rows`].
        judged, mixed (bool `torch.Tensor` of shape `(P,)`): Groups with scorable rows, and those of them whose labels
            differ. The others are *uniform*.
    """

    def __init__(self, labels: torch.Tensor, group_of_row: Sequence[int]):
        by_group: dict[int, list[int]] = {}
        for row, group in enumerate(group_of_row):
            by_group.setdefault(group, []).append(row)
        self.members = list(by_group.values())
        self.size = max([2, *map(len, self.members)])
        self._cells = torch.zeros(len(labels), dtype=torch.long)  # of each row in the flattened grid
        for group, rows in enumerate(self.members):
            self._cells[rows] = group * self.size + torch.arange(len(rows))
        self.labels = labels
        self._grid_labels = self._to_grid(labels, empty=math.nan)
        in_grid = scorable_rows(self._grid_labels, self.size)
        self.scorable = self._of_rows(in_grid)
        shape, in_grid = (-1, self.size), in_grid.view(-1, self.size)
        lowest = self._grid_labels.view(shape).masked_fill(~in_grid, math.inf).amin(dim=1)
        highest = self._grid_labels.view(shape).masked_fill(~in_grid, -math.inf).amax(dim=1)
        self.judged = in_grid.any(dim=1)
        self.mixed = self.judged & (highest > lowest)

    def _to_grid(self, values: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        grid = values.new_full((len(self.members) * self.size,), empty)
        grid[self._cells] = values
        return grid

    def _of_rows(self, grid: torch.Tensor) -> torch.Tensor:
        return grid[self._cells]

    def rows_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Return a bool `(B,)` for the rows of the groups that are True in a bool `(P,)`."""
        return self._of_rows(groups.repeat_interleave(self.size))

    def take(self, rows: Sequence[int]) -> "Groups":
        """Return the groups of `rows`, whole groups, which become rows 0, 1, ... in this order."""
        return Groups(self.labels[rows], (self._cells[rows] // self.size).tolist())

    def apply(self, function: Callable, *values: torch.Tensor, **kinds):
        """Call a function of `objective.py` on these rows: `function(*values, labels, num_generations=..., **kinds)`
        with `values` of shape `(B,)`. Its results of shape `(P * G,)` become `(B,)`; scalars stay."""
        results = function(*map(self._to_grid, values), self._grid_labels, num_generations=self.size, **kinds)
        found = [
            result if result.dim() == 0 else self._of_rows(result)
            for result in (results if isinstance(results, tuple) else (results,))
        ]
        return tuple(found) if isinstance(results, tuple) else found[0]


def split_into_steps(rollouts: Sequence[Rollout], num_steps: int) -> list[list[Rollout]]:
    """Return the rows of each optimizer step of a generation batch: whole groups in their order, about equally
    many."""
    groups = sorted({row.group for row in rollouts})
    step_of = {group: i * num_steps // len(groups) for i, group in enumerate(groups)}
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for row in rollouts:
        steps[step_of[row.group]].append(row)
    return steps

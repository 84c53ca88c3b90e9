"""Groups of completions: the map between a flat list of completions and the grid that `objective.py` works on.

`objective.py` expects `P` groups of `G` completions each. [`Groups`] scatters the completions of an optimizer step,
in any order, into a `(P, G)` grid, where `G` is the size of the largest group, and gathers the results. Empty cells
have the label NaN, which the objective excludes from every mean. A completion without a label also has the label NaN,
but is included in the KL term, the entropy, and the metrics.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..objective import scorable_completions


class Groups:
    """
    Map between a flat list of completions and the grid of groups that `objective.py` expects.

    Args:
        labels (`torch.Tensor` of shape `(B,)`): Labels in [0, 1], NaN for completions without a label.
        group_ids (sequence of `B` `int`): Group id of each completion.

    Attributes:
        members (list of `P` `list[int]`): Indices of the completions of each group, in order of first appearance.
        size (`int`): `G`, the number of completions of the largest group, at least 2.
        scorable (bool `torch.Tensor` of shape `(B,)`): See [`objective.scorable_completions`].
        has_scorable, mixed (bool `torch.Tensor` of shape `(P,)`): Groups with scorable completions, and those among
            them whose labels differ. Groups with scorable completions that are not mixed are *uniform*.
    """

    def __init__(self, labels: torch.Tensor, group_ids: Sequence[int]):
        members: dict[int, list[int]] = {}
        for index, group_id in enumerate(group_ids):
            members.setdefault(group_id, []).append(index)
        self.members = list(members.values())
        self.size = max([2, *map(len, self.members)])
        self.labels = labels

        # The cell of a completion in the flattened grid.
        self._cells = torch.zeros(len(labels), dtype=torch.long)
        for row, indices in enumerate(self.members):
            self._cells[indices] = row * self.size + torch.arange(len(indices))
        self._grid_labels = self._to_grid(labels, empty=math.nan)

        scorable_cells = scorable_completions(self._grid_labels, self.size)
        self.scorable = scorable_cells[self._cells]
        scorable_grid = scorable_cells.view(-1, self.size)
        label_grid = self._grid_labels.view(-1, self.size)
        lowest = label_grid.masked_fill(~scorable_grid, math.inf).amin(dim=1)
        highest = label_grid.masked_fill(~scorable_grid, -math.inf).amax(dim=1)
        self.has_scorable = scorable_grid.any(dim=1)
        self.mixed = self.has_scorable & (highest > lowest)

    def _to_grid(self, values: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        grid = values.new_full((len(self.members) * self.size,), empty)
        grid[self._cells] = values
        return grid

    def expand(self, group_mask: torch.Tensor) -> torch.Tensor:
        """Expand a bool mask over groups, `(P,)`, to a bool mask over their completions, `(B,)`."""
        return group_mask.repeat_interleave(self.size)[self._cells]

    def take(self, indices: Sequence[int]) -> "Groups":
        """Return the `Groups` of some completions, which must form whole groups and are renumbered 0, 1, ... in this
        order."""
        return Groups(self.labels[indices], (self._cells[indices] // self.size).tolist())

    def apply(self, function: Callable, *values: torch.Tensor, **settings):
        """Call `function(*values, labels, num_generations=..., **settings)` of `objective.py` on the grid. `values`
        have shape `(B,)`; results of shape `(P * G,)` are gathered to `(B,)`, and scalars are returned unchanged."""
        grids = [self._to_grid(value) for value in values]
        results = function(*grids, self._grid_labels, num_generations=self.size, **settings)
        if not isinstance(results, tuple):
            return self._from_grid(results)
        return tuple(self._from_grid(result) for result in results)

    def _from_grid(self, result: torch.Tensor) -> torch.Tensor:
        return result if result.dim() == 0 else result[self._cells]

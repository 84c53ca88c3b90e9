"""What the forward passes of an optimizer step find, put together from all micro-batches and processes."""

from typing import NamedTuple

import torch
from accelerate import Accelerator


class Forwarded(NamedTuple):
    """
    Values that forward passes over some rows of a step have found, on all processes together.

    Attributes:
        proxies (`torch.Tensor` of shape `(B,)`, on the CPU): 0 for rows that were not forwarded.
        row_values (`torch.Tensor` of shape `(K, B)`): See [`TokenWeights`].
        entropy (`float`): Sum of the entropies of the counted tokens.
        num_rows (`float`): Rows that were forwarded.
        kl (`float`): Sum of the KL estimator.
    """

    proxies: torch.Tensor
    row_values: torch.Tensor
    entropy: float
    num_rows: float
    kl: float


class Collector:
    """Collects what forward passes find; one reduction over processes at the end."""

    def __init__(self, num_places: int, accelerator: Accelerator, num_row_values: int = 0):
        self.accelerator = accelerator
        self.of_rows = torch.zeros(1 + num_row_values, num_places, device=accelerator.device)
        self.sums = torch.zeros(3, device=accelerator.device)  # see `Forwarded`

    def add(self, places: list[int], proxies, entropies, loss_mask, kl=0.0, row_values=()) -> None:
        """What a micro-batch has found of its rows; `places` are those of [`StepRollouts`]."""
        if not places:
            return
        of_rows = torch.stack([proxies.detach(), *row_values]).to(self.of_rows.dtype)
        self.of_rows[:, torch.tensor(places, device=of_rows.device)] = of_rows
        entropy = entropies.detach().masked_fill(~loss_mask, 0.0).sum()
        kl = kl.detach() if torch.is_tensor(kl) else torch.tensor(kl, device=entropy.device)
        count = torch.tensor(float(len(loss_mask)), device=entropy.device)
        self.sums += torch.stack([entropy, count, kl.to(entropy.dtype)])

    def reduce(self) -> Forwarded:
        values = self.accelerator.reduce(torch.cat([self.of_rows.flatten(), self.sums]), reduction="sum").cpu()
        of_rows = values[:-3].view(self.of_rows.shape)
        return Forwarded(of_rows[0], of_rows[1:], *values[-3:].tolist())

"""Load-balancing loss of the routers in a mixture of experts, exact over an optimizer step.

    L = coef * E * sum_e F_e * P_e

With `E` experts, `F_e` is the number of times that a router selects expert `e`, and `P_e` the sum of its probabilities
of `e`, both divided by the number of rows, one per token and layer (Switch Transformer, arXiv 2101.03961, eqs. 4 to 6;
`load_balancing_loss_func` of transformers, which TRL calls). Rows are the tokens of completions with their prompts.

The loss is not a sum over tokens, so it depends on the micro-batches if each computes `F` alone. But `F` has no
gradient, and `P` is a mean: once `F` of the whole optimizer step is known, from a forward pass without gradient, the
gradient is a sum over tokens, to which any micro-batch can contribute.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator


class RouterSums(NamedTuple):
    """
    Sums over the rows of a forward pass; tokens of a prompt that several completions share count once for each.

    Attributes:
        selections (shape `(E,)`): Number of rows in which each expert is selected, without gradient.
        probabilities (shape `(E,)`): Sum of the probabilities of each expert, differentiable.
        num_rows (shape `()`): Number of rows.
    """

    selections: torch.Tensor
    probabilities: torch.Tensor
    num_rows: torch.Tensor


class ExpertLoads(NamedTuple):
    """
    What a micro-batch needs of the whole optimizer step to compute its share of the loss.

    Attributes:
        fractions (shape `(E,)`): `F_e`.
        num_rows (`float`): Number of rows.
        loss (`float`): `E * sum_e F_e * P_e`, TRL's metric `aux_loss`.
    """

    fractions: torch.Tensor
    num_rows: float
    loss: float

    def share_of(self, sums: RouterSums) -> torch.Tensor:
        """Return the share of a micro-batch in the loss, differentiable."""
        fractions = self.fractions.to(sums.probabilities)
        return len(fractions) * (fractions * sums.probabilities).sum() / self.num_rows


def router_sums(router_logits: Sequence[torch.Tensor], token_counts: torch.Tensor, top_k: int) -> RouterSums:
    """
    Sum the outputs of the routers over layers and tokens.

    Args:
        router_logits (sequence of tensors `(N, E)`): Logits of each layer.
        token_counts (shape `(N,)`): How often each token counts; 0 for padding.
        top_k (`int`): Number of experts that a router selects.
    """
    selections, probabilities = [], []
    for logits in router_logits:
        layer_probabilities = logits.softmax(dim=-1).to(torch.promote_types(logits.dtype, torch.float32))
        counts = token_counts.to(layer_probabilities)[:, None]
        selected = torch.zeros_like(layer_probabilities).scatter(
            1, layer_probabilities.topk(top_k, dim=-1).indices, 1.0
        )
        selections.append((selected * counts).sum(dim=0).detach())
        probabilities.append((layer_probabilities * counts).sum(dim=0))
    device = probabilities[0].device
    num_rows = len(router_logits) * token_counts.to(probabilities[0]).sum()

    def total(parts: list[torch.Tensor]) -> torch.Tensor:  # layers may be on several devices
        return torch.stack([part.to(device) for part in parts]).sum(dim=0)

    return RouterSums(total(selections), total(probabilities), num_rows)


def expert_loads(sums: Sequence[RouterSums], accelerator: Accelerator) -> ExpertLoads:
    """Return the loads of an optimizer step from the sums of the micro-batches of this process."""
    parts = [torch.cat([s.selections, s.probabilities.detach(), s.num_rows[None]]) for s in sums]
    total = accelerator.reduce(torch.stack(parts).sum(dim=0), reduction="sum")
    selections, probabilities = total[:-1].chunk(2)
    num_rows = max(total[-1].item(), 1.0)
    fractions = selections / num_rows
    loss = len(fractions) * (fractions * probabilities).sum().item() / num_rows
    return ExpertLoads(fractions, num_rows, loss)

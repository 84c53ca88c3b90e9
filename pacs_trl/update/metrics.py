"""Metrics of the implicit critic, computed once per optimizer step from numbers that are known anyway.

docs/metrics.md is the glossary: one line for each name with formula and healthy range.
"""

import math

import torch

from ..objective import ClassWeighting, class_weights, scorable_rows


# |psi| beyond this leaves sigmoid(psi) * (1 - sigmoid(psi)) below 0.7 %: the row has stopped teaching.
SATURATED_SCORE = 5.0


@torch.no_grad()
def critic_metrics(
    proxies: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_generations: int,
    class_weighting: ClassWeighting = "balanced",
) -> dict[str, float]:
    """
    Metrics of one optimizer step.

    Args:
        proxies (`torch.Tensor` of shape `(B,)`), scores (`torch.Tensor` of shape `(B,)`):
            See `objective.pacs_loss`; all rows of the optimizer step, over all processes.
        labels (`torch.Tensor` of shape `(B,)`):
            Labels in [0, 1], NaN for rows without a verdict.
        num_generations (`int`):
            `G`.
        class_weighting (`str`, *optional*, defaults to `"balanced"`):
            See `objective.class_weights`; decides the targets that the critic is rated against.

    Returns:
        `dict[str, float]`: names with the prefix `pacs/`. NaN where a metric has no value in this step: everything if
        no row is scorable; accuracy and Brier score while all proxies are 0 or no group is mixed.
    """
    scorable = scorable_rows(labels, num_generations)
    grouped_labels = labels.view(-1, num_generations)
    grouped_mask = scorable.view(-1, num_generations)
    lowest = grouped_labels.masked_fill(~grouped_mask, math.inf).amin(dim=1)
    highest = grouped_labels.masked_fill(~grouped_mask, -math.inf).amax(dim=1)
    has_rows = grouped_mask.any(dim=1)
    mixed_rows = ((highest > lowest) & has_rows).repeat_interleave(num_generations) & scorable

    _, targets = class_weights(labels, num_generations=num_generations, class_weighting=class_weighting)
    probabilities = torch.sigmoid(scores)
    rated = mixed_rows if (proxies[scorable] != 0).any() else torch.zeros_like(scorable)

    def mean(values: torch.Tensor, where: torch.Tensor) -> float:
        return values[where].float().mean().item() if where.any() else math.nan

    return {
        "pacs/score_mean": mean(scores, scorable),
        "pacs/score_std": scores[scorable].std().item() if scorable.sum() > 1 else math.nan,
        "pacs/proxy_abs_mean": mean(proxies.abs(), scorable),
        "pacs/residual_abs_mean": mean((probabilities - targets).abs(), scorable),
        "pacs/label_mean": mean(labels, scorable),
        "pacs/critic_accuracy": mean((probabilities > 0.5) == (targets > 0.5), rated),
        "pacs/critic_brier": mean((probabilities - targets) ** 2, rated),
        "pacs/uniform_group_fraction": mean(highest == lowest, has_rows),
        "pacs/saturated_score_fraction": mean(scores.abs() > SATURATED_SCORE, scorable),
        "pacs/unscorable_fraction": 1.0 - scorable.float().mean().item(),
    }

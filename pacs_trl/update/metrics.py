"""Metrics of the implicit critic, computed once per optimizer step from numbers that are known anyway.

docs/metrics.md is the glossary: one line for each name with formula and healthy range.
"""

import math

import torch

from ..objective import ClassWeighting, class_weights
from .groups import Groups


# |psi| beyond this leaves sigmoid(psi) * (1 - sigmoid(psi)) below 0.7 %: the row has stopped teaching.
SATURATED_SCORE = 5.0


@torch.no_grad()
def critic_metrics(
    proxies: torch.Tensor,
    scores: torch.Tensor,
    groups: Groups,
    *,
    class_weighting: ClassWeighting = "balanced",
) -> dict[str, float]:
    """
    Metrics of one optimizer step, over all processes.

    Args:
        proxies, scores (`torch.Tensor` of shape `(B,)`): See [`objective.pacs_loss`].
        groups ([`Groups`]): Labels and groups of these rows.
        class_weighting (`str`): See [`objective.class_weights`]; decides the targets that the critic is rated against.

    Returns:
        `dict[str, float]`: names with the prefix `pacs/`. NaN where a metric has no value in this step: everything if
        no row is scorable; accuracy and Brier score while all proxies are 0 or no group is mixed.
    """
    scorable = groups.scorable
    _, targets = groups.apply(class_weights, class_weighting=class_weighting)
    probabilities = torch.sigmoid(scores)
    has_opinion = (proxies[scorable] != 0).any()
    rated = groups.rows_of(groups.mixed) & scorable & has_opinion

    def mean(values: torch.Tensor, where: torch.Tensor) -> float:
        return values[where].float().mean().item() if where.any() else math.nan

    return {
        "pacs/score_mean": mean(scores, scorable),
        "pacs/score_std": scores[scorable].std().item() if scorable.sum() > 1 else math.nan,
        "pacs/proxy_abs_mean": mean(proxies.abs(), scorable),
        "pacs/residual_abs_mean": mean((probabilities - targets).abs(), scorable),
        "pacs/label_mean": mean(groups.labels, scorable),
        "pacs/critic_accuracy": mean((probabilities > 0.5) == (targets > 0.5), rated),
        "pacs/critic_brier": mean((probabilities - targets) ** 2, rated),
        "pacs/uniform_group_fraction": mean(~groups.mixed, groups.judged),
        "pacs/saturated_score_fraction": mean(scores.abs() > SATURATED_SCORE, scorable),
        "pacs/unscorable_fraction": 1.0 - scorable.float().mean().item(),
    }

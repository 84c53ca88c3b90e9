"""What a generative critic learns from, and how good its values are (GenAC, arXiv 2604.10701). Pure functions.

`N` is the number of answers: one generation of the critic each, about one state, with the outcome `R` in [0, 1] of the
completion that the state is of. `nan` is the value of an answer that could not be read; it counts as 0.
"""

import math
from collections.abc import Callable, Sequence

import torch


Reduce = Callable[[torch.Tensor], torch.Tensor]  # sum over processes


def critic_rewards(values: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """`1 - (R - v)^2` of each answer, `(N,)` in [0, 1], and 0 where it could not be read."""
    return (1.0 - (outcomes - values).square()).nan_to_num(0.0)


def reinforce_weights(
    rewards: torch.Tensor, outcomes: torch.Tensor, baseline: str, reduce: Reduce = lambda total: total
) -> torch.Tensor:
    """
    What the log-probability of an answer is multiplied by: its reward minus a baseline.

    Args:
        rewards, outcomes (`torch.Tensor` of shape `(N,)`): Of all answers of this process.
        baseline (`str`): `"outcome"`, the mean reward of the others whose completion ended as this one did, right
        (above 0.5) or
            wrong, and 0 where there is none; `"none"`, 0 throughout.

    Returns:
        `torch.Tensor` of shape `(N,)`.
    """
    if baseline == "none":
        return rewards
    right = (outcomes > 0.5).long()
    of_outcome = torch.nn.functional.one_hot(right, 2).to(torch.float64)  # (N, 2)
    sums, counts = reduce(torch.stack([rewards.double() @ of_outcome, of_outcome.sum(dim=0)]))
    others = (sums[right] - rewards) / (counts[right] - 1.0).clamp(min=1.0)
    return (rewards - others.masked_fill(counts[right] == 1, 0.0)).to(rewards.dtype)


def reinforce_losses(
    logps: torch.Tensor, sampling_logps: torch.Tensor, weights: torch.Tensor, cap: float
) -> torch.Tensor:
    """
    Loss of each token of an answer: `-min(pi / pi_drawn, cap) * weight * log pi`, the ratio without gradient. It is 1
    where the model that learns drew the token; an engine with other rounding, or an update in between, makes it
    another.

    Args:
        logps (`torch.Tensor` of shape `(M,)`): Under the critic that learns.
        sampling_logps (`torch.Tensor` of shape `(M,)`): Under what drew the tokens; NaN where that is not known, for a
        ratio of 1.
        weights (`torch.Tensor` of shape `(M,)`): See [`reinforce_weights`].
        cap (`float`): Ratios above it count as this.
    """
    ratios = (logps.detach() - sampling_logps).nan_to_num(0.0).exp().clamp(max=cap)
    return -ratios * weights * logps


def value_scores(values: torch.Tensor, outcomes: torch.Tensor) -> dict[str, float]:
    """
    Of the values of any critic: `reward`, the mean of `1 - (R - v)^2` where a value that could not be read counts 0;
    `brier`, the mean of `(R - v)^2` with such a value as 0; `explained_variance` of the outcomes; `unparsed`, the
    share of such values.
    """
    if len(values) == 0:
        return dict.fromkeys(("reward", "brier", "explained_variance", "unparsed"), math.nan)
    read = values.double().nan_to_num(0.0)
    residual, total = (outcomes - read).var(correction=0), outcomes.double().var(correction=0)
    return {
        "reward": critic_rewards(values, outcomes).double().mean().item(),
        "brier": (outcomes - read).square().mean().item(),
        "explained_variance": (1.0 - residual / total).item() if total > 0 else math.nan,
        "unparsed": values.isnan().double().mean().item(),
    }


def ranking_accuracy(values: Sequence[float], right: Sequence[bool], candidates: int) -> float:
    """
    How often the highest value is that of a right completion, over all choices of so many candidates of one prompt
    that hold both right and wrong ones; equal values share. NaN where there is no such choice.

    Choices need not be gone through: the highest value of a choice is v or less in `C(n_v, m)` of them, `n_v` being
    the number of completions with no higher value.
    """
    num_right = sum(right)
    uniform = math.comb(num_right, candidates) + math.comb(len(right) - num_right, candidates)
    mixed = math.comb(len(right), candidates) - uniform
    if mixed == 0:
        return math.nan
    hits, below = 0.0, 0
    for value in sorted(set(values)):
        tied = [is_right for other, is_right in zip(values, right, strict=True) if other == value]
        highest = math.comb(below + len(tied), candidates) - math.comb(below, candidates)
        hits += highest * sum(tied) / len(tied)
        below += len(tied)
    return (hits - math.comb(num_right, candidates)) / mixed


def mean_ranking_accuracy(groups: Sequence[tuple[Sequence[float], Sequence[bool]]], candidates: int) -> float:
    """Mean of [`ranking_accuracy`] over the prompts that have one, each given by its values and grades."""
    found = [ranking_accuracy(values, right, candidates) for values, right in groups]
    found = [accuracy for accuracy in found if accuracy == accuracy]
    return sum(found) / len(found) if found else math.nan

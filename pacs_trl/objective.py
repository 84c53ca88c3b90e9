"""Objectives on groups of completions as pure tensor functions: PACS (proxy, score, class weights, loss, and the
derivative of the loss), REAL, DisCO, and the advantages of RLOO and MaxRL. `surrogate.py` has ratio losses.

This module does not depend on trainers, configurations, logging, processes, or micro-batches. Equation numbers without
a source refer to version 2 of the PACS paper, https://huggingface.co/papers/2509.02522.

Shapes and arguments of all functions: `P` prompts, `G = num_generations` (`int`, at least 2) completions per prompt,
`B = P * G` completions with those of a prompt adjacent, `T` completion tokens. `labels` has shape `(B,)` and lies in
[0, 1]; NaN marks a completion without a verdict (the verifier could not parse the gold answer, or the completion was
truncated and is masked). `proxies` and `scores` have shape `(B,)`.

A completion without a verdict is excluded from its group: baseline, class weights, and mean are computed over the
others. A group with fewer than two remaining completions contributes nothing. A completion that contributes is called
*scorable*; the scores and coefficients of all others are 0.

Every reduction runs in float32, or in float64 for float64 input, never in half precision.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F


ScoreEstimator = Literal["rloo", "dr_grpo", "grpo", "none"]
ClassWeighting = Literal["balanced", "none", "only_positive", "only_negative"]
Proxy = Literal["log_ratio", "mean_log_ratio", "mean_logp"]

# Added to the standard deviation of the "grpo" score; the value used by the paper's authors.
GRPO_STD_EPSILON = 1e-6


class PACSLoss(NamedTuple):
    """Result of [`pacs_loss`]: `loss` is a scalar, `scores` (psi) and `proxies` (r-hat) have shape `(B,)`."""

    loss: torch.Tensor
    scores: torch.Tensor
    proxies: torch.Tensor


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def sequence_proxies(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    pacs_beta: float = 1.0,
    proxy: Proxy = "log_ratio",
) -> torch.Tensor:
    """
    Return the implicit reward of each completion, r-hat of eq. 7, float32 `(B,)` (float64 for float64 input).

    `"log_ratio"`: `pacs_beta * sum_t mask * (logps - ref_logps)`, a plain sum over tokens without length
    normalization. `"mean_log_ratio"`: the same divided by `sum_t mask` (REAL, arXiv 2602.05630). `"mean_logp"`:
    `pacs_beta * sum_t mask * logps / sum_t mask`, which has no reference (second reward method of the authors' code,
    not in the paper).

    Args:
        logps, ref_logps (`torch.Tensor` of shape `(B, T)`): Log-probs of the completion tokens under policy and
            reference, in nats; padding may hold any value, NaN included. `"mean_logp"` does not read `ref_logps`.
        completion_mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for counted tokens, 0 for padding and for tokens
            that the policy did not generate. If there is no 1, the proxy is 0.
        pacs_beta (`float`): Scale of the proxy.
        proxy (`str`): `"log_ratio"`, `"mean_log_ratio"` or `"mean_logp"`.
    """
    mask = completion_mask.bool()
    terms = _at_least_float32(logps)
    if proxy == "log_ratio" or proxy == "mean_log_ratio":
        # Subtract before summing: the difference of two sums of thousands of nats loses precision in float32.
        terms = terms - _at_least_float32(ref_logps)
    elif proxy != "mean_logp":
        assert_never(proxy)
    total = pacs_beta * terms.masked_fill(~mask, 0.0).sum(dim=-1)
    return total if proxy == "log_ratio" else total / mask.sum(dim=-1).clamp(min=1)


def scorable_completions(labels: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Return which completions contribute to the loss, bool `(B,)`: those with a label other than NaN whose group has at
    least two such completions. Raises a `ValueError` if the labels do not form whole groups of at least two.
    """
    if num_generations < 2 or labels.numel() % num_generations != 0:
        raise ValueError(
            f"`num_generations` must be at least 2 and divide the number of completions, got num_generations="
            f"{num_generations} for {labels.numel()} completions: the score of a completion compares it with the "
            "others of its prompt. Pass whole groups, with the completions of a prompt adjacent."
        )
    has_label = ~labels.isnan().view(-1, num_generations)  # (P, G)
    is_compared = has_label.sum(dim=1, keepdim=True) >= 2  # (P, 1)
    return (has_label & is_compared).view(-1)


def _centered(x: torch.Tensor, scorable: torch.Tensor) -> torch.Tensor:
    """Return `x` minus its mean over the scorable completions of each group, `(P, G)`; 0 for the other completions,
    and exactly 0 if all scorable values of a group are equal."""
    count = scorable.sum(dim=1, keepdim=True).clamp(min=1)
    # Subtracting one member first makes the result exactly 0, not 1e-8, if all members are equal. The update relies on
    # this: it skips completions whose coefficient is exactly 0.
    first = scorable.int().argmax(dim=1, keepdim=True)
    shifted = (x - x.gather(1, first)).masked_fill(~scorable, 0.0)
    mean = shifted.sum(dim=1, keepdim=True) / count
    return (shifted - mean).masked_fill(~scorable, 0.0)


def _leave_one_out(x: torch.Tensor, scorable: torch.Tensor) -> torch.Tensor:
    """Return `x` minus the mean of the group's other scorable completions, `n / (n - 1) * (x - mean)`, `(P, G)`."""
    count = scorable.sum(dim=1, keepdim=True).clamp(min=2).to(x.dtype)
    return count / (count - 1) * _centered(x, scorable)


def _grpo_scale(centered: torch.Tensor, scorable: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the unbiased standard deviation of each group from centered proxies, and the divisor of the "grpo" score,
    `std + 1e-6`, but 1 in a group whose proxies are all equal; both `(P, 1)`.

    All proxies are equal whenever policy and reference are identical. Division by 1e-6 would scale the gradients of
    such groups by a million, and skipping the groups would leave no gradient. With a divisor of 1 their score is 0,
    and their gradient is that of "dr_grpo".
    """
    count = scorable.sum(dim=1, keepdim=True).clamp(min=2)
    variance = centered.square().sum(dim=1, keepdim=True) / (count - 1)
    # The derivative of sqrt at 0 is infinite; a group without spread gets gradient 0 instead.
    std = torch.where(variance > 0, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt(), 0.0)
    return std, torch.where(std > 0, std + GRPO_STD_EPSILON, 1.0)


def group_scores(
    proxies: torch.Tensor, labels: torch.Tensor, *, num_generations: int, score_estimator: ScoreEstimator = "rloo"
) -> torch.Tensor:
    """
    Return the score psi of each completion, `(B,)`: the logit of the cross-entropy with its label, 0 for completions
    that are not scorable. `labels` only determine which completions are scorable. Differentiable in `proxies`.

    With `n` scorable completions in the group and `mean`, `std` over them: `"rloo"` is `r_i - mean of the others` (eq.
    6), `"dr_grpo"` is `r_i - mean` (eq. 11), `"grpo"` is `(r_i - mean) / (std + 1e-6)` with the unbiased std (eq. 10;
    not divided in a group whose proxies are all equal), and `"none"` is `r_i`. `psi_rloo = n / (n - 1) * psi_dr_grpo`
    holds exactly: the two differ by a rescaled `pacs_beta`.
    """
    scorable = scorable_completions(labels, num_generations).view(-1, num_generations)
    grouped = _at_least_float32(proxies).view(-1, num_generations)  # (P, G)
    if score_estimator == "rloo":
        scores = _leave_one_out(grouped, scorable)
    elif score_estimator == "dr_grpo":
        scores = _centered(grouped, scorable)
    elif score_estimator == "grpo":
        centered = _centered(grouped, scorable)
        _, scale = _grpo_scale(centered, scorable)
        scores = centered / scale
    elif score_estimator == "none":
        scores = grouped.masked_fill(~scorable, 0.0)
    else:
        assert_never(score_estimator)
    return scores.view(-1)


def class_weights(
    labels: torch.Tensor,
    *,
    num_generations: int,
    class_weighting: ClassWeighting = "balanced",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the weight and the target of each completion in the loss, both `(B,)` (section 3.5; the paper has no
    formula, so the one for labels 0 and 1 is from the authors' code). Both are 0 for completions that are not
    scorable; weights are float32 and at least 0.

    Class weights scale the two terms of the cross-entropy, `p * softplus(-psi) + q * softplus(psi)`. `"balanced"`:
    in each group, with `n` scorable completions, `p = R * n / (2 sum R)` and `q = (1 - R) * n / (2 sum (1 - R))`, so
    that the correct and the wrong completions of a prompt have equal total weight; a group with one class only has
    `p = R`, `q = 1 - R`, as in `"none"`. `"only_positive"` is `p = R`, `q = 0` and `"only_negative"` is `p = 0`, `q =
    1 - R`.

    This equals `w * BCE(sigmoid(psi), y)` with the weight `w = p + q` and the target `y = p / w` (`R` where `w` is 0).
    For labels 0 and 1 the target is the label. For soft labels it is not: with one weight for both terms, as in `w *
    BCE(sigmoid(psi), R)`, the loss would push down the best completion of a group with a low mean label.
    """
    scorable = scorable_completions(labels, num_generations).view(-1, num_generations)
    scorable_labels = _at_least_float32(labels).view(-1, num_generations).masked_fill(~scorable, 0.0)  # (P, G)
    positive = scorable_labels  # p
    negative = (1.0 - scorable_labels).masked_fill(~scorable, 0.0)  # q
    if class_weighting == "balanced":
        count = scorable.sum(dim=1, keepdim=True)
        sum_positive = positive.sum(dim=1, keepdim=True)
        sum_negative = negative.sum(dim=1, keepdim=True)
        has_both_classes = (sum_positive > 0) & (sum_negative > 0)
        tiny = torch.finfo(positive.dtype).tiny
        balanced_positive = positive * count / (2 * sum_positive.clamp(min=tiny))
        balanced_negative = negative * count / (2 * sum_negative.clamp(min=tiny))
        positive = torch.where(has_both_classes, balanced_positive, positive)
        negative = torch.where(has_both_classes, balanced_negative, negative)
    elif class_weighting == "only_positive":
        negative = torch.zeros_like(negative)
    elif class_weighting == "only_negative":
        positive = torch.zeros_like(positive)
    elif class_weighting != "none":
        assert_never(class_weighting)
    weights = positive + negative
    targets = torch.where(weights != 0, positive / weights, scorable_labels)
    # Always rounded to float32, as in the authors' code, so that float64 comparisons with their numbers are exact.
    return weights.view(-1).float(), targets.view(-1)


def loss_from_proxies(
    proxies: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_generations: int,
    score_estimator: ScoreEstimator = "rloo",
    class_weighting: ClassWeighting = "balanced",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the PACS loss (eq. 8) from proxies that are already summed over tokens, and the scores `(B,)`.

    The mean of `w_i * BCE(sigmoid(psi_i), y_i)` over the scorable completions, in nats, with [`group_scores`] and the
    weights and targets of [`class_weights`]; 0 if none is scorable.
    """
    scorable = scorable_completions(labels, num_generations)
    scores = group_scores(proxies, labels, num_generations=num_generations, score_estimator=score_estimator)
    terms = _weighted_entropies(scores, labels, num_generations, class_weighting)
    return terms.sum() / scorable.sum().clamp(min=1), scores


def _weighted_entropies(
    scores: torch.Tensor, labels: torch.Tensor, num_generations: int, class_weighting: ClassWeighting
) -> torch.Tensor:
    """Return `w_i * BCE(sigmoid(psi_i), y_i)` of each completion, in nats, `(B,)`."""
    weights, targets = class_weights(labels, num_generations=num_generations, class_weighting=class_weighting)
    entropies = F.binary_cross_entropy_with_logits(scores, targets.to(scores.dtype), reduction="none")
    return weights.to(scores.dtype) * entropies


def pacs_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    completion_mask: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_generations: int,
    pacs_beta: float = 1.0,
    score_estimator: ScoreEstimator = "rloo",
    class_weighting: ClassWeighting = "balanced",
    proxy: Proxy = "log_ratio",
) -> PACSLoss:
    """
    Return the PACS loss (eq. 8) of whole groups from token log-probs: [`sequence_proxies`], then
    [`loss_from_proxies`], with their arguments. No gradient flows into `ref_logps` from `"mean_logp"`.

    Returns:
        [`PACSLoss`]: `.loss` (scalar, differentiable), `.scores` and `.proxies` of shape `(B,)`. The loss is the mean
        over scorable completions, without further normalization.
    """
    proxies = sequence_proxies(logps, ref_logps, completion_mask, pacs_beta=pacs_beta, proxy=proxy)
    loss, scores = loss_from_proxies(
        proxies,
        labels,
        num_generations=num_generations,
        score_estimator=score_estimator,
        class_weighting=class_weighting,
    )
    return PACSLoss(loss=loss, scores=scores, proxies=proxies)


@torch.no_grad()
def proxy_coefficients(
    proxies: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_generations: int,
    score_estimator: ScoreEstimator = "rloo",
    class_weighting: ClassWeighting = "balanced",
) -> torch.Tensor:
    """
    Return the exact derivative of [`loss_from_proxies`] with respect to each proxy, `(B,)`, in closed form.

    With the weighted residual `e_i = w_i * (sigmoid(psi_i) - y_i) / N` (eq. 4), `n` scorable completions per group:
    `"rloo"`: `n / (n - 1) * (e_i - mean e)`; `"dr_grpo"`: `e_i - mean e`; `"none"`: `e_i`; `"grpo"`, with
    `s = std + 1e-6` (1 if `std` is 0): `(e_i - mean e) / s - (r_i - mean r) / ((n - 1) * std * s) * sum_j e_j psi_j`.

    The gradient of the loss with respect to the parameters is `sum_i c_i * grad r_i`. Parameters are constant within
    an optimizer step, so once all its proxies are known, this sum can be back-propagated in any micro-batches.

    Coefficients of a group sum to 0 for `"rloo"` and `"dr_grpo"`. They are exactly 0 for unscorable completions, and,
    except for `"none"`, for all completions of a group with equal labels and equal proxies.
    """
    scorable = scorable_completions(labels, num_generations)
    scores = group_scores(proxies, labels, num_generations=num_generations, score_estimator=score_estimator)
    weights, targets = class_weights(labels, num_generations=num_generations, class_weighting=class_weighting)
    residuals = weights.to(scores.dtype) * (torch.sigmoid(scores) - targets.to(scores.dtype))
    residuals = residuals / scorable.sum().clamp(min=1)

    shape = (-1, num_generations)
    scorable, residuals = scorable.view(shape), residuals.view(shape)
    if score_estimator == "none":
        coefficients = residuals
    elif score_estimator == "dr_grpo":
        coefficients = _centered(residuals, scorable)
    elif score_estimator == "rloo":
        coefficients = _leave_one_out(residuals, scorable)
    elif score_estimator == "grpo":
        centered_proxies = _centered(_at_least_float32(proxies).view(shape), scorable)
        coefficients = _through_grpo_score(residuals, scores.view(shape), centered_proxies, scorable)
    else:
        assert_never(score_estimator)
    return coefficients.view(-1)


def _through_grpo_score(
    residuals: torch.Tensor, scores: torch.Tensor, centered_proxies: torch.Tensor, scorable: torch.Tensor
) -> torch.Tensor:
    """Return the derivatives with respect to the proxies from those with respect to the "grpo" scores (`residuals`),
    all `(P, G)`. Scores are centered proxies divided by a scale, and a proxy changes both."""
    std, scale = _grpo_scale(centered_proxies, scorable)
    through_center = _centered(residuals, scorable)
    # The clamp avoids 0 / 0 where the std is 0. It also lowers the second term of a group whose std is above 0 and
    # below 1e-12; but the scores of such a group are about 1e-6 or less, so that the term hardly counts.
    count = scorable.sum(dim=1, keepdim=True).clamp(min=2)
    safe_std = std.clamp(min=GRPO_STD_EPSILON**2)
    scale_derivative = torch.where(std > 0, centered_proxies / ((count - 1) * safe_std), 0.0)
    residuals_times_scores = (residuals * scores).sum(dim=1, keepdim=True)
    return (through_center - scale_derivative * residuals_times_scores) / scale


@torch.no_grad()
def actor_coefficients(
    scores: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_generations: int,
    class_weighting: ClassWeighting = "balanced",
) -> torch.Tensor:
    """
    Return the coefficients of the actor term of eq. 5, centered in the group: the factor of `grad log pi(o_i | q)`
    (the plain token sum, without `pacs_beta`), `(B,)`.

    With `ell_i = w_i * (y_i log sigmoid(psi_i) + (1 - y_i) log(1 - sigmoid(psi_i)))` (eq. 2 with the weight and target
    of [`class_weights`]), the actor term of the gradient is `-1/N * sum_i ell_i * grad log pi(o_i | q)`. Since `ell <=
    0`, it would lower the probability of every sampled completion. Subtracting the mean of the other completions of
    the prompt removes this finite-sample effect; for scores that do not depend on the group, it does not change the
    expectation over independently sampled completions. Eq. 5 has neither the weights nor the centering; the authors'
    code has no actor term.
    """
    scorable = scorable_completions(labels, num_generations).view(-1, num_generations)
    terms = _weighted_entropies(_at_least_float32(scores), labels, num_generations, class_weighting)
    return _leave_one_out(terms.view(-1, num_generations), scorable).view(-1) / scorable.sum().clamp(min=1)


# Other objectives on groups ------------------------------------------------------------------------------------------


def real_loss(proxies: torch.Tensor, labels: torch.Tensor, *, num_generations: int, tau: float = 0.5) -> torch.Tensor:
    """
    Return the loss of REAL (arXiv 2602.05630; `compute_policy_loss_real` of github.com/Red-RL/REAL, 1c30726), a
    scalar: `log(1 + sum_right exp(-r / tau)) + log(1 + sum_wrong exp(r / tau))` of each group with both labels, summed
    and divided by the number of all groups with scorable completions. Proxies are `"mean_log_ratio"` with the policy
    at rollout time as the reference. Completions whose label is neither 0 nor 1 are excluded.
    """
    right, wrong, num_groups = _right_and_wrong(labels, num_generations)
    is_mixed = right.any(dim=1) & wrong.any(dim=1)
    logits = _at_least_float32(proxies).view(-1, num_generations) / tau
    right_loss = _log_one_plus_sum_exp(-logits, right)
    wrong_loss = _log_one_plus_sum_exp(logits, wrong)
    return (right_loss + wrong_loss).masked_fill(~is_mixed, 0.0).sum() / num_groups


def disco_loss(
    proxies: torch.Tensor, labels: torch.Tensor, *, num_generations: int, tau: float = 10.0
) -> torch.Tensor:
    """
    Return the loss of DisCO (arXiv 2505.12366) without its constraint on the divergence from the policy at rollout
    time, a scalar: `tau * log(mean_wrong exp(r / tau)) - mean_right r` of each group with both labels, averaged over
    groups as in [`real_loss`]. Proxies are `"mean_logp"`, the log-likelihood score of the paper.
    """
    right, wrong, num_groups = _right_and_wrong(labels, num_generations)
    is_mixed = right.any(dim=1) & wrong.any(dim=1)
    right, wrong = right[is_mixed], wrong[is_mixed]  # of the mixed groups
    scores = _at_least_float32(proxies).view(-1, num_generations)[is_mixed]
    log_sum_wrong = torch.logsumexp((scores / tau).masked_fill(~wrong, -torch.inf), dim=1)
    log_mean_wrong = log_sum_wrong - wrong.sum(dim=1).log()
    mean_right = (scores * right).sum(dim=1) / right.sum(dim=1)
    return (tau * log_mean_wrong - mean_right).sum() / num_groups


def _right_and_wrong(labels: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scorable completions with label 1 and those with label 0, bool `(P, G)`, and the number of groups
    with scorable completions, at least 1."""
    scorable = scorable_completions(labels, num_generations).view(-1, num_generations)
    grid = labels.view(-1, num_generations)
    num_groups = scorable.any(dim=1).sum().clamp(min=1)
    return (grid == 1) & scorable, (grid == 0) & scorable, num_groups


def _log_one_plus_sum_exp(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return `log(1 + sum exp(x))` of each group, over the completions `where`; `(P,)` from two tensors `(P, G)`."""
    terms = x.masked_fill(~where, -torch.inf)
    return torch.logsumexp(F.pad(terms, (0, 1)), dim=1)  # padding with 0 adds exp(0) = 1


# Group losses: the loss as a function of the proxies, and the kind of proxy. Autograd differentiates them.
GROUP_LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Proxy]] = {
    "real": (real_loss, "mean_log_ratio"),
    "disco": (disco_loss, "mean_logp"),
}


def rloo_advantages(rewards: torch.Tensor, *, num_generations: int, normalize: bool = False) -> torch.Tensor:
    """
    Return the reward of each completion minus the mean reward of the others of its prompt, `(B,)` (arXiv 2402.14740);
    0 for completions that are not scorable. `normalize` shifts and scales the advantages of all scorable completions
    to mean 0 and standard deviation 1 (unbiased, 1e-4 added), TRL's `normalize_advantages`.
    """
    scorable = scorable_completions(rewards, num_generations)
    grid = _at_least_float32(rewards).view(-1, num_generations)
    advantages = _leave_one_out(grid, scorable.view(-1, num_generations)).view(-1)
    if normalize and scorable.sum() > 1:
        counted = advantages[scorable]
        advantages = ((advantages - counted.mean()) / (counted.std() + 1e-4)).masked_fill(~scorable, 0.0)
    return advantages


def maxrl_advantages(rewards: torch.Tensor, *, num_generations: int, epsilon: float = 1e-6) -> torch.Tensor:
    """
    Return the advantages of MaxRL, `(R - mean) / (mean + epsilon)` with the mean reward of the group, `(B,)` (arXiv
    2602.02710; `compute_maxrl_outcome_advantage` of github.com/tajwarfahim/maxrl, c0698eb). Rewards must be at least
    0; completions that are not scorable have advantage 0.
    """
    scorable = scorable_completions(rewards, num_generations).view(-1, num_generations)
    grid = _at_least_float32(rewards).view(-1, num_generations).masked_fill(~scorable, 0.0)
    mean = grid.sum(dim=1, keepdim=True) / scorable.sum(dim=1, keepdim=True).clamp(min=1)
    return (_centered(grid, scorable) / (mean + epsilon)).view(-1)

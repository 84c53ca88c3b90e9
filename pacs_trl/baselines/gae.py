"""Generalized advantage estimation and the clipped value loss, as pure functions. The policy loss is TRL's.

Shapes: `B` completions of up to `T` tokens. Masks are `True` for tokens that the policy generated. Tokens with `False`
(tool results, padding, masked completions) do not affect any result.
"""

from collections.abc import Callable

import torch


Reduce = Callable[[torch.Tensor], torch.Tensor]  # sum over processes


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute generalized advantage estimates (Schulman et al. 2016, eq. 16) with a single reward on the last token.

    `delta_t = r_t + gamma * V_{t+1} - V_t`, `A_t = delta_t + gamma * lambda * A_{t+1}`. Tokens that the policy did not
    generate are skipped: `t + 1` is the next token that it generated.

    Args:
        rewards (`torch.Tensor` of shape `(B,)`): Reward of each completion.
        values (`torch.Tensor` of shape `(B, T)`): `V_t`, the critic's estimate before token `t`.
        mask (bool `torch.Tensor` of shape `(B, T)`): Tokens that the policy generated.
        gamma (`float`): Discount per token, in [0, 1].
        gae_lambda (`float` or `torch.Tensor` of shape `(B, T)`): Lambda in [0, 1] between a token and the next one; 1
            gives `A_t = R - V_t` at `gamma=1`.

    Returns:
        Advantages and returns (`A_t + V_t`, the critic's targets), both `(B, T)` and 0 where `mask` is `False`.
    """
    advantages = torch.zeros_like(values)
    reward = rewards.clone()  # 0 before the last token
    next_advantage = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards)
    for t in reversed(range(values.size(1))):
        is_counted = mask[:, t]
        delta = reward + gamma * next_value - values[:, t]
        lambda_t = gae_lambda[:, t] if isinstance(gae_lambda, torch.Tensor) else gae_lambda
        advantage = torch.where(is_counted, delta + gamma * lambda_t * next_advantage, next_advantage)
        next_value = torch.where(is_counted, values[:, t], next_value)
        next_advantage = advantage
        reward = reward.masked_fill(is_counted, 0.0)
        advantages[:, t] = advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def masked_mean_and_variance(
    x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the unbiased variance (0 for a single value) of `x` where `mask` is `True`, scalars.
    `reduce` sums over processes."""
    total, count = reduce(torch.stack([x[mask].sum(), mask.sum().to(x.dtype)]))
    mean = total / count.clamp(min=1.0)
    squares = reduce((x[mask] - mean).square().sum())
    return mean, squares / (count - 1.0).clamp(min=1.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total) -> torch.Tensor:
    """Shift and scale advantages `x` of shape `(B, T)` to mean 0 and variance 1 over all masked tokens of the batch; 0
    where `mask` is `False`. `reduce` sums over processes."""
    mean, variance = masked_mean_and_variance(x, mask, reduce)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total
) -> torch.Tensor:
    """Return the fraction of the variance of `returns` that `values` explain, a scalar: 1 is perfect, 0 is as good as
    a constant, and negative values are worse than a constant. NaN if all returns are equal up to rounding."""
    _, residual_variance = masked_mean_and_variance(returns - values, mask, reduce)
    return_mean, return_variance = masked_mean_and_variance(returns, mask, reduce)
    value_mean, value_variance = masked_mean_and_variance(values, mask, reduce)
    # The returns of equal rewards differ, because sums of thousands of float32 values are rounded: relative to the
    # squares of returns and values, by a variance of up to 1e-12 at 4,096 tokens and 3e-11 at 131,072. One wrong token
    # among a million right ones has 1e-6.
    least = 1e-9 * (return_mean.square() + value_mean.square() + value_variance)
    return torch.where(return_variance > least, 1.0 - residual_variance / return_variance, torch.nan)


def clipped_value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute the clipped squared error of the critic per token: moving values away from those at rollout time by more
    than `clip_range` (`None`: no clipping) does not lower the loss. There is no factor 1/2, as in the authors' code.

    Args:
        values, old_values (`torch.Tensor` of shape `(B, T)`): Values of the current critic, and those at rollout time.
        returns (`torch.Tensor` of shape `(B, T)`): Targets.
        clip_range (`float`, *optional*): Maximum distance of the clipped values from `old_values`.

    Returns:
        Losses, `(B, T)`, and the tokens that are clipped and therefore have no gradient, bool `(B, T)`.
    """
    error = (values - returns).square()
    if clip_range is None:
        return error, torch.zeros_like(error, dtype=torch.bool)
    move = values - old_values
    clipped_error = (old_values + move.clamp(-clip_range, clip_range) - returns).square()
    # Comparing errors alone would count rounding differences as clipped: old + (new - old) may differ from new.
    is_clipped = (move.abs() > clip_range) & (clipped_error > error)
    return torch.maximum(error, clipped_error), is_clipped

"""Advantages from a critic, and the loss of a scalar one. Pure functions; the policy's loss is TRL's.

Shapes: `B` completions of up to `T` tokens. A mask is `True` for tokens that the policy generated; tool results,
padding and masked completions are `False` and have no influence on anything.
"""

from collections.abc import Callable

import torch


Reduce = Callable[[torch.Tensor], torch.Tensor]  # sum over processes


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalized advantage estimation (Schulman et al. 2016, eq. 16) with one reward, on the last token.

    `delta_t = r_t + gamma * V_{t+1} - V_t`, `A_t = delta_t + gamma * lambda * A_{t+1}`. Tokens that the policy did not
    generate are skipped: the successor of a token is the next token of its own.

    Args:
        rewards (`torch.Tensor` of shape `(B,)`): Reward of each completion.
        values (`torch.Tensor` of shape `(B, T)`): `V_t`, the critic's estimate before token `t`.
        mask (bool `torch.Tensor` of shape `(B, T)`): Tokens that count.
        gamma (`float`): Discount per token, in [0, 1].
        gae_lambda (`float` or `torch.Tensor` of shape `(B, T)`): In [0, 1], between a token and its successor; 1 gives
            `A_t = R - V_t` at `gamma=1`.

    Returns:
        Advantages and returns (`A_t + V_t`, the critic's targets), both `(B, T)` and 0 where `mask` is `False`.
    """
    advantages = torch.zeros_like(values)
    reward = rewards.clone()  # not paid out yet
    advantage = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards)
    for t in reversed(range(values.size(1))):
        own = mask[:, t]
        delta = reward + gamma * next_value - values[:, t]
        between = gae_lambda[:, t] if isinstance(gae_lambda, torch.Tensor) else gae_lambda
        advantage = torch.where(own, delta + gamma * between * advantage, advantage)
        next_value = torch.where(own, values[:, t], next_value)
        reward = reward.masked_fill(own, 0.0)
        advantages[:, t] = advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def masked_mean_and_variance(
    x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance (0 for a single value) of `x` where `mask`, over all processes that `reduce` sums."""
    total, count = reduce(torch.stack([x[mask].sum(), mask.sum().to(x.dtype)]))
    mean = total / count.clamp(min=1.0)
    squares = reduce((x[mask] - mean).square().sum())
    return mean, squares / (count - 1.0).clamp(min=1.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total) -> torch.Tensor:
    """Shift and scale advantages `x` of shape `(B, T)` to mean 0 and variance 1 over the tokens of the whole batch,
    over all processes that `reduce` sums; 0 where `mask` is `False`."""
    mean, variance = masked_mean_and_variance(x, mask, reduce)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, reduce: Reduce = lambda total: total
) -> torch.Tensor:
    """Share of the variance of `returns` that `values` explain: 1 is perfect, 0 is as good as a constant, and negative
    is worse than one. NaN if all returns are equal."""
    residual = masked_mean_and_variance(returns - values, mask, reduce)[1]
    total = masked_mean_and_variance(returns, mask, reduce)[1]
    return torch.where(total > 0, 1.0 - residual / total, torch.nan)


def clipped_value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Squared error of the critic per token, clipped: moving away from the values at rollout time by more than
    `clip_range` (`None`: no clipping) does not lower the loss. Without a factor 1/2, as the authors ran it.

    Args:
        values, old_values (`torch.Tensor` of shape `(B, T)`): Values under the critic that learns, and at rollout
            time.
        returns (`torch.Tensor` of shape `(B, T)`): Targets.

    Returns:
        Losses, `(B, T)`, and where the clipped error is the larger one, bool `(B, T)`: these tokens have no gradient.
    """
    error = (values - returns).square()
    if clip_range is None:
        return error, torch.zeros_like(error, dtype=torch.bool)
    move = values - old_values
    clipped_error = (old_values + move.clamp(-clip_range, clip_range) - returns).square()
    # Comparing errors alone would count rounding: old + (new - old) is not always new.
    return torch.maximum(error, clipped_error), (move.abs() > clip_range) & (clipped_error > error)

"""Segments of a completion, and rewards and loss of a generative critic (GenAC, arXiv 2604.10701). Pure functions.

A segment ends with a low-probability token, after a number of tokens, or with the completion. Positions count the
tokens that the policy generated, not tool results.

Shapes: `T` tokens of a completion, `N` answers of the critic (one per state), `M` tokens of answers.
"""

from collections.abc import Callable, Sequence

import torch


def segment_starts(
    probabilities: Sequence[float], *, threshold: float | None, length: int | None, most: int
) -> list[int]:
    """Return the first token of each segment of a completion, increasing from 0. Tokens with a lower probability under
    the policy than `threshold`, every `length`-th token, and the last one end segments; of more ends than `most`, ones
    with even distances are kept."""
    number = len(probabilities)
    ends = [
        t
        for t, probability in enumerate(probabilities)
        if (threshold is not None and probability < threshold)
        or (length is not None and (t + 1) % length == 0)
        or t == number - 1
    ]
    kept = min(most, len(ends))
    ends = [ends[(i + 1) * len(ends) // kept - 1] for i in range(kept)]
    return [0, *(end + 1 for end in ends[:-1])] if ends else []


def values_of_tokens(values: Sequence[float], starts: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Return the value of the segment of each token, `(T,)`."""
    lengths = [end - start for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)]
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def border_lambdas(starts: Sequence[int], num_tokens: int, gae_lambda: float) -> torch.Tensor:
    """Return the lambda between each token and the next for [`~gae.generalized_advantages`], `(T,)`: `gae_lambda`
    between segments, and 1 inside, because a discount per token would erase the reward of long completions."""
    lambdas = torch.ones(num_tokens)
    lambdas[[start - 1 for start in starts[1:]]] = gae_lambda
    return lambdas


def critic_rewards(values: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """Return `1 - (R - v)^2` of each answer, `(N,)` in [0, 1]; 0 for a value that could not be parsed (NaN)."""
    return (1.0 - (outcomes - values).square()).nan_to_num(0.0)


def reinforce_weights(
    rewards: torch.Tensor,
    outcomes: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
) -> torch.Tensor:
    """Return the factor on the log-prob of each answer, `(N,)`: its reward minus the mean reward of the other
    answers about completions with the same outcome, correct (above 0.5) or wrong, 0 without any. `rewards` and
    `outcomes`, `(N,)`, are those of this process; `reduce` sums over processes."""
    right = (outcomes > 0.5).long()
    of_outcome = torch.nn.functional.one_hot(right, 2).to(torch.float64)  # (N, 2)
    sums, counts = reduce(torch.stack([rewards.double() @ of_outcome, of_outcome.sum(dim=0)]))
    others = (sums[right] - rewards) / (counts[right] - 1.0).clamp(min=1.0)
    return (rewards - others.masked_fill(counts[right] == 1, 0.0)).to(rewards.dtype)


def reinforce_losses(
    logps: torch.Tensor, sampling_logps: torch.Tensor, weights: torch.Tensor, cap: float
) -> torch.Tensor:
    """Return the loss of each token of an answer, `(M,)`: `-min(pi / pi_old, cap) * weight * log pi`, where the ratio
    has no gradient. All tensors have shape `(M,)`; NaN in `sampling_logps` (at generation) gives a ratio of 1."""
    ratios = (logps.detach() - sampling_logps).nan_to_num(0.0).exp().clamp(max=cap)
    return -ratios * weights * logps

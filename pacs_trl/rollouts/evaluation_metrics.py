"""Metrics of an evaluation over all its completions, from the metrics of its batches."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from trl.trainer.utils import nanstd

from ..update.rollout import weighted_rewards


# Metrics that are an extreme value of a batch. All others are means.
_SMALLEST = (
    "completions/min_length",
    "completions/min_terminated_length",
    "clip_ratio/low_min",
    "sampling/importance_sampling_ratio/min",
)
_LARGEST = (
    "num_tokens",
    "completions/max_length",
    "completions/max_terminated_length",
    "clip_ratio/high_max",
    "sampling/importance_sampling_ratio/max",
    "sampling/sampling_logp_difference/max",
)


class EvaluationMetrics:
    """
    Collect the metrics of batches, and combine them to those of the whole evaluation.

    Means are weighted by the number of completions that they cover, those of tokens by the number of tokens. Means and
    standard deviations of rewards are computed from the rewards.

    Args:
        num_completions (`int`, *optional*): Number of completions of the evaluation; `None` if unknown (a stream).

    Attributes:
        num_counted (`int`): Number of completions of the current batch that belong to the evaluation. Several
            processes fill the last batch with completions of prompts that they repeat; those come last.
        num_tokens (`float`, *optional*): Number of counted tokens of these completions, if the loss has counted them.
    """

    def __init__(self, num_completions: int | None):
        self._num_left = num_completions
        self._values: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._rewards: list[torch.Tensor] = []
        self.num_counted = 0
        self.num_tokens: float | None = None

    def begin_batch(self, num_completions: int) -> None:
        """Begin a batch with `num_completions` completions on all processes."""
        self.num_counted, self.num_tokens = num_completions, None
        if self._num_left:
            self.num_counted = min(num_completions, self._num_left)
            self._num_left -= self.num_counted

    def add_rewards(self, rewards_per_func: torch.Tensor) -> None:
        """Add the rewards of a batch, `(B, F)`, of all processes."""
        self._rewards.append(rewards_per_func[: self.num_counted].cpu())

    def end_batch(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the other metrics of a batch, which are lists of values; NaN is no value."""
        batch = {}
        for name, values in metrics.items():
            numbers = [value for value in values if not math.isnan(value)]
            batch[name] = sum(numbers) / len(numbers) if numbers else math.nan
        for name, value in batch.items():
            values_and_weights = self._values[name]  # also of a metric that never has a value
            if not math.isnan(value):
                values_and_weights.append((value, self._weight(name, batch)))

    def _weight(self, name: str, batch: Mapping[str, float]) -> float:
        """Return how many completions, tokens, or calls the mean of a batch covers."""
        if name in ("entropy", "kl"):
            mean_length = batch["completions/mean_length"]  # of repeated completions, too
            return self.num_counted * mean_length if self.num_tokens is None else self.num_tokens
        if name == "completions/mean_terminated_length":
            return self.num_counted * (1 - batch["completions/clipped_ratio"])
        if name == "tools/failure_frequency":
            return self.num_counted * batch["tools/call_frequency"]
        return self.num_counted

    def result(self, reward_names: Sequence[str], reward_weights: torch.Tensor) -> dict[str, float | None]:
        """Return the metrics of the evaluation; `None` for a mean of no value."""
        metrics: dict[str, float | None] = {}
        for name, values in self._values.items():
            numbers, weights = [value for value, _ in values], [weight for _, weight in values]
            if not values:
                metrics[name] = None
            elif name in _SMALLEST:
                metrics[name] = min(numbers)
            elif name in _LARGEST:
                metrics[name] = max(numbers)
            elif sum(weights) == 0:
                metrics[name] = numbers[-1]
            else:
                metrics[name] = sum(value * weight for value, weight in values) / sum(weights)
        if not self._rewards:
            return metrics
        rewards_per_func = torch.cat(self._rewards)
        for i, name in enumerate(reward_names):
            rewards = rewards_per_func[:, i]
            metrics[f"rewards/{name}/mean"] = _number(rewards.nanmean())
            metrics[f"rewards/{name}/std"] = _number(nanstd(rewards))
        rewards = weighted_rewards(rewards_per_func, reward_weights)
        return metrics | {"reward": _number(rewards.nanmean()), "reward_std": _number(nanstd(rewards))}


def _number(value: torch.Tensor) -> float | None:
    return None if value.isnan() else value.item()

"""`PACSTrainer` in the place of `GRPOTrainer`, for TRL's tests, whose rewards are any numbers."""

import torch

from pacs_trl import PACSTrainer
from pacs_trl.update.rollout import weighted_rewards


class PACSTrainerOfGRPO(PACSTrainer):
    """Labels are the rewards, scaled to [0, 1] in each generation batch."""

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        rewards = weighted_rewards(rewards_per_func, self.reward_weights)
        known = rewards[~rewards.isnan()]
        if known.numel() == 0:
            return rewards
        low, high = known.aminmax()
        return (rewards - low) / (high - low).clamp(min=1e-9)

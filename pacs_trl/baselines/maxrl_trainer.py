"""MaxRL on the exact update: GRPO with another advantage."""

from ..errors import UserError
from ..objective import maxrl_advantages
from .grpo_config import MaxRLConfig
from .grpo_trainer import GRPOTrainer


class MaxRLTrainer(GRPOTrainer):
    """[`GRPOTrainer`] with the advantages of MaxRL (https://huggingface.co/papers/2602.02710), `(R - mean) / mean`;
    rewards must be at least 0. `args` is a [`MaxRLConfig`]."""

    _config_class = MaxRLConfig
    _name = "MaxRL"
    _paper = {"title": "Maximum Likelihood Reinforcement Learning", "id": "2602.02710"}

    def advantages(self, batch, num_generations):
        if (self._labels < 0).any():
            raise UserError(
                f"MaxRL divides by the mean reward of a group, but a reward is {self._labels.nan_to_num().min():g}. "
                "Rescale the reward functions to at least 0, or use method grpo."
            )
        if num_generations == 1:  # nothing to compare with
            return None
        return maxrl_advantages(self._labels, num_generations=num_generations)

"""REAL and DisCO on the exact update: the group losses of `objective.py`."""

import torch

from ..errors import UserError
from ..objective import GROUP_LOSSES
from ..rollouts.exact_trainer import ExactUpdateTrainer
from ..update.group_loss_update import AutogradObjective, GroupObjective
from .grpo_config import REALConfig


class REALTrainer(ExactUpdateTrainer):
    """
    Trainer for REAL (https://huggingface.co/papers/2602.05630): rewards are the labels of a classification, whose
    logits are length-normalized log-ratios. Takes the arguments of [`~trl.GRPOTrainer`], `args` a [`REALConfig`];
    rewards must be 0, 1, or `None`. Groups may be spread over micro-batches and processes.
    """

    args: REALConfig
    _config_class = REALConfig
    _name = "REAL"
    _paper = {"title": "Rewards as Labels: Revisiting RLVR from a Classification Perspective", "id": "2602.05630"}

    def create_objective(self) -> GroupObjective:
        function, proxy = GROUP_LOSSES[self.args.group_loss]
        return AutogradObjective(function, proxy, {"tau": self.args.tau}, self.beta)

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels = super()._compute_labels(rewards_per_func)
        if ((labels > 0) & (labels < 1)).any():
            raise UserError(
                "REAL needs rewards of 0 or 1, but some rewards are between 0 and 1. Use a binary reward function, or "
                "method pacs, which supports soft labels."
            )
        return labels

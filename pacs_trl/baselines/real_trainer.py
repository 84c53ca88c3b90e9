"""REAL and DisCO on the exact update: the group losses of `objective.py`."""

from dataclasses import dataclass

import torch

from ..errors import UserError
from ..objective import GROUP_LOSSES, sequence_proxies
from ..rollouts.exact_trainer import ExactUpdateTrainer
from ..update.group_loss_update import GroupObjective
from ..update.groups import Groups
from ..update.rollout import labels_from_rewards
from .grpo_config import REALConfig


@dataclass(frozen=True)
class AutogradObjective(GroupObjective):
    """A loss in `objective.GROUP_LOSSES`, for [`GroupLossUpdate`]. Autograd through the loss of a group, a function of
    its proxies, yields the coefficients."""

    group_loss: str = "real"
    tau: float = 0.5
    kl_coef: float = 0.0

    @property
    def has_reference(self) -> bool:  # type: ignore[override]
        return self._proxy != "mean_logp"

    @property
    def _proxy(self) -> str:
        return GROUP_LOSSES[self.group_loss][1]

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sequence_proxies(logps.detach(), ref_logps, mask, proxy=self._proxy)

    def loss(self, groups: Groups, proxies: torch.Tensor) -> torch.Tensor:
        return groups.apply(GROUP_LOSSES[self.group_loss][0], proxies, tau=self.tau)

    @torch.enable_grad()
    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        proxies = proxies.detach().requires_grad_()
        (derivatives,) = torch.autograd.grad(self.loss(groups, proxies), proxies)
        return derivatives / num_tokens.clamp(min=1)

    def size(self, groups: Groups) -> int:
        return int(groups.labeled.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        is_uniform = ~groups.mixed[groups.labeled]
        metrics = {
            "labels/uniform_group_fraction": is_uniform.float().mean().item(),
            "labels/mean": groups.labels[groups.scorable].float().mean().item(),
        }
        return self.loss(groups, proxies).item(), metrics


class REALTrainer(ExactUpdateTrainer):
    """
    Trainer for REAL (https://huggingface.co/papers/2602.05630): rewards are the labels of a classification, whose
    logits are length-normalized log-ratios. Takes the arguments of [`~trl.GRPOTrainer`], `args` a [`REALConfig`];
    rewards must be 0, 1, or `None`. Groups may be spread over micro-batches and processes.
    """

    args: REALConfig
    _config_class = REALConfig
    _name = "REAL"
    _tag_names = ["trl", "real"]
    _paper = {"title": "Rewards as Labels: Revisiting RLVR from a Classification Perspective", "id": "2602.05630"}

    def create_objective(self) -> GroupObjective:
        return AutogradObjective(self.args.group_loss, self.args.tau, self.beta)

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels = labels_from_rewards(rewards_per_func, self.reward_weights, self.reward_func_names)
        if ((labels > 0) & (labels < 1)).any():
            raise UserError(
                "REAL needs rewards of 0 or 1, but some rewards are between 0 and 1. Use a binary reward function, or "
                "method pacs, which supports soft labels."
            )
        return labels

"""REALTrainer: REAL, DisCO, and other group losses on the exact update."""

from dataclasses import dataclass

import torch

from ..objective import GROUP_LOSSES, sequence_proxies
from ..rollouts.exact_trainer import ExactUpdateTrainer
from ..update.step import Groups, Objective
from .grpo_config import REALConfig


@dataclass(frozen=True)
class GroupObjective(Objective):
    """Objective of a loss in `objective.GROUP_LOSSES`, for [`PolicyUpdate`]."""

    group_loss: str = "real"
    tau: float = 0.5
    kl_coef: float = 0.0

    @property
    def has_reference(self) -> bool:  # type: ignore[override]
        return GROUP_LOSSES[self.group_loss][1] != "mean_logp"

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sequence_proxies(logps.detach(), ref_logps, mask, proxy=GROUP_LOSSES[self.group_loss][1])

    def loss(self, groups: Groups, proxies: torch.Tensor) -> torch.Tensor:
        return groups.apply(GROUP_LOSSES[self.group_loss][0], proxies, tau=self.tau)

    @torch.enable_grad()
    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        proxies = proxies.detach().requires_grad_()
        return torch.autograd.grad(self.loss(groups, proxies), proxies)[0] / num_tokens.clamp(min=1)

    def size(self, groups: Groups) -> int:
        return int(groups.labeled.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        loss, mean = self.loss(groups, proxies).item(), lambda values: values.float().mean().item()
        uniform, labels = ~groups.mixed[groups.labeled], groups.labels[groups.scorable]
        return loss, {"pacs/uniform_group_fraction": mean(uniform), "pacs/label_mean": mean(labels)}


class REALTrainer(ExactUpdateTrainer):
    """
    Trainer for REAL (https://huggingface.co/papers/2602.05630): rewards are the labels of a classification, whose
    logits are length-normalized log-ratios. Takes the arguments of [`~trl.GRPOTrainer`], `args` a [`REALConfig`];
    rewards must be 0, 1, or `None`. Groups may be spread over micro-batches and processes.
    """

    args: REALConfig
    _config_class = REALConfig
    _own_shared_settings = ("group_loss", "tau")
    _name = "REAL"
    _tag_names = ["trl", "real"]
    _paper = {"title": "Rewards as Labels: Revisiting RLVR from a Classification Perspective", "id": "2602.05630"}

    def create_objective(self) -> GroupObjective:
        return GroupObjective(self.args.group_loss, self.args.tau, self.args.beta)

    def _labels_of(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels = super()._labels_of(rewards_per_func)
        if ((labels > 0) & (labels < 1)).any():
            raise ValueError(
                "REAL needs rewards of 0 or 1, but some rewards are between 0 and 1. Use a binary reward function, or "
                "method pacs, which supports soft labels."
            )
        return labels

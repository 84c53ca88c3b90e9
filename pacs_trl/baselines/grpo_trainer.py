"""Trainers on the exact update: GRPO, RLOO, and MaxRL with the ratio losses of `surrogate.py`, and REAL and DisCO with
the group losses of `objective.py`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import trl

from .. import surrogate
from ..objective import GROUP_LOSSES, maxrl_advantages, rloo_advantages, sequence_proxies
from ..rollouts.exact_trainer import ExactUpdateTrainer
from ..rollouts.rollout_trainer import RolloutTrainer
from ..update.forward_pass import logps_in_batches
from ..update.rollout import Rollout, unpad_rollouts
from ..update.step import Groups, Objective
from ..update.token_weights import HighEntropyTokens, Mismatch, TokenValues, TokenWeights, correction_weights
from .grpo_config import GRPOConfig, MaxRLConfig, REALConfig, RLOOConfig


@dataclass(frozen=True)
class RatioObjective(Objective):
    """
    Probability-ratio loss with given advantages, for [`PolicyUpdate`].

    Attributes:
        loss ([`RatioLoss`]): The loss and its settings.
        kl_coef (`float`), bias_correction (`bool`): Weight of the KL term, and TRL's `use_bias_correction_kl`.
        max_completion_length (`int`): Setting of the configuration.
        share (`float`): Fraction of a generation batch per optimizer step; above 1 if a step uses several batches.
        off_policy_threshold (`float`, *optional*): TRL's `off_policy_mask_threshold`.
        mismatch ([`Mismatch`], *optional*): Mismatch correction inside the weights of `"vespo"`.
        needs_all_completions (`bool`): Whether the ratio of a completion without a gradient may differ from 1, and a
            metric reads it.
    """

    loss: surrogate.RatioLoss
    kl_coef: float = 0.0
    bias_correction: bool = True
    max_completion_length: int = 1
    share: float = 1.0
    off_policy_threshold: float | None = None
    mismatch: Mismatch | None = None
    needs_all_completions: bool = False  # type: ignore[misc]
    has_ratio = True

    def known_coefficients(
        self, rollouts: list[Rollout], *, is_evaluation: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share = 1.0 if is_evaluation else self.share
        values = [
            (rollout.advantage * rollout.weight, share * max(rollout.generation_tokens, 1.0)) for rollout in rollouts
        ]
        advantages, generation_tokens = torch.tensor(values, dtype=torch.float64).view(-1, 2).unbind(dim=1)
        scales = surrogate.completion_scales(
            self.loss.loss_type,
            torch.tensor([int(rollout.loss_mask.sum()) for rollout in rollouts]),
            max_completion_length=self.max_completion_length,
            generation_tokens=generation_tokens,
        )
        return tuple(values.to(torch.get_default_dtype()) for values in (-advantages * scales, scales))

    def token_terms(self, tokens: TokenValues, factors: Sequence[torch.Tensor]) -> surrogate.RatioTerms:
        advantages, log_correction = -tokens.coefficients[:, 0], None
        factor = math.prod(factors, start=torch.ones_like(tokens.logps))
        if self.off_policy_threshold is not None:
            reported = ~tokens.sampling_logps.isnan().all(dim=1, keepdim=True)
            old_logps = torch.where(reported, tokens.sampling_logps, tokens.old_logps)
            values = tokens.logps, old_logps, advantages, tokens.mask
            factor = factor * surrogate.off_policy_mask(*values, self.off_policy_threshold)
        if self.mismatch is not None:
            weights = correction_weights(tokens.old_logps, tokens.sampling_logps, tokens.mask, self.mismatch)
            logs = weights.log().clamp(math.log(1e-8), 20.0)
            is_token = self.mismatch.mode.startswith("token_")
            log_correction = logs.masked_fill(~tokens.mask, 0.0).sum(dim=1, keepdim=True) if is_token else logs[:, :1]
        values = tokens.logps, tokens.old_logps, advantages, tokens.mask
        return surrogate.ratio_terms(*values, self.loss, factors=factor, log_correction=log_correction)

    def kl(self, logps, ref_logps, old_logps, mask):
        if not self.bias_correction:
            return surrogate.kl_terms(logps, ref_logps, mask)
        log_ratios, level = logps - old_logps, self.loss.importance_sampling_level
        return surrogate.kl_terms(logps, ref_logps, mask, surrogate.log_importance_weights(log_ratios, mask, level))

    def token_metrics(
        self, num_tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor, phi: torch.Tensor
    ) -> dict[str, float]:
        if self.loss.loss_type == "sapo":
            return {}
        if self.loss.loss_type == "vespo":
            return {"vespo/phi_seq_mean": phi.mean().item()}
        counts = num_tokens if self.loss.importance_sampling_level == "token" else torch.ones_like(num_tokens)
        below, above = ((share * counts).sum().item() / max(int(counts.sum()), 1) for share in (low, high))
        if self.loss.loss_type == "cispo":
            return {"cispo_clip_ratio": above}
        counted = num_tokens > 0
        extremes = (low[counted].min().item(), high[counted].max().item()) if counted.any() else (math.nan, math.nan)
        names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
        values = (below, above, below + above, *extremes)
        return {f"clip_ratio/{name}": value for name, value in zip(names, values, strict=True)}


class GRPOTrainer(ExactUpdateTrainer):
    """
    [`~trl.GRPOTrainer`] on the exact update, with the same arguments. It trains the same weights several times faster
    (docs/objectives.md). `args` is a [`GRPOConfig`].
    """

    args: GRPOConfig
    _config_class: type = GRPOConfig

    def create_objective(self) -> RatioObjective:
        args = self.args
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        is_cispo = args.loss_type == "cispo"  # its bound is a cap, not a distance from 1
        loss = surrogate.RatioLoss(
            args.loss_type,
            args.importance_sampling_level,
            -math.inf if is_cispo else 1 - args.epsilon,
            high if is_cispo else 1 + high,
            args.delta,
            (args.sapo_temperature_pos, args.sapo_temperature_neg),
            (args.vespo_k_pos, args.vespo_k_neg),
            (args.vespo_lambda_pos, args.vespo_lambda_neg),
        )
        mismatch = self._mismatch if self._corrects and args.loss_type == "vespo" else None
        has_later_updates = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
        ratios_differ_from_1 = has_later_updates or args.rollout_lag > 0 or mismatch is not None
        return RatioObjective(
            loss,
            args.beta,
            args.use_bias_correction_kl,
            args.max_completion_length,
            args.gradient_accumulation_steps / args.steps_per_generation,
            args.off_policy_mask_threshold,
            mismatch,
            needs_all_completions=args.loss_type == "vespo" and ratios_differ_from_1,
        )

    @property
    def _corrects(self) -> bool:
        return self.use_vllm and self.args.vllm_importance_sampling_correction

    def token_weights(self) -> list[TokenWeights]:
        corrects = self._corrects and self.args.loss_type != "vespo"
        quantile = self.args.top_entropy_quantile
        of_entropy: list[TokenWeights] = [HighEntropyTokens(quantile)] if quantile < 1 else []
        return (super().token_weights() if corrects else []) + of_entropy

    def _labels_of(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        return RolloutTrainer._labels_of(self, rewards_per_func)  # rewards of any size

    def advantages(self, batch: dict[str, Any], num_generations: int) -> torch.Tensor | None:
        """Return the advantages of the completions of all processes, `(B,)`, from the rewards in `self._labels`, or
        `None` to use those that TRL computed."""
        return None

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        number = self.num_generations if self.model.training else self.num_generations_eval
        own = self.advantages(batch, number) if number > 1 else None
        if own is not None:
            first = self.accelerator.process_index * len(inputs)
            batch["advantages"] = own[first : first + len(inputs)]
            self._log_advantages(own.tolist())
        return batch


class MaxRLTrainer(GRPOTrainer):
    """[`GRPOTrainer`] with the advantages of MaxRL (https://huggingface.co/papers/2602.02710), `(R - mean) / mean`;
    rewards must be at least 0. `args` is a [`MaxRLConfig`]."""

    _config_class = MaxRLConfig
    _name = "MaxRL"
    _tag_names = ["trl", "maxrl"]
    _paper = {"title": "Maximum Likelihood Reinforcement Learning", "id": "2602.02710"}

    def advantages(self, batch, num_generations):
        if (self._labels < 0).any():
            raise ValueError(
                f"MaxRL divides by the mean reward of a group, but a reward is {self._labels.nan_to_num().min():g}. "
                "Rescale the reward functions to at least 0, or use method grpo."
            )
        return maxrl_advantages(self._labels, num_generations=num_generations)


class RLOOTrainer(GRPOTrainer):
    """
    [`~trl.RLOOTrainer`] on the exact update, with the same arguments and those of [`~trl.GRPOTrainer`]. `args` is an
    [`RLOOConfig`].
    """

    _config_class = RLOOConfig
    _name = "RLOO"
    _tag_names = ["trl", "rloo"]
    _paper = trl.RLOOTrainer._paper

    def create_objective(self) -> RatioObjective:
        args = self.args
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        return RatioObjective(surrogate.RatioLoss("rloo", "completion", 1 - args.epsilon, 1 + high))

    @property
    def _corrects(self) -> bool:
        return self.args.vllm_importance_sampling_correction

    def advantages(self, batch, num_generations):
        rewards = self._labels
        if self.args.reward_clip_range is not None:
            rewards = rewards.clamp(*self.args.reward_clip_range)
        if self.beta != 0:
            rewards = rewards - self.beta * self._sequence_kl(unpad_rollouts(batch))
        kinds = {"num_generations": num_generations, "normalize": self.args.normalize_advantages}
        return rloo_advantages(rewards, **kinds)

    @torch.no_grad()
    def _sequence_kl(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Return the summed log-ratios of policy and reference in nats, of all processes, `(B,)`."""
        prompts, completions = [each.prompt_ids for each in rollouts], [each.completion_ids for each in rollouts]
        rows = prompts, completions, self.args.per_device_train_batch_size
        with self.timer.part("log_probs"):
            functions = self.forward_pass.compute_logps, self._compute_kl_ref_logps
            both = [logps_in_batches(partial(each, self.model_wrapped), *rows) for each in functions]
        masks = [torch.from_numpy(rollout.loss_mask) for rollout in rollouts]  # tokens that the policy generated
        log_ratios = [(policy - reference)[mask].sum() for policy, reference, mask in zip(*both, masks, strict=True)]
        kl = self.accelerator.gather(torch.stack(log_ratios).to(self.accelerator.device))
        num_tokens = self.accelerator.reduce(torch.stack([mask.sum() for mask in masks]).sum()).item()
        self.record_metrics({"kl": kl.sum().item() / max(num_tokens, 1)})
        return kl


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

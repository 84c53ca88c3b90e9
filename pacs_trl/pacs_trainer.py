"""PACSTrainer: the PACS objective with exact optimizer steps, and metrics of its implicit critic."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from . import objective
from .errors import UserError
from .pacs_config import PACSConfig
from .rollouts.checkpoint import load_policy_copy, save_policy_copy
from .rollouts.exact_trainer import ExactUpdateTrainer
from .update.group_loss_update import GroupObjective
from .update.groups import Groups
from .update.minibatch import Minibatch
from .update.reference import SnapshotReference


# For |psi| above this, sigmoid(psi) * (1 - sigmoid(psi)) is below 0.7 %: the completion has almost no gradient.
SATURATED_SCORE = 5.0


@dataclass(frozen=True)
class PACSObjective(GroupObjective):
    """PACS objective for [`GroupLossUpdate`]: the settings of `objective.py`, the weights of the actor term
    (`actor_term_coef`) and the KL term (`kl_coef`), and the `reference` of proxies that have one."""

    pacs_beta: float = 1.0
    proxy: objective.Proxy = "log_ratio"
    score_estimator: objective.ScoreEstimator = "rloo"
    class_weighting: objective.ClassWeighting = "balanced"
    actor_term_coef: float = 0.0
    kl_coef: float = 0.0
    reference: str = "rollout"

    @property
    def proxy_reference(self) -> str | None:
        return None if self.proxy == "mean_logp" else self.reference

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return objective.sequence_proxies(logps.detach(), ref_logps, mask, pacs_beta=self.pacs_beta, proxy=self.proxy)

    def proxy_derivatives(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the derivative of each proxy with respect to the log-prob of one of its `num_tokens` counted tokens,
        `(B,)`."""
        derivatives = torch.full(num_tokens.shape, self.pacs_beta)
        if self.proxy == "log_ratio":
            return derivatives
        return derivatives / num_tokens.clamp(min=1)

    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        loss_derivatives = groups.apply(
            objective.proxy_coefficients,
            proxies,
            score_estimator=self.score_estimator,
            class_weighting=self.class_weighting,
        )
        coefficients = self.proxy_derivatives(num_tokens) * loss_derivatives
        if self.actor_term_coef == 0:
            return coefficients
        scores = groups.apply(objective.group_scores, proxies, score_estimator=self.score_estimator)
        actor_coefficients = groups.apply(objective.actor_coefficients, scores, class_weighting=self.class_weighting)
        return coefficients + self.actor_term_coef * actor_coefficients

    def loss(self, groups: Groups, proxies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss without the KL term, a scalar, and the scores psi, `(B,)`."""
        return groups.apply(
            objective.loss_from_proxies,
            proxies,
            score_estimator=self.score_estimator,
            class_weighting=self.class_weighting,
        )

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        loss, scores = self.loss(groups, proxies)
        return loss.item(), critic_metrics(proxies, scores, groups, class_weighting=self.class_weighting)


@torch.no_grad()
def critic_metrics(
    proxies: torch.Tensor, scores: torch.Tensor, groups: Groups, *, class_weighting: str = "balanced"
) -> dict[str, float]:
    """
    Return the metrics `pacs/*` of one optimizer step over all processes; docs/metrics.md has formulas and healthy
    ranges.

    Args:
        proxies, scores (`torch.Tensor` of shape `(B,)`): See [`objective.pacs_loss`].
        groups ([`Groups`]): Labels and groups of these completions.
        class_weighting (`str`): See [`objective.class_weights`]; determines the targets of the critic metrics.

    Returns:
        `dict[str, float]`: Metrics. Undefined ones are NaN: all of them if no completion is scorable, and accuracy and
        Brier score if all proxies are 0 or no group is mixed.
    """
    scorable = groups.scorable
    _, targets = groups.apply(objective.class_weights, class_weighting=class_weighting)
    probabilities = torch.sigmoid(scores)
    # With proxies of 0, as on the first update, no score predicts anything; in uniform groups there is nothing to tell
    # apart.
    any_proxy_is_nonzero = (proxies[scorable] != 0).any()
    has_prediction = groups.expand(groups.mixed) & scorable & any_proxy_is_nonzero

    def mean(values: torch.Tensor, where: torch.Tensor) -> float:
        return values[where].float().mean().item() if where.any() else math.nan

    return {
        "pacs/score_mean": mean(scores, scorable),
        "pacs/score_std": scores[scorable].std().item() if scorable.sum() > 1 else math.nan,
        "pacs/proxy_abs_mean": mean(proxies.abs(), scorable),
        "pacs/residual_abs_mean": mean((probabilities - targets).abs(), scorable),
        "pacs/label_mean": mean(groups.labels, scorable),
        "pacs/critic_accuracy": mean((probabilities > 0.5) == (targets > 0.5), has_prediction),
        "pacs/critic_brier": mean((probabilities - targets) ** 2, has_prediction),
        "pacs/uniform_group_fraction": mean(~groups.mixed, groups.has_scorable),
        "pacs/saturated_score_fraction": mean(scores.abs() > SATURATED_SCORE, scorable),
        "pacs/unscorable_fraction": 1.0 - scorable.float().mean().item(),
    }


class PACSTrainer(ExactUpdateTrainer):
    """
    Trainer for PACS (imPlicit Actor Critic coupling via a Supervised learning framework), introduced in [Implicit
    Actor Critic Coupling via a Supervised Learning Framework for RLVR](https://huggingface.co/papers/2509.02522).

    The verifier's reward is the label, a score computed from the log-probs of the policy is the logit, and the loss is
    binary cross-entropy. Takes the arguments of [`~trl.GRPOTrainer`]; rewards must lie in [0, 1].

    Example:

    ```python
    from datasets import load_dataset
    from pacs_trl import PACSTrainer
    from pacs_trl.rewards import math_reward

    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")  # columns "prompt" and "solution"
    trainer = PACSTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=math_reward, train_dataset=dataset)
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Model id, path, or instance.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): As in [`~trl.GRPOTrainer`]. The weighted sum over reward
            functions is the label and must lie in [0, 1]; `None` means that there is no verdict.
        args ([`PACSConfig`], *optional*): Configuration of this trainer. If `None`, a default configuration is used.

    All other arguments are those of [`~trl.GRPOTrainer`].
    """

    _name = "PACS"
    _config_class = PACSConfig
    _paper = {
        "title": "Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR",
        "id": "2509.02522",
        "citation": (Path(__file__).parent / "templates" / "citation.bib").read_text().strip(),
    }

    args: PACSConfig
    divergence_metrics = ("pacs/proxy_abs_mean",)

    def create_objective(self) -> PACSObjective:
        args = self.args
        return PACSObjective(
            pacs_beta=args.pacs_beta,
            proxy=args.proxy,
            score_estimator=args.score_estimator,
            class_weighting=args.class_weighting,
            actor_term_coef=args.actor_term_coef,
            kl_coef=self.beta,
            reference=args.reference,
        )

    # Snapshot reference ---------------------------------------------------------------------------------------------

    def _set_up_update(self) -> None:
        resets_optimizer = self.args.reference == "snapshot" and self.args.reset_optimizer_on_reference_reset
        if resets_optimizer and self.is_deepspeed_enabled:
            raise UserError(
                "reset_optimizer_on_reference_reset=True is not supported with DeepSpeed, which keeps the optimizer's "
                "state in separate buffers. Use DDP or FSDP2, or set it to False."
            )
        super()._set_up_update()

    def _reset_run(self) -> None:
        super()._reset_run()
        self._snapshot: SnapshotReference | None = None

    def policy_is_reference(self) -> bool:
        if self.args.reference == "rollout":
            return super().policy_is_reference()
        # The snapshot is taken before the first update.
        return self.update.objective.proxy_reference == "snapshot" and self._snapshot is None

    def store_reference_logps(self, model, minibatch: Minibatch) -> None:
        if self.args.reference == "rollout":
            return
        with self.timer.part("log_probs"):
            if model.training:
                self._renew_snapshot(model)
            if self._snapshot is not None:  # an evaluation before the first update has none
                with self._snapshot.in_place_of_policy():
                    self.update.driver.store_logps(model, minibatch, "ref_logps")

    def _renew_snapshot(self, model) -> None:
        """Take the snapshot before the first update, and again every `reference_reset_steps`."""
        if self._snapshot is None:
            self._snapshot = SnapshotReference(model, offload=self.args.reference_offload)
        every, step = self.args.reference_reset_steps, self.state.global_step
        is_reset_step = every is not None and step > 0 and step % every == 0
        if is_reset_step:
            self._snapshot.renew()
            if self.args.reset_optimizer_on_reference_reset:
                assert self.optimizer is not None  # created before the first step
                self.optimizer.state.clear()

    def _save_run(self, directory: Path) -> None:
        super()._save_run(directory)
        if self._snapshot is not None:
            save_policy_copy(self, self._snapshot, directory)

    def _load_run(self, checkpoint: Path, state: dict) -> None:
        super()._load_run(checkpoint, state)
        if self.args.reference == "snapshot":
            self._snapshot = SnapshotReference(self.model_wrapped, offload=self.args.reference_offload)
            load_policy_copy(self, self._snapshot, checkpoint)

"""GRPO on the exact update: the ratio losses of `surrogate.py`, the base class of others, and the trainer from which
RLOO and MaxRL derive."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import surrogate
from ..errors import UserError
from ..rollouts.exact_trainer import ExactUpdateTrainer
from ..update.ratio_update import RatioObjective, RatioUpdate
from ..update.rollout import Rollout
from ..update.token_weights import HighEntropyTokens, Mismatch, TokenValues, TokenWeights, correction_weights
from .grpo_config import GRPOConfig


@dataclass(frozen=True)
class SurrogateObjective(RatioObjective):
    """
    A loss of `surrogate.py` with the advantages of the rollouts, for [`RatioUpdate`]. For other functions of the ratio
    there is [`RatioFunctionObjective`].

    Attributes:
        ratio_loss ([`RatioLoss`]): The loss and its settings.
        kl_coef (`float`), bias_correction (`bool`): Weight of the KL term, and TRL's `use_bias_correction_kl`.
        max_completion_length (`int`): Setting of the configuration.
        off_policy_threshold (`float`, *optional*): TRL's `off_policy_mask_threshold`.
        mismatch ([`Mismatch`], *optional*): Mismatch correction inside the weights of `"vespo"`.
        needs_all_completions (`bool`): Whether the ratio of a completion without a gradient may differ from 1, and a
            metric reads it.
    """

    ratio_loss: surrogate.RatioLoss
    kl_coef: float = 0.0
    bias_correction: bool = True
    max_completion_length: int = 1
    off_policy_threshold: float | None = None
    mismatch: Mismatch | None = None
    needs_all_completions: bool = False

    def coefficients_and_completion_scales(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        weighted_advantages = [rollout.advantage * rollout.weight for rollout in rollouts]
        advantages = torch.tensor(weighted_advantages, dtype=torch.float64)
        generation_tokens = [rollout.generation_share * max(rollout.generation_tokens, 1.0) for rollout in rollouts]
        completion_scales = surrogate.completion_scales(
            self.ratio_loss.loss_type,
            torch.tensor([int(rollout.loss_mask.sum()) for rollout in rollouts]),
            max_completion_length=self.max_completion_length,
            generation_tokens=torch.tensor(generation_tokens, dtype=torch.float64),
        )
        dtype = torch.get_default_dtype()
        return (-advantages * completion_scales).to(dtype), completion_scales.to(dtype)

    def token_terms(self, tokens: TokenValues, token_factors: Sequence[torch.Tensor]) -> surrogate.RatioTerms:
        # `-coefficient` is `advantage * scale`. Scales are positive, and only the signs of advantages are read.
        scaled_advantages = -tokens.coefficients[:, 0]
        combined_weights = math.prod(token_factors, start=torch.ones_like(tokens.logps))
        if self.off_policy_threshold is not None:
            is_kept = self._off_policy_mask(tokens, scaled_advantages, self.off_policy_threshold)
            combined_weights = combined_weights * is_kept
        return surrogate.ratio_terms(
            tokens.logps,
            tokens.old_logps,
            scaled_advantages,
            tokens.mask,
            self.ratio_loss,
            token_weights=combined_weights,
            log_correction=None if self.mismatch is None else self._log_correction(tokens, self.mismatch),
            function=self._ratio_function,
        )

    @property
    def _ratio_function(self) -> surrogate.RatioFunction | None:
        """The function that is used instead of that of `ratio_loss.loss_type`; `None` if there is none."""
        return None

    def _off_policy_mask(self, tokens: TokenValues, scaled_advantages: torch.Tensor, threshold: float) -> torch.Tensor:
        """Return which completions are kept, as in TRL. Without an engine that reports log-probs the policy at rollout
        time is compared; a completion for which such an engine reports none is kept."""
        assert tokens.has_sampling_logps is not None
        sampling_logps = torch.where(tokens.has_sampling_logps, tokens.sampling_logps, tokens.old_logps)
        return surrogate.off_policy_mask(tokens.logps, sampling_logps, scaled_advantages, tokens.mask, threshold)

    def _log_correction(self, tokens: TokenValues, mismatch: Mismatch) -> torch.Tensor:
        """Return the log of the mismatch correction of each completion, `(B, 1)`."""
        weights = correction_weights(tokens.old_logps, tokens.sampling_logps, tokens.mask, mismatch)
        log_weights = weights.log().clamp(math.log(1e-8), 20.0)
        if mismatch.mode.startswith("token_"):
            return log_weights.masked_fill(~tokens.mask, 0.0).sum(dim=1, keepdim=True)
        return log_weights[:, :1]

    def kl(self, logps, ref_logps, old_logps, mask):
        if not self.bias_correction:
            return surrogate.kl_terms(logps, ref_logps, mask)
        level = self.ratio_loss.importance_sampling_level
        log_weights = surrogate.log_importance_weights(logps - old_logps, mask, level)
        return surrogate.kl_terms(logps, ref_logps, mask, log_weights)

    def token_metrics(
        self, num_tokens: torch.Tensor, low_fraction: torch.Tensor, high_fraction: torch.Tensor, phi: torch.Tensor
    ) -> dict[str, float]:
        if self.ratio_loss.loss_type == "sapo":
            return {}
        if self.ratio_loss.loss_type == "vespo":
            return {"vespo/phi_seq_mean": phi.mean().item()}
        num_ratios = num_tokens
        if self.ratio_loss.importance_sampling_level != "token":
            num_ratios = torch.ones_like(num_tokens)
        total = max(int(num_ratios.sum()), 1)
        low_mean = (low_fraction * num_ratios).sum().item() / total
        high_mean = (high_fraction * num_ratios).sum().item() / total
        if self.ratio_loss.loss_type == "cispo":
            return {"cispo_clip_ratio": high_mean}
        has_tokens = num_tokens > 0
        low_min, high_max = math.nan, math.nan
        if has_tokens.any():
            low_min = low_fraction[has_tokens].min().item()
            high_max = high_fraction[has_tokens].max().item()
        return {
            "clip_ratio/low_mean": low_mean,
            "clip_ratio/high_mean": high_mean,
            "clip_ratio/region_mean": low_mean + high_mean,
            "clip_ratio/low_min": low_min,
            "clip_ratio/high_max": high_max,
        }


@dataclass(frozen=True)  # also where a subclass is no dataclass, its settings are checked
class RatioFunctionObjective(SurrogateObjective):
    """
    Base class of losses with another function of the ratio. A subclass overrides [`f`], and autograd differentiates
    it. Of `ratio_loss`, `loss_type` is the normalization, and `importance_sampling_level` says whether a ratio is that
    of a token or of a completion. KL term, token weights, and the off-policy mask are those of [`SurrogateObjective`].

    Raises a `ValueError` for settings of GRPO's function of the ratio that [`f`] does not read, unless they have their
    default value. `settings_of_f` names those of `epsilon`, `epsilon_high`, and `delta` that a subclass reads.
    """

    settings_of_f: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        loss = self.ratio_loss
        default = surrogate.RatioLoss()
        if loss.loss_type in ("sapo", "cispo", "vespo"):
            raise UserError(
                f"loss_type={loss.loss_type!r} names another function of the ratio than {type(self).__name__}, "
                "which reads only the normalization from it. Set loss_type to 'dapo', 'grpo', 'bnpo', 'dr_grpo', or "
                "'luspo'."
            )
        epsilon, epsilon_high = 1 - loss.lower_bound, loss.upper_bound - 1
        is_set = {
            "epsilon": loss.lower_bound != default.lower_bound,
            "epsilon_high": not math.isclose(epsilon, epsilon_high),  # its default is epsilon
            "delta": loss.delta is not None,
        }
        ignored = [name for name in is_set if is_set[name] and name not in self.settings_of_f]
        if ignored:
            raise UserError(
                f"{' and '.join(ignored)} would be ignored: {type(self).__name__} has another function of the ratio "
                "than GRPO. Remove the keys, or, if `f` reads them, name them in its attribute `settings_of_f`."
            )

    @abstractmethod
    def f(self, ratio: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        """
        Return `f(rho)`. The loss is `-sum_i A_i * scale_i * sum_t f(rho_it)`; `f` of GRPO is `min(rho, 1 + epsilon)`
        for a positive advantage, and `max(rho, 1 - epsilon)` for a negative one.

        Args:
            ratio (shape `(B, T)`, or `(B, 1)` for ratios of completions): Probability ratios `pi / pi_old`; 1 for
                tokens that are not counted.
            sign (shape `(B, 1)`): Signs of the advantages: 1, 0, or -1.

        Returns:
            Values of the shape of `ratio`, each computed from its ratio alone, and differentiable in it.
        """

    def f_and_derivative(self, ratio: torch.Tensor, sign: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [`f`] and its derivative with respect to log rho, `rho * f'(rho)`, both of the shape of `ratio`. A
        subclass may override it to state the derivative."""
        return surrogate.with_derivative(self.f, ratio, sign)

    @property
    def _ratio_function(self) -> surrogate.RatioFunction:
        return self.f_and_derivative

    def token_metrics(
        self, num_tokens: torch.Tensor, low_fraction: torch.Tensor, high_fraction: torch.Tensor, phi: torch.Tensor
    ) -> dict[str, float]:
        return {}  # the bounds of GRPO are not those of `f`


class GRPOTrainer(ExactUpdateTrainer):
    """
    [`~trl.GRPOTrainer`] on the exact update, with the same arguments. It trains the same weights several times faster
    (docs/objectives.md). `args` is a [`GRPOConfig`].
    """

    args: GRPOConfig
    _config_class: type = GRPOConfig
    update_class = RatioUpdate
    live_attributes = ("beta", "epsilon_low", "epsilon_high")
    _saved_attributes = (*ExactUpdateTrainer._saved_attributes, "epsilon_low", "epsilon_high")

    def create_objective(self) -> SurrogateObjective:
        args = self.args
        lower_bound, upper_bound = 1 - self.epsilon_low, 1 + self.epsilon_high
        if args.loss_type == "cispo":  # its bound is a cap, not a distance from 1
            lower_bound, upper_bound = -math.inf, self.epsilon_high
        is_vespo = args.loss_type == "vespo"
        mismatch = self._mismatch if is_vespo and self.corrects_mismatch else None
        # In the first update of its own rollouts a policy has ratios of 1.
        has_later_updates = (
            args.num_iterations > 1
            or args.steps_per_generation > args.gradient_accumulation_steps
            or self.is_sliced  # steps take completions as they come
        )
        ratios_differ_from_1 = has_later_updates or args.is_asynchronous or mismatch is not None
        return SurrogateObjective(
            surrogate.RatioLoss(
                args.loss_type,
                args.importance_sampling_level,
                lower_bound,
                upper_bound,
                delta=args.delta,
                sapo_temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
                vespo_k=(args.vespo_k_pos, args.vespo_k_neg),
                vespo_lambda=(args.vespo_lambda_pos, args.vespo_lambda_neg),
            ),
            kl_coef=self.beta,
            bias_correction=args.use_bias_correction_kl,
            max_completion_length=args.max_completion_length or 1,  # read by dr_grpo alone
            off_policy_threshold=args.off_policy_mask_threshold,
            mismatch=mismatch,
            needs_all_completions=is_vespo and ratios_differ_from_1,
        )

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the mismatch with the engine is corrected."""
        return self.use_vllm and self.args.vllm_importance_sampling_correction

    def token_weights(self) -> list[TokenWeights]:
        token_weights: list[TokenWeights] = []
        if self.corrects_mismatch and self.args.loss_type != "vespo":
            token_weights += super().token_weights()
        if self.args.top_entropy_quantile < 1:
            token_weights.append(HighEntropyTokens(self.args.top_entropy_quantile))
        return token_weights

    def advantages(self, batch: dict[str, Any], num_generations: int) -> torch.Tensor | None:
        """Return the advantages of the completions of all processes, `(B,)`, from the rewards in `self._labels`, or
        `None` to use those that TRL computed. An evaluation may have `num_generations=1`."""
        return None

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        advantages = self.advantages(batch, num_generations)
        if advantages is not None:
            first = self.first_row(len(inputs))
            batch["advantages"] = advantages[first : first + len(inputs)]
            self._log_advantages(advantages.tolist())
        return batch

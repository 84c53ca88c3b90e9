"""Update of probability-ratio losses (GRPO, RLOO, MaxRL): the coefficients follow from the rewards alone.

    L = sum_i c_i * sum_t f(rho_it),        c_i = -advantage_i * scale_i,        rho_it = pi(o_it) / pi_old(o_it)

Because the coefficients are known when a generation batch arrives, completions with coefficient 0 are never scheduled.
The weight of a token, the derivative of `f` in log pi, is computed in the forward pass of its micro-batch
(`surrogate.ratio_terms`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..surrogate import RatioTerms, kl_terms
from .driver import MicroBatchResults, PassResults, StepResult
from .microbatching import Schedule
from .minibatch import Minibatch, UpdateTiming, scheduled_completions
from .policy_update import PolicyUpdate
from .rollout import Rollout
from .router_loss import ExpertLoads
from .token_weights import MismatchValues, TokenValues


class RatioObjective(ABC):
    """
    A loss of probability ratios, for [`RatioUpdate`].

    Attributes:
        kl_coef (`float`): Weight of the KL term, which is normalized like the loss.
        needs_all_completions (`bool`): Whether metrics need a forward pass of completions without a gradient too.
    """

    kl_coef: float = 0.0
    needs_all_completions: bool = False

    @abstractmethod
    def coefficients_and_completion_scales(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the coefficients of the completions of a minibatch, `-advantage * scale`, and the scales, which the
        summed losses and KL terms of their tokens are multiplied by; both `(B,)`."""

    @abstractmethod
    def token_terms(self, tokens: TokenValues, token_factors: Sequence[torch.Tensor]) -> RatioTerms:
        """Return the terms of a micro-batch; `token_factors` are the results of [`TokenWeights`], `(B, T)` each, which
        the losses of the tokens are multiplied by."""

    def token_metrics(
        self, num_tokens: torch.Tensor, low_fraction: torch.Tensor, high_fraction: torch.Tensor, phi: torch.Tensor
    ) -> dict[str, float]:
        """Return metrics from the number of counted tokens of the completions, and `low_fraction`, `high_fraction`,
        and `phi` of [`RatioTerms`], all `(B,)`."""
        return {}

    def kl(self, logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor):
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        return kl_terms(logps, ref_logps, mask)


@dataclass
class RatioMinibatch(Minibatch):
    """[`Minibatch`] with the `coefficients` and `completion_scales` of a [`RatioObjective`], both `(B,)`."""

    coefficients: torch.Tensor
    completion_scales: torch.Tensor


class RatioUpdate(PolicyUpdate[RatioMinibatch]):
    """[`PolicyUpdate`] with a [`RatioObjective`]."""

    objective: RatioObjective

    @property
    def logps_of_generating_policy(self) -> tuple[str, ...]:
        return ("old_logps",)

    def schedule_minibatch(self, rollouts: list[Rollout]) -> RatioMinibatch:
        coefficients, completion_scales = self.objective.coefficients_and_completion_scales(rollouts)
        takes_part = self._takes_part(rollouts)
        needs_all = self.all_have_gradient or self.objective.needs_all_completions or self.shapes_coefficients
        if not needs_all:
            takes_part &= coefficients != 0
        return self._schedule_minibatch(rollouts, takes_part, coefficients, completion_scales)

    def schedule_evaluation(self, rollouts: list[Rollout]) -> RatioMinibatch:
        coefficients, completion_scales = self.objective.coefficients_and_completion_scales(rollouts)
        takes_part = self._takes_part(rollouts)
        with self.driver.holding_longest(rollouts):
            return self._schedule_minibatch(rollouts, takes_part, coefficients, completion_scales)

    def _takes_part(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Return which completions can have a gradient: those with a counted token, and with a loss of the routers
        all, bool `(B,)`."""
        return torch.tensor([self.has_router_loss or rollout.num_counted > 0 for rollout in rollouts])

    def _schedule_minibatch(
        self,
        rollouts: list[Rollout],
        takes_part: torch.Tensor,
        coefficients: torch.Tensor,
        completion_scales: torch.Tensor,
    ) -> RatioMinibatch:
        minibatch = self.driver.schedule_minibatch(rollouts, takes_part, ignores_groups=True)
        return RatioMinibatch(**vars(minibatch), coefficients=coefficients, completion_scales=completion_scales)

    def run(self, model, minibatch: RatioMinibatch, timing: UpdateTiming) -> StepResult:
        """Back-propagate the loss of an optimizer step. The rollouts need `old_logps`, except on the first update on a
        rollout without a lag."""
        with self.driver.forward_pass.attention():
            # 1. The completions with a gradient.
            coefficients, shaping_metrics = self.shape_coefficients(model, minibatch, minibatch.coefficients)
            schedule = minibatch.schedule
            if self.shapes_coefficients:
                schedule = self.driver.schedule_with_gradient(
                    minibatch,
                    coefficients,
                    all_have_gradient=self.all_have_gradient,
                    keeps_processes=timing.old_logps_are_stored or not timing.is_first_update,
                    had_forward_pass=False,
                )

            # 2. What the token weights and the loss of the routers need of the whole minibatch.
            self._prepare_token_weights(model, minibatch)
            if self.reads_completion_values:
                measured = self._measure_completion_values(model, minibatch, schedule, timing)
                self._begin_token_weights(minibatch, coefficients, measured)
            loads = self._measure_expert_loads(model, minibatch)

            # 3. The entropy of the completions without a forward pass, before the backward passes, between which FSDP
            # keeps weights gathered.
            skipped_entropy_sum = self._skipped_entropy(model, minibatch, schedule, timing)

            # 4. The gradient.
            results, measured_mismatch = self._run_passes(model, minibatch, schedule, coefficients, timing, loads)

        # 5. Loss and metrics.
        result = self._with_router_loss(self._summarize(minibatch, schedule, results, skipped_entropy_sum), loads)
        metrics = shaping_metrics | result.metrics | self._mismatch_metrics(measured_mismatch)
        return result._replace(metrics=metrics | self._token_weight_metrics())

    @torch.no_grad()
    def evaluate(self, model, minibatch: RatioMinibatch, *, policy_is_reference: bool) -> StepResult:
        """Compute loss and metrics as in [`run`]. Ratios are 1, because the weights are those that generated, and
        `policy_is_reference` is not read, because there are no proxies."""
        timing = UpdateTiming(is_first_update=True)
        schedule, coefficients = minibatch.schedule, minibatch.coefficients
        self._prepare_token_weights(model, minibatch)
        if self.reads_completion_values:
            measured = self._measure_completion_values(model, minibatch, schedule, timing)
            self._begin_token_weights(minibatch, coefficients, measured)
        loads = self._measure_expert_loads(model, minibatch)
        results, measured_mismatch = self._run_passes(model, minibatch, schedule, coefficients, timing, loads)
        result = self._with_router_loss(self._summarize(minibatch, schedule, results, skipped_entropy_sum=0.0), loads)
        return result._replace(metrics=result.metrics | self._mismatch_metrics(measured_mismatch))

    @torch.no_grad()
    def _measure_completion_values(
        self, model, minibatch: RatioMinibatch, schedule: Schedule, timing: UpdateTiming
    ) -> PassResults:
        """Compute the values that token weights need of the whole minibatch."""
        results = MicroBatchResults(self._completion_value_names, minibatch, self.driver.accelerator)
        for micro_batch in self.driver.micro_batches(minibatch, schedule):
            logps, entropies = self.driver.compute_logps(model, micro_batch).padded()
            no_coefficients = logps.new_zeros(len(logps), 1)
            tokens = self._token_values(micro_batch, logps, entropies, no_coefficients, timing)
            results.add(micro_batch, entropies, self._completion_values(tokens))
        return results.reduce()

    def _run_passes(
        self,
        model,
        minibatch: RatioMinibatch,
        schedule: Schedule,
        coefficients: torch.Tensor,
        timing: UpdateTiming,
        loads: ExpertLoads | None,
    ) -> tuple[PassResults, list[MismatchValues]]:
        """Run the forward passes of a schedule, and back-propagate `sum_i c_i * sum_t w_it * log pi(o_it)`, the KL
        term, the entropy bonus, and the loss of the routers, unless gradients are disabled. Returns the results of the
        forward passes, and the mismatch of each micro-batch."""
        names = ["surrogate_sums", "low_fraction", "high_fraction", "phi", "kl"]
        results = MicroBatchResults(names, minibatch, self.driver.accelerator)
        num_bonus_tokens = self._num_bonus_tokens(minibatch)
        measures_mismatch = timing.is_first_update and minibatch.has_sampling_logps
        measured_mismatch: list[MismatchValues] = []
        for micro_batch in self.driver.micro_batches_for_backward(model, minibatch, schedule):
            logps, entropies = self.driver.compute_logps(model, micro_batch).padded()
            router_sums = self.driver.forward_pass.router_sums  # before a pass of the KL reference
            if micro_batch.indices:
                completion_coefficients = coefficients[micro_batch.indices]
                completion_scales = minibatch.completion_scales[micro_batch.indices]
            else:  # a filler
                completion_coefficients = completion_scales = torch.zeros(1)
            completion_coefficients = completion_coefficients.to(logps.device)[:, None]
            completion_scales = completion_scales.to(logps.device)[:, None]
            if measures_mismatch:
                measured_mismatch.append(self._measure_mismatch(logps, micro_batch))

            tokens = self._token_values(micro_batch, logps, entropies, completion_coefficients, timing)
            token_factors = [weights(tokens) for weights in self.token_weights]
            kl = self._kl_terms(model, logps, micro_batch, tokens.old_logps)
            terms = self.objective.token_terms(tokens, token_factors)
            weighted_logps = (logps * terms.logp_weights).masked_fill(~micro_batch.loss_mask, 0.0)
            policy_loss = (completion_coefficients * weighted_logps).sum()
            kl_loss = self.objective.kl_coef * (completion_scales * kl).sum()
            bonus_entropy_sum = self._bonus_entropy(entropies, micro_batch.loss_mask, token_factors)
            entropy_loss = self._entropy_loss(bonus_entropy_sum, num_bonus_tokens)
            router_loss = self._router_loss(loads, router_sums, micro_batch)
            self.driver.backward(policy_loss + kl_loss + entropy_loss + router_loss)
            values = {
                "surrogate_sums": terms.surrogate_sums,
                "low_fraction": terms.low_fraction,
                "high_fraction": terms.high_fraction,
                "phi": terms.phi,
                "kl": kl.sum(dim=1),
            }
            results.add(micro_batch, entropies, values, kl.sum(), bonus_entropy_sum)
        return results.reduce(), measured_mismatch

    def _summarize(
        self, minibatch: RatioMinibatch, schedule: Schedule, results: PassResults, skipped_entropy_sum: float
    ) -> StepResult:
        """Return the loss of an optimizer step and its metrics. `skipped_entropy_sum` is that of the counted tokens of
        the completions without a forward pass."""
        policy_loss = (minibatch.coefficients * results.values["surrogate_sums"]).sum()
        kl_loss = self.objective.kl_coef * (minibatch.completion_scales * results.values["kl"]).sum()
        num_tokens = torch.tensor([rollout.num_counted for rollout in minibatch.rollouts])
        metrics = {
            "entropy": (results.entropy_sum + skipped_entropy_sum) / max(minibatch.num_tokens, 1),
            "update/forwarded_fraction": results.num_completions / max(len(minibatch.rollouts), 1),
        }
        # The weights of completions without a forward pass are 1, or the objective needs all completions.
        has_forward_pass = torch.zeros(len(minibatch.rollouts), dtype=torch.bool)
        has_forward_pass[list(scheduled_completions(schedule))] = True
        phi = results.values["phi"].masked_fill(~has_forward_pass, 1.0)
        metrics |= self.objective.token_metrics(
            num_tokens, results.values["low_fraction"], results.values["high_fraction"], phi
        )
        if self.objective.kl_coef != 0:
            metrics["kl"] = results.kl_sum / max(minibatch.num_tokens, 1)
        loss = (policy_loss + kl_loss).item()
        return self._with_entropy_bonus(loss, metrics, results.bonus_entropy_sum, self._num_bonus_tokens(minibatch))

    def _skipped_entropy(self, model, minibatch: RatioMinibatch, schedule: Schedule, timing: UpdateTiming) -> float:
        """Return the summed entropy in nats of the counted tokens in completions that `schedule` skips, estimated by
        the engine's log-probs, or by the mean over a sample with an extra forward pass."""
        skipped = self._skipped(minibatch, schedule)
        if not skipped:
            return 0.0
        estimate = self._estimated_entropy(minibatch, skipped, timing)
        if estimate is not None:
            return estimate
        sample = self.driver.sample_of_skipped(minibatch, schedule, skipped)
        sampled_entropy = self.driver.entropy_of(model, minibatch, sample)
        num_skipped_tokens = sum(minibatch.rollouts[i].num_counted for i in skipped)
        num_sampled_tokens = sum(minibatch.rollouts[i].num_counted for i in sample)
        return sampled_entropy * num_skipped_tokens / num_sampled_tokens

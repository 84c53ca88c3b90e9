"""Base of both kinds of update: token weights, the KL term, the entropy bonus, the mismatch with the engine, and the
entropy metric.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it)

Every objective is a coefficient `c_i` per completion, which may depend on its whole group, and a weight `w_it` per
token, which depends on detached values of that token only. Both are known before the backward pass of a completion, so
the gradient does not depend on which micro-batch or process computes it.

- [`GroupLossUpdate`] (PACS, REAL, DisCO): the coefficients follow from the proxies of the group, which follow from the
  log-probs of whole completions.
- [`RatioUpdate`] (GRPO, RLOO, MaxRL): the coefficients follow from the rewards alone, and the token weights from
  probability ratios.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .driver import PassResults, StepResult, UpdateDriver
from .forward_pass import CompletionLogps
from .microbatching import Schedule
from .minibatch import MicroBatch, Minibatch, UpdateTiming, collate, scheduled_completions
from .rollout import Rollout
from .router_loss import ExpertLoads, RouterSums
from .token_weights import Mismatch, MismatchValues, TokenValues, TokenWeights, mismatch_metrics, mismatch_ratios


MinibatchT = TypeVar("MinibatchT", bound=Minibatch)


class PolicyUpdate(ABC, Generic[MinibatchT]):
    """
    Computes and back-propagates the loss of one optimizer step.

    Args:
        driver ([`UpdateDriver`]): Micro-batches and their passes.
        objective: The objective, a [`GroupObjective`] or a [`RatioObjective`].
        mismatch ([`Mismatch`]): Settings for the mismatch between the engine's and the trainer's log-probs.
        token_weights (`list[TokenWeights]`): Weights of each token in the gradient.
        samples_policy (`bool`): Whether completions are sampled from the full trained distribution, without top-k,
            top-p, or similar truncation.
        compute_kl_ref_logps (`Callable`, *optional*): [`ForwardPass.compute_logps`] under the reference of the KL.
        has_router_loss (`bool`): Whether the loss has that of the routers of a mixture of experts, to which all
            completions contribute. It takes one more forward pass, for the loads of the experts.
        has_entropy_bonus (`bool`): Whether the loss has an entropy bonus. Every completion then has a forward and a
            backward pass, also in steps whose coefficient is 0, because adaptive control reads all entropies.

    Attributes:
        entropy_coef, router_coef (`float`): Coefficients of the entropy bonus and of the loss of the routers, which
            may differ between optimizer steps.
    """

    # Whether `shape_coefficients` needs the coefficients of the whole minibatch before the first backward pass.
    shapes_coefficients = False
    # Whether the loss of a group with one completion is undefined.
    needs_several_completions = False

    def __init__(
        self,
        driver: UpdateDriver,
        objective,
        mismatch: Mismatch,
        token_weights: list[TokenWeights] | None = None,
        samples_policy: bool = True,
        compute_kl_ref_logps: Callable[..., CompletionLogps] | None = None,
        has_entropy_bonus: bool = False,
        has_router_loss: bool = False,
    ):
        self.driver = driver
        self.objective = objective
        self.mismatch = mismatch
        self.token_weights = token_weights or []
        self.samples_policy = samples_policy
        self.compute_kl_ref_logps = compute_kl_ref_logps
        self.has_entropy_bonus = has_entropy_bonus
        self.has_router_loss = has_router_loss
        self.entropy_coef = 0.0
        self.router_coef = 0.0

    @property
    def all_have_gradient(self) -> bool:
        """Whether every completion with a counted token has a gradient, whatever its coefficient."""
        return self.objective.kl_coef != 0 or self.has_entropy_bonus or self.has_router_loss

    # One optimizer step ---------------------------------------------------------------------------------------------

    @abstractmethod
    def schedule_minibatch(self, rollouts: list[Rollout]) -> MinibatchT:
        """Return the completions of an optimizer step, with the micro-batches of their forward passes."""

    @abstractmethod
    def run(self, model, minibatch: MinibatchT, timing: UpdateTiming) -> StepResult:
        """Back-propagate the loss of an optimizer step. `model` is the wrapped model, in training mode."""

    def schedule_evaluation(self, rollouts: list[Rollout]) -> MinibatchT:
        """Return the completions of an evaluation batch, a whole generation batch, with their micro-batches, which
        hold the longest completion with its prompt, whatever the limit of training."""
        with self.driver.holding_longest(rollouts):
            return self.schedule_minibatch(rollouts)

    @abstractmethod
    def evaluate(self, model, minibatch: MinibatchT, *, policy_is_reference: bool) -> StepResult:
        """Compute loss and metrics as in [`run`], without gradient. `policy_is_reference` is whether the weights are
        those of the reference of the proxies."""

    @property
    @abstractmethod
    def logps_of_generating_policy(self) -> tuple[str, ...]:
        """Names of the log-probs that the objective reads of the policy that generated: `ref_logps`, `old_logps`."""

    def logps_for_later_updates(self, *, is_late: bool) -> tuple[str, ...]:
        """Return the names of the values that later updates on a rollout read, and that must be stored before the
        policy changes; [`UpdateTiming`] has a table. If an earlier policy generated (`is_late`), its log-probs are
        stored with the rollouts already."""
        names = () if is_late else self.logps_of_generating_policy
        # `old_logps` of an earlier policy, whose entropies are not known
        has_earlier_logps = is_late and "old_logps" in self.logps_of_generating_policy
        if not self.token_weights or has_earlier_logps:
            return names
        # Token weights compare with the policy before the updates, also where the objective does not.
        return tuple(dict.fromkeys([*names, "old_logps", "old_entropies"]))

    # Extension point ------------------------------------------------------------------------------------------------

    def shape_coefficients(
        self, model, minibatch: Minibatch, coefficients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return modified coefficients of a minibatch, and metrics. Completions whose shaped coefficients are 0 are
        skipped, the others are trained on. Requires `shapes_coefficients`."""
        return coefficients, {}

    # Token weights --------------------------------------------------------------------------------------------------

    # They `prepare` before all passes of an optimizer step, and `begin` before its first backward pass.

    @property
    def reads_completion_values(self) -> bool:
        """Whether a token weight needs a value of every completion before the first backward pass."""
        return any(weights.num_values > 0 for weights in self.token_weights)

    def _prepare_token_weights(self, model, minibatch: Minibatch) -> None:
        for weights in self.token_weights:
            weights.prepare(self.driver, model, minibatch)

    def _names_of_values(self, number: int) -> list[str]:
        """Return the names of the results of [`TokenWeights.completion_values`] of the token weights `number`."""
        return [f"{number}/{i}" for i in range(self.token_weights[number].num_values)]

    @property
    def _completion_value_names(self) -> list[str]:
        """Names of the results of [`TokenWeights.completion_values`] of all token weights."""
        return [name for number in range(len(self.token_weights)) for name in self._names_of_values(number)]

    def _completion_values(self, tokens: TokenValues) -> dict[str, torch.Tensor]:
        """Return the values of the completions of a micro-batch by name, `(B,)` each."""
        values = [value for weights in self.token_weights for value in weights.completion_values(tokens)]
        return dict(zip(self._completion_value_names, values, strict=True))

    def _begin_token_weights(self, minibatch: Minibatch, coefficients: torch.Tensor, results: PassResults) -> None:
        """Give token weights their values of the whole minibatch."""
        is_counted = torch.tensor([rollout.num_counted > 0 for rollout in minibatch.rollouts])
        for number, weights in enumerate(self.token_weights):
            values = torch.zeros(0, len(coefficients))
            if weights.num_values > 0:
                values = torch.stack([results.values[name] for name in self._names_of_values(number)])
            weights.begin(coefficients, values, is_counted, minibatch.num_scorable)

    def _token_values(
        self,
        micro_batch: MicroBatch,
        logps: torch.Tensor,
        entropies: torch.Tensor,
        coefficients: torch.Tensor,
        timing: UpdateTiming,
    ) -> TokenValues:
        """Return what token weights and ratio losses read of a micro-batch, `(B, T)`. On the first update, the policy
        at rollout time is the current one, unless an earlier policy generated."""
        old_logps, old_entropies = micro_batch.old_logps, micro_batch.old_entropies
        if timing.is_first_update:
            old_entropies = entropies
            if not timing.old_logps_are_stored:
                old_logps = logps
        return TokenValues(
            logps=logps.detach(),
            old_logps=old_logps.detach(),
            sampling_logps=micro_batch.sampling_logps,
            entropies=entropies.detach(),
            old_entropies=old_entropies.detach(),
            coefficients=coefficients.detach(),
            mask=micro_batch.loss_mask,
            has_sampling_logps=micro_batch.has_sampling_logps,
        )

    def _token_weight_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for weights in self.token_weights:
            metrics |= weights.metrics(self.driver.accelerator)
        return metrics

    # KL term --------------------------------------------------------------------------------------------------------

    def _kl_terms(self, model, logps: torch.Tensor, micro_batch: MicroBatch, old_logps: torch.Tensor) -> torch.Tensor:
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        if self.objective.kl_coef == 0 or self.compute_kl_ref_logps is None:
            return torch.zeros_like(logps)
        with torch.no_grad():
            outputs = self.driver.compute_logps(model, micro_batch, self.compute_kl_ref_logps)
            kl_ref_logps = pad_sequence(outputs.logps, batch_first=True)
        return self.objective.kl(logps, kl_ref_logps, old_logps, micro_batch.loss_mask)

    # Entropy bonus --------------------------------------------------------------------------------------------------

    # L = L_policy - entropy_coef * (mean entropy of the tokens of the optimizer step)

    def _bonus_entropy(
        self, entropies: torch.Tensor, mask: torch.Tensor, token_factors: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the summed entropy of the tokens of a micro-batch that the entropy bonus counts, differentiable:
        counted ones that the token weights select. `token_factors` are the results of the token weights, `(B, T)`
        each."""
        for weights, factors in zip(self.token_weights, token_factors, strict=True):
            if weights.num_selected is not None:  # 1 for selected tokens, 0 for others
                entropies = entropies * factors
        return entropies.masked_fill(~mask, 0.0).sum()

    def _entropy_loss(self, bonus_entropy_sum: torch.Tensor, num_bonus_tokens: int) -> torch.Tensor | float:
        """Return the share of a micro-batch in the loss of the entropy bonus, differentiable."""
        if not self.entropy_coef:
            return 0.0
        return -self.entropy_coef * bonus_entropy_sum / num_bonus_tokens

    def _num_bonus_tokens(self, minibatch: Minibatch) -> int:
        """Return the number of tokens of a minibatch that the entropy bonus counts, at least 1."""
        numbers = [weights.num_selected for weights in self.token_weights if weights.num_selected is not None]
        return max(min(numbers, default=minibatch.num_tokens), 1)

    def _with_entropy_bonus(
        self, policy_loss: float, metrics: dict[str, float], bonus_entropy_sum: float, num_bonus_tokens: int
    ) -> StepResult:
        """Return the result of an optimizer step or an evaluation from its loss without the entropy bonus, and from
        the summed entropy and the number of the tokens that the bonus counts."""
        if not self.has_entropy_bonus:
            return StepResult(policy_loss, metrics)
        mean_entropy = bonus_entropy_sum / num_bonus_tokens
        loss = policy_loss - self.entropy_coef * mean_entropy
        return StepResult(loss, metrics | {"policy_loss": policy_loss}, mean_entropy)

    # Routers of a mixture of experts ---------------------------------------------------------------------------------

    def _measure_expert_loads(self, model, minibatch: Minibatch) -> ExpertLoads | None:
        return self.driver.measure_expert_loads(model, minibatch) if self.has_router_loss else None

    def _router_loss(
        self, loads: ExpertLoads | None, router_sums: RouterSums | None, micro_batch: MicroBatch
    ) -> torch.Tensor | float:
        """Return the share of a micro-batch in the loss of the routers, differentiable."""
        if loads is None or router_sums is None or not micro_batch.indices:
            return 0.0
        return self.router_coef * loads.share_of(router_sums)

    def _with_router_loss(self, result: StepResult, loads: ExpertLoads | None) -> StepResult:
        if loads is None:
            return result
        metrics = result.metrics | {"aux_loss": loads.loss}
        return result._replace(loss=result.loss + self.router_coef * loads.loss, metrics=metrics)

    # Mismatch between engine and trainer ----------------------------------------------------------------------------

    def _measure_mismatch(self, logps: torch.Tensor, micro_batch: MicroBatch) -> MismatchValues:
        return mismatch_ratios(logps, micro_batch.sampling_logps, micro_batch.loss_mask, self.mismatch)

    def _mismatch_metrics(self, measured: list[MismatchValues]) -> dict[str, float]:
        """Return the metrics of the mismatch over all processes, of which `measured` has the values of each
        micro-batch of this process."""
        if not measured:
            return {}
        differences = torch.cat([values.differences for values in measured])
        ratios = torch.cat([values.ratios for values in measured])
        return mismatch_metrics(self._gather(differences), self._gather(ratios))

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all processes, `(N,)`, of which each may have another number."""
        accelerator = self.driver.accelerator
        lengths = accelerator.gather(torch.tensor([len(values)], device=values.device)).tolist()
        padded = accelerator.gather(accelerator.pad_across_processes(values))
        parts = padded.view(len(lengths), max(lengths))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def stored_mismatch_metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return the metrics of the mismatch of the rollouts that have `old_logps`, which all processes must have
        stored; empty without log-probs of the engine."""
        measured: list[MismatchValues] = []
        for i, rollout in enumerate(rollouts):
            if rollout.old_logps is not None and rollout.sampling_logps is not None:
                micro_batch = collate(rollouts, [i], torch.device("cpu"))
                measured.append(self._measure_mismatch(micro_batch.old_logps, micro_batch))
        if not measured:
            return {}
        differences = torch.cat([values.differences for values in measured])
        ratios = torch.cat([values.ratios for values in measured])
        return mismatch_metrics(differences, ratios)

    # Entropy of completions without a forward pass -------------------------------------------------------------------

    def _skipped(self, minibatch: Minibatch, schedule: Schedule) -> list[int]:
        """Return the completions with counted tokens that `schedule` skips."""
        scheduled = scheduled_completions(schedule)
        return [i for i in minibatch.counted if i not in scheduled]

    def _estimated_entropy(self, minibatch: Minibatch, indices: list[int], timing: UpdateTiming) -> float | None:
        """Estimate the summed entropy in nats of some completions by the engine's `-log p` of their sampled tokens.
        Returns `None` after the first update on a rollout, and where the engine reported no log-probs of the full
        distribution."""
        if not timing.is_first_update or not self.samples_policy:
            return None
        counted_logps: list[np.ndarray] = []
        for rollout in [minibatch.rollouts[i] for i in indices]:
            if rollout.sampling_logps is None:
                return None
            counted_logps.append(rollout.sampling_logps[rollout.loss_mask])
        all_logps = np.concatenate(counted_logps)
        if not np.isfinite(all_logps).all():
            return None
        return -float(all_logps.sum(dtype=np.float64))

"""Update of group losses (PACS, REAL, DisCO): the coefficients follow from the proxies of a group.

The loss couples the completions of a prompt, but its gradient is `sum_i c_i * sum_t w_it * grad log pi(o_it)`, and the
coefficients `c_i` depend on log-probs only through the proxies (`objective.proxy_coefficients`). The proxies of a
minibatch come from one of three sources:

- They are exactly 0 on the first update after a rollout, if the reference is the policy at rollout time. No forward
  pass is needed, and completions of uniform groups, whose coefficients are 0, are skipped.
- `"whole"` layout: micro-batches hold whole groups, so the forward pass of a micro-batch yields all its coefficients.
- `"split"` layout: one forward pass without gradient over all completions, then one with gradient over the completions
  with a nonzero coefficient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..objective import Proxy, sequence_proxies
from ..surrogate import kl_terms
from .driver import MicroBatchResults, PassResults, StepResult
from .groups import Groups
from .microbatching import Schedule
from .minibatch import MicroBatch, Minibatch, UpdateTiming
from .policy_update import PolicyUpdate
from .rollout import Rollout
from .router_loss import ExpertLoads
from .token_weights import MismatchValues


class GroupObjective(ABC):
    """
    A loss on the proxies of a group, for [`GroupLossUpdate`].

    Attributes:
        kl_coef (`float`): Weight of the KL term, a mean over the tokens of the minibatch.
    """

    kl_coef: float = 0.0

    @property
    def proxy_reference(self) -> str | None:
        """Policy whose log-probs `ref_logps` the proxies read: `"rollout"`, the policy at rollout time, `"snapshot"`,
        an earlier policy, whose log-probs the trainer stores before each update, or `None`."""
        return None

    @abstractmethod
    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the proxy of each completion, `(B,)` without gradient, from tensors `(B, T)`. Coefficients depend on
        log-probs only through the proxies."""

    @abstractmethod
    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the loss of some groups with respect to the log-prob of one counted token of each
        completion, `(B,)`; it is the same for all counted tokens of a completion. `proxies` and `num_tokens` (counted
        tokens) have shape `(B,)`."""

    @abstractmethod
    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss without the KL term, and the metrics of the objective."""

    def size(self, groups: Groups) -> int:
        """Return the divisor of the loss of some groups."""
        return int(groups.scorable.sum())

    def kl(self, logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor):
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        return kl_terms(logps, ref_logps, mask)


@dataclass(frozen=True)
class AutogradObjective(GroupObjective):
    """
    A loss whose coefficients autograd computes, for [`GroupLossUpdate`].

    Attributes:
        function (`Callable`): The loss, `function(proxies, labels, num_generations=..., **settings)`: a scalar from
            the proxies and labels of some groups of equal size, both `(P * G,)`, with NaN as the label of a completion
            without a verdict. A sum over groups with a gradient, divided by the number of groups with scorable
            completions.
        proxy (`str`): Kind of proxy, see [`sequence_proxies`]: `"log_ratio"`, `"mean_log_ratio"`, or `"mean_logp"`.
        settings (`Mapping`): Keyword arguments of `function`.
        kl_coef (`float`): Weight of the KL term.
    """

    function: Callable[..., torch.Tensor]
    proxy: Proxy
    settings: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0

    @property
    def proxy_reference(self) -> str | None:
        return None if self.proxy == "mean_logp" else "rollout"

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sequence_proxies(logps.detach(), ref_logps, mask, proxy=self.proxy)

    def loss(self, groups: Groups, proxies: torch.Tensor) -> torch.Tensor:
        return groups.apply(self.function, proxies, **self.settings)

    @torch.enable_grad()
    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        proxies = proxies.detach().requires_grad_()
        (derivatives,) = torch.autograd.grad(self.loss(groups, proxies), proxies)
        return derivatives / (1 if self.proxy == "log_ratio" else num_tokens.clamp(min=1))

    def size(self, groups: Groups) -> int:
        return int(groups.has_scorable.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        is_uniform = ~groups.mixed[groups.has_scorable]
        metrics = {
            "labels/uniform_group_fraction": is_uniform.float().mean().item(),
            "labels/mean": groups.labels[groups.scorable].float().mean().item(),
        }
        return self.loss(groups, proxies).item(), metrics


class GroupLossUpdate(PolicyUpdate[Minibatch]):
    """[`PolicyUpdate`] with a [`GroupObjective`]."""

    objective: GroupObjective
    needs_several_completions = True

    @property
    def logps_of_generating_policy(self) -> tuple[str, ...]:
        return ("ref_logps",) if self.objective.proxy_reference == "rollout" else ()

    # Extension points -----------------------------------------------------------------------------------------------

    def proxies(self, logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the proxies of the completions of a micro-batch, `(B,)`, from their log-probs `(B, T)` in nats."""
        return self.objective.proxies(logps, micro_batch.ref_logps, micro_batch.loss_mask)

    def counted_tokens(self, rollout: Rollout) -> int:
        """Return the number of tokens that the proxy of a completion sums over."""
        return rollout.num_counted

    def coefficients(self, minibatch: Minibatch, indices: list[int], proxies: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of the completions `indices`, which must form whole groups, for the loss averaged
        over the whole minibatch. `proxies` are those of `indices`."""
        groups = minibatch.groups.take(indices)
        share = self.objective.size(groups) / max(self.objective.size(minibatch.groups), 1)
        num_tokens = torch.tensor([self.counted_tokens(minibatch.rollouts[i]) for i in indices])
        completion_weights = torch.tensor([minibatch.rollouts[i].weight for i in indices])
        return self.objective.coefficients(groups, proxies, num_tokens) * share * completion_weights

    def token_coefficients(self, micro_batch: MicroBatch, coefficients: torch.Tensor) -> torch.Tensor:
        """Expand the coefficients of the completions of a micro-batch, `(B,)`, to tokens, `(B, T)` or `(B, 1)`."""
        return coefficients[:, None]

    def summarize(self, minibatch: Minibatch, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss of the minibatch without the KL term, and the metrics of the objective."""
        return self.objective.summarize(minibatch.groups, proxies)

    # One optimizer step ---------------------------------------------------------------------------------------------

    def schedule_minibatch(self, rollouts: list[Rollout]) -> Minibatch:
        if self.objective.proxy_reference is None:
            # The mean log-prob of no token would be 0, that of the most probable completion.
            rollouts = [r if r.num_counted > 0 else replace(r, label=math.nan) for r in rollouts]
        if not self.all_have_gradient and not self.shapes_coefficients:
            return self.driver.schedule_minibatch(rollouts)
        # KL term and entropy bonus include completions without a label, and shaped coefficients may be theirs.
        takes_part = torch.tensor([self.has_router_loss or len(rollout.completion_ids) > 0 for rollout in rollouts])
        return self.driver.schedule_minibatch(rollouts, takes_part)

    def run(self, model, minibatch: Minibatch, timing: UpdateTiming) -> StepResult:
        """Back-propagate the loss of an optimizer step. The rollouts need `ref_logps`, unless the proxies are zero or
        the objective has no reference."""
        with self.driver.forward_pass.attention():
            self._prepare_token_weights(model, minibatch)

            # 1. The proxies of the whole minibatch, unless micro-batches of whole groups yield them one by one.
            needs_all_proxies = self.reads_completion_values or self.shapes_coefficients or not minibatch.whole_groups
            all_proxies: torch.Tensor | None = None
            proxy_pass: PassResults | None = None  # the forward pass without gradient that computes them
            if timing.proxies_are_zero:
                all_proxies = torch.zeros(minibatch.num_proxies)
            elif needs_all_proxies:
                proxy_pass = self._compute_proxies(model, minibatch, minibatch.schedule, timing)
                all_proxies = proxy_pass.values["proxies"]

            # 2. Their coefficients, and the micro-batches of the completions with a gradient.
            coefficients: torch.Tensor | None = None
            shaping_metrics: dict[str, float] = {}
            schedule = minibatch.schedule
            if all_proxies is not None:
                all_indices = list(range(len(minibatch.rollouts)))
                coefficients = self.coefficients(minibatch, all_indices, all_proxies)
                coefficients, shaping_metrics = self.shape_coefficients(model, minibatch, coefficients)
                schedule = self.driver.schedule_with_gradient(
                    minibatch,
                    coefficients,
                    all_have_gradient=self.all_have_gradient,
                    keeps_processes=bool(self.token_weights) and not timing.is_first_update,
                    had_forward_pass=proxy_pass is not None,
                )

            # 3. What the token weights need of the whole minibatch.
            if self.reads_completion_values:
                assert coefficients is not None  # `needs_all_proxies`, or all proxies are 0
                measured = proxy_pass
                if measured is None:  # the proxies are 0, and no forward pass was run
                    measured = self._compute_proxies(model, minibatch, schedule, timing)
                self._begin_token_weights(minibatch, coefficients, measured)

            # 4. The entropy of the completions without a forward pass, before the backward passes, between which FSDP
            # keeps weights gathered.
            forwarded_schedule = schedule if proxy_pass is None else minibatch.schedule
            skipped_entropy_sum = self._skipped_entropy(model, minibatch, forwarded_schedule, timing)

            # 5. The gradient.
            loads = self._measure_expert_loads(model, minibatch)
            results, measured_mismatch = self._back_propagate(model, minibatch, schedule, coefficients, timing, loads)

        # 6. Loss and metrics.
        proxies = results.values["proxies"] if all_proxies is None else all_proxies
        entropy_pass = results if proxy_pass is None else proxy_pass
        entropy_sum = entropy_pass.entropy_sum + skipped_entropy_sum
        result = self._summarize(minibatch, results, proxies, entropy_sum, self._num_bonus_tokens(minibatch))
        result = self._with_router_loss(result, loads)
        metrics = shaping_metrics | result.metrics | self._mismatch_metrics(measured_mismatch)
        return result._replace(metrics=metrics | self._token_weight_metrics())

    def evaluate(self, model, minibatch: Minibatch, *, policy_is_reference: bool) -> StepResult:
        """Compute loss and metrics as in [`run`], without gradient and token weights: the entropy bonus counts all
        tokens."""
        timing = UpdateTiming(is_first_update=False, proxies_are_zero=policy_is_reference)
        results = self._run_evaluation_passes(model, minibatch)
        proxies = results.values["proxies"]
        if policy_is_reference:
            proxies = torch.zeros_like(proxies)
        skipped_entropy_sum = self._skipped_entropy(model, minibatch, minibatch.schedule, timing)
        entropy_sum = results.entropy_sum + skipped_entropy_sum
        num_bonus_tokens = max(minibatch.num_tokens, 1)
        result = self._summarize(minibatch, results, proxies, entropy_sum, num_bonus_tokens)
        return self._with_router_loss(result, self._measure_expert_loads(model, minibatch))

    @torch.no_grad()
    def _compute_proxies(self, model, minibatch: Minibatch, schedule: Schedule, timing: UpdateTiming) -> PassResults:
        """Compute the proxies of the completions of a schedule, and the values that token weights need of them."""
        names = ["proxies", *self._completion_value_names]
        results = MicroBatchResults(names, minibatch, self.driver.accelerator)
        for micro_batch in self.driver.micro_batches(minibatch, schedule):
            logps, entropies = self.driver.compute_logps(model, micro_batch).padded()
            no_coefficients = logps.new_zeros(len(logps), 1)
            tokens = self._token_values(micro_batch, logps, entropies, no_coefficients, timing)
            values = {"proxies": self.proxies(logps, micro_batch)} | self._completion_values(tokens)
            results.add(micro_batch, entropies, values)
        return results.reduce()

    @torch.no_grad()
    def _run_evaluation_passes(self, model, minibatch: Minibatch) -> PassResults:
        """Compute the proxies, KL terms, and entropies of an evaluation, whose entropy bonus counts all tokens."""
        results = MicroBatchResults(["proxies"], minibatch, self.driver.accelerator)
        for micro_batch in self.driver.micro_batches(minibatch, minibatch.schedule):
            logps, entropies = self.driver.compute_logps(model, micro_batch).padded()
            proxies = self.proxies(logps, micro_batch)
            kl = self._kl_terms(model, logps, micro_batch, old_logps=logps)
            bonus_entropy_sum = entropies.masked_fill(~micro_batch.loss_mask, 0.0).sum()
            results.add(micro_batch, entropies, {"proxies": proxies}, kl.sum(), bonus_entropy_sum)
        return results.reduce()

    def _back_propagate(
        self,
        model,
        minibatch: Minibatch,
        schedule: Schedule,
        coefficients: torch.Tensor | None,
        timing: UpdateTiming,
        loads: ExpertLoads | None,
    ) -> tuple[PassResults, list[MismatchValues]]:
        """Back-propagate `sum_i c_i * sum_t w_it * log pi(o_it)`, the KL term, the entropy bonus, and the loss of the
        routers. If `coefficients` is `None`, micro-batches must hold whole groups. Returns the results of the forward
        passes, and the mismatch of each micro-batch."""
        results = MicroBatchResults(["proxies"], minibatch, self.driver.accelerator)
        num_tokens = max(minibatch.num_tokens, 1)
        num_bonus_tokens = self._num_bonus_tokens(minibatch)
        measures_mismatch = timing.is_first_update and minibatch.has_sampling_logps
        measured_mismatch: list[MismatchValues] = []
        for micro_batch in self.driver.micro_batches_for_backward(model, minibatch, schedule):
            logps, entropies = self.driver.compute_logps(model, micro_batch).padded()
            router_sums = self.driver.forward_pass.router_sums  # before a pass of the KL reference
            proxies = self.proxies(logps, micro_batch)
            completion_coefficients = self._coefficients_of(micro_batch, minibatch, coefficients, proxies)
            token_coefficients = self.token_coefficients(micro_batch, completion_coefficients.to(logps.device))
            if measures_mismatch:
                measured_mismatch.append(self._measure_mismatch(logps, micro_batch))

            tokens = self._token_values(micro_batch, logps, entropies, token_coefficients, timing)
            token_factors = [weights(tokens) for weights in self.token_weights]
            weighted_logps = logps
            for factors in token_factors:
                weighted_logps = weighted_logps * factors
            kl = self._kl_terms(model, logps, micro_batch, tokens.old_logps)
            policy_loss = (token_coefficients * weighted_logps.masked_fill(~micro_batch.loss_mask, 0.0)).sum()
            kl_sum = kl.sum()
            kl_loss = self.objective.kl_coef * kl_sum / num_tokens
            bonus_entropy_sum = self._bonus_entropy(entropies, micro_batch.loss_mask, token_factors)
            entropy_loss = self._entropy_loss(bonus_entropy_sum, num_bonus_tokens)
            router_loss = self._router_loss(loads, router_sums, micro_batch)
            self.driver.backward(policy_loss + kl_loss + entropy_loss + router_loss)
            results.add(micro_batch, entropies, {"proxies": proxies}, kl_sum, bonus_entropy_sum)
        return results.reduce(), measured_mismatch

    def _coefficients_of(
        self,
        micro_batch: MicroBatch,
        minibatch: Minibatch,
        coefficients: torch.Tensor | None,
        proxies: torch.Tensor,
    ) -> torch.Tensor:
        """Return the coefficients of a micro-batch from those of the minibatch, if they are known, or else from the
        proxies of the micro-batch."""
        if not micro_batch.indices:  # a filler
            return torch.zeros(1)
        if coefficients is not None:
            return coefficients[minibatch.proxy_indices(micro_batch.indices)]
        return self.coefficients(minibatch, micro_batch.indices, proxies.cpu())

    def _skipped_entropy(self, model, minibatch: Minibatch, schedule: Schedule, timing: UpdateTiming) -> float:
        """Return the summed entropy in nats of the counted tokens in completions that `schedule` skips, estimated by
        the engine's log-probs or computed by an extra forward pass."""
        skipped = self._skipped(minibatch, schedule)
        if not skipped:
            return 0.0
        estimate = self._estimated_entropy(minibatch, skipped, timing)
        return self.driver.entropy_of(model, minibatch, skipped) if estimate is None else estimate

    def _summarize(
        self,
        minibatch: Minibatch,
        results: PassResults,
        proxies: torch.Tensor,
        entropy_sum: float,
        num_bonus_tokens: int,
    ) -> StepResult:
        """Return the loss and the metrics of a minibatch from its proxies, its summed entropy, and the number of
        tokens that the entropy bonus counts."""
        loss, metrics = self.summarize(minibatch, proxies)
        num_tokens = minibatch.num_tokens
        metrics["entropy"] = entropy_sum / max(num_tokens, 1)
        metrics["update/forwarded_fraction"] = results.num_completions / max(len(minibatch.rollouts), 1)
        if self.objective.kl_coef != 0:
            metrics["kl"] = results.kl_sum / max(num_tokens, 1)
            loss += self.objective.kl_coef * metrics["kl"]
        return self._with_entropy_bonus(loss, metrics, results.bonus_entropy_sum, num_bonus_tokens)

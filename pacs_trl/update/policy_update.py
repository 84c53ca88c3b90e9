"""The gradient of one optimizer step, exact at any composition of its micro-batches.

The PACS loss couples the completions of a prompt, but its gradient is `sum_i c_i * grad r_i` with coefficients `c_i`
that depend only on the values of the proxies `r` (`objective.proxy_coefficients`). So first the proxies of the whole
optimizer step are found, then the coefficients, and then `sum_i c_i * r_i` is back-propagated in whatever
micro-batches are cheapest. The proxies are found in one of three ways:

- They are exactly 0 on the first update after a rollout, if the reference is the policy at rollout time. No forward
  pass is needed to know them, and rows of one-class groups have coefficient 0 and are left out.
- `"whole"` layout: micro-batches hold whole groups, so the forward pass of a micro-batch yields all its coefficients.
- `"split"` layout: a forward pass without gradient over all rows, then one with gradient over the rows that count.

Dividing: coefficients are divided by the number of scorable rows of the whole optimizer step, over all micro-batches
and processes. Losses of processes are averaged by DDP, FSDP and DeepSpeed, hence the factor `num_processes`; nothing
is divided by the number of accumulation steps.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.utils.rnn import pad_sequence

from ..objective import (
    ClassWeighting,
    Proxy,
    ScoreEstimator,
    actor_coefficients,
    group_scores,
    loss_from_proxies,
    proxy_coefficients,
    sequence_proxies,
)
from .forwarded import Collector, Forwarded
from .groups import Groups
from .metrics import critic_metrics
from .microbatching import Schedule
from .rows import Rollout
from .sampling_correction import Mismatch, merge_statistics, mismatch_metrics, mismatch_statistics
from .scorer import Scorer, Scores
from .step import FILLER, Limits, MicroBatch, StepRollouts, collate, schedule_rows, schedule_step
from .token_weights import TokenValues, TokenWeights


class Objective(NamedTuple):
    """The numbers of the objective: those of `objective.py`, and the weights of the actor term, of the KL term
    (`beta`)."""

    pacs_beta: float = 1.0
    proxy: Proxy = "log_ratio"
    score_estimator: ScoreEstimator = "rloo"
    class_weighting: ClassWeighting = "balanced"
    actor_term_coef: float = 0.0
    kl_coef: float = 0.0

    def loss(self, groups: Groups, proxies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss without the KL term, and scores."""
        kinds = {"score_estimator": self.score_estimator, "class_weighting": self.class_weighting}
        return groups.apply(loss_from_proxies, proxies, **kinds)

    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Derivatives of the loss with respect to the log-probability of any counted token of each row, float32
        `(B,)`, from the proxies of the rows and the numbers of their counted tokens, both `(B,)`."""
        score, weighting = {"score_estimator": self.score_estimator}, {"class_weighting": self.class_weighting}
        found = self.slopes(num_tokens) * groups.apply(proxy_coefficients, proxies, **score, **weighting)
        if self.actor_term_coef:
            scores = groups.apply(group_scores, proxies, **score)
            actor = groups.apply(actor_coefficients, scores, **weighting)
            found = found + self.actor_term_coef * actor
        return found

    def slopes(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """Derivatives of proxies with respect to the log-probability of any of their `num_tokens` counted tokens."""
        slopes = torch.full(num_tokens.shape, self.pacs_beta)
        return slopes / num_tokens.clamp(min=1) if self.proxy == "mean_logp" else slopes


@dataclass(eq=False)
class PolicyUpdate:
    """
    Computes and back-propagates the loss of one optimizer step.

    Args:
        scorer ([`Scorer`]): Of the policy.
        accelerator ([`~accelerate.Accelerator`]): Runs the backward pass and reduces over processes.
        objective ([`Objective`]), limits ([`Limits`]): What is learnt, and what micro-batches may be like.
        mismatch ([`Mismatch`]): How the engine's probabilities are compared with the trainer's.
        token_weights (`list[TokenWeights]`): Factors on the gradient of each token.
        samples_policy (`bool`): Whether completions are drawn from the distribution that is scored, not a truncated
        one.
        score_kl_reference (`Callable`, *optional*): [`Scorer.score`] under the policy that the KL term refers to.
    """

    scorer: Scorer
    accelerator: Accelerator
    objective: Objective
    limits: Limits
    mismatch: Mismatch
    token_weights: list[TokenWeights] = field(default_factory=list)
    samples_policy: bool = True
    score_kl_reference: Callable[..., Scores] | None = None

    # Whether the coefficients of a whole step must be known before its first backward pass, for `shape_coefficients`.
    coefficients_first = False

    # Extension points ---------------------------------------------------------------------------------------------

    def shape_coefficients(
        self, model, step: StepRollouts, coefficients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return other coefficients for all rows of a step, and metrics; needs `coefficients_first`."""
        return coefficients, {}

    def token_coefficients(self, batch: MicroBatch, coefficients: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of the tokens of a micro-batch, `(B, T)` or `(B, 1)`, from those of its rows."""
        return coefficients[:, None]

    def counted_tokens(self, row: Rollout) -> int:
        """Return the number of tokens that the proxy of a row sums over."""
        return int(row.loss_mask.sum())

    def proxies(self, logps: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the proxies of the rows of a micro-batch, `(B,)`, from their log-probabilities."""
        kinds: dict = {"pacs_beta": self.objective.pacs_beta, "proxy": self.objective.proxy}
        return sequence_proxies(logps.detach(), batch.ref_logps, batch.loss_mask, **kinds)

    def coefficients(self, step: StepRollouts, rows: list[int], proxies: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of `rows`, which are whole groups with these proxies, in the mean over the whole
        step."""
        groups = step.groups.take(rows)
        share = groups.scorable.sum().item() / max(int(step.groups.scorable.sum()), 1)
        num_tokens = torch.tensor([self.counted_tokens(step.rollouts[i]) for i in rows])
        weights = torch.tensor([step.rollouts[i].weight for i in rows])
        return self.objective.coefficients(groups, proxies, num_tokens) * share * weights

    def summarize(self, step: StepRollouts, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss without the KL term, and the metrics of the objective."""
        loss, scores = self.objective.loss(step.groups, proxies)
        weighting = self.objective.class_weighting
        return loss.item(), critic_metrics(proxies, scores, step.groups, class_weighting=weighting)

    # Forward passes -----------------------------------------------------------------------------------------------

    def schedule(self, rollouts: list[Rollout]) -> StepRollouts:
        every_row = self.objective.kl_coef != 0  # the KL term is a mean over all tokens, whatever the verdict
        return schedule_step(rollouts, self._limits, every_row=every_row)

    @property
    def _limits(self) -> Limits:
        return self.limits._replace(padded=self.scorer.packing is None)

    def micro_batches(self, step: StepRollouts, schedule: Schedule) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this process's micro-batches: rows and what is known of them."""
        # Without any row there is still one forward and backward pass, of a filler: gradients must exist and be zero.
        for rows in schedule[self.accelerator.process_index] or [[]]:
            yield rows, collate([step.rollouts[i] for i in rows] or [FILLER], self.accelerator.device)

    def _score(self, score: Callable, model, batch: MicroBatch):
        return score(model, [row.prompt_ids for row in batch.rollouts], [row.completion_ids for row in batch.rollouts])

    @torch.no_grad()
    def fill_in(self, model, step: StepRollouts, *names: str) -> None:
        """Fill in `ref_logps`, `old_logps` or `old_entropies` of the rows this process learns from, with the weights
        `model` has now."""
        for rows, batch in self.micro_batches(step, step.schedule):
            scores = self._score(self.scorer.score, model, batch)
            for name in names:
                values = scores.entropies if name == "old_entropies" else scores.logps
                on_cpu = torch.cat(values).cpu().split(list(map(len, values)))  # one transfer
                for i, of_row in zip(rows, on_cpu, strict=False):
                    setattr(step.rollouts[i], name, of_row.numpy().copy())

    @torch.no_grad()
    def _forward(self, model, step: StepRollouts, schedule: Schedule) -> Forwarded:
        found = Collector(step.num_places, self.accelerator, sum(w.num_row_values for w in self.token_weights))
        for rows, batch in self.micro_batches(step, schedule):
            logps, entropies = self._score(self.scorer.score, model, batch).padded()
            tokens = self._token_values(step, batch, logps, entropies, logps.new_zeros(len(logps), 1))
            values = [value for weights in self.token_weights for value in weights.row_values(tokens)]
            found.add(step.places(rows), self.proxies(logps, batch), entropies, batch.loss_mask, row_values=values)
        return found.reduce()

    def left_out_entropy(self, model, step: StepRollouts, schedule: Schedule) -> float:
        """
        Sum of the entropies at the counted tokens of the rows that `schedule` leaves out, the same on all processes.

        On the first update after a rollout it is `-log p` of their sampled tokens where the engine has reported it,
        whose expectation is the entropy of the distribution it sampled from; else it takes one more forward pass.
        """
        forwarded = {i for batches in schedule for rows in batches for i in rows}
        left_out = [i for i, row in enumerate(step.rollouts) if i not in forwarded and row.loss_mask.any()]
        if left_out and step.on_policy and self.samples_policy:
            rows = [step.rollouts[i] for i in left_out]
            sampled = [row.sampling_logps[row.loss_mask] for row in rows if row.sampling_logps is not None]
            if len(sampled) == len(rows) and all(np.isfinite(logps).all() for logps in sampled):
                return -float(np.concatenate(sampled).sum(dtype=np.float64))
        return self._forward(model, step, self.schedule_rows(step, left_out)).entropy if left_out else 0.0

    # One optimizer step -------------------------------------------------------------------------------------------

    def run(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """
        Back-propagate the loss of an optimizer step.

        Args:
            model: The wrapped model, in training mode.
            step ([`StepRollouts`]): With `ref_logps` filled in, unless `proxies_are_zero` or the proxy has no
                reference.
            proxies_are_zero (`bool`): Whether policy and reference are the same, so that no forward pass is needed to
                know the proxies.

        Returns:
            Loss (mean over scorable rows, KL term included), the same on all processes, and metrics.
        """
        row_values_first = any(weights.num_row_values for weights in self.token_weights)
        with self.scorer.attention():
            before, coefficients, schedule = None, None, step.schedule
            if not proxies_are_zero and (row_values_first or self.coefficients_first or not step.whole_groups):
                before = self._forward(model, step, step.schedule)
            proxies = torch.zeros(step.num_places) if proxies_are_zero else before and before.proxies
            if proxies is not None:
                coefficients = self.coefficients(step, list(range(len(step.rollouts))), proxies)
                schedule = self._schedule_rows_that_count(step, coefficients, scored=before is not None)
            # Before the backward passes, between which FSDP keeps what it has gathered. A pass for the proxies went
            # over more rows.
            left_out = self.left_out_entropy(model, step, schedule if before is None else step.schedule)
            metrics: dict[str, float] = {}
            if coefficients is not None:
                coefficients, metrics = self.shape_coefficients(model, step, coefficients)
            if row_values_first:
                self._begin_weights(step, coefficients, before or self._forward(model, step, schedule))
            found, mismatch = self._back_propagate(model, step, schedule, coefficients)
        proxies = found.proxies if proxies is None else proxies
        loss, of_step = self._summarize(step, proxies, left_out + (before or found).entropy, found.num_rows)
        metrics |= of_step
        if mismatch:
            parts = self.accelerator.gather(merge_statistics(torch.stack(mismatch))[None])
            metrics |= mismatch_metrics(merge_statistics(parts))
        for weights in self.token_weights:
            metrics |= weights.metrics(self.accelerator, on_policy=step.on_policy)
        if self.objective.kl_coef != 0:
            metrics["kl"] = found.kl / max(step.num_tokens, 1)
            loss += self.objective.kl_coef * metrics["kl"]
        return loss, metrics

    def _begin_weights(self, step: StepRollouts, coefficients, found: Forwarded) -> None:
        counted = torch.tensor([bool(row.loss_mask.any()) for row in step.rollouts])
        num_rows, first = max(int(step.groups.scorable.sum()), 1), 0
        for weights in self.token_weights:
            last = first + weights.num_row_values
            weights.begin(coefficients, found.row_values[first:last], counted, num_rows)
            first = last

    def evaluate(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """Loss and metrics as in [`run`], without gradient and without the KL term."""
        found = self._forward(model, step, step.schedule)
        proxies = torch.zeros_like(found.proxies) if proxies_are_zero else found.proxies
        entropy = found.entropy + self.left_out_entropy(model, step, step.schedule)
        return self._summarize(step, proxies, entropy, found.num_rows)

    def _schedule_rows_that_count(self, step: StepRollouts, coefficients: torch.Tensor, *, scored: bool) -> Schedule:
        """Micro-batches of the rows with a gradient; `scored` is whether those of `step.schedule` were forwarded
        before."""
        scheduled = {i for batches in step.schedule for rows in batches for i in rows}
        # With a KL term every row has a gradient; otherwise rows with coefficient 0 have none.
        counting = [
            i for i in sorted(scheduled) if self.objective.kl_coef != 0 or coefficients[step.places([i])].any()
        ]
        # Log-probabilities under the policy that generated lie on the process that `step.schedule` gave the row to.
        rows_may_move = step.on_policy or not self.token_weights
        keeps = not rows_may_move or (scored and len(counting) == len(scheduled))
        return step.schedule if keeps else self.schedule_rows(step, counting)

    def schedule_rows(self, step: StepRollouts, rows: list[int]) -> Schedule:
        """Return micro-batches of some rows of a step."""
        return schedule_rows(step.rollouts, rows, self._limits)

    def _back_propagate(
        self,
        model,
        step: StepRollouts,
        schedule: Schedule,
        coefficients: torch.Tensor | None,
    ) -> tuple[Forwarded, list[torch.Tensor]]:
        """Back-propagate `sum_i c_i * sum_t w_it * log pi(o_it)` and the KL term; without `coefficients`,
        micro-batches hold whole groups. Returns what the forward passes found, and the statistics of the mismatch of
        each."""
        found, mismatch = Collector(step.num_places, self.accelerator), []
        compares = step.on_policy and any(row.sampling_logps is not None for row in step.rollouts)
        num_tokens, last = max(step.num_tokens, 1), max(len(schedule[self.accelerator.process_index]) - 1, 0)
        for k, (rows, batch) in enumerate(self.micro_batches(step, schedule)):
            with self._synchronize_gradients(model, last=k == last):
                logps, entropies = self._score(self.scorer.score, model, batch).padded()
                proxies = self.proxies(logps, batch)
                if not rows:
                    of_rows = torch.zeros(1)
                elif coefficients is not None:
                    of_rows = coefficients[step.places(rows)]
                else:
                    of_rows = self.coefficients(step, rows, proxies.cpu())
                of_tokens = self.token_coefficients(batch, of_rows.to(logps.device))
                if compares:
                    compared = logps, batch.sampling_logps, batch.loss_mask
                    mismatch.append(mismatch_statistics(*compared, **self.mismatch._asdict()))
                weighted, tokens = logps, self._token_values(step, batch, logps, entropies, of_tokens)
                for weights in self.token_weights:
                    weighted = weighted * weights(tokens)
                loss = (of_tokens * weighted.masked_fill(~batch.loss_mask, 0.0)).sum()
                kl = self._kl(model, logps, batch)
                loss = loss + self.objective.kl_coef * kl / num_tokens
                self._backward(loss * self.accelerator.num_processes)
                found.add(step.places(rows), proxies, entropies, batch.loss_mask, kl)
        return found.reduce(), mismatch

    def _token_values(self, step, batch: MicroBatch, logps, entropies, coefficients) -> TokenValues:
        old_logps, old_entropies = batch.old_logps, batch.old_entropies
        if step.on_policy:
            old_logps, old_entropies = logps, entropies
        values = logps, old_logps, batch.sampling_logps, entropies, old_entropies, coefficients, batch.loss_mask
        return TokenValues(*(value.detach() for value in values))

    def _kl(self, model, logps: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Sum over tokens of the k3 estimator of KL(policy || KL reference)."""
        if self.objective.kl_coef == 0 or self.score_kl_reference is None:
            return logps.new_zeros(())
        with torch.no_grad():
            reference = pad_sequence(self._score(self.score_kl_reference, model, batch).logps, batch_first=True)
        log_ratio = reference - logps
        return (torch.exp(log_ratio) - log_ratio - 1).masked_fill(~batch.loss_mask, 0.0).sum()

    def _summarize(self, step: StepRollouts, proxies, entropy: float, num_forwarded: float):
        """Return the loss without the KL term, and the metrics that every step has; `entropy` is summed over all
        counted tokens."""
        loss, metrics = self.summarize(step, proxies)
        of_step = {
            "entropy": entropy / step.num_tokens if step.num_tokens else math.nan,
            "pacs/forwarded_fraction": num_forwarded / max(len(step.rollouts), 1),
        }
        return loss, of_step | metrics

    @contextlib.contextmanager
    def _synchronize_gradients(self, model, *, last: bool):
        """Processes exchange gradients in the last backward pass only."""
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.gradient_state._set_sync_gradients(last)
        with contextlib.nullcontext() if last or deepspeed else self.accelerator.no_sync(model):
            yield

    def _backward(self, loss: torch.Tensor) -> None:
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

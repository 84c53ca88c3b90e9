"""The gradient of one optimizer step, exact for any composition of its micro-batches.

The loss couples the completions of a prompt, but its gradient is `sum_i c_i * sum_t w_it * grad log pi(o_it)`, and the
coefficients `c_i` depend only on the values of the proxies (`objective.proxy_coefficients`). The update therefore
computes the proxies of the whole optimizer step, then the coefficients, and then back-propagates the sum in the
cheapest micro-batches. The proxies come from one of three sources:

- They are exactly 0 on the first update after a rollout, if the reference is the policy at rollout time. No forward
  pass is needed, and completions of uniform groups, whose coefficients are 0, are skipped.
- `"whole"` layout: micro-batches hold whole groups, so the forward pass of a micro-batch yields all its coefficients.
- `"split"` layout: one forward pass without gradient over all completions, then one with gradient over the completions
  with a nonzero coefficient.

Loss normalization: coefficients are divided by the number of scorable completions of the whole optimizer step, over
all micro-batches and processes. DDP, FSDP and DeepSpeed average over processes, so each process multiplies its loss by
`num_processes`. Nothing is divided by the number of accumulation steps.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.utils.rnn import pad_sequence

from .forward_pass import CompletionLogps, ForwardPass
from .microbatching import MicroBatchConfig, Schedule, schedule_micro_batches
from .rollout import Rollout
from .step import FILLER, MicroBatch, Objective, StepRollouts, collate, rollout_lengths, schedule_step
from .token_weights import Mismatch, TokenValues, TokenWeights, mismatch_metrics, mismatch_ratios


class Forwarded:
    """Results of forward passes over some completions of an optimizer step; [`reduce`] sums them over processes, once,
    into `proxies` `(B,)` and `own_values` `(K, B)` (see [`TokenWeights`]) on the CPU, 0 for completions without a
    forward pass, and sums: `entropy` of counted tokens in nats, `num_completions`, and `kl` of counted tokens."""

    def __init__(self, num_proxies: int, accelerator: Accelerator, num_values: int = 0):
        self.accelerator = accelerator
        self.of_completions = torch.zeros(1 + num_values, num_proxies, device=accelerator.device)
        self.sums = torch.zeros(3, device=accelerator.device)  # entropy, num_completions, kl

    def add(self, indices: list[int], proxies, entropies, loss_mask, kl=None, own_values=()) -> None:
        if not indices:
            return
        of_completions = torch.stack([proxies.detach(), *own_values]).to(self.of_completions.dtype)
        self.of_completions[:, torch.tensor(indices, device=of_completions.device)] = of_completions
        entropy = entropies.detach().masked_fill(~loss_mask, 0.0).sum()
        kl = torch.zeros_like(entropy) if kl is None else kl.detach().to(entropy.dtype)
        self.sums += torch.stack([entropy, torch.full_like(entropy, len(loss_mask)), kl])

    def reduce(self) -> "Forwarded":
        values = self.accelerator.reduce(torch.cat([self.of_completions.flatten(), self.sums]), reduction="sum").cpu()
        of_completions = values[:-3].view(self.of_completions.shape)
        self.proxies, self.own_values = of_completions[0], of_completions[1:]
        self.entropy, self.num_completions, self.kl = values[-3:].tolist()
        return self


@dataclass(eq=False)
class PolicyUpdate:
    """
    Compute and back-propagate the loss of one optimizer step.

    Args:
        forward_pass ([`ForwardPass`]): Forward passes of the policy.
        accelerator ([`~accelerate.Accelerator`]): Runs the backward pass and reduces over processes.
        objective ([`Objective`]), limits ([`MicroBatchConfig`]): The loss, and the size limits of micro-batches.
        mismatch ([`Mismatch`]): Settings for the mismatch between the engine's and the trainer's log-probs.
        token_weights (`list[TokenWeights]`): Factors on the gradient of each token.
        samples_policy (`bool`): Whether completions are sampled from the full trained distribution, without top-k,
            top-p, or similar truncation.
        compute_kl_ref_logps (`Callable`, *optional*): [`ForwardPass.compute_logps`] under the reference of the KL.
    """

    forward_pass: ForwardPass
    accelerator: Accelerator
    objective: Objective
    limits: MicroBatchConfig
    mismatch: Mismatch
    token_weights: list[TokenWeights] = field(default_factory=list)
    samples_policy: bool = True
    compute_kl_ref_logps: Callable[..., CompletionLogps] | None = None

    # Whether `shape_coefficients` needs the coefficients of the whole step before the first backward pass.
    coefficients_first = False

    # Extension points -----------------------------------------------------------------------------------------------

    def shape_coefficients(
        self, model, step: StepRollouts, coefficients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return modified coefficients of an optimizer step, and metrics. Requires `coefficients_first`."""
        return coefficients, {}

    def token_coefficients(self, batch: MicroBatch, coefficients: torch.Tensor) -> torch.Tensor:
        """Expand the coefficients of the completions of a micro-batch, `(B,)`, to tokens, `(B, T)` or `(B, 1)`."""
        return coefficients[:, None]

    def counted_tokens(self, rollout: Rollout) -> int:
        """Return the number of tokens that the proxy of a completion sums over."""
        return int(rollout.loss_mask.sum())

    def proxies(self, logps: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the proxies of the completions of a micro-batch, `(B,)`, from their log-probs `(B, T)` in nats."""
        return self.objective.proxies(logps, batch.ref_logps, batch.loss_mask)

    def coefficients(self, step: StepRollouts, indices: list[int], proxies: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of the completions `indices`, which must form whole groups, for the loss averaged
        over the whole optimizer step. `proxies` are those of `indices`."""
        groups = step.groups.take(indices)
        share = self.objective.size(groups) / max(self.objective.size(step.groups), 1)
        num_tokens = torch.tensor([self.counted_tokens(step.rollouts[i]) for i in indices])
        weights = torch.tensor([step.rollouts[i].weight for i in indices])
        return self.objective.coefficients(groups, proxies, num_tokens) * share * weights

    def summarize(self, step: StepRollouts, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss of the optimizer step without the KL term, and the metrics of the objective."""
        return self.objective.summarize(step.groups, proxies)

    # Forward passes -------------------------------------------------------------------------------------------------

    def schedule(self, rollouts: list[Rollout], *, is_evaluation: bool = False) -> StepRollouts:
        known = self.objective.known_coefficients(rollouts, is_evaluation=is_evaluation)
        has_kl = self.objective.kl_coef != 0
        if known is None:
            # The KL term includes completions without a verdict.
            takes_part = torch.tensor([len(rollout.completion_ids) > 0 for rollout in rollouts]) if has_kl else None
            return schedule_step(rollouts, self._limits, takes_part)
        counted = torch.tensor([bool(rollout.loss_mask.any()) for rollout in rollouts])
        needs_all = has_kl or is_evaluation or self.objective.needs_all_completions
        takes_part = counted if needs_all else counted & (known[0] != 0)
        step = schedule_step(rollouts, self._limits._replace(group_layout="split"), takes_part)
        step.coefficients, step.scales = known
        return step

    def schedule_some(self, step: StepRollouts, indices: list[int]) -> Schedule:
        """Return micro-batches of some completions of a step. Increases `max_tokens` to the longest single rollout,
        which happens only for completions without a gradient."""
        lengths, limits = rollout_lengths(step.rollouts, self.limits.pair_cost), self._limits
        if limits.max_tokens is not None:
            longest = max((lengths.prompts[i] + lengths.completions[i] for i in indices), default=0)
            limits = limits._replace(max_tokens=max(limits.max_tokens, longest))
        schedule = schedule_micro_batches(lengths, [[i] for i in indices], limits)
        assert schedule is not None  # a single rollout always fits
        return schedule

    @property
    def _limits(self) -> MicroBatchConfig:
        return self.limits._replace(padded=self.forward_pass.packing is None)

    def micro_batches(self, step: StepRollouts, schedule: Schedule) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this process's micro-batches: the completion indices, and the collated tensors."""
        # A process without completions still runs a forward and backward pass on a filler, for zero gradients.
        for indices in schedule[self.accelerator.process_index] or [[]]:
            yield indices, collate([step.rollouts[i] for i in indices] or [FILLER], self.accelerator.device)

    def _compute(self, compute: Callable, model, batch: MicroBatch):
        return compute(model, [r.prompt_ids for r in batch.rollouts], [r.completion_ids for r in batch.rollouts])

    @torch.no_grad()
    def cache_logps(self, model, step: StepRollouts, *names: str) -> None:
        """Compute `ref_logps`, `old_logps` or `old_entropies` under the current weights of `model`, and store them in
        the rollouts that this process trains on."""
        for indices, batch in self.micro_batches(step, step.schedule):
            found = self._compute(self.forward_pass.compute_logps, model, batch)
            for name in names:
                values = found.entropies if name == "old_entropies" else found.logps
                on_cpu = torch.cat(values).cpu().split(list(map(len, values)))  # one transfer
                for i, of_completion in zip(indices, on_cpu, strict=False):
                    setattr(step.rollouts[i], name, of_completion.numpy().copy())

    @torch.no_grad()
    def _forward(self, model, step: StepRollouts, schedule: Schedule, *, with_kl: bool = False) -> Forwarded:
        found = Forwarded(step.num_proxies, self.accelerator, sum(w.num_values for w in self.token_weights))
        for indices, batch in self.micro_batches(step, schedule):
            logps, entropies = self._compute(self.forward_pass.compute_logps, model, batch).padded()
            tokens = self._token_values(step, batch, logps, entropies, logps.new_zeros(len(logps), 1))
            values = [value for weights in self.token_weights for value in weights.own_values(tokens)]
            proxies = self.proxies(logps, batch)
            kl = self._kl(model, logps, batch, tokens.old_logps).sum() if with_kl else None
            found.add(step.flat_indices(indices), proxies, entropies, batch.loss_mask, kl, values)
        return found.reduce()

    @torch.no_grad()
    def token_entropies(self, model, step: StepRollouts) -> np.ndarray:
        """Compute the entropies in nats of all counted tokens of an optimizer step with an extra forward pass. The
        result is the same on all processes."""
        counted = [i for i, rollout in enumerate(step.rollouts) if rollout.loss_mask.any()]
        starts = dict(zip(counted, np.cumsum([0, *(step.rollouts[i].loss_mask.sum() for i in counted)]), strict=False))
        found = torch.zeros(step.num_tokens, device=self.accelerator.device)
        for indices, batch in self.micro_batches(step, self.schedule_some(step, counted)):
            entropies = self._compute(self.forward_pass.compute_logps, model, batch).entropies
            for i, rollout, values in zip(indices, batch.rollouts, entropies, strict=False):
                found[starts[i] : starts[i] + rollout.loss_mask.sum()] = values[torch.from_numpy(rollout.loss_mask)]
        return self.accelerator.reduce(found, reduction="sum").cpu().numpy()

    def left_out_entropy(self, model, step: StepRollouts, schedule: Schedule) -> float:
        """Return the summed entropy in nats of the counted tokens in completions that `schedule` skips, the same on
        all processes. On the first update after a rollout it is estimated by the engine's `-log p` of the sampled
        tokens; otherwise an extra forward pass computes it, or it is NaN if no coefficient needs a forward pass."""
        left_out = self._left_out(step, schedule)
        if left_out and step.on_policy and self.samples_policy:
            rollouts = [step.rollouts[i] for i in left_out]
            sampled = [r.sampling_logps[r.loss_mask] for r in rollouts if r.sampling_logps is not None]
            if len(sampled) == len(rollouts) and all(np.isfinite(logps).all() for logps in sampled):
                return -float(np.concatenate(sampled).sum(dtype=np.float64))
        if step.coefficients is not None:
            return math.nan if left_out else 0.0
        return self._forward(model, step, self.schedule_some(step, left_out)).entropy if left_out else 0.0

    def _left_out(self, step: StepRollouts, schedule: Schedule) -> list[int]:
        forwarded = {i for batches in schedule for indices in batches for i in indices}
        return [i for i, rollout in enumerate(step.rollouts) if i not in forwarded and rollout.loss_mask.any()]

    # One optimizer step ---------------------------------------------------------------------------------------------

    def run(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """
        Back-propagate the loss of an optimizer step.

        Args:
            model: The wrapped model, in training mode.
            step ([`StepRollouts`]): The rollouts. They need `ref_logps`, unless `proxies_are_zero` or the objective
                has no reference.
            proxies_are_zero (`bool`): Whether policy and reference are identical, so that the proxies need no forward
                pass.

        Returns:
            The loss (mean over scorable completions, including the KL term) and metrics, the same on all processes.
        """
        values_first = any(weights.num_values for weights in self.token_weights)
        with self.forward_pass.attention():
            for weights in self.token_weights:
                weights.prepare(self, model, step)
            # Compute the proxies of the whole step first, unless micro-batches of whole groups yield them.
            before, coefficients, schedule = None, step.coefficients, step.schedule
            known = coefficients is not None
            needs_logps = values_first or self.coefficients_first or not step.whole_groups
            if needs_logps and not proxies_are_zero and not known:
                before = self._forward(model, step, step.schedule)
            proxies = torch.zeros(step.num_proxies) if proxies_are_zero else before and before.proxies
            # Then compute the coefficients, and schedule only the completions with a gradient.
            if proxies is not None and not known:
                coefficients = self.coefficients(step, list(range(len(step.rollouts))), proxies)
                schedule = self._schedule_nonzero(step, coefficients, scored=before is not None)
            # Run before the backward passes, between which FSDP keeps weights gathered. If there was a forward pass
            # for the proxies, it already covered the completions of `step.schedule`.
            left_out = self.left_out_entropy(model, step, schedule if before is None else step.schedule)
            metrics: dict[str, float] = {}
            if coefficients is not None:
                coefficients, metrics = self.shape_coefficients(model, step, coefficients)
            if values_first:
                self._begin_weights(step, coefficients, before or self._forward(model, step, schedule))
            found, mismatch = self._back_propagate(model, step, schedule, coefficients)
        proxies = found.proxies if proxies is None else proxies
        loss, of_step = self._summarize(step, found, proxies, (before or found).entropy, left_out)
        metrics |= of_step
        if mismatch:
            metrics |= mismatch_metrics(*self._gather_mismatch(mismatch))
        for weights in self.token_weights:
            metrics |= weights.metrics(self.accelerator)
        if self.objective.kl_coef != 0:
            metrics["kl"] = found.kl / max(step.num_tokens, 1)
            loss += 0.0 if known else self.objective.kl_coef * metrics["kl"]
        return loss, metrics

    def evaluate(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """Compute the loss and metrics as in [`run`], without gradient. Token weights change the loss of known
        coefficients only."""
        known = step.coefficients is not None
        mismatch: list[tuple[torch.Tensor, torch.Tensor]] = []
        if known:
            for weights in self.token_weights:
                weights.prepare(self, model, step)
            if any(weights.num_values for weights in self.token_weights):
                self._begin_weights(step, step.coefficients, self._forward(model, step, step.schedule))
            with torch.no_grad():
                found, mismatch = self._back_propagate(model, step, step.schedule, step.coefficients)
        else:
            found = self._forward(model, step, step.schedule, with_kl=True)
        proxies = torch.zeros_like(found.proxies) if proxies_are_zero else found.proxies
        left_out = self.left_out_entropy(model, step, step.schedule)
        loss, metrics = self._summarize(step, found, proxies, found.entropy, left_out)
        if mismatch:
            metrics |= mismatch_metrics(*self._gather_mismatch(mismatch))
        if self.objective.kl_coef != 0:
            metrics["kl"] = found.kl / max(step.num_tokens, 1)
            loss += 0.0 if known else self.objective.kl_coef * metrics["kl"]
        return loss, metrics

    def _begin_weights(self, step: StepRollouts, coefficients, found: Forwarded) -> None:
        counted = torch.tensor([bool(rollout.loss_mask.any()) for rollout in step.rollouts])
        num_completions, first = max(int(step.groups.scorable.sum()), 1), 0
        for weights in self.token_weights:
            last = first + weights.num_values
            weights.begin(coefficients, found.own_values[first:last], counted, num_completions)
            first = last

    def _schedule_nonzero(self, step: StepRollouts, coefficients: torch.Tensor, *, scored: bool) -> Schedule:
        """Return micro-batches of the completions with a gradient. `scored` is whether the completions of
        `step.schedule` have already had a forward pass."""
        scheduled = {i for batches in step.schedule for indices in batches for i in indices}
        # With a KL term every completion has a gradient; without it, coefficient 0 means no gradient.
        counting = [
            i for i in sorted(scheduled) if self.objective.kl_coef != 0 or coefficients[step.flat_indices([i])].any()
        ]
        # Cached `old_logps` exist only on the process to which `step.schedule` assigned the completion.
        may_reschedule = step.on_policy or not self.token_weights
        keeps = not may_reschedule or (scored and len(counting) == len(scheduled))
        return step.schedule if keeps else self.schedule_some(step, counting)

    def _back_propagate(
        self, model, step: StepRollouts, schedule: Schedule, coefficients: torch.Tensor | None
    ) -> tuple[Forwarded, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Back-propagate `sum_i c_i * sum_t w_it * log pi(o_it)` and the KL term. If `coefficients` is `None`,
        micro-batches must hold whole groups. Returns the results of the forward passes, and [`mismatch_ratios`] of
        each micro-batch."""
        known = step.coefficients is not None
        found, mismatch = Forwarded(step.num_proxies, self.accelerator, 4 if known else 0), []
        compares = step.on_policy and any(rollout.sampling_logps is not None for rollout in step.rollouts)
        num_tokens, last = max(step.num_tokens, 1), max(len(schedule[self.accelerator.process_index]) - 1, 0)
        for k, (indices, batch) in enumerate(self.micro_batches(step, schedule)):
            with self._synchronize_gradients(model, last=k == last):
                logps, entropies = self._compute(self.forward_pass.compute_logps, model, batch).padded()
                proxies = self.proxies(logps, batch)
                if not indices:
                    of_completions = torch.zeros(1)
                elif coefficients is not None:
                    of_completions = coefficients[step.flat_indices(indices)]
                else:
                    of_completions = self.coefficients(step, indices, proxies.cpu())
                of_tokens = self.token_coefficients(batch, of_completions.to(logps.device))
                if compares:
                    mismatch.append(mismatch_ratios(logps, batch.sampling_logps, batch.loss_mask, self.mismatch))
                tokens = self._token_values(step, batch, logps, entropies, of_tokens)
                factors, weighted = [weights(tokens) for weights in self.token_weights], logps
                kl = self._kl(model, logps, batch, tokens.old_logps)
                if known:
                    terms = self.objective.token_terms(tokens, factors)
                    weighted, proxies = logps * terms.weights, terms.values
                    scales = (step.scales[step.flat_indices(indices)] if indices else torch.zeros(1)).to(logps.device)
                    of_kl = self.objective.kl_coef * (scales[:, None] * kl).sum()
                    own_values = terms.low, terms.high, terms.phi, kl.detach().sum(dim=1)
                else:
                    for factor in factors:
                        weighted = weighted * factor
                    own_values, of_kl = (), self.objective.kl_coef * kl.sum() / num_tokens
                loss = (of_tokens * weighted.masked_fill(~batch.loss_mask, 0.0)).sum() + of_kl
                if torch.is_grad_enabled():
                    scale = {"scale_wrt_gas": False} if self._is_deepspeed else {}
                    self.accelerator.backward(loss * self.accelerator.num_processes, **scale)
                found.add(step.flat_indices(indices), proxies, entropies, batch.loss_mask, kl.sum(), own_values)
        return found.reduce(), mismatch

    def _gather_mismatch(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[torch.Tensor]:
        for own in map(torch.cat, zip(*parts, strict=True)):
            found = self.accelerator.gather(self.accelerator.pad_across_processes(own, pad_index=math.nan))
            yield found[~found.isnan()]

    def _token_values(self, step, batch: MicroBatch, logps, entropies, coefficients) -> TokenValues:
        old_logps, old_entropies = batch.old_logps, batch.old_entropies
        if step.on_policy:
            old_logps, old_entropies = batch.old_logps if step.is_late else logps, entropies
        values = logps, old_logps, batch.sampling_logps, entropies, old_entropies, coefficients, batch.loss_mask
        return TokenValues(*(value.detach() for value in values))

    def _kl(self, model, logps: torch.Tensor, batch: MicroBatch, old_logps: torch.Tensor) -> torch.Tensor:
        """Return the KL term of each token, `(B, T)`."""
        if self.objective.kl_coef == 0 or self.compute_kl_ref_logps is None:
            return torch.zeros_like(logps)
        with torch.no_grad():
            reference = pad_sequence(self._compute(self.compute_kl_ref_logps, model, batch).logps, batch_first=True)
        return self.objective.kl(logps, reference, old_logps, batch.loss_mask)

    def _summarize(self, step: StepRollouts, found: Forwarded, proxies, entropy: float, left_out_entropy: float):
        """Return the loss, of a group loss without the KL term, and the metrics of the step. If `left_out_entropy` is
        NaN, the entropy metric covers only completions with a forward pass."""
        num_tokens = torch.tensor([int(rollout.loss_mask.sum()) for rollout in step.rollouts])
        without = self._left_out(step, step.schedule) if math.isnan(left_out_entropy) else []
        counted = step.num_tokens - int(num_tokens[without].sum())
        of_step = {
            "entropy": (entropy + (0.0 if without else left_out_entropy)) / counted if counted else math.nan,
            "pacs/forwarded_fraction": found.num_completions / max(len(step.rollouts), 1),
        }
        if step.coefficients is None:
            loss, metrics = self.summarize(step, proxies)
            return loss, of_step | metrics
        low, high, phi, kl = found.own_values
        forwarded = [i for batches in step.schedule for indices in batches for i in indices]
        has_forward_pass = torch.zeros(len(step.rollouts), dtype=torch.bool)
        has_forward_pass[forwarded] = True
        phi = phi.masked_fill(~has_forward_pass, 1.0)  # their ratios are 1, or `needs_all_completions`
        loss = (step.coefficients * found.proxies).sum() + self.objective.kl_coef * (step.scales * kl).sum()
        return loss.item(), of_step | self.objective.token_metrics(num_tokens, low, high, phi)

    @property
    def _is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    @contextlib.contextmanager
    def _synchronize_gradients(self, model, *, last: bool):
        """Synchronize gradients across processes in the last backward pass only."""
        if not torch.is_grad_enabled():
            yield
            return
        self.accelerator.gradient_state._set_sync_gradients(last)
        with contextlib.nullcontext() if last or self._is_deepspeed else self.accelerator.no_sync(model):
            yield

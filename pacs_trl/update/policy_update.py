"""The gradient of one optimizer step, exact at any composition of its micro-batches.

The PACS loss couples the completions of a prompt, but its gradient is `sum_i c_i * grad r_i` with coefficients `c_i` that
depend only on the values of the proxies `r` (`objective.proxy_coefficients`). So first the proxies of the whole
optimizer step are found, then the coefficients, and then `sum_i c_i * r_i` is back-propagated in whatever micro-batches
are cheapest. The proxies are found in one of three ways:

- They are exactly 0 on the first update after a rollout, if the reference is the policy at rollout time. No forward pass
  is needed to know them, and rows of one-class groups have coefficient 0 and are left out.
- `"whole"` layout: micro-batches hold whole groups, so the forward pass of a micro-batch yields all its coefficients.
- `"split"` layout: a forward pass without gradient over all rows, then one with gradient over the rows that count.

Dividing: coefficients are divided by the number of scorable rows of the whole optimizer step, over all micro-batches
and processes. Losses of processes are averaged by DDP, FSDP and DeepSpeed, hence the factor `num_processes`; nothing is
divided by the number of accumulation steps.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.utils.rnn import pad_sequence

from ..objective import (
    actor_coefficients,
    group_scores,
    loss_from_proxies,
    proxy_coefficients,
    sequence_proxies,
)
from ..pacs_config import PACSConfig
from ..rollouts.rows import FILLER, MicroBatch, Rollout, collate, row_lengths
from .groups import Groups
from .metrics import critic_metrics
from .microbatching import Plan, plan_micro_batches, plan_tokens
from .sampling_correction import merge_statistics, mismatch_correction, mismatch_metrics, mismatch_statistics
from .scorer import Scorer, Scores
from .token_weights import TokenValues, TokenWeights


@dataclass
class StepRollouts:
    """
    All rows of one optimizer step, the same on every process, and how they are scored.

    Attributes:
        rollouts (`list[Rollout]`):
            Whole groups.
        groups ([`Groups`]):
            Their labels and groups.
        plan (`Plan`):
            Micro-batches of every forward pass over all rows. Reference and policy are scored in the same ones: with
            equal weights they then give equal bits, also in half precision.
        whole_groups (`bool`):
            Whether the micro-batches of `plan` hold whole groups.
        on_policy (`bool`):
            Whether the weights are still those that generated the rows. The forward pass itself then tells how far the
            engine is from the trainer, and token weights take it for that of the policy that generated.
    """

    rollouts: list[Rollout]
    groups: Groups
    plan: Plan
    whole_groups: bool
    on_policy: bool = False


def plan_step(rollouts: list[Rollout], args: PACSConfig, *, num_processes: int, padded: bool) -> StepRollouts:
    """
    Decide the composition of the forward passes over all rows of an optimizer step, from their lengths.

    Raises:
        `ValueError`: if a row is longer than `max_tokens_per_micro_batch`, or if `group_layout="whole"` and a group does
            not fit into a micro-batch.
    """
    groups = Groups(torch.tensor([row.label for row in rollouts]), [row.group for row in rollouts])
    takes_part = groups.scorable
    if args.beta != 0:  # the KL term is a mean over all tokens, whatever the verdict
        takes_part = torch.tensor([len(r.completion_ids) > 0 for r in rollouts])
    lengths = row_lengths(rollouts)
    limits = {
        "num_processes": num_processes,
        "max_rows": args.per_device_train_batch_size,
        "max_tokens": args.max_tokens_per_micro_batch,
        "padded": padded,
    }
    split = plan_micro_batches(lengths, takes_part.nonzero().tolist(), **limits)
    if split is None:
        longest = max(p + c for p, c in zip(lengths.prompts, lengths.completions, strict=True))
        raise ValueError(
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} cannot hold the longest sequence of this "
            f"generation batch, which has {longest} tokens (prompt and completion). Raise it to at least {longest}, or "
            "leave out longer prompts (in a recipe: max_prompt_length) and lower max_completion_length."
        )
    whole = plan_micro_batches(lengths, [rows for rows in groups.members if takes_part[rows].any()], **limits)
    if args.group_layout == "whole" and whole is None:
        bound = (
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch}"
            if args.max_tokens_per_micro_batch
            else f"per_device_train_batch_size={args.per_device_train_batch_size}"
        )
        raise ValueError(
            f"group_layout='whole' needs a group of num_generations={groups.size} completions to fit into one "
            f"micro-batch, but {bound} is too small. Raise it, or use group_layout='auto' or 'split'."
        )
    # In forward passes: a backward pass costs two, recomputing activations one more.
    with_gradient = 4 if args.gradient_checkpointing else 3
    cheaper_whole = whole is not None and (
        with_gradient * plan_tokens(whole, lengths, padded=padded)
        <= (with_gradient + 1) * plan_tokens(split, lengths, padded=padded)
    )
    whole_groups = args.group_layout == "whole" or (args.group_layout == "auto" and cheaper_whole)
    return StepRollouts(rollouts, groups, whole if whole_groups else split, whole_groups)


class PolicyUpdate:
    """
    Computes and back-propagates the loss of one optimizer step.

    Args:
        args ([`PACSConfig`]):
            Settings of the objective and of the micro-batches.
        accelerator ([`~accelerate.Accelerator`]):
            Runs the backward pass and reduces over processes.
        scorer ([`Scorer`]):
            Of the policy.
        score_kl_reference (`Callable`, *optional*):
            [`Scorer.score`] under the policy that the KL term (`args.beta`) refers to.
    """

    def __init__(
        self,
        args: PACSConfig,
        accelerator: Accelerator,
        scorer: Scorer,
        score_kl_reference: Callable[..., Scores] | None = None,
    ):
        self.args = args
        self.accelerator = accelerator
        self.scorer = scorer
        self.padded = scorer.packing is None
        self.score_kl_reference = score_kl_reference
        self.objective = {
            "score_estimator": args.score_estimator,
            "class_weighting": args.class_weighting,
        }
        self.correction = {
            "mode": args.vllm_importance_sampling_mode,
            "clip_min": args.vllm_importance_sampling_clip_min,
            "clip_max": args.vllm_importance_sampling_clip_max,
        }
        corrects = args.vllm_importance_sampling_correction
        self.token_weights: list[TokenWeights] = [mismatch_correction(**self.correction)] if corrects else []

    def plan(self, rollouts: list[Rollout]) -> StepRollouts:
        return plan_step(
            rollouts,
            self.args,
            num_processes=self.accelerator.num_processes,
            padded=self.padded,
        )

    def _collate(self, step: StepRollouts, rows: list[int]) -> MicroBatch:
        rollouts = [step.rollouts[i] for i in rows] or [FILLER]
        return collate(rollouts, self.accelerator.device)

    def _score(self, score: Callable[..., Scores], model, micro_batch: MicroBatch) -> Scores:
        rows = micro_batch.rollouts
        return score(model, [row.prompt_ids for row in rows], [row.completion_ids for row in rows])

    def _own_micro_batches(self, plan: Plan) -> list[list[int]]:
        # Without any row there is still one forward and backward pass, of a filler: gradients must exist and be zero.
        return plan[self.accelerator.process_index] or [[]]

    @torch.no_grad()
    def score(self, model, step: StepRollouts, *names: str) -> None:
        """Fill in `ref_logps` or `old_logps` of the rows this process learns from, with the weights `model` has now."""
        for rows in self._own_micro_batches(step.plan):
            logps = self._score(self.scorer.score, model, self._collate(step, rows)).logps
            on_cpu = torch.cat(logps).cpu().split(list(map(len, logps)))  # one transfer
            for i, row_logps in zip(rows, on_cpu, strict=False):
                for name in names:
                    setattr(step.rollouts[i], name, row_logps.numpy().copy())

    @torch.no_grad()
    def find_proxies(self, model, step: StepRollouts) -> tuple[torch.Tensor, "_Sums"]:
        """Proxies of all rows by a forward pass without gradient, `(B,)` on the CPU, and sums over their tokens."""
        found = _RowValues(len(step.rollouts), self.accelerator)
        for rows in self._own_micro_batches(step.plan):
            micro_batch = self._collate(step, rows)
            logps, entropies = self._score(self.scorer.score, model, micro_batch).padded()
            found.add(rows, self._proxies(logps, micro_batch), entropies, micro_batch.loss_mask)
        return found.reduce()

    def _proxies(self, logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        return sequence_proxies(
            logps.detach(),
            micro_batch.ref_logps,
            micro_batch.loss_mask,
            pacs_beta=self.args.pacs_beta,
            proxy=self.args.proxy,
        )

    def _token_factors(self, step: StepRollouts, rows: list[int], proxies: torch.Tensor):
        """d(loss) / d(logp of any counted token) of `rows`, which are whole groups with proxies `(len(rows),)`."""
        groups = step.groups.take(rows)
        share = groups.scorable.sum().item() / max(int(step.groups.scorable.sum()), 1)
        slope = torch.full_like(proxies, self.args.pacs_beta)
        if self.args.proxy == "mean_logp":
            slope /= torch.tensor([max(int(step.rollouts[i].loss_mask.sum()), 1) for i in rows])
        factors = slope * groups.apply(proxy_coefficients, proxies, **self.objective)
        if self.args.actor_term_coef:
            scores = groups.apply(group_scores, proxies, score_estimator=self.args.score_estimator)
            factors = factors + self.args.actor_term_coef * groups.apply(
                actor_coefficients, scores, class_weighting=self.args.class_weighting
            )
        return factors * share

    def run(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """
        Back-propagate the loss of an optimizer step.

        Args:
            model:
                The wrapped model, in training mode.
            step (`StepRollouts`):
                Rows with `ref_logps` filled in, unless `proxies_are_zero` or the proxy has no reference.
            proxies_are_zero (`bool`):
                Whether policy and reference are the same, so that no forward pass is needed to know the proxies.

        Returns:
            The loss of the optimizer step (mean over its scorable rows, KL term included), the same on all processes,
            and its metrics.
        """
        all_rows = list(range(len(step.rollouts)))
        proxies, factors, before = None, None, None
        if proxies_are_zero:
            proxies = torch.zeros(len(all_rows))
        elif not step.whole_groups:
            proxies, before = self.find_proxies(model, step)
        plan = step.plan
        if proxies is not None:
            factors = self._token_factors(step, all_rows, proxies)
            plan = self._plan_rows_that_count(step, factors, scored=not proxies_are_zero)

        # Before the backward passes, between which FSDP keeps what it has gathered. A pass for the proxies went over more rows.
        left_out = self._left_out_entropy(model, step, plan if before is None else step.plan)
        compares = step.on_policy and any(row.sampling_logps is not None for row in step.rollouts)
        mismatch: list[torch.Tensor] = []
        found = _RowValues(len(all_rows), self.accelerator)
        num_tokens = sum(int(r.loss_mask.sum()) for r in step.rollouts)
        micro_batches = self._own_micro_batches(plan)
        for k, rows in enumerate(micro_batches):
            with self._synchronize_gradients(model, last=k == len(micro_batches) - 1):
                micro_batch = self._collate(step, rows)
                logps, entropies = self._score(self.scorer.score, model, micro_batch).padded()
                row_proxies = self._proxies(logps, micro_batch)
                if not rows:
                    row_factors = torch.zeros(1)
                elif factors is not None:
                    row_factors = factors[rows]
                else:
                    row_factors = self._token_factors(step, rows, row_proxies.cpu())
                row_factors = row_factors.to(logps.device)
                if compares:
                    compared = (logps, micro_batch.sampling_logps, micro_batch.loss_mask)
                    mismatch.append(mismatch_statistics(*compared, **self.correction))
                old_logps = logps if step.on_policy else micro_batch.old_logps
                tokens = TokenValues(
                    logps.detach(),
                    old_logps.detach(),
                    micro_batch.sampling_logps,
                    entropies.detach(),
                    row_factors,
                    micro_batch.loss_mask,
                )
                weighted = logps
                for weights in self.token_weights:
                    weighted = weighted * weights(tokens)
                weighted = weighted.masked_fill(~micro_batch.loss_mask, 0.0)
                loss = (row_factors * weighted.sum(dim=1)).sum()
                kl = self._kl(model, logps, micro_batch)
                loss = loss + self.args.beta * kl / max(num_tokens, 1)
                self._backward(loss * self.accelerator.num_processes)
                found.add(rows, row_proxies, entropies, micro_batch.loss_mask, kl)
        forwarded_proxies, sums = found.reduce()
        proxies = forwarded_proxies if proxies is None else proxies
        loss, metrics = self._summarize(step, proxies, left_out + (sums if before is None else before).entropy, sums)
        if compares:
            parts = self.accelerator.gather(merge_statistics(torch.stack(mismatch))[None])
            metrics |= mismatch_metrics(merge_statistics(parts))
        if self.args.beta != 0:
            metrics["kl"] = sums.kl / max(num_tokens, 1)
            loss += self.args.beta * metrics["kl"]
        return loss, metrics

    @torch.no_grad()
    def _left_out_entropy(self, model, step: StepRollouts, plan: Plan) -> float:
        """
        Sum of the entropies at the counted tokens of the rows that `plan` leaves out, the same on all processes.

        On the first update after a rollout it is `-log p` of their sampled tokens where the engine has reported it, whose
        expectation is the entropy of the distribution it sampled from; else it takes one more forward pass.
        """
        forwarded = {i for batches in plan for rows in batches for i in rows}
        left_out = [i for i, row in enumerate(step.rollouts) if i not in forwarded and row.loss_mask.any()]
        if left_out and step.on_policy and _draws_from_whole_distribution(self.args):
            rows = [step.rollouts[i] for i in left_out]
            sampled = [row.sampling_logps[row.loss_mask] for row in rows if row.sampling_logps is not None]
            if len(sampled) == len(rows) and all(np.isfinite(logps).all() for logps in sampled):
                return -float(np.concatenate(sampled).sum(dtype=np.float64))
        if left_out:
            found = _RowValues(len(step.rollouts), self.accelerator)
            for rows in self._own_micro_batches(self._plan_rows(step, left_out)):
                micro_batch = self._collate(step, rows)
                logps, entropies = self._score(self.scorer.score, model, micro_batch).padded()
                found.add(rows, logps[:, 0], entropies, micro_batch.loss_mask)
            return found.reduce()[1].entropy
        return 0.0

    def evaluate(self, model, step: StepRollouts, *, proxies_are_zero: bool) -> tuple[float, dict[str, float]]:
        """Loss and metrics as in [`run`], without gradient and without the KL term."""
        proxies, sums = self.find_proxies(model, step)
        proxies = torch.zeros_like(proxies) if proxies_are_zero else proxies
        entropy = sums.entropy + self._left_out_entropy(model, step, step.plan)
        return self._summarize(step, proxies, entropy, sums)

    def _summarize(self, step, proxies, entropy: float, sums: "_Sums") -> tuple[float, dict[str, float]]:
        """The loss without the KL term, and the metrics that every step has; `entropy` is summed over all counted tokens."""
        loss, scores = step.groups.apply(loss_from_proxies, proxies, **self.objective)
        num_tokens = sum(int(row.loss_mask.sum()) for row in step.rollouts)
        metrics = {
            "entropy": entropy / num_tokens if num_tokens else math.nan,
            "pacs/forwarded_fraction": sums.num_rows / max(len(step.rollouts), 1),
        }
        metrics |= critic_metrics(proxies, scores, step.groups, class_weighting=self.args.class_weighting)
        return loss.item(), metrics

    def _plan_rows_that_count(self, step: StepRollouts, factors: torch.Tensor, *, scored: bool) -> Plan:
        """Micro-batches of the rows that have a gradient; `scored` is whether those of `step.plan` were forwarded before."""
        planned = {i for batches in step.plan for rows in batches for i in rows}
        # With a KL term every row has a gradient; otherwise rows with coefficient 0 have none.
        counting = [i for i in sorted(planned) if self.args.beta != 0 or factors[i] != 0]
        # Log-probabilities under the policy that generated lie on the process that `step.plan` gave the row to.
        rows_may_move = step.on_policy or not self.token_weights
        keeps = not rows_may_move or (scored and len(counting) == len(planned))
        return step.plan if keeps else self._plan_rows(step, counting)

    def _plan_rows(self, step: StepRollouts, rows: list[int]) -> Plan:
        lengths, max_tokens = row_lengths(step.rollouts), self.args.max_tokens_per_micro_batch
        if max_tokens is not None:  # a row that nothing is learnt from may be longer; it is only forwarded
            max_tokens = max(max_tokens, *(lengths.prompts[i] + lengths.completions[i] for i in rows))
        plan = plan_micro_batches(
            lengths,
            [[row] for row in rows],
            num_processes=self.accelerator.num_processes,
            max_rows=self.args.per_device_train_batch_size,
            max_tokens=max_tokens,
            padded=self.padded,
        )
        assert plan is not None  # every single row fits
        return plan

    def _kl(self, model, logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Sum over tokens of the k3 estimator of KL(policy || KL reference)."""
        if self.args.beta == 0 or self.score_kl_reference is None:
            return logps.new_zeros(())
        with torch.no_grad():
            log_ratio = pad_sequence(self._score(self.score_kl_reference, model, micro_batch).logps, batch_first=True)
        log_ratio = log_ratio - logps
        return (torch.exp(log_ratio) - log_ratio - 1).masked_fill(~micro_batch.loss_mask, 0.0).sum()

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


class _RowValues:
    """Collects values of rows and tokens over micro-batches; one reduction over processes at the end."""

    def __init__(self, num_rows: int, accelerator: Accelerator):
        self.accelerator = accelerator
        self.proxies = torch.zeros(num_rows, device=accelerator.device)
        self.sums = torch.zeros(3, device=accelerator.device)  # see `_Sums`

    def add(self, rows: list[int], proxies, entropies, loss_mask, kl=0.0) -> None:
        if not rows:
            return
        self.proxies[torch.tensor(rows, device=self.proxies.device)] = proxies.detach().to(self.proxies.dtype)
        entropy = entropies.detach().masked_fill(~loss_mask, 0.0).sum()
        kl = kl.detach() if torch.is_tensor(kl) else torch.tensor(kl, device=entropy.device)
        count = torch.tensor(float(len(rows)), device=entropy.device)
        self.sums += torch.stack([entropy, count, kl.to(entropy.dtype)])

    def reduce(self) -> tuple[torch.Tensor, "_Sums"]:
        values = self.accelerator.reduce(torch.cat([self.proxies, self.sums]), reduction="sum").cpu()
        return values[:-3], _Sums(*values[-3:].tolist())


class _Sums(NamedTuple):
    """Over the rows that were forwarded: entropies of their counted tokens, the rows themselves, the KL estimator."""

    entropy: float
    num_rows: float
    kl: float


def _draws_from_whole_distribution(args: PACSConfig) -> bool:
    """Whether nothing but the temperature, which the loss has too, stands between the policy and the sampler."""
    untruncated = args.top_p == 1.0 and not args.top_k and not args.min_p and args.repetition_penalty == 1.0
    return untruncated and not args.generation_kwargs

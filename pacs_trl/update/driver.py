"""Driver of an optimizer step: schedules micro-batches, runs forward and backward passes, and sums their results.

Both kinds of update use it ([`GroupLossUpdate`], [`RatioUpdate`]): they decide what a micro-batch contributes, and
the driver decides which completions a micro-batch holds, and when gradients are synchronized across processes.

Loss normalization: the updates divide by the number of completions or tokens of the whole optimizer step, over all
micro-batches and processes. DDP, FSDP and DeepSpeed average over processes, so [`UpdateDriver.backward`] multiplies
the loss by `num_processes`. Nothing is divided by the number of accumulation steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from .forward_pass import CompletionLogps, ForwardPass
from .microbatching import MicroBatchConfig, Schedule, micro_batch_size, schedule_micro_batches
from .minibatch import (
    MicroBatch,
    Minibatch,
    collate,
    longest_rollout,
    rollout_lengths,
    schedule_minibatch,
    scheduled_completions,
    split_minibatch,
)
from .rollout import Rollout
from .router_loss import ExpertLoads, RouterSums, expert_loads


MAX_ENTROPY_SHARE = 0.05  # of an optimizer step, for the entropy of completions that it skips


class OutOfMemoryElsewhere(Exception):
    """Another process has run out of memory in this optimizer step, which all processes repeat."""


class StepResult(NamedTuple):
    """
    Result of an optimizer step, the same on all processes.

    Attributes:
        loss (`float`): Its loss, including the KL term and the entropy bonus.
        metrics (`dict[str, float]`): Its metrics.
        mean_bonus_entropy (`float`): Mean entropy in nats of the tokens of the entropy bonus; 0 without one.
    """

    loss: float
    metrics: dict[str, float]
    mean_bonus_entropy: float = 0.0


class PassResults(NamedTuple):
    """
    Results of the forward passes over some completions of a minibatch, on the CPU of every process.

    Attributes:
        values (`dict[str, torch.Tensor]`): Values by name, one per proxy of the minibatch, which is one per completion
            but for process labels; 0 for completions without a forward pass.
        entropy_sum (`float`): Summed entropy of the counted tokens, in nats.
        num_completions (`float`): Number of completions with a forward pass.
        kl_sum (`float`): Summed KL terms of the counted tokens.
        bonus_entropy_sum (`float`): Summed entropy of the tokens of the entropy bonus, in nats.
    """

    values: dict[str, torch.Tensor]
    entropy_sum: float
    num_completions: float
    kl_sum: float
    bonus_entropy_sum: float


class MicroBatchResults:
    """
    Collects the results of the micro-batches of this process; [`reduce`] sums them over all processes.

    Args:
        names (sequence of `str`): Names of the values per completion.
        minibatch ([`Minibatch`]): Their completions.
        accelerator ([`~accelerate.Accelerator`]): Sums over processes.
    """

    def __init__(self, names: Sequence[str], minibatch: Minibatch, accelerator: Accelerator):
        self._minibatch = minibatch
        self._accelerator = accelerator
        zeros = torch.zeros(len(names), minibatch.num_proxies, device=accelerator.device)
        self._values = dict(zip(names, zeros, strict=True))
        sum_names = [name for name in PassResults._fields if name != "values"]
        self._sums = {name: torch.zeros((), device=accelerator.device) for name in sum_names}

    def add(
        self,
        micro_batch: MicroBatch,
        entropies: torch.Tensor,
        values: dict[str, torch.Tensor],
        kl_sum: torch.Tensor | float = 0.0,
        bonus_entropy_sum: torch.Tensor | float = 0.0,
    ) -> None:
        """Add the results of a micro-batch: entropies `(B, T)`, the values by name, and sums of [`PassResults`]. The
        filler of a process without completions adds nothing."""
        if not micro_batch.indices:
            return
        proxy_indices = self._minibatch.proxy_indices(micro_batch.indices)
        indices = torch.tensor(proxy_indices, device=self._accelerator.device)
        for name, all_values in self._values.items():
            all_values[indices] = values[name].detach().to(all_values.dtype)
        sums: dict[str, torch.Tensor | float] = {
            "entropy_sum": entropies.detach().masked_fill(~micro_batch.loss_mask, 0.0).sum(),
            "num_completions": len(micro_batch.rollouts),
            "kl_sum": kl_sum,
            "bonus_entropy_sum": bonus_entropy_sum,
        }
        with torch.no_grad():
            for name, value in sums.items():
                self._sums[name] += value

    def reduce(self) -> PassResults:
        """Return the results of all processes, in one reduction."""
        concatenated = torch.cat([*self._values.values(), torch.stack([*self._sums.values()])])
        reduced = self._accelerator.reduce(concatenated, reduction="sum").cpu()
        num_sums = len(self._sums)
        values = reduced[:-num_sums].view(len(self._values), self._minibatch.num_proxies)
        sums = reduced[-num_sums:].tolist()
        values_by_name = dict(zip(self._values, values, strict=True))
        sums_by_name = dict(zip(self._sums, sums, strict=True))
        return PassResults(values_by_name, **sums_by_name)


class UpdateDriver:
    """
    Schedules micro-batches, runs their forward and backward passes, and reduces over processes.

    Args:
        forward_pass ([`ForwardPass`]): Forward passes of the policy.
        accelerator ([`~accelerate.Accelerator`]): Runs the backward pass and reduces over processes.
        limits ([`MicroBatchConfig`]): Size limits of micro-batches.
    """

    def __init__(self, forward_pass: ForwardPass, accelerator: Accelerator, limits: MicroBatchConfig):
        self.forward_pass = forward_pass
        self.accelerator = accelerator
        self._limits = limits
        # With DDP all processes call `agree_on_memory` twice per optimizer step: before the forward and before the
        # backward pass of their last micro-batch. A process that runs out of memory earlier makes its call early, from
        # `abandon_step`; it must therefore be the next communication of every process. Only passes of the policy may
        # go through DDP until then: it sends buffers at most before the first of them, and before they need memory.
        # After the second call nobody asks again.
        self._others_will_ask = False  # whether the second call of this optimizer step is still to come
        self._is_last_micro_batch = False  # whether the passes now are those of the last micro-batch

    @property
    def limits(self) -> MicroBatchConfig:
        """The size limits, for the packing that the startup check has chosen."""
        return self._limits._replace(padded=self.forward_pass.packing is None)

    @limits.setter
    def limits(self, limits: MicroBatchConfig) -> None:
        self._limits = limits

    # Schedules ------------------------------------------------------------------------------------------------------

    def schedule_minibatch(
        self, rollouts: list[Rollout], takes_part: torch.Tensor | None = None, *, ignores_groups: bool = False
    ) -> Minibatch:
        """Schedule the completions of an optimizer step, see [`schedule_minibatch`]. With `ignores_groups`,
        micro-batches need not hold whole groups, whatever `group_layout` says."""
        limits = self.limits
        if ignores_groups:
            limits = limits._replace(group_layout="split")
        return schedule_minibatch(rollouts, limits, takes_part)

    @contextlib.contextmanager
    def holding_longest(self, rollouts: Sequence[Rollout]) -> Iterator[None]:
        """Raise `max_tokens` to the longest of some rollouts inside the context: for forward passes without gradient,
        which keep no activations."""
        limits = self._limits
        if limits.max_tokens is not None:
            self._limits = limits._replace(max_tokens=max(limits.max_tokens, longest_rollout(rollouts)))
        try:
            yield
        finally:
            self._limits = limits

    def schedule_some(self, minibatch: Minibatch, indices: Sequence[int]) -> Schedule:
        """Return micro-batches of some completions of a minibatch. `max_tokens` is increased to the longest single
        rollout, which is necessary only for completions without a gradient."""
        limits = self.limits
        lengths = rollout_lengths(minibatch.rollouts, limits.pair_cost)
        if limits.max_tokens is not None:
            longest = max((lengths.prompts[i] + lengths.completions[i] for i in indices), default=0)
            limits = limits._replace(max_tokens=max(limits.max_tokens, longest))
        schedule = schedule_micro_batches(lengths, [[i] for i in indices], limits)
        assert schedule is not None  # a single rollout always fits
        return schedule

    def schedule_with_gradient(
        self,
        minibatch: Minibatch,
        coefficients: torch.Tensor,
        *,
        all_have_gradient: bool,
        keeps_processes: bool,
        had_forward_pass: bool,
    ) -> Schedule:
        """
        Return micro-batches of the scheduled completions that have a gradient.

        Args:
            minibatch ([`Minibatch`]): The completions.
            coefficients (`torch.Tensor`): A row per proxy; a completion with zeros only has no gradient.
            all_have_gradient (`bool`): Whether every completion has a gradient, that of a KL term or an entropy bonus.
            keeps_processes (`bool`): Whether a completion must stay on its process, because micro-batches read
                `old_logps` that are stored only there. The schedule is then kept.
            had_forward_pass (`bool`): Whether all scheduled completions had a forward pass already. The schedule is
                then kept if all of them have a gradient.
        """
        scheduled = sorted(minibatch.scheduled)
        with_gradient = [i for i in scheduled if all_have_gradient or coefficients[minibatch.proxy_indices([i])].any()]
        if keeps_processes or (had_forward_pass and len(with_gradient) == len(scheduled)):
            return minibatch.schedule
        return self.schedule_some(minibatch, with_gradient)

    def micro_batches(self, minibatch: Minibatch, schedule: Schedule) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this process. A process without completions still yields a filler, because the
        other processes wait for its forward and backward pass."""
        for indices in schedule[self.accelerator.process_index] or [[]]:
            yield collate(minibatch.rollouts, indices, self.accelerator.device)

    def micro_batches_for_backward(self, model, minibatch: Minibatch, schedule: Schedule) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this process, each inside a context in which only the last backward pass
        synchronizes gradients across processes."""
        num_micro_batches = max(len(schedule[self.accelerator.process_index]), 1)
        self._others_will_ask = torch.is_grad_enabled() and self.runs_passes_alone
        for number, micro_batch in enumerate(self.micro_batches(minibatch, schedule), start=1):
            self._is_last_micro_batch = number == num_micro_batches
            if self._is_last_micro_batch and self._others_will_ask:
                self.agree_on_memory(is_exhausted=False)  # DDP's last forward pass communicates too
            with self._synchronize_gradients(model, is_last=self._is_last_micro_batch):
                yield micro_batch

    @contextlib.contextmanager
    def _synchronize_gradients(self, model, *, is_last: bool) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        skips = not is_last and not self._is_deepspeed
        with self.accelerator.no_sync(model) if skips else contextlib.nullcontext():
            yield

    # Memory ---------------------------------------------------------------------------------------------------------

    @property
    def runs_passes_alone(self) -> bool:
        """Whether processes run their forward passes alone, so that an optimizer step in which one of them runs out of
        memory can be repeated: with DDP they communicate in the last micro-batch only."""
        return self.accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)

    def agree_on_memory(self, *, is_exhausted: bool) -> None:
        """Compare between processes whether one has run out of memory. Every process calls this before the forward
        and before the backward pass of its last micro-batch, or when its memory `is_exhausted`. Raises an
        [`OutOfMemoryElsewhere`] if another process has run out of memory."""
        flag = torch.tensor([float(is_exhausted)], device=self.accelerator.device)
        if self.accelerator.reduce(flag, reduction="sum").item() and not is_exhausted:
            self._others_will_ask = False
            raise OutOfMemoryElsewhere

    @property
    def can_repeat(self) -> bool:
        """Whether this process, whose memory is exhausted, may repeat the optimizer step: if it is alone, or can still
        tell the others."""
        is_alone = self.accelerator.num_processes == 1 and not self._is_deepspeed
        return self._others_will_ask or is_alone

    def abandon_step(self, model, *, is_exhausted: bool) -> None:
        """Discard what was computed of an optimizer step, and tell the other processes if the memory of this one
        `is_exhausted`."""
        if is_exhausted and self._others_will_ask:
            self.agree_on_memory(is_exhausted=True)
        self._others_will_ask = False
        self.discard_gradients(model)

    def discard_gradients(self, model) -> None:
        """Set the gradients to `None`, and let DDP expect a new backward pass."""
        model.zero_grad(set_to_none=True)
        if isinstance(model, DistributedDataParallel):
            model.reducer._reset_state()
            model.require_forward_param_sync = True  # as after a whole step: the next pass sends buffers

    def run_without_loss(self, model, minibatch: Minibatch) -> None:
        """Run the forward and backward passes of a minibatch with a loss of 0, which need the memory of an optimizer
        step."""
        model.train()
        with torch.enable_grad(), self.forward_pass.attention():
            for micro_batch in self.micro_batches(minibatch, minibatch.schedule):
                with self._synchronize_gradients(model, is_last=False):
                    logps, _ = self.compute_logps(model, micro_batch).padded()
                    self.backward(0.0 * logps.sum())

    def lower_max_tokens(self, minibatch: Minibatch) -> bool:
        """Halve `max_tokens`, or the size of the largest micro-batch of `minibatch`, whichever is smaller, but hold
        its longest rollout. A minibatch without a scheduled completion counts with its passes over the skipped ones.
        Return whether micro-batches become smaller; all processes get the same result."""
        limits = self.limits
        schedule = minibatch.schedule
        if not minibatch.scheduled:
            schedule = self.schedule_some(minibatch, minibatch.counted)
        largest = max(self._numbers_of_tokens(minibatch, schedule), default=0)
        longest = longest_rollout([minibatch.rollouts[i] for i in scheduled_completions(schedule)])
        max_tokens = min(limits.max_tokens or largest, largest)
        lowered = max(max_tokens // 2, longest)
        if lowered >= max_tokens:
            return False
        self.limits = limits._replace(max_tokens=lowered, is_adaptive=True)
        return True

    def _numbers_of_tokens(self, minibatch: Minibatch, schedule: Schedule) -> list[int]:
        """Return the number of tokens of each micro-batch of a schedule, of all processes."""
        lengths, padded = rollout_lengths(minibatch.rollouts), self.limits.padded
        micro_batches = [indices for process in schedule for indices in process]
        return [micro_batch_size(indices, lengths, padded=padded).tokens for indices in micro_batches]

    def split(self, minibatch: Minibatch) -> None:
        """Split the micro-batches of a minibatch that are larger than `max_tokens` allows by now."""
        limits = self.limits
        if limits.max_tokens is not None:
            size = max(limits.max_tokens, longest_rollout(minibatch.rollouts))
            split_minibatch(minibatch, size, padded=limits.padded)

    @property
    def _is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def sample_of_skipped(self, minibatch: Minibatch, schedule: Schedule, skipped: Sequence[int]) -> list[int]:
        """Return one of the `skipped` completions of each group, the first one, for as many groups as cost at most 5 %
        of the passes of `schedule`, but for at least one group."""
        lengths, padded = rollout_lengths(minibatch.rollouts), self.limits.padded
        passes = 1 + self.limits.backward_cost  # forward and backward, in forward passes
        budget = MAX_ENTROPY_SHARE * passes * sum(self._numbers_of_tokens(minibatch, schedule))  # in tokens
        first_of_group: dict[int, int] = {}
        for i in skipped:
            first_of_group.setdefault(minibatch.rollouts[i].group, i)
        sample: list[int] = []
        for i in first_of_group.values():
            if sample and micro_batch_size([*sample, i], lengths, padded=padded).tokens > budget:
                break
            sample.append(i)
        return sample

    # Passes ---------------------------------------------------------------------------------------------------------

    def compute_logps(self, model, micro_batch: MicroBatch, compute: Callable | None = None) -> CompletionLogps:
        """Compute the log-probs and entropies of the completions of a micro-batch under the policy, or with another
        function `compute` that has the signature of [`ForwardPass.compute_logps`]."""
        prompts = [rollout.prompt_ids for rollout in micro_batch.rollouts]
        completions = [rollout.completion_ids for rollout in micro_batch.rollouts]
        images = [rollout.images for rollout in micro_batch.rollouts]
        compute = compute or self.forward_pass.compute_logps
        if any(images):
            return compute(model, prompts, completions, images=images)
        return compute(model, prompts, completions)

    @torch.no_grad()
    def measure_expert_loads(self, model, minibatch: Minibatch) -> ExpertLoads:
        """Compute the loads of the experts in an optimizer step, over all completions of the minibatch, with an extra
        forward pass. The result is the same on all processes."""
        schedule = self.schedule_some(minibatch, range(len(minibatch.rollouts)))
        sums = []
        for micro_batch in self.micro_batches(minibatch, schedule):
            self.compute_logps(model, micro_batch)
            assert self.forward_pass.router_sums is not None  # it reads the routers
            factor = 1.0 if micro_batch.indices else 0.0  # a filler does not count
            sums.append(RouterSums(*(values * factor for values in self.forward_pass.router_sums)))
        return expert_loads(sums, self.accelerator)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a micro-batch, unless gradients are disabled, as in an evaluation."""
        if not torch.is_grad_enabled():
            return
        if self._is_last_micro_batch and self._others_will_ask:
            self.agree_on_memory(is_exhausted=False)
            self._others_will_ask = False
        scaled = loss * self.accelerator.num_processes
        if self._is_deepspeed:
            self.accelerator.backward(scaled, scale_wrt_gas=False)
        else:
            self.accelerator.backward(scaled)

    @torch.no_grad()
    def store_logps(self, model, minibatch: Minibatch, *names: str) -> None:
        """Compute `ref_logps`, `old_logps`, or `old_entropies` under the current weights of `model`, and store them in
        the rollouts that are scheduled on this process."""
        for micro_batch in self.micro_batches(minibatch, minibatch.schedule):
            outputs = self.compute_logps(model, micro_batch)
            for name in names:
                values = outputs.entropies if name == "old_entropies" else outputs.logps
                lengths = [len(completion_values) for completion_values in values]
                values_on_cpu = torch.cat(values).cpu().split(lengths)  # one transfer
                for i, completion_values in zip(micro_batch.indices, values_on_cpu, strict=False):  # a filler has none
                    setattr(minibatch.rollouts[i], name, completion_values.numpy().copy())

    @torch.no_grad()
    def token_entropies(self, model, minibatch: Minibatch) -> np.ndarray:
        """Compute the entropies in nats of all counted tokens of a minibatch with an extra forward pass. The result is
        the same on all processes."""
        counted = minibatch.counted
        positions: dict[int, slice] = {}  # of the tokens of each completion in the result
        end = 0
        for i in counted:
            start, end = end, end + minibatch.rollouts[i].num_counted
            positions[i] = slice(start, end)
        entropies = torch.zeros(minibatch.num_tokens, device=self.accelerator.device)
        for micro_batch in self.micro_batches(minibatch, self.schedule_some(minibatch, counted)):
            completion_entropies = self.compute_logps(model, micro_batch).entropies
            for i, values in zip(micro_batch.indices, completion_entropies, strict=False):  # a filler has no index
                loss_mask = torch.from_numpy(minibatch.rollouts[i].loss_mask)
                entropies[positions[i]] = values[loss_mask]
        return self.accelerator.reduce(entropies, reduction="sum").cpu().numpy()

    @torch.no_grad()
    def entropy_of(self, model, minibatch: Minibatch, indices: Sequence[int]) -> float:
        """Compute the summed entropy in nats of the counted tokens of some completions with an extra forward pass. The
        result is the same on all processes."""
        results = MicroBatchResults([], minibatch, self.accelerator)
        for micro_batch in self.micro_batches(minibatch, self.schedule_some(minibatch, indices)):
            _, entropies = self.compute_logps(model, micro_batch).padded()
            results.add(micro_batch, entropies, {})
        return results.reduce().entropy_sum

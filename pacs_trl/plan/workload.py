"""Work of all updates on a generation batch, and the choice of recomputation and of the size of micro-batches by cost.

The backward pass needs the activations of a micro-batch. Recomputing them saves memory and costs a forward pass, and
small micro-batches save memory too, but use a GPU less well, and may split groups, which costs group losses (PACS,
REAL) a forward pass in every update but the first on a rollout. [`choose`] compares the seconds of all that fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..update.step_sizes import BatchSizes
from . import cost
from .cost import Execution, Gpu, ModelShape, Passes, Recomputation


USABLE_SHARE = 0.95  # of the memory of a GPU; the rest is fragmentation, kernels, and communication
EFFICIENT_TOKENS = 8192  # in a micro-batch, above which larger ones gain little
# Tokens of the longest prompt and of prompts on average, where they are not known.
UNKNOWN_LONGEST_PROMPT, UNKNOWN_MEAN_PROMPT = 1024, 256
_MEAN_SHARE = 0.35  # mean length of completions over the largest, where it is not known
_FILLED_SHARE = 0.9  # of `max_tokens`, in an average micro-batch
_CHOSEN_SHARE = 0.9  # of the room; the rest is for what the cost model does not count
_TIE = 1.02  # options whose estimates differ by less count as equally fast


def mean_completion(longest: int | None) -> int:
    """Return the expected tokens of a completion of at most `longest` tokens."""
    return max(1, round(_MEAN_SHARE * (longest or 1)))


def activation_precision(*, loads_float32: bool, is_mixed: bool, is_wrapped: bool) -> str:
    """
    Return the precision of activations, see [`~cost.Execution`].

    Args:
        loads_float32 (`bool`): Whether the weights are loaded in float32.
        is_mixed (`bool`): Whether the run has mixed precision, `bf16` or `fp16`.
        is_wrapped (`bool`): Whether FSDP or DeepSpeed hold the weights. With mixed precision they train float32
            copies, and compute with half-precision ones.
    """
    if not loads_float32 or (is_mixed and is_wrapped):
        return "bfloat16"
    return "autocast" if is_mixed else "float32"


class MemoryChoice(NamedTuple):
    """
    What a run recomputes, and the size of its micro-batches.

    Attributes:
        recomputation (`str`): One of `cost.RECOMPUTATIONS`.
        max_tokens (`int`, *optional*): Tokens of a micro-batch; `None` if `per_device_train_batch_size` bounds it.
        reason (`str`): Why, as a phrase.
    """

    recomputation: Recomputation
    max_tokens: int | None
    reason: str

    def __str__(self) -> str:
        size = "per_device_train_batch_size completions"
        if self.max_tokens is not None:
            size = f"{self.max_tokens:,} tokens"
        recomputation = "no" if self.recomputation == "none" else self.recomputation
        return f"{recomputation} recomputation, micro-batches of {size} ({self.reason})"


@dataclass(frozen=True)
class Workload:
    """
    Work of the updates on a generation batch.

    Attributes:
        training: Configuration of the trainer.
        step ([`BatchSizes`]): Batch sizes.
        shape ([`~cost.ModelShape`]), gpu ([`~cost.Gpu`]), execution ([`~cost.Execution`]): Model, device, and how it
            computes.
        longest_prompt, mean_prompt, mean_completion (`int`): Tokens.
        sharing (`int`): Completions of a prompt in an optimizer step, which compute it once in a micro-batch.
        trains_routers (`bool`): Whether each update measures the loads of experts by a forward pass, for the loss of
            their routers.
    """

    training: Any
    step: BatchSizes
    shape: ModelShape
    gpu: Gpu
    execution: Execution
    longest_prompt: int
    mean_prompt: int
    mean_completion: int
    sharing: int = 1
    trains_routers: bool = False

    # Tokens ---------------------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a completion."""
        return self.longest_prompt + (self.training.max_completion_length or 0)

    def largest(self, completions: int) -> int:
        """Return the tokens of some completions, if all are as long as possible."""
        saved = completions - math.ceil(completions / self.sharing)
        return completions * self.longest - saved * (self.longest_prompt - 1)

    def _completions_of_a_prompt(self, max_tokens: int) -> int:
        """Return how many average completions of a prompt share it in a micro-batch."""
        fitting = self.training.per_device_train_batch_size
        if self.sharing > 1 and self.training.max_tokens_per_micro_batch is not None:
            fitting = (max_tokens - self.mean_prompt) // self.mean_completion
        return max(1, min(fitting, self.sharing))

    def computed_per_completion(self, max_tokens: int) -> float:
        """Return the computed tokens per completion with its part of the prompt, on average."""
        return (self.mean_prompt - 1) / self._completions_of_a_prompt(max_tokens) + 1 + self.mean_completion

    def attended_length(self, max_tokens: int) -> float:
        """Return the mean of squared lengths over the mean length, as [`~cost.ModelShape.forward_flops`] takes it."""
        prompt, completion, longest = self.mean_prompt, self.mean_completion, self.training.max_completion_length
        squares = prompt**2 / self._completions_of_a_prompt(max_tokens) + 2 * prompt * completion
        return (squares + cost.mean_square_length(completion, longest)) / self.computed_per_completion(max_tokens)

    def has_split_groups(self, max_tokens: int) -> bool:
        """Return whether groups of completions of average length are spread over several micro-batches."""
        training, completions = self.training, self.step.num_generations
        if not training.scores_groups:
            return False
        if training.group_layout == "split":
            return True
        if training.group_layout == "whole":
            return False
        if training.max_tokens_per_micro_batch is None:
            return training.per_device_train_batch_size < completions
        return max_tokens < self.mean_prompt + completions * self.mean_completion

    # Cost -----------------------------------------------------------------------------------------------------------

    def passes(self, *, has_split_groups: bool) -> Passes:
        """Return the passes of the policy over the generation batch."""
        training, step = self.training, self.step
        reference = training.proxy_reference
        if training.is_asynchronous and reference == "rollout":  # its log-probs come from the engine
            reference = None
        corrects = training.use_vllm and training.vllm_importance_sampling_correction
        if training.is_asynchronous and not training.scores_groups:  # the denominators of ratios come from the engine
            corrects = False
        updates, iterations, kl = step.updates_per_generation, training.num_iterations, training.beta != 0
        if training.is_exact:
            passes = cost.exact_passes(
                updates=updates,
                iterations=iterations,
                correction=corrects,
                kl=kl,
                reference=reference,
                split=has_split_groups,
            )
        else:
            passes = cost.actor_critic_passes(updates=updates, iterations=iterations, correction=corrects, kl=kl)
        more = training.keeps_generating_policy + iterations * self.trains_routers
        return passes._replace(forward=passes.forward + more)

    def seconds(self, recomputation: Recomputation, max_tokens: int) -> float:
        """Return the seconds of all updates, without the optimizer."""
        passes = self.passes(has_split_groups=self.has_split_groups(max_tokens))
        return self.seconds_of_passes(self.shape, passes, recomputation, max_tokens)

    def seconds_of_passes(
        self, shape: ModelShape, passes: Passes, recomputation: Recomputation, max_tokens: int
    ) -> float:
        """Return the seconds of some passes of a model over the generation batch."""
        tokens = (
            self.step.completions_per_generation * self.computed_per_completion(max_tokens) / self.step.num_processes
        )
        updates = self.step.updates_per_generation / self.training.num_iterations
        return cost.update_seconds(
            shape,
            self.gpu,
            self.execution._replace(recomputation=recomputation),
            passes,
            tokens=tokens,
            mean_length=self.attended_length(max_tokens),
            micro_batches=max(updates, tokens / (_FILLED_SHARE * max_tokens)),
        )

    def activation_bytes(self, recomputation: Recomputation, max_tokens: float) -> float:
        """Return the bytes of the activations of a micro-batch and of the casts of weights."""
        execution = self.execution._replace(recomputation=recomputation)
        return self.shape.activation_bytes(max_tokens, execution) + self.shape.cast_bytes(execution)

    def tokens_that_fit(self, recomputation: Recomputation, room: float) -> int:
        """Return the tokens of the largest micro-batch that fits into `room` bytes; 0 if none does."""
        casts = self.activation_bytes(recomputation, 0)
        per_token = self.activation_bytes(recomputation, 1) - casts
        return max(0, int((room - casts) / per_token))


def completions_of_a_prompt(step: BatchSizes, training: Any) -> int:
    """Return the completions of a prompt in an optimizer step, which shuffled minibatches divide."""
    if not training.shuffle_minibatches:
        return step.num_generations
    minibatches = step.updates_per_generation // training.num_iterations
    return max(1, step.num_generations // minibatches)


class _Option(NamedTuple):
    """A way to run the updates of a generation batch, and the `seconds` that it takes."""

    seconds: float
    max_tokens: int
    recomputation: Recomputation


def choose(
    workload: Workload, room: float, recomputations: Sequence[Recomputation] = cost.RECOMPUTATIONS
) -> MemoryChoice | None:
    """
    Choose what a configuration leaves open with `gradient_checkpointing: auto` or `max_tokens_per_micro_batch: auto`:
    the fastest option by the cost model that fits into `room` bytes. Of options that are about equally fast, the one
    with the least recomputation wins, then that with the smallest micro-batches.

    Args:
        recomputations (`Sequence[str]`): What `gradient_checkpointing: auto` chooses from, from most memory to least.

    Returns:
        The choice, or `None` if the longest completion, or the size that is set, does not fit.
    """
    training = workload.training
    if not chooses(training):
        return MemoryChoice(set_recomputation(training), training.max_tokens_per_micro_batch, "as set")
    if training.gradient_checkpointing != "auto":
        recomputations = (set_recomputation(training),)
    options = []
    for recomputation in recomputations:
        fitting_tokens = workload.tokens_that_fit(recomputation, _CHOSEN_SHARE * room)
        for size in _sizes(workload, fitting_tokens):
            if workload.longest <= size <= fitting_tokens:
                options.append(_Option(workload.seconds(recomputation, size), size, recomputation))
    if not options:
        return None
    fastest = min(option.seconds for option in options)
    ties = [option for option in options if option.seconds <= _TIE * fastest]
    best = min(ties, key=lambda option: (recomputations.index(option.recomputation), option.max_tokens))
    is_bounded_by_completions = training.max_tokens_per_micro_batch is None
    reason = _reason(workload, room, best.recomputation, best.max_tokens)
    return MemoryChoice(best.recomputation, None if is_bounded_by_completions else best.max_tokens, reason)


def choice_on_cpu(training: Any) -> MemoryChoice:
    """Return the choice on a CPU, whose memory is not counted: `"auto"` recomputes nothing, and micro-batches hold
    `per_device_train_batch_size` completions."""
    size = training.max_tokens_per_micro_batch
    return MemoryChoice(set_recomputation(training), None if size == "auto" else size, "on a CPU")


def choice_of_unknown_model(training: Any, model_type: str) -> MemoryChoice:
    """Return the choice for an architecture whose activations the cost model does not know: the least memory."""
    recomputation: Recomputation = "full" if training.gradient_checkpointing else "none"
    size = training.max_tokens_per_micro_batch
    reason = f"the memory that {model_type!r} models need is not known"
    return MemoryChoice(recomputation, None if size == "auto" else size, reason)


def chooses(training: Any) -> bool:
    """Return whether a configuration leaves recomputation or the size of micro-batches open."""
    return "auto" in (training.gradient_checkpointing, training.max_tokens_per_micro_batch)


def recomputations_of(training: Any, *, has_adapter: bool, is_zero3: bool) -> tuple[Recomputation, ...]:
    """Return what a configuration leaves open, from most memory to least. TRL sets `use_reentrant` for adapters with
    ZeRO-3, which excludes selective recomputation, as the user may."""
    if training.gradient_checkpointing != "auto":
        return (set_recomputation(training),)
    is_reentrant = bool((training.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    if is_reentrant or (has_adapter and is_zero3):
        return ("none", "full")
    return cost.RECOMPUTATIONS


FSDP_RECOMPUTES = (
    "gradient_checkpointing cannot be used with fsdp_activation_checkpointing: true, which recomputes in any case. "
    "Set the latter to false, in the accelerate file or in fsdp_config."
)


def set_recomputation(training: Any) -> Recomputation:
    """Return the recomputation of a configuration that does not leave it open."""
    return "full" if training.gradient_checkpointing is True else "none"


def _sizes(workload: Workload, fitting_tokens: int) -> list[int]:
    """Return the sizes of micro-batches to compare: the one that is set, or efficient ones, the one that holds the
    longest group, and the largest that fits."""
    training, step = workload.training, workload.step
    if training.max_tokens_per_micro_batch is None:
        return [workload.largest(training.per_device_train_batch_size)]
    if training.max_tokens_per_micro_batch != "auto":
        return [training.max_tokens_per_micro_batch]
    whole_update = workload.largest(max(1, step.completions_per_update // step.num_processes))
    sizes = {whole_update, min(whole_update, workload.largest(step.num_generations))}
    size = max(EFFICIENT_TOKENS, workload.longest)
    while size < whole_update:
        sizes.add(size)
        size *= 2
    return sorted({min(size, fitting_tokens) for size in sizes})


def _reason(workload: Workload, room: float, recomputation: Recomputation, size: int) -> str:
    """Return why an option was chosen."""
    bytes_needed = workload.activation_bytes(recomputation, size)
    reason = f"{bytes_needed / cost.GIB:.1f} of {room / cost.GIB:.1f} GiB that are left"
    if recomputation != "none":
        without = workload.tokens_that_fit("none", _CHOSEN_SHARE * room)
        if without < workload.longest:
            reason += f"; without recomputation {without:,} tokens fit, and a rollout can have {workload.longest:,}"
        else:
            reason += f"; without recomputation {without:,} tokens fit, which is slower"
    if workload.training.scores_groups and workload.has_split_groups(size):
        reason += "; groups are split, which costs a forward pass after the first update of a rollout"
    return reason

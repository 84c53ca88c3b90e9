"""Memory of the optimizer steps of a run: a step that runs out of memory is repeated with less.

`memory.py` has chosen recomputation and the size of micro-batches before the model was loaded. [`StepMemory`] holds
what they are now, and lowers them.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache

from ..errors import FailedRun
from ..plan.cost import RECOMPUTATIONS
from ..plan.workload import MemoryChoice, chooses
from ..update.driver import OutOfMemoryElsewhere, StepResult
from ..update.groups import Groups
from ..update.minibatch import Minibatch
from ..update.peft_models import without_peft
from ..update.recomputation import set_recomputation
from ..update.reference import local_shard
from ..update.rollout import Rollout
from .compared_settings import fixed_settings
from .memory import MemoryPlan, set_checkpointing
from .random_numbers import random_states, restore_random_states


if TYPE_CHECKING:
    from ..pacs_config import ExactUpdateConfig
    from .exact_trainer import ExactUpdateTrainer


class StepMemory:
    """
    What the backward passes of a run recompute, and the size of its micro-batches.

    Args:
        trainer ([`ExactUpdateTrainer`]): Its model, update, and settings follow the choice.
        plan ([`MemoryPlan`]): What was chosen for this device.
        args ([`ExactUpdateConfig`]): The configuration as the user has written it, perhaps with `"auto"`.

    Attributes:
        choice ([`MemoryChoice`]): What holds now.
        is_automatic (`bool`): Whether a setting is `"auto"`.
    """

    def __init__(self, trainer: "ExactUpdateTrainer", plan: MemoryPlan, args: "ExactUpdateConfig"):
        self.trainer, self.plan, self.choice = trainer, plan, plan.choice
        self.is_automatic = chooses(args)
        self._settings = [args.gradient_checkpointing, args.max_tokens_per_micro_batch]

    # Start of a run -------------------------------------------------------------------------------------------------

    def begin_run(self, saved: dict[str, Any] | None) -> None:
        """Use the plan, or what a checkpoint has `saved` ([`state`]) with the same settings if it fits. Call this
        before Trainer prepares the model."""
        before, self.choice = self.choice, self.plan.choice
        if saved is not None and saved["settings"] == self._settings:
            choice = MemoryChoice(*saved["choice"])
            if self.plan.fits(choice):
                self.choice = choice
            else:
                self.trainer.accelerator.print(
                    f"The checkpoint was written with {choice}, which does not fit here. The run continues with "
                    "other micro-batches, whose rounding differs."
                )
        if self.is_automatic:
            self.trainer.accelerator.print(f"Memory: {self.choice}.")
        if self.is_automatic or self.choice != before:  # an earlier run of this trainer may have lowered it
            self._apply()

    def state(self) -> dict[str, Any]:
        """Return the choice and the settings that it was made from, as plain values for a checkpoint."""
        return {"choice": list(self.choice), "settings": self._settings}

    def try_largest_micro_batch(self) -> None:
        """Run the largest micro-batch on all processes, and halve it until it fits on all of them. With FSDP and
        ZeRO-3 processes wait for each other in every layer, so that a step in which one of them runs out of memory
        could not be repeated."""
        trainer, workload = self.trainer, self.plan.workload
        driver, model = trainer.update.driver, trainer.model_wrapped
        assert workload is not None
        start = StartOfUpdate(trainer)
        while True:
            size = driver.limits.max_tokens or trainer.args.per_device_train_batch_size * workload.longest
            rollouts = largest_micro_batch(size, workload.longest_prompt, workload.longest - workload.longest_prompt)
            minibatch = trial_minibatch(rollouts, trainer.accelerator.num_processes)
            fits = True
            try:
                with moments_of_optimizer(model, trainer.accelerator.device):
                    driver.run_without_loss(model, minibatch)
            except torch.OutOfMemoryError:
                fits = False
            driver.discard_gradients(model)
            start.restore()
            if all(gather_object([fits])):
                return
            self._use_less(minibatch)

    # Optimizer steps ------------------------------------------------------------------------------------------------

    def repeat_until_it_fits(
        self, update: Callable[[], StepResult], model: torch.nn.Module, minibatch: Minibatch
    ) -> StepResult:
        """Return the result of an `update` on a minibatch. If the device runs out of memory, discard what was
        computed, halve the micro-batches of this and all later steps, and repeat."""
        start, driver = StartOfUpdate(self.trainer), self.trainer.update.driver
        while True:
            is_exhausted = False
            try:
                return update()
            except OutOfMemoryElsewhere:
                pass
            except torch.OutOfMemoryError:
                if not driver.can_repeat:
                    raise
                is_exhausted = True
            # The exception has been deleted, and with it the last references to activations.
            start.restore()
            driver.abandon_step(model, is_exhausted=is_exhausted)
            self._use_less(minibatch)

    def _use_less(self, minibatch: Minibatch) -> None:
        """Halve the micro-batches of this run. If those of `minibatch` hold one completion each, and recomputation is
        chosen automatically, recompute more. Raises a [`FailedRun`] if nothing is left to try."""
        driver, step = self.trainer.update.driver, self.trainer.state.global_step + 1
        if driver.lower_max_tokens(minibatch):
            size = driver.limits.max_tokens
            self.choice = self.choice._replace(max_tokens=size, reason=f"out of memory in step {step}")
            minibatches = [minibatch, *self.trainer._waiting.minibatches]
            for distinct in {id(each): each for each in minibatches}.values():  # `minibatch` may wait too
                driver.split(distinct)
        else:
            self._recompute_more(step)
        self.trainer.accelerator.print(
            f"Out of memory in optimizer step {step}, which is repeated with {self.choice}."
        )

    def _recompute_more(self, step: int) -> None:
        done = RECOMPUTATIONS.index(self.choice.recomputation)  # a resumed run may have another one than the plan's
        later = [choice for choice in self.plan.recomputations if RECOMPUTATIONS.index(choice) > done]
        if not later:
            raise FailedRun(
                f"The device ran out of memory in optimizer step {step} with micro-batches of the longest completion. "
                "Set gradient_checkpointing: true, lower max_completion_length, or shard the training state "
                "(recipes/accelerate_configs/fsdp2.yaml)."
            )
        self.choice = self.choice._replace(recomputation=later[0], reason=f"out of memory in step {step}")
        self._apply()

    def _apply(self) -> None:
        """Let model, update, and Trainer follow the choice."""
        trainer, args = self.trainer, self.trainer.args
        set_checkpointing(args, self.choice)
        trainer._fixed_settings = fixed_settings(args)
        model = without_peft(trainer.accelerator.unwrap_model(trainer.model))
        set_recomputation(model, self.choice.recomputation, args.gradient_checkpointing_kwargs)
        driver = trainer.update.driver
        driver.limits = driver.limits._replace(
            max_tokens=self.choice.max_tokens,
            is_adaptive=self.is_automatic or self.choice.max_tokens != args.max_tokens_per_micro_batch,
            backward_cost=backward_cost(args),
        )


def backward_cost(args: "ExactUpdateConfig") -> int:
    """Return the cost of a backward pass in forward passes: 2, and 3 if it computes activations again."""
    return 3 if args.gradient_checkpointing else 2


# Repeated and tried steps -------------------------------------------------------------------------------------------


class StartOfUpdate:
    """
    State of a trainer before the passes of an update, to which [`restore`] returns: random numbers, metrics of
    training, the work that its timer counts, and the attributes that checkpoints contain (a method may update running
    means in a pass), of which containers are copied, but not what they contain. Besides these, passes change only
    gradients.
    """

    def __init__(self, trainer: "ExactUpdateTrainer"):
        self._trainer = trainer
        self._random_states = random_states(trainer.accelerator.device)
        self._metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self._work = trainer.timer.work.copy()
        self._attributes = {name: copy.copy(getattr(trainer, name)) for name in trainer._saved_attributes}

    def restore(self) -> None:
        """Set the trainer to this state; it can be restored several times."""
        trainer = self._trainer
        restore_random_states(self._random_states, trainer.accelerator.device)
        metrics, work = trainer._metrics["train"], trainer.timer.work
        metrics.clear()
        metrics.update({name: list(values) for name, values in self._metrics.items()})
        work.clear()
        work.update(self._work)
        for name, value in self._attributes.items():
            setattr(trainer, name, copy.copy(value))
        clear_device_cache(garbage_collection=True)


def largest_micro_batch(num_tokens: int, prompt: int, completion: int) -> list[Rollout]:
    """Return rollouts of `num_tokens` tokens together: as many as possible with the largest lengths of `prompt` and
    `completion`, and the rest. Prompts differ, so that none is computed once for several rollouts."""
    num_longest, rest = divmod(num_tokens, prompt + completion)
    lengths = [(prompt, completion)] * num_longest
    if rest > 1:  # a prompt and a completion have at least a token each
        lengths.append((1, rest - 1))
    return [
        Rollout(
            prompt_ids=np.full(prompt_length, i, dtype=np.int32),
            completion_ids=np.zeros(completion_length, dtype=np.int32),
            loss_mask=np.ones(completion_length, dtype=bool),
            label=0.0,
        )
        for i, (prompt_length, completion_length) in enumerate(lengths)
    ]


def trial_minibatch(rollouts: list[Rollout], num_processes: int) -> Minibatch:
    """Return a minibatch in which every process has all of the rollouts in two micro-batches, the second of which adds
    its gradient to that of the first."""
    indices = list(range(len(rollouts)))
    groups = Groups(torch.zeros(len(rollouts)), indices)
    return Minibatch(rollouts, groups, [[indices, indices] for _ in range(num_processes)], whole_groups=False)


@contextmanager
def moments_of_optimizer(model: torch.nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    """Occupy the memory of Adam's moments of this process's weights on a device, which are allocated after the first
    backward pass. FSDP may have the weights, and so the moments, in memory of the CPU."""
    shards = [local_shard(parameter) for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(shard.numel() for shard in shards if shard.device.type == device.type)
    moments = torch.empty(2 * num_trained, device=device)
    try:
        yield moments
    finally:
        del moments

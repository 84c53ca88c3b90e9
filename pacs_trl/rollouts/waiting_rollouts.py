"""Completions between their generation and their optimizer steps, in memory and in checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object

from ..update.minibatch import Minibatch
from ..update.prompt_images import PromptImages
from ..update.rollout import Rollout, with_arrays, with_tensors


@dataclass(frozen=True)
class WaitingRollouts:
    """
    Completions that wait for their optimizer steps. The lists are never changed in place, so that a reference to this
    object restores an earlier state.

    Attributes:
        next_step (`list[Rollout]`): Completions of the next optimizer step that have arrived; micro-batches are
            scheduled when it has all.
        minibatches (`list[Minibatch]`): The optimizer steps of the current generation batch, if it has several; each
            is used `num_iterations` times.
        slices (`list[list[Rollout]]`): The completions of the current generation batch by accumulation slot, if
            optimizer steps take them as they come (`BatchSizes.is_sliced`).
    """

    next_step: list[Rollout] = field(default_factory=list)
    minibatches: list[Minibatch] = field(default_factory=list)
    slices: list[list[Rollout]] = field(default_factory=list)

    def with_more_for_next_step(self, rollouts: Sequence[Rollout]) -> "WaitingRollouts":
        """Return these completions with more for the next optimizer step."""
        return replace(self, next_step=[*self.next_step, *rollouts])

    def by_step(self) -> list[list[Rollout]]:
        """Return the completions of each accumulation slot or optimizer step of the current generation batch."""
        return self.slices or [minibatch.rollouts for minibatch in self.minibatches]


def share_logps(rollouts: Sequence[Rollout], names: Sequence[str]) -> None:
    """Give all processes the log-probs `names` that each has stored in some of `rollouts`, which are those of all
    processes in one order."""
    stored_here: list[tuple[int, list]] = []  # the index of a rollout, and its log-probs
    for i, rollout in enumerate(rollouts):
        logps = [getattr(rollout, name) for name in names]
        if logps[0] is not None:
            stored_here.append((i, logps))
    for i, logps in gather_object(stored_here):
        for name, values in zip(names, logps, strict=True):
            setattr(rollouts[i], name, values)


def split_into_slices(rollouts: Sequence[Rollout], num_slots: int, shuffle_seed: int | None) -> list[list[Rollout]]:
    """Split a generation batch into its accumulation slots, in a random order unless `shuffle_seed` is `None`."""
    order = torch.arange(len(rollouts))
    if shuffle_seed is not None:
        order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(shuffle_seed))
    return [[rollouts[i] for i in slot.tolist()] for slot in order.tensor_split(num_slots)]


# Checkpoints --------------------------------------------------------------------------------------------------------


def rollouts_to_save(
    steps: Sequence[Sequence[Rollout]], process: int, num_processes: int
) -> dict[tuple[int, int], dict]:
    """Return the completions of a generation batch that this process saves, keyed by (optimizer step, index): those
    with the log-probs that only this process has, and its share of the others."""
    return {
        (step, i): with_tensors(vars(rollout) | {"images": images_to_save(rollout.images)})
        for step, rollouts in enumerate(steps)
        for i, rollout in enumerate(rollouts)
        if rollout.ref_logps is not None or rollout.old_logps is not None or i % num_processes == process
    }


def images_to_save(images: PromptImages | None) -> dict[str, Any] | None:
    """Return what a checkpoint has of a prompt's images: the index of its dataset row, or all if it has none."""
    if images is None:
        return None
    if images.row is not None:
        return {"row": images.row}
    return {"inputs": images.inputs, "token_types": images.token_types}


def merge_rollouts(parts: Sequence[dict[tuple[int, int], dict]], num_minibatches: int) -> list[list[Rollout]]:
    """Merge the parts of all processes that [`rollouts_to_save`] returned into the rollouts of each of
    `num_minibatches` optimizer steps; an empty list if nothing was saved. Log-probs that only one process has are
    taken from its part."""
    states: dict[tuple[int, int], dict] = {}
    for part in parts:
        for index, state in part.items():
            merged = states.setdefault(index, dict(state))
            merged |= {name: value for name, value in state.items() if merged[name] is None}
    if not states:
        return []
    minibatches: list[list[Rollout]] = [[] for _ in range(num_minibatches)]
    for minibatch, i in sorted(states):
        minibatches[minibatch].append(Rollout(**with_arrays(states[minibatch, i])))
    return minibatches

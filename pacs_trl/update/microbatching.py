"""Micro-batch scheduling for ragged rollouts: pure functions on lengths.

The gradient of an optimizer step is a sum over completions (see `objective.proxy_coefficients`), so its micro-batches
may have any composition. A schedule has one entry per process: a list of micro-batches, each a list of completion
indices. Every process gets the same number of micro-batches, because each forward pass may be a collective operation
(FSDP, ZeRO-3); for an empty micro-batch, the process runs a filler completion of weight zero. Schedules depend only on
the lengths, so all processes compute the same schedule without communication.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


Schedule = list[list[list[int]]]


class MicroBatchConfig(NamedTuple):
    """
    Size limits of micro-batches, and the costs by which schedules are compared.

    Attributes:
        num_processes (`int`): Number of processes.
        max_rollouts (`int`): Maximum number of rollouts per micro-batch. Ignored if `max_tokens` is set.
        max_tokens (`int`, *optional*): Maximum number of tokens per micro-batch, see [`micro_batch_size`].
        padded (`bool`): Whether rollouts are padded (`True`) or packed (`False`).
        group_layout (`str`): `"auto"`, `"whole"`, or `"split"`, see [`PACSConfig`].
        backward_cost (`int`): Cost of a backward pass in forward passes.
        pair_cost (`float`): See [`RolloutLengths`].
        is_adaptive (`bool`): Whether `max_tokens` was chosen for the memory of the device, and not set: a longer
            rollout raises it.
    """

    num_processes: int
    max_rollouts: int
    max_tokens: int | None = None
    padded: bool = False
    group_layout: str = "auto"
    backward_cost: int = 2
    pair_cost: float = 0.0
    is_adaptive: bool = False


class RolloutLengths(NamedTuple):
    """
    Lengths of rollouts, and the prompts that they share.

    Attributes:
        prompts, completions (`Sequence[int]`): Numbers of tokens.
        prompt_numbers (`Sequence[int]`): Number of the prompt of each rollout. A packed micro-batch computes rollouts
            with equal numbers from one copy of the prompt.
        pair_cost (`float`): Cost of one token attending to another token, in units of the cost of a token outside
            attention. In a layer of width `h`, a token costs about `12 h^2` multiplications outside attention, and
            `2 h` for every token that it attends to: `1 / (6 h)`.
    """

    prompts: Sequence[int]
    completions: Sequence[int]
    prompt_numbers: Sequence[int]
    pair_cost: float = 0.0

    def by_prompt(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the rollout indices `indices` grouped by prompt."""
        indices_of_prompts: dict[int, list[int]] = {}
        for i in indices:
            indices_of_prompts.setdefault(self.prompt_numbers[i], []).append(i)
        return list(indices_of_prompts.values())


class MicroBatchSize(NamedTuple):
    """Size of a forward pass: its `tokens`, and its `cost` in tokens, with that of attention."""

    tokens: int
    cost: float


class Unit(NamedTuple):
    """Rollouts that stay together in a micro-batch, with the size of a forward pass over them alone."""

    indices: list[int]
    tokens: int
    cost: float


def micro_batch_size(indices: Sequence[int], lengths: RolloutLengths, *, padded: bool) -> MicroBatchSize:
    """Return the size of a forward pass over `indices`, which may be empty. If `padded`, each rollout counts with the
    length of the longest. Otherwise a shared prompt counts once."""
    if not indices:
        return MicroBatchSize(0, 0.0)
    if padded:
        tokens = len(indices) * max(lengths.prompts[i] + lengths.completions[i] for i in indices)
        return MicroBatchSize(tokens, tokens + lengths.pair_cost * tokens * tokens / len(indices) / 2)
    tokens, pairs = 0, 0.0
    for group in lengths.by_prompt(indices):
        prompt, completions = lengths.prompts[group[0]], [lengths.completions[i] for i in group]
        tokens += prompt + sum(completions)
        pairs += prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in completions)
    return MicroBatchSize(tokens, tokens + lengths.pair_cost * pairs)


def schedule_cost(schedule: Schedule, lengths: RolloutLengths, *, padded: bool) -> float:
    """Return the cost of the critical path. Processes run in lockstep, so each micro-batch costs as much as the most
    expensive one that runs concurrently."""
    return sum(
        max(micro_batch_size(indices, lengths, padded=padded).cost for indices in concurrent)
        for concurrent in zip(*schedule, strict=True)
    )


def schedule_micro_batches(
    lengths: RolloutLengths, units: Sequence[Sequence[int]], limits: MicroBatchConfig
) -> Schedule | None:
    """
    Distribute rollouts over processes and micro-batches.

    Padded micro-batches hold rollouts of similar length, to minimize padding. Packed micro-batches mix lengths, to
    equalize their sizes; rollouts with the same prompt stay together where computing the prompt once saves more than
    better balance would. Micro-batches that run concurrently on different processes have similar sizes, and all
    processes have similar totals. `units` hold indices of rollouts; a unit is never split.

    Returns:
        The schedule, or `None` if a unit does not fit into a micro-batch.
    """
    max_rollouts, max_tokens = limits.max_rollouts, math.inf
    if limits.max_tokens is not None:
        max_rollouts, max_tokens = max(sum(map(len, units)), 1), limits.max_tokens

    candidates: list[Sequence[Sequence[int]]] = [units]
    if not limits.padded:
        candidates += _parts_of_groups(units, lengths, max_rollouts)
    schedules: list[Schedule] = []
    for candidate in candidates:
        sized = [Unit(list(unit), *micro_batch_size(unit, lengths, padded=limits.padded)) for unit in candidate]
        if any(len(unit.indices) > max_rollouts or unit.tokens > max_tokens for unit in sized):
            continue
        sized.sort(key=lambda unit: -unit.cost)
        if limits.padded:
            micro_batches = _neighbours_in_length(sized, lengths, max_rollouts, max_tokens)
        else:
            micro_batches = _evenly_filled(sized, limits.num_processes, max_rollouts, max_tokens)
        schedules.append(_over_processes(micro_batches, lengths, limits))
    return min(schedules, key=lambda schedule: schedule_cost(schedule, lengths, padded=limits.padded), default=None)


def split_micro_batches(
    schedule: Schedule, lengths: RolloutLengths, max_tokens: int, *, padded: bool = False
) -> Schedule:
    """Return the schedule with every micro-batch of more than `max_tokens` tokens split. No rollout changes its
    process, where its log-probs may be stored. `max_tokens` must hold the longest rollout."""
    limits = MicroBatchConfig(1, 1, max_tokens, padded=padded)
    processes: Schedule = []
    for micro_batches in schedule:
        parts: list[list[int]] = []
        for indices in micro_batches:
            if micro_batch_size(indices, lengths, padded=padded).tokens <= max_tokens:
                parts.append(indices)
                continue
            split = schedule_micro_batches(lengths, [[i] for i in indices], limits)
            assert split is not None  # `max_tokens` holds the longest rollout
            parts += split[0]  # of the only process of `limits`
        processes.append(sorted(parts, key=lambda part: -micro_batch_size(part, lengths, padded=padded).cost))
    most_parts = max(map(len, processes))
    return [[*parts, *([[]] * (most_parts - len(parts)))] for parts in processes]


def _parts_of_groups(
    units: Sequence[Sequence[int]], lengths: RolloutLengths, max_rollouts: int
) -> Iterator[list[list[int]]]:
    """Yield units that join rollouts with the same prompt: first whole groups, then 2, 4, ... parts per group, of
    about equal length. Yields nothing if the units already hold several rollouts."""
    if any(len(unit) != 1 for unit in units):
        return
    groups = lengths.by_prompt([i for (i,) in units])
    num_parts = 1
    while num_parts < max(map(len, groups), default=1):
        parts: list[list[int]] = []
        for indices in groups:
            num_parts_of_group = max(min(num_parts, len(indices)), math.ceil(len(indices) / max_rollouts))
            parts_of_group: list[list[int]] = [[] for _ in range(num_parts_of_group)]
            # Dealing the longest rollouts first, back and forth, balances the lengths.
            longest_first = sorted(indices, key=lambda i: -lengths.completions[i])
            back_and_forth = itertools.cycle([*parts_of_group, *reversed(parts_of_group)])
            for rollout, part in zip(longest_first, back_and_forth, strict=False):
                part.append(rollout)
            parts += parts_of_group
        yield parts
        num_parts *= 2


def _over_processes(micro_batches: list[list[int]], lengths: RolloutLengths, limits: MicroBatchConfig) -> Schedule:
    num_processes = limits.num_processes
    micro_batches.sort(key=lambda batch: -micro_batch_size(batch, lengths, padded=limits.padded).cost)
    micro_batches += [[] for _ in range(-len(micro_batches) % num_processes)]
    schedule: Schedule = [[] for _ in range(num_processes)]
    for start in range(0, len(micro_batches), num_processes):
        concurrent = micro_batches[start : start + num_processes]
        # Alternating the direction balances totals: the process with the largest micro-batch gets the smallest next.
        for process, batch in enumerate(concurrent if start // num_processes % 2 == 0 else reversed(concurrent)):
            schedule[process].append(batch)
    return schedule


def _neighbours_in_length(
    units: list[Unit], lengths: RolloutLengths, max_rollouts: int, max_tokens: float
) -> list[list[int]]:
    """Cut the units, longest first, into runs that fit; a run has similar lengths, so there is little padding."""
    micro_batches: list[list[int]] = []
    for unit in units:
        if micro_batches:
            joined = micro_batches[-1] + unit.indices
            tokens = micro_batch_size(joined, lengths, padded=True).tokens
            if tokens <= max_tokens and len(joined) <= max_rollouts:
                micro_batches[-1] = joined
                continue
        micro_batches.append(unit.indices)
    return micro_batches


def _evenly_filled(units: list[Unit], num_processes: int, max_rollouts: int, max_tokens: float) -> list[list[int]]:
    """Assign each unit, most expensive first, to the cheapest micro-batch with room, and use the smallest number of
    micro-batches for which all units fit."""
    num_rollouts = sum(len(unit.indices) for unit in units)
    num_tokens = sum(unit.tokens for unit in units)
    fewest = max(math.ceil(num_rollouts / max_rollouts), math.ceil(num_tokens / max_tokens))
    num_micro_batches = math.ceil(fewest / num_processes) * num_processes
    while True:
        micro_batches = _filled(units, num_micro_batches, max_rollouts, max_tokens)
        if micro_batches is not None:
            return micro_batches
        num_micro_batches += num_processes


def _filled(units: list[Unit], num_micro_batches: int, max_rollouts: int, max_tokens: float) -> list[list[int]] | None:
    """Assign each unit to the cheapest of some micro-batches with room; `None` if there is none for one of them."""
    micro_batches: list[list[int]] = [[] for _ in range(num_micro_batches)]
    num_rollouts, num_tokens, costs = np.zeros((3, num_micro_batches))
    for unit in units:
        has_room = (num_rollouts + len(unit.indices) <= max_rollouts) & (num_tokens + unit.tokens <= max_tokens)
        if not has_room.any():
            return None
        cheapest = int(np.where(has_room, costs, np.inf).argmin())
        micro_batches[cheapest] += unit.indices
        num_rollouts[cheapest] += len(unit.indices)
        num_tokens[cheapest] += unit.tokens
        costs[cheapest] += unit.cost
    return micro_batches

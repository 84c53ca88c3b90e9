"""Which sequences go into which micro-batch, on which process: pure functions on lengths.

The gradient of an optimizer step is a sum over sequences (see `objective.proxy_coefficients`), so its micro-batches may
have any composition. A schedule is a list with one entry per process, each a list of micro-batches, each a list of row
indices. Every process gets the same number of micro-batches, because each forward may be a collective operation
(FSDP, ZeRO-3); an empty micro-batch stands for a forward of a row whose weight is zero. Schedules depend on nothing but the
lengths, so all processes compute the same one without talking to each other.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


Schedule = list[list[list[int]]]


class RowLengths(NamedTuple):
    """Number of prompt tokens and completion tokens of each row, in the order of the rows."""

    prompts: Sequence[int]
    completions: Sequence[int]


def micro_batch_tokens(rows: Sequence[int], lengths: RowLengths, *, padded: bool) -> int:
    """Tokens that a forward over `rows`, possibly none, processes: if `padded`, the rows form a rectangle, prompts
    padded on the left and completions on the right, each to the longest of these rows; else they are packed and only
    real tokens count."""
    if not rows:
        return 0
    if padded:
        return len(rows) * (max(lengths.prompts[i] for i in rows) + max(lengths.completions[i] for i in rows))
    return sum(lengths.prompts[i] + lengths.completions[i] for i in rows)


def schedule_tokens(schedule: Schedule, lengths: RowLengths, *, padded: bool) -> int:
    """Tokens on the critical path: processes run in lockstep, so each micro-batch costs as much as its largest one."""
    return sum(
        max(micro_batch_tokens(rows, lengths, padded=padded) for rows in concurrent)
        for concurrent in zip(*schedule, strict=True)
    )


def schedule_micro_batches(
    lengths: RowLengths,
    units: Sequence[Sequence[int]],
    *,
    num_processes: int,
    max_rows: int,
    max_tokens: int | None = None,
    padded: bool = False,
) -> Schedule | None:
    """
    Distribute rows over processes and micro-batches.

    Padded micro-batches hold rows of similar length, so that little of each rectangle is padding. Packed ones hold
    rows of all lengths, so that all are equally large. Micro-batches that run at the same time on different processes
    get similar sizes, and every process gets a similar total.

    Args:
        lengths (`RowLengths`): Lengths of all rows.
        units (sequence of sequences of `int`): The rows to place, each in exactly one micro-batch; the rows of a unit
            share one.
        num_processes (`int`): Number of processes.
        max_rows (`int`): Most rows in a micro-batch. Not used if `max_tokens` is given.
        max_tokens (`int`, *optional*): Most tokens in a micro-batch, padding included.
        padded (`bool`): Whether rows are padded to a rectangle or packed.

    Returns:
        `list[list[list[int]]]`: the schedule, or `None` if some unit does not fit into a micro-batch.
    """
    if max_tokens is not None:
        max_rows = max(sum(map(len, units)), 1)
    sizes = [micro_batch_tokens(unit, lengths, padded=padded) for unit in units]
    if any(len(unit) > max_rows or (max_tokens is not None and n > max_tokens) for unit, n in zip(units, sizes)):
        return None
    longest_first = [list(unit) for _, unit in sorted(zip(sizes, units), key=lambda pair: -pair[0])]
    if padded:
        micro_batches = _neighbours_in_length(longest_first, lengths, max_rows, max_tokens)
    else:
        sizes.sort(reverse=True)
        micro_batches = _evenly_filled(longest_first, sizes, num_processes, max_rows, max_tokens)

    micro_batches.sort(key=lambda batch: -micro_batch_tokens(batch, lengths, padded=padded))
    micro_batches += [[] for _ in range(-len(micro_batches) % num_processes)]
    schedule: Schedule = [[] for _ in range(num_processes)]
    for start in range(0, len(micro_batches), num_processes):
        concurrent = micro_batches[start : start + num_processes]
        # Alternating directions evens out the totals: the process that got the largest now gets the smallest.
        for process, batch in enumerate(concurrent if start // num_processes % 2 == 0 else reversed(concurrent)):
            schedule[process].append(batch)
    return schedule


def _neighbours_in_length(
    units: list[list[int]], lengths: RowLengths, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Cut the units, longest first, into runs that fit: little padding, as the rows of a run are similarly long."""
    micro_batches: list[list[int]] = []
    for unit in units:
        joined = micro_batches[-1] + unit if micro_batches else []
        if (
            micro_batches
            and len(joined) <= max_rows
            and (max_tokens is None or micro_batch_tokens(joined, lengths, padded=True) <= max_tokens)
        ):
            micro_batches[-1] = joined
        else:
            micro_batches.append(list(unit))
    return micro_batches


def _evenly_filled(
    units: list[list[int]], sizes: list[int], num_processes: int, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Give each unit, longest first, to the emptiest micro-batch; take the smallest number of them that works."""
    num_rows, num_tokens, smallest = sum(map(len, units)), sum(sizes), min(map(len, units), default=1)
    fewest = -(-num_rows // max_rows) if max_tokens is None else -(-num_tokens // max_tokens)
    num_micro_batches = -(-fewest // num_processes) * num_processes
    while True:
        micro_batches: list[list[int]] = [[] for _ in range(num_micro_batches)]
        emptiest_first = [(0, i) for i in range(num_micro_batches)]
        for unit, size in zip(units, sizes, strict=True):
            too_small = []  # for this unit, and perhaps not for the next
            while emptiest_first and max_rows - len(micro_batches[emptiest_first[0][1]]) < len(unit):
                tokens, i = heapq.heappop(emptiest_first)
                if max_rows - len(micro_batches[i]) >= smallest:
                    too_small.append((tokens, i))
            if not emptiest_first or (max_tokens is not None and emptiest_first[0][0] + size > max_tokens):
                break
            tokens, i = emptiest_first[0]
            micro_batches[i] += unit
            heapq.heapreplace(emptiest_first, (tokens + size, i))
            for entry in too_small:
                heapq.heappush(emptiest_first, entry)
        else:
            return micro_batches
        num_micro_batches += num_processes

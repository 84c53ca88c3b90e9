"""Micro-batch scheduling for ragged rollouts: pure functions on lengths.

The gradient of an optimizer step is a sum over completions (see `objective.proxy_coefficients`), so its micro-batches
may have any composition. A schedule is a list with one entry per process, each a list of micro-batches, each a list of
row indices. Every process gets the same number of micro-batches, because each forward pass may be a collective
operation (FSDP, ZeRO-3); an empty one stands for a forward pass of a row with weight zero. Schedules depend on nothing
but the lengths, so all processes compute the same one without communication.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple


Schedule = list[list[list[int]]]


class RowLengths(NamedTuple):
    """
    Lengths of rows, and which of them share a prompt.

    Attributes:
        prompts, completions (`Sequence[int]`): Numbers of tokens.
        texts (`Sequence[int]`, *optional*): The same number for rows with the same prompt, which is computed once in a
            packed micro-batch; by default all differ.
        pair_cost (`float`): Cost of one token attending to another one, in tokens. In a layer of width `h`, a token
            costs about `12 h^2` multiplications outside attention and `2 h` for every token that it sees: `1 / (6 h)`.
    """

    prompts: Sequence[int]
    completions: Sequence[int]
    texts: Sequence[int] = ()
    pair_cost: float = 0.0

    def by_text(self, rows: Sequence[int]) -> list[list[int]]:
        """Return `rows` grouped by prompt."""
        if not self.texts:
            return [[i] for i in rows]
        found: dict[int, list[int]] = {}
        for i in rows:
            found.setdefault(self.texts[i], []).append(i)
        return list(found.values())


def micro_batch_tokens(rows: Sequence[int], lengths: RowLengths, *, padded: bool) -> int:
    """Return the tokens that a forward pass over `rows`, possibly none, processes. If `padded`, each row counts as the
    longest; else only real tokens count, and of a shared prompt all but the last one count once."""
    if not rows:
        return 0
    if padded:
        return len(rows) * max(lengths.prompts[i] + lengths.completions[i] for i in rows)
    tokens = sum(lengths.prompts[i] + lengths.completions[i] for i in rows)
    if lengths.texts:
        tokens -= sum((len(same) - 1) * (lengths.prompts[same[0]] - 1) for same in lengths.by_text(rows))
    return tokens


def micro_batch_cost(rows: Sequence[int], lengths: RowLengths, *, padded: bool) -> float:
    """Return the cost of a forward pass over `rows` in tokens: [`micro_batch_tokens`] and their attention."""
    tokens = micro_batch_tokens(rows, lengths, padded=padded)
    if not lengths.pair_cost or not rows:
        return tokens
    if padded:
        return tokens + lengths.pair_cost * tokens * tokens / len(rows) / 2
    pairs = 0.0
    for same in lengths.by_text(rows):
        prompt = lengths.prompts[same[0]]
        pairs += prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in (lengths.completions[i] for i in same))
    return tokens + lengths.pair_cost * pairs


def schedule_cost(schedule: Schedule, lengths: RowLengths, *, padded: bool) -> float:
    """Return the cost on the critical path: processes run in lockstep, so a micro-batch costs as much as the most
    expensive one that runs at the same time."""
    return sum(
        max(micro_batch_cost(rows, lengths, padded=padded) for rows in concurrent)
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

    Padded micro-batches hold rows of similar length, so that little is padding. Packed ones hold rows of all lengths,
    so that all are equally large; rows with the same prompt stay together where computing it once saves more than the
    better balance of scattered rows. Micro-batches that run at the same time on different processes get similar sizes,
    and every process gets a similar total.

    Args:
        lengths (`RowLengths`): Lengths of all rows.
        units (sequence of sequences of `int`): The rows to place; those of a unit share a micro-batch.
        num_processes (`int`): Number of processes.
        max_rows (`int`): Most rows in a micro-batch. Not used if `max_tokens` is given.
        max_tokens (`int`, *optional*): Most tokens in a micro-batch, as [`micro_batch_tokens`] counts them.
        padded (`bool`): Whether rows are padded or packed.

    Returns:
        The schedule, or `None` if some unit does not fit into a micro-batch.
    """
    if max_tokens is not None:
        max_rows = max(sum(map(len, units)), 1)

    def schedule(units: Sequence[Sequence[int]]) -> Schedule | None:
        sizes = [micro_batch_tokens(unit, lengths, padded=padded) for unit in units]
        if any(len(unit) > max_rows or (max_tokens is not None and n > max_tokens) for unit, n in zip(units, sizes)):
            return None
        costs = [micro_batch_cost(unit, lengths, padded=padded) for unit in units]
        order = sorted(range(len(units)), key=lambda i: -costs[i])
        if padded:
            micro_batches = _neighbours_in_length([list(units[i]) for i in order], lengths, max_rows, max_tokens)
        else:
            placed = [(list(units[i]), sizes[i], costs[i]) for i in order]
            micro_batches = _evenly_filled(placed, num_processes, max_rows, max_tokens)
        return _over_processes(micro_batches, lengths, num_processes, padded=padded)

    schedules = [schedule(units)]
    if not padded and lengths.texts:
        schedules += [schedule(parts) for parts in _parts_of_texts(units, lengths, max_rows)]
    possible = [found for found in schedules if found is not None]
    return min(possible, key=lambda found: schedule_cost(found, lengths, padded=padded), default=None)


def _parts_of_texts(units: Sequence[Sequence[int]], lengths: RowLengths, max_rows: int) -> Iterator[list[list[int]]]:
    """Yield single rows joined with those of the same prompt: all of them, then in 2, 4, ... parts of about equal
    length."""
    if any(len(unit) != 1 for unit in units):
        return
    texts = lengths.by_text([i for (i,) in units])
    num_parts = 1
    while num_parts < max(map(len, texts), default=1):
        parts = []
        for rows in texts:
            longest_first = sorted(rows, key=lambda i: -lengths.completions[i])
            n = max(min(num_parts, len(rows)), -(-len(rows) // max_rows))
            order = [*range(n), *reversed(range(n))]  # back and forth, which balances the lengths
            parts += [[row for k, row in enumerate(longest_first) if order[k % len(order)] == i] for i in range(n)]
        yield parts
        num_parts *= 2


def _over_processes(
    micro_batches: list[list[int]], lengths: RowLengths, num_processes: int, *, padded: bool
) -> Schedule:
    micro_batches.sort(key=lambda batch: -micro_batch_cost(batch, lengths, padded=padded))
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
        fits = max_tokens is None or micro_batch_tokens(joined, lengths, padded=True) <= max_tokens
        if joined and fits and len(joined) <= max_rows:
            micro_batches[-1] = joined
        else:
            micro_batches.append(list(unit))
    return micro_batches


def _evenly_filled(
    units: list[tuple[list[int], int, float]], num_processes: int, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Give each unit, a tuple of rows, tokens, and cost, the most expensive first, to the cheapest micro-batch with
    room; take the smallest number of micro-batches that works."""
    num_rows, num_tokens = sum(len(rows) for rows, _, _ in units), sum(tokens for _, tokens, _ in units)
    smallest = min((len(rows) for rows, _, _ in units), default=1)
    fewest = -(-num_rows // max_rows) if max_tokens is None else -(-num_tokens // max_tokens)
    num_micro_batches = -(-fewest // num_processes) * num_processes
    while True:
        micro_batches: list[list[int]] = [[] for _ in range(num_micro_batches)]
        tokens_of = [0] * num_micro_batches
        cheapest_first = [(0.0, i) for i in range(num_micro_batches)]
        for rows, tokens, cost in units:
            full = []  # for this unit, and perhaps not for the next
            while cheapest_first:
                _, i = cheapest_first[0]
                fits = max_tokens is None or tokens_of[i] + tokens <= max_tokens
                if fits and len(micro_batches[i]) + len(rows) <= max_rows:
                    break
                entry = heapq.heappop(cheapest_first)
                if max_rows - len(micro_batches[i]) >= smallest:
                    full.append(entry)
            if not cheapest_first:
                break
            so_far, i = cheapest_first[0]
            micro_batches[i] += rows
            tokens_of[i] += tokens
            heapq.heapreplace(cheapest_first, (so_far + cost, i))
            for entry in full:
                heapq.heappush(cheapest_first, entry)
        else:
            return micro_batches
        num_micro_batches += num_processes

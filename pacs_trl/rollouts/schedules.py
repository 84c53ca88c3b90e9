"""How many more completions a prompt gets, from those that it has: the two schedules of DARS, as pure functions of numbers.

DARS ([arXiv 2508.13755](https://huggingface.co/papers/2508.13755)) draws again for hard prompts, until the cumulative advantage of
a group is what an easier one has. Vectors of the authors' code are in `tests/data/dars_vectors.json`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal


Schedule = Literal["equal_treatment", "hardness_weighted"]

# A quotient that is whole but for rounding is not rounded up.
_ROUNDING = 1e-9


def additional_completions(
    num_correct: float, num_generations: int, *, schedule: Schedule, max_generations: int, use_std: bool = False
) -> int:
    """
    Completions to draw on top of `num_generations`.

    With the success rate `u` and the cumulative advantage `S(u) = 2 u (1 - u)` per completion (with `use_std`
    `2 sqrt(u (1 - u))`), a prompt with `u` below 1/2 gets as many as lift `N S` to its peak `P`, the value at `u = 1/2`:
    `ceil((P - N S) / S)` for `"equal_treatment"`; to `2 (1 - u) P` for `"hardness_weighted"`; but no more than
    `max_generations` in all. Half a right completion is the least that is taken for `u`, so that a prompt without any has a `u`
    at all; that holds for soft labels too, which would otherwise ask for more the closer their sum comes to 0.

    Args:
        num_correct (`float`):
            Right completions, or the sum of soft labels.
        num_generations (`int`):
            Completions that there are, `N`.
        schedule (`str`):
            `"equal_treatment"` or `"hardness_weighted"`.
        max_generations (`int`):
            Most completions of a prompt.
        use_std (`bool`, *optional*, defaults to `False`):
            Whether advantages are divided by the group's standard deviation.

    Returns:
        `int`: 0 for a success rate of one half and above.

    Raises:
        `ValueError`: if `num_correct` does not lie between 0 and `num_generations`.
    """
    if not 0 <= num_correct <= num_generations:
        raise ValueError(
            f"num_correct must lie between 0 and num_generations={num_generations}, got {num_correct}: it is the number of "
            "right completions, or the sum of labels in [0, 1]."
        )
    rate = max(num_correct, 0.5) / num_generations
    if rate >= 0.5:
        return 0
    share, peak = 2 * rate * (1 - rate), 0.5 * num_generations
    if use_std:
        share, peak = 2 * math.sqrt(rate * (1 - rate)), float(num_generations)
    if schedule == "hardness_weighted":
        peak *= 2 * (1 - rate)
    wanted = math.ceil((peak - num_generations * share) / share - _ROUNDING)
    return max(0, min(wanted, max_generations - num_generations))


def within_budget(wanted: Sequence[int], hardness: Sequence[float], budget: int | None) -> list[int]:
    """What each prompt gets of `budget` completions: the hardest first, of equally hard ones the first, the last one in part."""
    left = math.inf if budget is None else budget
    granted = [0] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: -hardness[i]):
        granted[i] = int(min(wanted[i], left))
        left -= granted[i]
    return granted


def in_turns(limits: Sequence[int], total: int) -> list[int]:
    """`total` shared out one by one in turns, to none more than its limit."""
    shares = [0] * len(limits)
    for turn in range(max(limits, default=0)):
        for i, limit in enumerate(limits):
            if turn < limit and total > 0:
                shares[i] += 1
                total -= 1
    return shares


def mean_over_rates(
    num_generations: int, value: Callable[[int], float], rates: Iterable[float] | None = None
) -> float:
    """
    Mean of a function of the number of right completions over prompts, for plans.

    Args:
        num_generations (`int`):
            Completions of a prompt.
        value (`Callable`):
            A function of the right ones among them.
        rates (iterable of `float`, *optional*):
            Success rates of the prompts. By default they lie evenly between 0 and 1: every number of right completions is then
            equally frequent.
    """
    counts = range(num_generations + 1)
    if rates is None:
        return sum(map(value, counts)) / len(counts)
    means = [
        sum(math.comb(num_generations, k) * p**k * (1 - p) ** (num_generations - k) * value(k) for k in counts)
        for p in rates
    ]
    return sum(means) / len(means)

"""Problems with many correct answers that SmolLM2-135M-Instruct solves sometimes, and one that it solves rarely.

A prompt has one worked example, and a completion is an answer and the end of its line, so that the tokens of a
completion are few and all correct answers can be listed: their probabilities are computed, not sampled.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


END = "\n"  # ends a completion
HELD_OUT = 12  # problems of a task


class Problem(NamedTuple):
    """A prompt and every correct answer, without the end of its line."""

    prompt: str
    answers: tuple[str, ...]


def between() -> list[Problem]:
    """A number between two numbers of two digits: 5 to 14 correct answers."""
    return [
        Problem(f"20 to 30: 27\n{low} to {low + width}: ", _texts(range(low + 1, low + width)))
        for low in range(10, 95)
        for width in range(6, 16)
        if low + width < 100 and (low, width) != (20, 10)
    ]


def multiples() -> list[Problem]:
    """A multiple of a number, below 200: 4 to 48 correct answers."""
    return [
        Problem(f"A multiple of 8: 24\nA multiple of {number}: ", _texts(range(2 * number, 200, number)))
        for number in range(4, 40)
        if number != 8
    ]


def divisors() -> list[Problem]:
    """A divisor of a number of two digits, neither 1 nor the number: 4 to 10 correct answers."""
    return [
        Problem(f"A number that divides 20: 5\nA number that divides {number}: ", _texts(_divisors(number)))
        for number in range(12, 100)
        if number != 20 and len(_divisors(number)) >= 4
    ]


def sums() -> list[Problem]:
    """Two numbers with a given sum: 5 to 35 correct answers, which the model rarely hits."""
    return [
        Problem(f"8 = 3 + 5\n13 = 4 + 9\n{total} = ", tuple(f"{first} + {total - first}" for first in range(1, total)))
        for total in range(6, 37)
        if total not in (8, 13)
    ]


TASKS: dict[str, Callable[[], list[Problem]]] = {
    "between": between,
    "multiples": multiples,
    "divisors": divisors,
    "sums": sums,
}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(2, number) if number % divisor == 0]


def _texts(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(str, numbers))


def split(task: str) -> tuple[list[Problem], list[Problem]]:
    """Return the problems for training and the `HELD_OUT` that are held out, in an order that is always the same."""
    problems = TASKS[task]()
    random.Random(1).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def reward(completions: Sequence[str], answers: Sequence[Sequence[str]], **kwargs) -> list[float]:
    """Reward function: 1 for a correct answer and the end of its line, with nothing before or between."""
    return [
        float(text[-1:] == END and text[:-1] in correct) for text, correct in zip(completions, answers, strict=True)
    ]

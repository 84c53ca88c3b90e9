r"""Labels of the steps of a sum, for the miniature alone: every step can be checked, since each adds one term to what
came before.

`30+8=38,38+7=\boxed{45}` for `7+30+8`: a step ends with its comma, and is right if it and all steps before it hold.
The outcome is what `math_reward` says of the whole.
"""

import re
from functools import cache
from typing import Any

from ..rewards import math_reward
from ..verification import completion_text
from .tokenizer import build_tokenizer


_STEP = re.compile(r"(\d+)\+(\d+)=(\d+)")


def steps_hold(problem: str, steps: list[str]) -> list[bool]:
    """Of each step `a+b=c` of a sum like `7+30+8`, whether it and all before it hold: `c` is the sum, `a` the last `c`
    (at first a term), and `b` a term that has not been added."""
    left, total, found = problem.split("+"), None, []
    for step in steps:
        match = _STEP.fullmatch(step)
        if match is None or not all(found):
            found.append(False)
            continue
        first, second, result = match.groups()
        known = first == total
        if total is None and first in left:
            known = True
            left.remove(first)
        found.append(known and second in left and int(first) + int(second) == int(result))
        if found[-1]:
            left.remove(second)
            total = result
    return found


def step_reward(
    completions: list, prompts: list, completion_ids: list[list[int]], **kwargs: Any
) -> list[list[tuple[int, float]] | None]:
    """
    Labels of the steps of `miniature/terms` and of the outcome, one after the other.

    Args:
        completions (`list`), prompts (`list`): Conversational; the prompt is the sum alone (`prompt_instruction: ""`).
        completion_ids (`list[list[int]]`): Tokens of each completion, passed by the trainer.
        **kwargs: For [`math_reward`].

    Returns:
        `list[list[tuple[int, float]] | None]`: (position, label) pairs of each completion; `None` without a verdict.
    """
    comma = _comma()
    labels: list[list[tuple[int, float]] | None] = []
    outcomes = math_reward(completions, prompts=prompts, **kwargs)
    for prompt, completion, ids, outcome in zip(prompts, completions, completion_ids, outcomes, strict=True):
        ends = [t for t, token in enumerate(ids[:-1]) if token == comma]  # the last token is that of the outcome
        steps = (completion_text(completion) or "").split(",")[: len(ends)]
        held = steps_hold(prompt[-1]["content"], steps)
        pairs = [(t, float(holds)) for t, holds in zip(ends, held, strict=True)]
        labels.append(None if outcome is None else [*pairs, (len(ids) - 1, outcome)])
    return labels


@cache
def _comma() -> int:
    return build_tokenizer().convert_tokens_to_ids(",")

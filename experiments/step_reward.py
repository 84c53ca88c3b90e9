r"""Process labels of miniature sums, whose steps can be checked: each adds one term to the previous sum.

`30+8=38,38+7=\boxed{45}` for `7+30+8`: a step ends with its comma, and is correct if it and all previous steps are.
The label of the last token is the reward of `math_reward`.
"""

import re
from functools import cache
from typing import Any

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.rewards import math_reward
from pacs_trl.verification import completion_text


_STEP = re.compile(r"(\d+)\+(\d+)=(\d+)")


def steps_hold(problem: str, steps: list[str]) -> list[bool]:
    """Return for each step `a+b=c` of a sum like `7+30+8` whether it and all previous ones are correct: `c` is the
    sum, `a` the previous `c` (at first a term), and `b` an unused term."""
    left = problem.split("+")
    total: str | None = None
    holds: list[bool] = []
    for step in steps:
        match = _STEP.fullmatch(step)
        if match is None or not all(holds):
            holds.append(False)
            continue
        first, second, result = match.groups()
        known = first == total
        if total is None and first in left:
            known = True
            left.remove(first)
        holds.append(known and second in left and int(first) + int(second) == int(result))
        if holds[-1]:
            left.remove(second)
            total = result
    return holds


def step_reward(
    completions: list,
    prompts: list,
    completion_ids: list[list[int]],
    truncated: list[bool] | None = None,
    **kwargs: Any,
) -> list[list[tuple[int, float]] | None]:
    """
    Return the process labels of `miniature/terms`.

    Args:
        completions (`list`), prompts (`list`): Conversations whose prompt is the sum (`prompt_instruction: ""`).
        completion_ids (`list[list[int]]`): Tokens of each completion, from the trainer.
        truncated (`list[bool]`, *optional*), **kwargs: Arguments of [`math_reward`].

    Returns:
        `list[list[tuple[int, float]] | None]`: (position, label) pairs of each completion; `None` for no verdict.
    """
    comma = _comma()
    labels: list[list[tuple[int, float]] | None] = []
    outcomes = math_reward(completions, prompts=prompts, truncated=truncated, **kwargs)
    for prompt, completion, ids, outcome in zip(prompts, completions, completion_ids, outcomes, strict=True):
        ends = [t for t, token in enumerate(ids[:-1]) if token == comma]  # the last token has the outcome
        steps = (completion_text(completion) or "").split(",")[: len(ends)]
        holds = steps_hold(prompt[-1]["content"], steps)
        pairs = [(t, float(step_holds)) for t, step_holds in zip(ends, holds, strict=True)]
        labels.append(None if outcome is None else [*pairs, (len(ids) - 1, outcome)])
    return labels


@cache
def _comma() -> int:
    (token_id,) = build_tokenizer()(",")["input_ids"]
    return token_id

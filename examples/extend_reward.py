"""A reward of your own: 1 if the last number of a completion is the answer, and less for many words.

pacs-trl train --config recipes/qwen3-0.6b/pacs.yaml --reward_funcs examples.extend_reward:short_number_reward
"""

import re

from pacs_trl.verification import completion_text


def short_number_reward(completions, solution, **columns) -> list[float | None]:
    """
    Return a label in [0, 1] for each completion, `None` where the solution is no number: such completions are not
    trained on. Columns of the dataset are arguments; completions are texts or messages.
    """
    rewards: list[float | None] = []
    for completion, answer in zip(completions, solution, strict=True):
        text = completion_text(completion) or ""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
        try:
            is_correct = bool(numbers) and float(numbers[-1]) == float(answer)
        except (TypeError, ValueError):
            rewards.append(None)
            continue
        rewards.append(float(is_correct) / (1 + len(text.split()) / 1000))
    return rewards

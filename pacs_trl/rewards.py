"""Verification with the signature of TRL reward functions: what these return are the labels of PACS training."""

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def completion_text(completion: Any) -> str | None:
    """Text of a completion, plain (`str`) or conversational (content of its last message); `None` for anything else."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return completion if isinstance(completion, str) else None


def math_reward(completions: list, solution: list, **kwargs: Any) -> list[float | None]:
    """
    1.0 for a completion whose final answer equals the gold answer, 0.0 otherwise, `None` when the gold is unparseable.

    Args:
        completions (`list`): Completions, plain (`str`) or conversational (lists of messages).
        solution (`list`): Gold answers, one per completion, with or without `\\boxed{}`.
        **kwargs: Further columns that TRL passes; unused.

    Returns:
        `list[float | None]`: One label per completion.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, solution, strict=True):
        gold = str(gold)
        boxed = gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"
        gold_parsed = parse(boxed, [LatexExtractionConfig()])
        if not gold_parsed:
            rewards.append(None)
            continue
        prediction = parse(completion_text(completion) or "", [ExprExtractionConfig(), LatexExtractionConfig()])
        rewards.append(float(verify(gold_parsed, prediction)))
    return rewards


def format_reward(completions: list, **kwargs: Any) -> list[float]:
    """1.0 for a completion that contains `\\boxed{`, 0.0 otherwise."""
    return [float("\\boxed{" in (completion_text(completion) or "")) for completion in completions]

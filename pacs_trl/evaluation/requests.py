"""Requests to an engine and its completions: plain values without torch.

Every completion has a seed of its own, a hash of the run's seed, the problem and the sample number.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple


# A prompt is a conversation (list of {"role", "content"}) or a string that is already rendered.
Prompt = list[dict] | str


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled, see [`EvaluationArguments`]."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 8192


class Completion(NamedTuple):
    """One sampled completion: `text` without special tokens, `num_tokens` with the end token, `finish_reason` "stop"
    (end token produced) or "length" (truncated at the limit)."""

    text: str
    num_tokens: int
    finish_reason: str


class Request(NamedTuple):
    """One completion to generate."""

    problem_id: str
    sample: int
    seed: int
    prompt: Prompt


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """Seed of one completion, in [0, 2**53): a hash, so that neighbouring samples share nothing, and a whole number
    that survives JSON everywhere."""
    digest = hashlib.sha256(f"{seed}/{problem_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def render_prompt(tokenizer, prompt: Prompt, chat_template_kwargs: dict | None = None) -> str:
    """The text the model continues: a conversation goes through the chat template up to the assistant's turn."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
    )

"""What is asked of an engine and what it gives back: plain values without torch, so that a process can pass them on.

Every completion has a seed of its own, a hash of the run's seed, the problem and the sample number.
"""

import hashlib
from dataclasses import dataclass


# A prompt is a conversation (list of {"role", "content"}) or a string that is already rendered.
Prompt = list[dict] | str


@dataclass(frozen=True)
class SamplingSettings:
    """
    How tokens are drawn, see [`EvaluationArguments`].

    Raises:
        `ValueError`: if a value lies outside its range.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 8192

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (0 is greedy decoding), got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability mass in (0, 1], got {self.top_p}; 1 keeps every token.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps every token), got {self.top_k}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")


@dataclass(frozen=True)
class Completion:
    """One sampled completion: `text` without special tokens, `num_tokens` with the end token, `finish_reason` "stop"
    (end token produced) or "length" (cut at the limit)."""

    text: str
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Request:
    """One completion to draw."""

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

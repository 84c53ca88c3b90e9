"""Requests to an engine and its completions, as plain values without torch."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple


# A prompt is a conversation (list of {"role", "content"}), text without a chat template, or its token ids.
Prompt = list[dict] | str | list[int]


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings, documented in [`EvaluationArguments`]."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 8192


class Completion(NamedTuple):
    """
    A completion.

    Attributes:
        text (`str`): Without special tokens.
        num_tokens (`int`): With the end token.
        finish_reason (`str`): "stop" (ended) or "length" (truncated).
        token_ids (sequence of `int`): Empty if the engine does not report them.
        more (`dict`): Further entries of its record in the sample store.
    """

    text: str
    num_tokens: int
    finish_reason: str
    token_ids: Sequence[int] = ()
    more: Mapping[str, Any] = MappingProxyType({})


class Request(NamedTuple):
    """One completion to generate: `sample` is its number among those of the problem, from 0."""

    problem_id: str
    sample: int
    seed: int
    prompt: Prompt


FinishedRequests = Iterator[tuple[Request, Completion]]  # in any order


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """Return the seed of one completion, a hash in [0, 2**53): an integer that every JSON parser keeps exactly."""
    digest = hashlib.sha256(f"{seed}/{problem_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def render_prompt(tokenizer, prompt: list[dict] | str, chat_template_kwargs: dict | None = None) -> str:
    """Render a conversation with the chat template, up to the assistant's turn; return a string unchanged."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
    )


def tokenize_prompt(tokenizer, prompt: Prompt, chat_template_kwargs: dict | None = None) -> list[int]:
    """Return the token ids of a prompt, as in training: text with the special tokens that the tokenizer adds, and a
    conversation with those of its chat template."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if isinstance(prompt[0], int):
        return prompt  # type: ignore[return-value]
    text = render_prompt(tokenizer, prompt, chat_template_kwargs)  # type: ignore[arg-type]
    return tokenizer(text, add_special_tokens=False)["input_ids"]

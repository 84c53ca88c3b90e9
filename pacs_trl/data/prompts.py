"""Prompts as tokens: how long they are, and whether they leave room for a completion."""

from collections.abc import Mapping, Sequence
from typing import Any


_BATCH = 1000


def prompt_lengths(
    prompts: Sequence[Any],
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Tokens of each prompt as it is generated from: messages (all prompts or none) by the chat template, text as it stands."""
    if len(prompts) == 0:
        return []
    more = dict(chat_template_kwargs or {}) | ({"tools": list(tools)} if tools else {})
    lengths: list[int] = []
    for start in range(0, len(prompts), _BATCH):
        batch = list(prompts[start : start + _BATCH])
        if isinstance(batch[0], str):
            ids = tokenizer(text=batch)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                batch, add_generation_prompt=True, tokenize=True, return_dict=False, **more
            )
        lengths += map(len, ids)
    return lengths

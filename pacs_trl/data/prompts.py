"""Prompts as tokens: how long they are, and how many tokens a model has room for."""

from collections.abc import Mapping, Sequence
from typing import Any


_BATCH = 1000


def prompt_lengths(
    prompts: Sequence[Any],
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """
    Count the tokens of each prompt: messages (all prompts or none) by the chat template, text as it stands.

    Raises:
        `ValueError`: if prompts are messages and the tokenizer has no chat template.
    """
    if len(prompts) == 0:
        return []
    if not isinstance(prompts[0], str):
        check_chat_template(tokenizer)
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


def check_chat_template(tokenizer: Any) -> None:
    """
    Raises:
        `ValueError`: if a tokenizer cannot turn messages into text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"The prompts are messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat template. Save the "
            "tokenizer of an instruction-tuned model of the family beside the weights, or write chat_template.jinja there."
        )


def context_length(config: Any) -> int | None:
    """Return how many tokens a model has positions for (with scaled RoPE, the scaled number); `None` if unbounded."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("factor")]
    scaled = [kind["factor"] * kind.get("original_max_position_embeddings", limit) for kind in kinds]
    return int(max([limit, *scaled]))


def length_with_fixed_positions(config: Any) -> int | None:
    """Tokens up to which a sequence's positions do not depend on the longest one of its batch; `None` if they never do.
    RoPE of the types `longrope` and `dynamic` changes its frequencies beyond that length, for the whole batch."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = []
    for kind in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        rope_type = kind.get("rope_type", "") if isinstance(kind, dict) else ""
        if rope_type == "longrope":
            lengths.append(kind["original_max_position_embeddings"])
        elif "dynamic" in rope_type:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


def context_lengths(config: Any) -> dict[str, int | None]:
    """Bounds on the tokens of a sequence, by the key of the configuration that each comes from."""
    fixed = length_with_fixed_positions(config)
    return {"max_position_embeddings": context_length(config), "original_max_position_embeddings": fixed}

"""Check of what a rollout function returns, where it enters the trainer.

TRL pads the lists of a rollout function to tensors: a missing log-prob would become 0, and a token id outside of the
vocabulary another token.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..update.context_length import context_lengths


# What TRL reads from the output; further entries become columns of reward functions.
ENGINE_FIELDS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
# A column with one of these names would replace an argument of reward functions, or be replaced by it.
_RESERVED = ("prompt", "prompts", "completion", "completions", "trainer_state", "log_extra", "log_metric")
_MAX_LOGP = 1e-3  # log-probs are not positive, but for rounding


def checked_output(
    output: Any, *, num_prompts: int, config: Any, needs_logprobs: bool = False, has_tools: bool = False
) -> dict[str, Any]:
    """
    Return the output of a rollout function as new lists of plain numbers.

    Args:
        output (`dict`): `prompt_ids`, `completion_ids`, `logprobs` (or `None`), and optionally `env_mask` and further
            columns, with one entry per prompt.
        num_prompts (`int`): Number of prompts that the function received.
        config ([`~transformers.PreTrainedConfig`]): That of the model, for its vocabulary and context length.
        needs_logprobs (`bool`): Whether `logprobs` must not be `None`.
        has_tools (`bool`): Whether the trainer has tools, which make the mask themselves.

    Raises:
        `ValueError`: if lengths, types, or ranges are wrong. Empty completions are allowed.
    """
    if not isinstance(output, Mapping):
        raise UserError(
            f"rollout_func returned a {type(output).__name__}. Return a dict with the keys {', '.join(_REQUIRED)}."
        )
    checked = dict(output)
    if missing := [key for key in _REQUIRED if key not in checked]:
        raise UserError(
            f"rollout_func returned no {' and no '.join(missing)}. Return a dict with the keys "
            f"{', '.join(_REQUIRED)}; logprobs may be None."
        )
    if reserved := [key for key in _RESERVED if key in checked]:
        raise UserError(
            f"rollout_func returned {reserved[0]!r}, which is an argument of every reward function. Return the column "
            "under another name."
        )
    if checked["logprobs"] is None and needs_logprobs:
        raise UserError(
            "rollout_func returned no logprobs, which rollout_lag needs: the policy has changed since. Return those "
            "of `generate`, with None for tokens that it has not generated."
        )
    if checked.get("env_mask") is not None and has_tools:
        raise UserError(
            "rollout_func returned env_mask beside tools, which make the mask themselves. Remove tools, or env_mask."
        )
    for key, entries in checked.items():
        is_engine_field = key in ENGINE_FIELDS and entries is not None
        if not is_engine_field and (torch.is_tensor(entries) or isinstance(entries, tuple | np.ndarray)):
            raise UserError(
                f"rollout_func returned a {type(entries).__name__} as {key}, which each completion would get as a "
                "whole. Return a list with one entry per prompt."
            )
        if is_engine_field or isinstance(entries, list):
            _check_number(key, entries, num_prompts)

    vocab_size = config.get_text_config().vocab_size
    for key in ("prompt_ids", "completion_ids"):
        checked[key] = [_token_ids(f"{key}[{i}]", ids, vocab_size) for i, ids in enumerate(checked[key])]
    _check_lengths_of_sequences(checked["prompt_ids"], checked["completion_ids"], config)

    lengths = [len(ids) for ids in checked["completion_ids"]]
    for key, check in (("logprobs", _logprobs), ("env_mask", _mask)):
        if checked.get(key) is None:
            continue
        checked_entries = []
        for i, (values, length) in enumerate(zip(checked[key], lengths, strict=True)):
            values = _as_list(f"{key}[{i}]", values)
            if len(values) != length:
                raise UserError(
                    f"rollout_func returned {len(values)} entries in {key}[{i}] for {length} tokens in "
                    f"completion_ids[{i}]. Return one entry for each token of the completion."
                )
            checked_entries.append(check(f"{key}[{i}]", values))
        checked[key] = checked_entries
    return checked


def check_prompts(prompt_ids: Any, config: Any) -> list[list[int]]:
    """Return the token ids of prompts as new lists. Raises a `ValueError` for empty prompts, and for what is not an id
    of the vocabulary."""
    vocab_size = config.get_text_config().vocab_size
    checked = [_token_ids(f"prompt_ids[{i}]", ids, vocab_size) for i, ids in enumerate(prompt_ids)]
    _check_lengths_of_sequences(checked, [[]] * len(checked), config)
    return checked


def _check_number(key: str, entries: Any, num_prompts: int) -> None:
    is_sequence = hasattr(entries, "__len__") and not isinstance(entries, str | bytes | Mapping)
    if not is_sequence:
        raise UserError(
            f"rollout_func returned a {type(entries).__name__} as {key}. Return a list with one entry per prompt."
        )
    if len(entries) != num_prompts:
        what = "completions" if key == "completion_ids" else f"entries in {key}"
        raise UserError(
            f"rollout_func returned {len(entries)} {what} for {num_prompts} prompts. The batch contains each prompt "
            "once per generation already; return exactly one completion for each."
        )


def _as_list(place: str, values: Any) -> list:
    if torch.is_tensor(values) or isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UserError(f"rollout_func returned {values!r:.100} as {place}. Return a list with one entry per token.")
    return list(values)


def _token_ids(place: str, values: Any, vocab_size: int) -> list[int]:
    ids = _as_list(place, values)
    for index, token in enumerate(ids):
        is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_integer or not 0 <= token < vocab_size:
            raise UserError(
                f"rollout_func returned {token!r:.50} as {place}[{index}]. Token ids are integers from 0 to "
                f"{vocab_size - 1}, the vocabulary of the model; use its tokenizer."
            )
    return list(map(int, ids))


def _check_lengths_of_sequences(prompt_ids: list[list[int]], completion_ids: list[list[int]], config: Any) -> None:
    limits = {name: limit for name, limit in context_lengths(config).items() if limit is not None}
    name = min(limits, key=lambda limit_name: limits[limit_name], default=None)
    for i, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        if not prompt:
            raise UserError(
                f"rollout_func returned no token in prompt_ids[{i}]. The first token of a completion is predicted "
                "from its prompt, so a prompt needs at least one token, such as the beginning of the chat template."
            )
        length = len(prompt) + len(completion)
        if name is not None and length > limits[name]:
            raise UserError(
                f"rollout_func returned {len(prompt)} tokens in prompt_ids[{i}] and {len(completion)} in "
                f"completion_ids[{i}], more than the context of the model, {name}={limits[name]}. End completions "
                "before it."
            )


def _logprobs(place: str, values: list) -> list[float | None]:
    for index, value in enumerate(values):
        if value is None:  # the engine knows none of this token
            continue
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value > _MAX_LOGP:
            raise UserError(
                f"rollout_func returned {value!r:.50} as {place}[{index}]. Return log-probs in nats, which are finite "
                "and not positive, and None for a token that has none."
            )
    return [None if value is None else float(value) for value in values]


def _mask(place: str, values: list) -> list[int]:
    for index, value in enumerate(values):
        if value not in (0, 1):
            raise UserError(
                f"rollout_func returned {value!r:.50} as {place}[{index}]. Return 1 for tokens that the model "
                "generated, and 0 for others."
            )
    return list(map(int, values))

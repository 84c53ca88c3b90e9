"""Checks that the model has an embedding for the tokens of its tokenizer, to which users may have added some.

Without them an embedding layer raises an error that names no token, on a GPU one that ends the process.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..errors import UserError


def check_pad_token(tokenizer: Any, config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the model has no embedding for the pad token, with which transformers fills prompts."""
    vocab_size = config.get_text_config().vocab_size
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= vocab_size:
        raise UserError(
            f"The pad token {tokenizer.pad_token!r} of the tokenizer has the id {tokenizer.pad_token_id}, and the "
            f"vocabulary of the model ends at {vocab_size - 1}. Set `tokenizer.pad_token = tokenizer.eos_token`, or "
            "call `model.resize_token_embeddings(len(tokenizer))`."
        )


def check_token_ids(prompt_ids: Sequence[Sequence[int]], tokenizer: Any, config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if a prompt has a token for which the model has no embedding. `prompt_ids` are `B` lists of
    token ids."""
    vocab_size = config.get_text_config().vocab_size
    largest = max((max(ids, default=0) for ids in prompt_ids), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"A prompt has the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}, and the "
            f"vocabulary of the model ends at {vocab_size - 1}. Call `model.resize_token_embeddings(len(tokenizer))` "
            "and pass that model, or remove the token from the tokenizer."
        )

"""Images of prompts as the processor returns them, kept once for all completions of a prompt."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from trl.data_utils import prepare_multimodal_messages

from ..data.images import image_blocks


@dataclass(frozen=True, eq=False)
class PromptImages:
    """
    The images of one prompt, as its processor returns them. All completions of a prompt share one object.

    Attributes:
        inputs (`dict[str, torch.Tensor]`): Inputs of the model by name, on the CPU. Their first dimension counts
            patches, tiles, images, or prompts, so that those of several prompts are concatenated.
        token_types (`dict[str, np.ndarray]`): Types of the prompt's tokens by the name of the input, integers `(P,)`;
            0 is text.
        row (`int`, *optional*): Index of the prompt in the training set, by which a checkpoint refers to it.
    """

    inputs: dict[str, torch.Tensor]
    token_types: dict[str, np.ndarray]
    row: int | None = None

    @cached_property
    def digest(self) -> bytes:
        """Hash of the inputs: equal in all processes for equal images."""
        tensors = (value for _, value in sorted(self.inputs.items()))
        parts = [
            repr(tensor.shape).encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for tensor in tensors
        ]
        return hashlib.sha256(b"".join(parts)).digest()


def process_prompt(
    processor: Any,
    prompt: Any,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], PromptImages | None]:
    """Return the token ids of a prompt, text or messages whose image blocks have PIL images, and its images."""
    if isinstance(prompt, str):
        return processor(text=[prompt])["input_ids"][0], None
    tokenized = processor.apply_chat_template(
        [prepare_multimodal_messages(prompt)],
        chat_template=chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **(chat_template_kwargs or {}),
    )
    ids = tokenized.pop("input_ids")
    tokenized.pop("attention_mask", None)
    if next(image_blocks(prompt), None) is None:
        return ids[0].tolist(), None
    tensors = {name: torch.as_tensor(value) for name, value in tokenized.items()}
    types = {name: value[0].numpy() for name, value in tensors.items() if value.shape == ids.shape}
    inputs = {name: value for name, value in tensors.items() if name not in types}
    return ids[0].tolist(), PromptImages(inputs, types)


def ids_without_expansion(
    processor: Any,
    prompt: Any,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of messages with one placeholder per image, which vLLM repeats itself."""
    (text,) = processor.apply_chat_template(
        [prepare_multimodal_messages(prompt)],
        chat_template=chat_template,
        add_generation_prompt=True,
        tokenize=False,
        **(chat_template_kwargs or {}),
    )
    bos = processor.tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)  # the same rule as that of processors
    return processor.tokenizer(text, add_special_tokens=not has_bos)["input_ids"]


def left_padded_image_inputs(images: Sequence[PromptImages | None], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of `generate` for the images of prompts of some `lengths`, padded on the left."""
    longest = max(lengths)
    first_tokens = [(i, longest - length) for i, length in enumerate(lengths)]
    return _image_inputs(images, first_tokens, (len(images), longest))


def padded_image_inputs(images: Sequence[PromptImages | None], num_tokens: int) -> dict[str, torch.Tensor]:
    """
    Return the inputs of a model for the images of some sequences, on the CPU; empty if none has an image.

    Args:
        images (sequence of `B` [`PromptImages`] or `None`): The images of each sequence.
        num_tokens (`int`): Width `N` of the padded sequences, to which the types of tokens are padded with 0.
    """
    return _image_inputs(images, [(i, 0) for i in range(len(images))], (len(images), num_tokens))


def packed_image_inputs(
    images: Sequence[PromptImages | None], num_tokens: int, starts: Sequence[int]
) -> dict[str, torch.Tensor]:
    """
    Return the inputs of a model for the images of prompts in one packed sequence, on the CPU; empty if none has an
    image.

    Args:
        images (sequence of [`PromptImages`] or `None`): The images of each distinct prompt.
        num_tokens (`int`): Number `N` of tokens of the sequence.
        starts (sequence of `int`): Index of the first token of each prompt.
    """
    return _image_inputs(images, [(0, start) for start in starts], (1, num_tokens))


def _image_inputs(
    images: Sequence[PromptImages | None], first_tokens: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return inputs with types of tokens of some `shape`; `first_tokens` are rows and columns, one pair per
    prompt."""
    present = [(part, *first) for part, first in zip(images, first_tokens, strict=True) if part is not None]
    if not present:
        return {}
    first = present[0][0]
    inputs = {name: _concatenated([part.inputs[name] for part, *_ in present]) for name in first.inputs}
    for name in first.token_types:
        types = torch.zeros(shape, dtype=torch.long)
        for part, row, start in present:
            types[row, start : start + len(part.token_types[name])] = torch.from_numpy(part.token_types[name])
        inputs[name] = types
    return inputs


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension; others are padded with 0 to the largest, as processors do."""
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - length for size, length in zip(sizes, part.shape[1:], strict=True)]
        padding = [amount for number in reversed(missing) for amount in (0, number)]
        padded.append(F.pad(part, padding) if any(missing) else part)
    return torch.cat(padded)

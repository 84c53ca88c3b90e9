"""Prompts with images: from dataset rows to what the model reads, once for all completions of a prompt.

TRL processes the images of a generation batch twice, with one copy per completion. Here the images of each distinct
prompt are processed alone and once, and its completions share them ([`PromptImages`]); therefore what a model reads
does not depend on the other prompts of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from ..data.images import (
    COLUMNS,
    ImageReader,
    check_no_image_placeholders,
    image_blocks,
    prompt_with_images,
    share_equal_images,
)
from ..update.prompt_images import PromptImages, ids_without_expansion, padded_image_inputs, process_prompt
from ..update.rollout import Rollout
from .prompt_order import indices_of_generation


class ImagePrompts:
    """The part of [`RolloutTrainer`] that reads images; a base class of it before [`~trl.GRPOTrainer`]."""

    _reads_images = False  # whether a dataset has images
    _image_columns: list[dict[str, Any]] = []  # those of the rows of a batch, for reward functions
    _rows_of_prompts: dict[int, int] = {}  # indices of dataset rows by the position of a completion in the batch
    _prompt_images: list[PromptImages | None] | None = None  # of each completion of the batch
    # Token ids of prompts before the processor repeated the placeholder of each image, which a colocated vLLM does
    # itself, by the token ids after it.
    _unexpanded_prompt_ids: dict[tuple[int, ...], list[int]] = {}

    def _with_images_in_prompts(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return dataset rows without columns of images, which are in their prompts instead. Equal prompts are one
        object."""
        self._image_columns = [{name: row[name] for name in COLUMNS if name in row} for row in inputs]
        rows = [{name: value for name, value in row.items() if name not in COLUMNS} for row in inputs]
        if not self._reads_images:
            return rows
        read = ImageReader()
        prompts = share_equal_images([prompt_with_images(row, read) for row in inputs])
        self._rows_of_prompts = {}
        is_from_sampler = self._continued_groups is None and self._shares is None
        if self.model.training and isinstance(self.train_dataset, Dataset) and is_from_sampler:
            first = self.first_row(len(inputs))
            indices = indices_of_generation(self, self.generation_number)
            self._rows_of_prompts = dict(enumerate(indices[first : first + len(inputs)]))
        return [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]

    def _tokenize_with_images(self, prompts: Sequence[Any]) -> tuple[list[list[int]], list | None, dict[str, Any]]:
        """Return token ids, images, and the inputs of `generate` for the images, as TRL's `_tokenize_prompts`."""
        processed: dict[int, tuple[list[int], PromptImages | None]] = {}
        for i, prompt in enumerate(prompts):
            if id(prompt) not in processed:
                check_no_image_placeholders(prompt, self.processing_class)  # of a stream
                processed[id(prompt)] = self._process(prompt, self._rows_of_prompts.get(i))
        prompt_ids = [processed[id(prompt)][0] for prompt in prompts]
        if self.use_vllm and self.vllm_mode == "colocate":
            distinct = {tuple(ids): prompt for ids, prompt in zip(prompt_ids, prompts, strict=True)}
            self._unexpanded_prompt_ids = {
                ids: ids_without_expansion(
                    self.processing_class, prompt, self.chat_template, self.chat_template_kwargs
                )
                for ids, prompt in distinct.items()
                if next(image_blocks(prompt), None) is not None
            }
        self._prompt_images = [processed[id(prompt)][1] for prompt in prompts]
        images = [[block["image"] for block in image_blocks(prompt)] or None for prompt in prompts]
        if self.log_multimodal:
            self._logs["images"].extend(gather_object(images))
        if not any(images):
            return list(map(list, prompt_ids)), None, {}
        present = next(filter(None, self._prompt_images))
        fields: dict[str, Any] = dict(inputs_of_generation(self._prompt_images))
        for name in present.token_types:  # lists, which TRL pads
            fields[name] = [
                [0] * len(ids) if part is None else part.token_types[name].tolist()
                for ids, part in zip(prompt_ids, self._prompt_images, strict=True)
            ]
        return list(map(list, prompt_ids)), images, fields

    def _process(self, prompt: Any, row: int | None = None) -> tuple[list[int], PromptImages | None]:
        """Return the token ids of a prompt, and its images."""
        ids, images = process_prompt(self.processing_class, prompt, self.chat_template, self.chat_template_kwargs)
        return ids, images and replace(images, row=row)

    def _with_image_filler(self, prompt_ids: list[list[int]], args: tuple) -> tuple[list[list[int]], tuple]:
        """Append a prompt with an image to prompts without, and to the other arguments of a generation: processes with
        sharded weights run the encoder of images together."""
        ids, part = self._small_image_prompt()
        assert part is not None
        fields: dict[str, Any] = dict(inputs_of_generation([part]))
        for name, types in part.token_types.items():
            fields[name] = [*([0] * len(prompt) for prompt in prompt_ids), types.tolist()]
        images = [*[None] * len(prompt_ids), []]
        return [*prompt_ids, ids], (images, fields, *args[2:])

    def _small_image_prompt(self) -> tuple[list[int], PromptImages | None]:
        """Return a prompt with one small image."""
        from PIL import Image

        image = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What does the picture show?"}]
        return self._process([{"role": "user", "content": content}])

    def restore_images(self, rollouts: Sequence[Rollout]) -> None:
        """Process the images of rollouts of a checkpoint again, which has the indices of their dataset rows."""
        by_row: dict[int, PromptImages | None] = {}
        for rollout in rollouts:
            saved: Any = rollout.images
            if saved is None:
                continue
            if "inputs" in saved:
                inputs = {name: torch.as_tensor(value) for name, value in saved["inputs"].items()}
                rollout.images = PromptImages(inputs, saved["token_types"])
                continue
            row = saved["row"]
            if row not in by_row:
                by_row[row] = self._process(prompt_with_images(self.train_dataset[row]), row)[1]
            rollout.images = by_row[row]


def inputs_of_generation(images: Sequence[PromptImages | None]) -> dict[str, torch.Tensor]:
    """Return the inputs of images that do not depend on tokens, of all sequences of a batch."""
    without_types = [part and PromptImages(part.inputs, {}) for part in images]
    return padded_image_inputs(without_types, 0)

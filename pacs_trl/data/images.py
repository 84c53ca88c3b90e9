"""Images in datasets, as TRL takes them: a column `image` or `images`, or image blocks in messages.

An image is a PIL image, what a dataset with an `Image` column has undecoded, a path, or a URL.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from .columns import columns_of, is_in_memory
from .prompts import prompt_lengths


COLUMNS = ("image", "images")


def images_of_columns(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a dataset row; `images` comes first, as in TRL."""
    if "images" in row:
        images = row["images"]
        if images is not None and not isinstance(images, list | tuple):
            raise UserError(
                f"The column `images` has {images!r:.80}, which is no list. Write a list of images, or call the "
                "column `image`."
            )
        return list(images or [])
    return [] if row.get("image") is None else [row["image"]]


def image_blocks(prompt: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield the image blocks of a prompt, which is text, messages, or token ids; only messages have any."""
    if not isinstance(prompt, list | tuple):
        return
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            continue
        for block in content:
            if isinstance(block, MutableMapping) and block.get("type") == "image":
                yield block


def _has_image_block(prompt: Any) -> bool:
    return next(image_blocks(prompt), None) is not None


def has_images(dataset: Any) -> bool:
    """Return whether a dataset has an image in any row; a stream, or a dataset with a transform, whether it has a
    column of images."""
    if isinstance(dataset, Mapping):
        return any(has_images(part) for part in dataset.values())
    names = columns_of(dataset) or []
    columns = [name for name in COLUMNS if name in names]
    if not is_in_memory(dataset):
        return bool(columns)
    if any(_has_values(dataset.data.column(name)) for name in columns):
        return True
    if "prompt" not in names or "type" not in str(dataset.features["prompt"]):
        return False
    return any(_has_image_block(prompt) for prompt in dataset["prompt"])


def _has_values(column: Any) -> bool:
    """Return whether a column of images has any: not only nulls and empty lists."""
    values = column.drop_null()
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return bool(pc.any(pc.greater(pc.list_value_length(values), 0)).as_py())
    return len(values) > 0


def prompt_with_images(row: Mapping[str, Any], read: Callable[[Any], Any] | None = None) -> Any:
    """
    Return the prompt of a dataset row with its images as RGB images in blocks of its messages. Prompts without images
    are returned as they are. `read` is by default [`read_image`].

    Raises:
        `ValueError`: if the number of images is not that of the placeholders, an image cannot be read, or the prompt
            is text.
    """
    prompt, images = row["prompt"], images_of_columns(row)
    if not images and not _has_image_block(prompt):
        return prompt
    if read is None:
        read = read_image
    messages = with_image_blocks(prompt, images)
    for block in image_blocks(messages):
        block["image"] = read(block["image"])
    return messages


class ImageReader:
    """Reads images as [`read_image`], and each file, address, and content once."""

    def __init__(self) -> None:
        self._images: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):  # undecoded
            key: Any = (value.get("path"), value.get("bytes"))
        elif isinstance(value, str):  # a path or an address
            key = value
        else:
            return read_image(value)
        if key not in self._images:
            self._images[key] = read_image(value)
        return self._images[key]


def with_image_blocks(prompt: Any, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt with the images of its row in blocks, unread. Raises the errors of
    [`checked_messages`]."""
    from trl.data_utils import prepare_multimodal_messages

    return prepare_multimodal_messages(checked_messages(prompt, images), images=list(images))


def image_digest(value: Any) -> str:
    """Return a hash of an image of a row: of the content of its file, of its pixels, or of its address."""
    if isinstance(value, Mapping) and value.get("bytes"):
        hashed = value["bytes"]
    elif _is_pil(value):
        hashed = _pixel_digest(value)
    else:
        path = value["path"] if isinstance(value, Mapping) else str(value)
        hashed = Path(path).read_bytes() if _is_file(Path(path)) else str(path).encode()
    return hashlib.sha256(hashed).hexdigest()


def checked_messages(prompt: Any, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt whose row has these images. Raises a `ValueError` if their number is not that of
    the placeholders, or the prompt is text."""
    if isinstance(prompt, str):
        raise UserError(
            "A prompt with images is text. Write it as a list of messages, to which the chat template adds the tokens "
            "of images."
        )
    messages = [_without_absent_keys(message) for message in prompt]
    num_placeholders = sum("image" not in block for block in image_blocks(messages))
    has_text_of_user = any(
        message["role"] == "user" and isinstance(message.get("content"), str) for message in messages
    )
    # Without placeholders TRL places all images before the first text of a user.
    are_placed_by_trl = bool(images) and num_placeholders == 0 and has_text_of_user
    if num_placeholders != len(images) and not are_placed_by_trl:
        raise UserError(
            f"A prompt has {num_placeholders} image block(s) without an image, and its row has {len(images)} "
            "image(s). Write one `{'type': 'image'}` per image, or the content as text, before which the images are "
            "placed."
        )
    if num_placeholders > 0:
        messages = [_with_text_in_block(message) for message in messages]  # to which TRL adds no placeholders
    return messages


def _with_text_in_block(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _without_absent_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose blocks lack the keys that are null: a column has all keys of all blocks."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    blocks = [{key: value for key, value in block.items() if value is not None} for block in content]
    return {**message, "content": blocks}


def _is_pil(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)


def read_image(value: Any) -> Any:
    """Return an image as a PIL image in RGB, upright as its EXIF data say. Raises a `ValueError` if it cannot be
    read."""
    image = _opened(value)
    if image.mode.startswith(("I", "F")):
        image = _with_8_bits(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _opened(value: Any) -> Any:
    """Return an image as an upright PIL image with its pixels, in any mode."""
    from PIL import Image, ImageOps

    image: Any
    try:
        if isinstance(value, Mapping):
            image = Image.open(BytesIO(value["bytes"]) if value.get("bytes") else value["path"])
        elif isinstance(value, np.ndarray):
            image = Image.fromarray(value)
        elif isinstance(value, str) and _is_file(Path(value)):
            image = Image.open(value)
        elif isinstance(value, str):  # an address, or content as base64
            from transformers.image_utils import load_image

            image = load_image(value)
        else:
            image = value
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception as error:  # of Pillow, of the file system, and of connections
        raise UserError(
            f"The image {value!r:.100} cannot be read ({type(error).__name__}: {error}). Correct the file or address, "
            "or remove the row."
        ) from error


def _with_8_bits(image: Any) -> Any:
    """Return a gray image of integers or floats per pixel with 8 bits: of 16 bits the upper half is kept, floats up to
    1 are stretched. `convert` would keep the lower half."""
    from PIL import Image

    pixels = np.asarray(image, dtype=np.float64)
    largest = pixels.max(initial=0)
    if image.mode.startswith("I;16") or largest > 255:
        pixels = pixels / 257
    elif image.mode == "F" and largest <= 1:
        pixels = pixels * 255
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _is_file(path: Path) -> bool:
    """Return whether `path` is a file; base64 content is longer than a name may be."""
    try:
        return path.is_file()
    except OSError:
        return False


def share_equal_images(prompts: Sequence[Any]) -> list[Any]:
    """Return prompts in which equal images are one object, and equal prompts are one object. Changes image blocks of
    `prompts`, whose images are PIL images."""
    image_by_digest: dict[bytes, Any] = {}
    digest_by_id: dict[int, bytes] = {}  # of objects that are images, so that each is read once
    prompt_by_key: dict[tuple, Any] = {}
    shared_prompts = []
    for prompt in prompts:
        for block in image_blocks(prompt):
            image = block["image"]
            if id(image) not in digest_by_id:
                digest_by_id[id(image)] = _pixel_digest(image)
            block["image"] = image_by_digest.setdefault(digest_by_id[id(image)], image)
        shared_prompts.append(prompt_by_key.setdefault(_key(prompt), prompt))
    return shared_prompts


def _pixel_digest(image: Any) -> bytes:
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()


def _key(value: Any) -> Any:
    """Return a hashable value that equal prompts have in common, if equal images are one object."""
    if isinstance(value, Mapping):
        return tuple((key, _key(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(_key(inner) for inner in value)
    return id(value) if _is_pil(value) else repr(value)


def dataset_prompt_lengths(
    name: str,
    dataset: Any,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Count the tokens of the prompts of a dataset, with a tokenizer, or with a processor and the images; raises the
    errors of [`image_prompt_lengths`]."""
    from transformers import ProcessorMixin  # `--help` needs no library

    if isinstance(tokenizer, ProcessorMixin):
        return image_prompt_lengths(name, dataset, tokenizer, chat_template_kwargs)
    return prompt_lengths(dataset["prompt"][:], tokenizer, chat_template_kwargs, tools)


def with_absolute_paths(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row whose images in columns, if they are paths of files in `folder`, have absolute paths."""

    def absolute(image: Any) -> Any:
        if isinstance(image, str) and "://" not in image and _is_file(folder / image):
            return str((folder / image).resolve())
        return image

    changed = dict(row)
    if "image" in row:
        changed["image"] = absolute(row["image"])
    if isinstance(row.get("images"), list):
        changed["images"] = [absolute(image) for image in row["images"]]
    return changed


def image_prompt_lengths(
    name: str, dataset: Any, processor: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """
    Count the tokens of the prompts of a dataset, with those of their images, from the sizes of the images. Raises a
    `ValueError` that names the row of `name` whose images cannot be read or do not fit its placeholders.
    """
    # All images are looked at before any tokens are counted, which is slow.
    prompts, sizes_by_prompt = [], []
    for i, row in enumerate(_undecoded(dataset)):
        try:
            check_no_image_placeholders(row["prompt"], processor)
            sizes_by_prompt.append([image_size(image) for image in _images_of_row(row)])
        except ValueError as error:
            raise UserError(f"Row {i} of {name}: {error}") from error
        prompts.append(row["prompt"])

    counter = _TokenCounter(processor, {"add_generation_prompt": True, **(chat_template_kwargs or {})})
    lengths = []
    for i, (prompt, sizes) in enumerate(zip(prompts, sizes_by_prompt, strict=True)):
        text_prompt = prompt if isinstance(prompt, str) else [_without_images(message) for message in prompt]
        try:
            image_tokens = sum(counter.image_tokens(size) for size in sizes)
        except ValueError as error:  # of a processor
            height, width = max(sizes, key=lambda size: max(size) / max(min(size), 1))
            raise UserError(
                f"Row {i} of {name}: the processor rejects an image ({error}; the longest one has {width} x {height} "
                "pixels). Crop it, or remove the row."
            ) from error
        lengths.append(counter.text_tokens(text_prompt) + image_tokens)
    return lengths


def _images_of_row(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a dataset row and in the blocks of its prompt. Raises the errors of
    [`checked_messages`]."""
    images = images_of_columns(row)
    if not images and not _has_image_block(row["prompt"]):
        return []
    messages = checked_messages(row["prompt"], images)
    return [*images, *(block["image"] for block in image_blocks(messages) if "image" in block)]


def check_no_image_placeholders(prompt: Any, processor: Any) -> None:
    """Raise a `UserError` if the text of a prompt has a placeholder of images, which would stand for none."""
    texts = []
    messages = []
    if isinstance(prompt, str):
        texts.append(prompt)
    elif isinstance(prompt, list | tuple):
        messages = list(prompt)
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list | tuple):
            texts += [block.get("text") or "" for block in content]
    for attribute in ("image_token", "boi_token"):
        token: str | None = getattr(processor, attribute, None)
        if token and any(token in text for text in texts):
            raise UserError(
                f"The text of a prompt has {token!r}, for which the processor expects an image. Write a block "
                "`{'type': 'image'}` in its place, or remove it."
            )


def _undecoded(dataset: Any) -> Any:
    """Return a dataset whose columns of images are not decoded."""
    from datasets import Image

    columns = [name for name in COLUMNS if name in dataset.column_names]
    dataset = dataset.select_columns(["prompt", *columns])
    for name in columns:
        feature = dataset.features[name]
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            dataset = dataset.cast_column(name, type(feature)(Image(decode=False)))
    return dataset


def image_size(value: Any) -> tuple[int, int]:
    """Return the height and width of an image, and of an address 0. Raises a `ValueError` if there is no image, or a
    file is broken anywhere."""
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return 0, 0  # read when it is needed
    if not isinstance(value, str | Mapping | np.ndarray) and not _is_pil(value):
        raise UserError(
            f"{value!r:.100} is not an image. Write a path, an address, or the content of a file, or remove the row."
        )
    image = _opened(value)
    return image.height, image.width


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": block["text"]} for block in content if block.get("type") == "text"]
    return {**message, "content": content}


class _TokenCounter:
    """Counts the tokens of prompts and of images; those of an image follow from its size (height, width)."""

    def __init__(self, processor: Any, template_kwargs: dict[str, Any]):
        self.processor, self.template_kwargs = processor, template_kwargs
        self._tokens_by_size: dict[tuple[int, int], int] = {(0, 0): 0}

    def text_tokens(self, prompt: str | list[dict[str, Any]]) -> int:
        if isinstance(prompt, str):
            return len(self.processor(text=[prompt])["input_ids"][0])
        return self._count(prompt)

    def image_tokens(self, size: tuple[int, int]) -> int:
        if size not in self._tokens_by_size:
            from PIL import Image

            height, width = size
            text = {"type": "text", "text": "x"}
            image = {"type": "image", "image": Image.new("RGB", (width, height))}
            with_image = self._count([{"role": "user", "content": [image, text]}])
            without_image = self._count([{"role": "user", "content": [text]}])
            self._tokens_by_size[size] = with_image - without_image
        return self._tokens_by_size[size]

    def _count(self, messages: list[dict[str, Any]]) -> int:
        from trl.data_utils import prepare_multimodal_messages

        conversation = prepare_multimodal_messages(messages)
        tokenized = self.processor.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, **self.template_kwargs
        )
        return len(tokenized["input_ids"][0])

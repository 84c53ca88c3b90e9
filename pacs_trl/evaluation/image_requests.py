"""Requests with images: in the form of OpenAI's API, and the processor of a checkpoint that reads them."""

import base64
from io import BytesIO
from typing import Any

from ..data.images import image_blocks, prompt_with_images
from ..errors import UserError
from .requests import Request


def has_images(request: Request) -> bool:
    """Return whether the prompt of a request has images."""
    return next(image_blocks(request.prompt), None) is not None


def openai_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return messages with images in the form of OpenAI's API: their content is in the request."""
    messages = prompt_with_images({"prompt": prompt})
    for block in image_blocks(messages):
        content = BytesIO()
        block.pop("image").save(content, format="PNG")
        url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
        block.update({"type": "image_url", "image_url": {"url": url}})
    return messages


def load_processor(model: str, **loading: Any) -> Any:
    """Load the processor of a checkpoint; `loading` goes to `from_pretrained`. Raises a `ValueError` if it reads no
    images, or a package is missing."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(model, **loading)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"A benchmark has images, and the processor of {model} cannot be loaded ({reason:.200}). Install the "
            "missing package, usually torchvision, or evaluate a checkpoint that reads images."
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise UserError(
            f"A benchmark has images, and {model} reads text alone. Evaluate a checkpoint that reads images, or "
            "remove the images."
        )
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    return processor

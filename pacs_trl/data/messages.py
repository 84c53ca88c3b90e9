"""Messages whose text reaches the prompt: content as text, and a check of the chat template.

A chat template leaves out what it does not know, without an error: a role, a list of content blocks, no content. The
model would then be trained or evaluated on other prompts than those of the data.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from ..errors import UserError


# How templates that expect text print a list of content blocks.
_PRINTED_BLOCK = re.compile(r"""["']type["']\s*:\s*["']text["']""")


def content_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in which a list of text blocks is their text, one block per line. Other content is kept."""
    content = message.get("content")
    if content and isinstance(content, list) and all(_is_text_block(block) for block in content):
        return {**message, "content": "\n".join(block["text"] for block in content)}
    return dict(message)


def _is_text_block(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _is_image_block(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image"


class MessageCheck:
    """
    Check that a chat template renders the text of all messages.

    One prompt for each combination of roles and kinds of content is rendered with a marker in place of each text, so
    the check costs little and does not depend on how a template trims or formats text.

    Args:
        tokenizer: Tokenizer with a chat template, or processor, with which messages may have images.
        chat_template_kwargs (mapping, *optional*): Arguments of the template.
        tools (sequence, *optional*): Tools that the prompts describe.
        chat_template (`str`, *optional*): Template to use instead of the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Callable] | None = None,
        chat_template: str | None = None,
    ):
        from transformers import ProcessorMixin  # `--help` needs no library

        self.tokenizer = tokenizer
        self.reads_images = isinstance(tokenizer, ProcessorMixin)
        self.template_arguments: dict[str, Any] = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        if tools:
            self.template_arguments["tools"] = list(tools)
        if chat_template is not None:
            self.template_arguments["chat_template"] = chat_template
        self._checked: set[tuple] = set()  # kinds of the messages of prompts that are rendered as a whole

    def check(self, name: str, prompts: Iterable[Any]) -> None:
        """Raise a `ValueError` that names the row of `name` if a message has no text, or is left out."""
        for row, prompt in enumerate(prompts):
            self.check_prompt(f"Row {row} of {name}", prompt)

    def check_prompt(self, where: str, prompt: str | Sequence[Mapping[str, Any]]) -> None:
        """Raise a `ValueError` that starts with `where` as [`check`] does. Text prompts are skipped."""
        if isinstance(prompt, str):
            return
        kinds = tuple(_kind(message) for message in prompt)
        if kinds not in self._checked:
            self._render(where, prompt)
            self._checked.add(kinds)

    def _render(self, where: str, prompt: Sequence[Mapping[str, Any]]) -> None:
        for message in prompt:
            _check_content(where, message, self.reads_images)
        markers = [_markers(f"message{i}", message) for i, message in enumerate(prompt)]
        marked = [_with_texts(message, texts) for message, texts in zip(prompt, markers, strict=True)]
        try:
            if self.reads_images:
                from trl.data_utils import prepare_multimodal_messages

                marked = prepare_multimodal_messages(marked)
            rendered = self.tokenizer.apply_chat_template(marked, tokenize=False, **self.template_arguments)
        except (TemplateError, TypeError, AttributeError, LookupError) as error:
            roles = ", ".join(str(message["role"]) for message in prompt)
            raise UserError(
                f"{where} cannot be rendered by the chat template ({type(error).__name__}: {error}). It has messages "
                f"of the roles {roles}; use roles in an order and with a content that the template knows."
            ) from error
        for message, texts in zip(prompt, markers, strict=True):
            is_call = bool(message.get("tool_calls"))  # of which many templates render the call alone
            is_rendered = all(text.casefold() in rendered.casefold() for text in texts)
            if isinstance(message.get("content"), list) and (not is_rendered or _PRINTED_BLOCK.search(rendered)):
                raise UserError(
                    f"{where} has a message of the role {message['role']!r} whose content is a list of blocks, which "
                    "the chat template does not render as text. Write the content as text."
                )
            if not is_rendered and not is_call:
                raise UserError(
                    f"{where} has a message of the role {message['role']!r}, which the chat template leaves out of "
                    "the prompt. Use roles that the template knows (usually system, user, assistant, and tool), or "
                    "the tokenizer of a text model."
                )


def _kind(message: Mapping[str, Any]) -> tuple:
    """Return what decides how a template renders a message: its role, and the types of its content."""
    content = message.get("content")
    types: Any = type(content).__name__
    if isinstance(content, list):
        types = tuple(_kind_of_block(block) for block in content)
    return message["role"], types, bool(message.get("tool_calls"))


def _kind_of_block(block: Any) -> str:
    if _is_text_block(block):
        return "text"
    if _is_image_block(block):
        return "image"
    return "other"


def _check_content(where: str, message: Mapping[str, Any], may_have_images: bool) -> None:
    """Raise a `ValueError` if a message has no content, or a content that is neither text nor an allowed image."""
    content, role = message.get("content"), message["role"]
    is_only_call = content is None and message.get("tool_calls")
    if isinstance(content, str) or is_only_call:
        return
    if content is None or content == []:
        raise UserError(
            f"{where} has a message of the role {role!r} without content. Remove the row, or complete the message."
        )
    known_kinds = ("text", "image") if may_have_images else ("text",)
    is_known = isinstance(content, list) and all(_kind_of_block(block) in known_kinds for block in content)
    if not is_known:
        raise UserError(
            f"{where} has a message of the role {role!r} with the content {content!r:.100}. Models are trained on "
            "text: write the content as text."
        )


def _markers(name: str, message: Mapping[str, Any]) -> list[str]:
    """Return a text to look for in place of each text block of a message, or of its whole text."""
    content = message.get("content")
    if isinstance(content, list):
        return [f"{name}block{i}text" for i, block in enumerate(content) if _is_text_block(block)]
    return [f"{name}text"]


def _with_texts(message: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return a message with `texts` in place of its text blocks, or of its whole text."""
    content = message.get("content")
    if content is None:
        return {**message, "content": None}
    if not isinstance(content, list):
        return {**message, "content": texts[0]}
    remaining_texts = iter(texts)
    blocks: list[dict[str, Any]] = []
    for block in content:
        if _is_text_block(block):
            blocks.append({**block, "text": next(remaining_texts)})
        else:
            blocks.append({"type": "image", "image": None})
    return {**message, "content": blocks}

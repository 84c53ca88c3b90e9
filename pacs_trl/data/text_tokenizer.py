"""Tokenizers of models that are trained and evaluated on text, also of those that read images."""

import json
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file


_PROBE = "probe of the template"


def load_text_tokenizer(name: str, **kwargs: Any) -> Any:
    """
    Load the tokenizer of a model; `kwargs` are those of `from_pretrained`. Without a chat template of its own it gets
    that of the processor of the model (`chat_template.json`).
    """
    tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    if tokenizer.chat_template is None:
        file = cached_file(
            name,
            "chat_template.json",
            revision=kwargs.get("revision"),
            local_files_only=kwargs.get("local_files_only", False),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            tokenizer.chat_template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    return accepting_text(tokenizer)


def accepting_text(tokenizer: Any) -> Any:
    """Return a tokenizer, changed so that its chat template gets content that is text as a list of one text block, if
    it renders text only from blocks, as those of many models that read images."""
    if tokenizer.chat_template is None:
        return tokenizer
    renders_blocks_alone = not _renders(tokenizer, _PROBE) and _renders(tokenizer, [{"type": "text", "text": _PROBE}])
    if renders_blocks_alone:
        tokenizer.apply_chat_template = MethodType(_apply_to_blocks, tokenizer)
    return tokenizer


def _renders(tokenizer: Any, content: Any) -> bool:
    """Return whether the chat template renders a message whose content has the text `_PROBE`."""
    try:
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except (TemplateError, TypeError, AttributeError, LookupError, ValueError):
        return False


@wraps(PreTrainedTokenizerBase.apply_chat_template)
def _apply_to_blocks(self, conversation: Sequence, *args: Any, **kwargs: Any) -> Any:
    if conversation and isinstance(conversation[0], Mapping):
        conversation = [_in_blocks(message) for message in conversation]
    else:
        conversation = [[_in_blocks(message) for message in messages] for messages in conversation]
    return type(self).apply_chat_template(self, conversation, *args, **kwargs)


def _in_blocks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with text as a list of one block; other content is kept."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}

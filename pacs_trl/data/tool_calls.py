"""Calls of tools as models write them, and results of tools as models read them."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ..errors import UserError


MAX_OBSERVATION = 100_000  # characters of a result of a tool, and of an observation of an environment
MAX_DEPTH = 32  # lists and objects in each other in the arguments of a call


def readable_text(text: str) -> str:
    """Return a text that can be tokenized and stored: halves of characters replaced, and at most `MAX_OBSERVATION`
    characters, followed by the number of characters that were cut."""
    cut = len(text) - MAX_OBSERVATION
    if cut > 0:
        text = f"{text[:MAX_OBSERVATION]}... ({cut} more characters)"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_observation(result: Any, takes_images: bool) -> str | list[dict[str, Any]]:
    """Return the result of a tool as the content of a message: text, or content blocks if one is an image that the
    model takes."""
    is_list_of_blocks = (
        isinstance(result, list)
        and len(result) > 0
        and all(isinstance(part, dict) and part.get("type") in ("text", "image") for part in result)
    )
    if not is_list_of_blocks:
        return readable_text(str(result))
    blocks: list[dict[str, Any]] = []
    for part in result:
        if part["type"] == "text":
            blocks.append({"type": "text", "text": readable_text(str(part.get("text", "")))})
        elif takes_images:
            blocks.append(part)
        else:
            blocks.append({"type": "text", "text": "[image]"})
    if any(block["type"] == "image" for block in blocks):
        return blocks
    return readable_text("".join(block["text"] for block in blocks))


def safe_tools(tools: Mapping[str, Callable], takes_images: bool) -> dict[str, Callable]:
    """Wrap tools so that their results are contents of messages, also those of coroutine functions behind other
    functions. Exceptions become a `RuntimeError` with a readable message."""
    return {name: _safe_tool(tool, takes_images) for name, tool in tools.items()}


def _safe_tool(tool: Callable, takes_images: bool) -> Callable:
    if inspect.iscoroutinefunction(tool):

        @wraps(tool)
        async def call_async(**arguments: Any) -> Any:
            try:
                return as_observation(await tool(**arguments), takes_images)
            except Exception as error:
                raise RuntimeError(_message_of(error)) from error

        return call_async

    @wraps(tool)
    def call(**arguments: Any) -> Any:
        try:
            result = tool(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_await(result))
            return as_observation(result, takes_images)
        except Exception as error:
            raise RuntimeError(_message_of(error)) from error

    return call


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _message_of(error: Exception) -> str:
    try:
        return readable_text(str(error))
    except Exception:  # its `__str__` fails
        return type(error).__name__


@contextmanager
def readable_calls(tokenizer: Any) -> Iterator[None]:
    """Let `parse_response` of a tokenizer raise a `ValueError` for calls that no tool can get, so that TRL reads them
    as text: arguments that are no object, nested more than `MAX_DEPTH` deep, or with half a character."""
    parse = getattr(tokenizer, "parse_response", None)
    if parse is None:  # transformers before 5
        yield
        return

    @wraps(parse)
    def parse_readable(*args: Any, **kwargs: Any) -> Any:
        try:
            message = parse(*args, **kwargs)
            if isinstance(message, list):  # of an empty completion, which looks like an empty batch
                raise ValueError("an empty message")
            if isinstance(message, dict) and message.get("tool_calls"):
                _check_calls(message["tool_calls"])
        except (RecursionError, KeyError, AttributeError) as error:
            raise UserError("a call that cannot be read") from error
        return message

    attribute_before = vars(tokenizer).get("parse_response")  # `None` if it is a method of the class
    tokenizer.parse_response = parse_readable
    try:
        yield
    finally:
        if attribute_before is None:
            del tokenizer.parse_response
        else:
            tokenizer.parse_response = attribute_before


def _check_calls(calls: Sequence[dict[str, Any]]) -> None:
    """Raise a `ValueError` if no tool can get one of the calls, see [`readable_calls`]."""
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if call["type"] != "function" or not isinstance(arguments, dict | None):
            raise UserError("the arguments of a call must be an object")
        _check_depth(arguments)
    # A half of a character raises a UnicodeEncodeError, which is a ValueError.
    json.dumps(calls, ensure_ascii=False).encode()


def _check_depth(arguments: Any) -> None:
    """Raise a `ValueError` if lists and objects are nested too deep. Goes level by level: recursion could exceed the
    stack of Python."""
    values_of_level = [arguments]
    for _ in range(MAX_DEPTH):
        values_below: list[Any] = []
        for value in values_of_level:
            if isinstance(value, dict):
                values_below += value.values()
            elif isinstance(value, list):
                values_below += value
        values_of_level = values_below
    if any(isinstance(value, dict | list) for value in values_of_level):
        raise UserError(f"the arguments of a call are nested more than {MAX_DEPTH} deep")


def messages_for_table(completion: Any) -> Any:
    """Return a completion for the columns of a table, in which a field has one type: arguments of calls as JSON, and
    content as text. Completions that are text are returned as they are."""
    if not isinstance(completion, list):
        return completion
    return [_message_for_table(message) for message in completion]


def _message_for_table(message: dict[str, Any]) -> dict[str, Any]:
    message = dict(message)
    if isinstance(message.get("content"), list):
        message["content"] = "".join(part.get("text", f"[{part.get('type')}]") for part in message["content"])
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call_for_table(call) for call in calls]
    return message


def _call_for_table(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False, default=str)
    return call | {"function": function | {"arguments": arguments}}

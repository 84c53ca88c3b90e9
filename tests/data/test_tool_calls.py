"""Calls that cannot be read are text, and results of tools are text that can be tokenized and stored."""

import asyncio
import functools

import pandas as pd
import pytest

from pacs_trl.data import tool_calls
from pacs_trl.data.tool_calls import (
    MAX_OBSERVATION,
    as_observation,
    messages_for_table,
    readable_calls,
    readable_text,
    safe_tools,
)


class Mute(Exception):
    def __str__(self):
        raise TypeError("no text")


IMAGE = {"type": "image", "image": "pixels"}
NESTED = [1]
for _ in range(tool_calls.MAX_DEPTH):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("a", "a"),
        (None, "None"),
        ({"a": 1}, "{'a': 1}"),
        ([], "[]"),
        ([1, {"a": 2}], "[1, {'a': 2}]"),
        ([{"type": "text"}, {"type": "text", "text": "b"}], "b"),
        ([{"type": "text", "text": 5}], "5"),
        ([{"type": "video"}], "[{'type': 'video'}]"),
        ([{"type": "text", "text": "a"}, IMAGE], "a[image]"),
        ("\ud83d half", "\ufffd half"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_a_result_is_text(result, content):
    assert as_observation(result, takes_images=False) == content


def test_images_are_kept_for_a_model_that_takes_them():
    result = [{"type": "text", "text": "\ud83d"}, IMAGE]
    assert as_observation(result, takes_images=True) == [{"type": "text", "text": "\ufffd"}, IMAGE]


def test_a_long_result_is_cut_to_the_stated_length():
    assert readable_text("x" * MAX_OBSERVATION) == "x" * MAX_OBSERVATION
    text = readable_text("x" * 50_000_000)
    assert len(text) < MAX_OBSERVATION + 100 and text.endswith("x... (49900000 more characters)")


def run(tool, **arguments):
    return safe_tools({"tool": tool}, takes_images=False)["tool"](**arguments)


def raising(error):
    def tool():
        raise error

    return tool


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("a"), "'a'"),
        (Mute(), "Mute"),
        (ValueError("\ud83d"), "\ufffd"),
    ],
)
def test_what_a_tool_raises_is_an_error_with_a_message(error, message):
    async def later():
        raise error

    for call in (lambda: run(raising(error)), lambda: asyncio.run(run(later))):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value) == message


def test_a_result_without_text_is_an_error():
    with pytest.raises(RuntimeError, match="no text"):
        run(Mute)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_caught(kind):
    with pytest.raises(kind):
        run(raising(kind()))


def test_a_coroutine_behind_a_decorator_is_awaited():
    async def tool(text):
        return [text]

    @functools.wraps(tool)
    def decorated(*args, **kwargs):
        return tool(*args, **kwargs)

    assert run(decorated, text="a") == asyncio.run(run(tool, text="a")) == "['a']"


class Tokenizer:
    def __init__(self, message):
        self.message = message

    def parse_response(self, ids):
        if isinstance(self.message, Exception):
            raise self.message
        return self.message


def call_with(arguments, **more):
    return {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments} | more}]}


@pytest.mark.parametrize(
    "message",
    [
        RecursionError(),
        call_with([1]),
        call_with("a"),
        call_with({"a": "\ud83d"}),
        call_with({"\udc00": 1}),
        call_with({}, name="\ud83d"),
        call_with({"a": NESTED}),
        {"tool_calls": [{"name": "f", "arguments": {}}]},
        {"tool_calls": [{"type": "other", "function": {"name": "f", "arguments": {}}}]},
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_of_the_parser(message):
    tokenizer = Tokenizer(message)
    with readable_calls(tokenizer), pytest.raises(ValueError):
        tokenizer.parse_response([1])


@pytest.mark.parametrize(
    "message", [{"content": "a"}, {"tool_calls": None}, call_with({}), call_with(None), call_with({"a": NESTED[0][0]})]
)
def test_other_messages_are_parsed_as_before(message):
    tokenizer = Tokenizer(message)
    with readable_calls(tokenizer), readable_calls(tokenizer):
        assert tokenizer.parse_response([1]) is message
    assert "parse_response" not in vars(tokenizer)


def test_the_table_has_one_type_per_field(tmp_path):
    calls = [call_with(arguments) for arguments in ({"a": 1}, {"a": "x"}, {"a": [1]}, {}, {"a": {"b": None}})]
    messages = [[{"role": "assistant", "content": ""} | call, {"role": "tool", "content": "5"}] for call in calls]
    messages += [[{"role": "assistant", "content": [{"type": "text", "text": "a"}, IMAGE]}], [{"tool_calls": None}]]
    rows = [messages_for_table(completion) for completion in messages]
    pd.DataFrame({"completion": rows}).to_parquet(tmp_path / "table.parquet")
    arguments = [row[0]["tool_calls"][0]["function"]["arguments"] for row in rows[:5]]
    assert arguments == ['{"a": 1}', '{"a": "x"}', '{"a": [1]}', "{}", '{"a": {"b": null}}']
    assert rows[5][0]["content"] == "a[image]" and "tool_calls" not in rows[6][0]
    assert messages[0][0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}  # rewards may still read it
    assert messages_for_table("text") == "text" and messages_for_table(rows[0]) == rows[0]

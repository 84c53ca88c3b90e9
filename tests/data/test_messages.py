"""Every message of a prompt reaches the model, or is refused by row and role."""

from pathlib import Path

import pytest
import trl

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.data.messages import MessageCheck, content_as_text
from pacs_trl.data.prompts import read_problem


USER = {"role": "user", "content": "What is 2+3?"}
BLOCKS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2+3?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}


def tokenizer_of(template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return tokenizer


def check(template, *messages):
    MessageCheck(tokenizer_of(template)).check("the set", [[USER], list(messages)])


RENDERED = {
    "turns": [{"role": "system", "content": " Be brief. "}, USER, {"role": "assistant", "content": "5"}, USER],
    "calls without content": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}],
    "calls with content": [
        USER,
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
    ],
}


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_2", "gemma4", "nemotron_3_nano"])
@pytest.mark.parametrize("messages", RENDERED.values(), ids=RENDERED)
def test_conversations_that_a_template_renders_pass(template, messages):
    check(template, *messages)


@pytest.mark.parametrize("role", ["developer", "human"])
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "phi3"])
def test_roles_that_a_template_leaves_out_are_refused(template, role):
    with pytest.raises(ValueError, match=f"Row 1 of the set .*(role '{role}'.* leaves out|cannot be rendered)"):
        check(template, {"role": role, "content": "Answer in French."}, USER)


def test_a_role_that_one_template_knows_passes():
    check("gptoss", {"role": "developer", "content": "Answer in French."}, USER)


@pytest.mark.parametrize("template", ["qwen3", "llama3_2", "qwen2_5", "phi3"])  # drop, print, and fail at a list
def test_blocks_that_a_template_does_not_render_as_text_are_refused(template):
    with pytest.raises(ValueError, match="Row 1 of the set .*(Write the content as text|cannot be rendered)"):
        check(template, {"role": "user", "content": BLOCKS})


def test_blocks_behind_the_first_that_a_template_leaves_out_are_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content[0].text }}{% endfor %}"
    MessageCheck(tokenizer).check("the set", [[{"role": "user", "content": BLOCKS[:1]}]])
    with pytest.raises(ValueError, match="Row 0 of the set .* Write the content as text"):
        MessageCheck(tokenizer).check("the set", [[{"role": "user", "content": BLOCKS}]])


def test_blocks_that_a_template_renders_pass():
    check("gemma3", {"role": "user", "content": BLOCKS})


@pytest.mark.parametrize("template", ["smolvlm", "llava_next"])
def test_templates_of_image_models_that_leave_out_text_are_refused(template):
    with pytest.raises(ValueError, match="Row 0 of the set .*'user', which the chat template leaves out"):
        check(template, USER)


@pytest.mark.parametrize("content", [None, [], [None], 5, [{"type": "image"}], [*BLOCKS, {"type": "image"}]])
@pytest.mark.parametrize("template", ["qwen3", "gemma3"])
def test_messages_without_text_are_refused(template, content):
    with pytest.raises(ValueError, match="Row 1 of the set has a message of the role 'user'"):
        check(template, {"role": "user", "content": content})


def test_each_combination_of_roles_and_contents_is_rendered_once():
    messages, rendered = MessageCheck(tokenizer_of("qwen3")), []
    render = messages.tokenizer.apply_chat_template
    messages.tokenizer.apply_chat_template = lambda *args, **how: rendered.append(args) or render(*args, **how)
    messages.check("the set", [[USER]] * 50 + [[RENDERED["turns"][0], USER], "a text prompt"] * 2)
    assert len(rendered) == 2


def test_text_blocks_of_a_data_file_are_read_as_text():
    assert content_as_text({"role": "user", "content": BLOCKS}) == {"role": "user", "content": "What is\n2+3?"}
    turns = [{"role": "user", "content": BLOCKS}, {"role": "assistant", "content": "5"}]
    assert read_problem(turns, "messages") == [{"role": "user", "content": "What is\n2+3?"}]
    assert read_problem(turns, "prompt") == [{"role": "user", "content": "What is\n2+3?"}, turns[1]]
    image = {"role": "user", "content": [{"type": "image"}]}
    assert content_as_text(image) == image

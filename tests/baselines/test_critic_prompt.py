"""The question to a generative critic: what stands in it and what does not, and how answers are read."""

import re

import pytest
from replay import TOKENIZER

from pacs_trl.baselines.critic_prompt import Actor, CriticPrompt, State, shipped


ACTOR = Actor("Qwen3-4B, 4.0B parameters", token_limit=8192, success_rate=0.37)
STATE = State("What is {problem} of $\\frac{1}{2}$?", "I think {score}", tokens_used=12)


@pytest.mark.parametrize("name", shipped())
def test_shipped_templates_say_the_state_and_condition_or_not(name):
    text = CriticPrompt.read(name).render(STATE, ACTOR)
    assert STATE.problem in text and STATE.response in text  # braces of a user's text are left alone
    conditioned = "unconditioned" not in name
    assert all((word in text) == conditioned for word in ("37%", "8192"))
    assert ("Qwen3-4B" in text) == (name == "genac")
    assert ("unknown" in CriticPrompt.read(name).render(STATE, ACTOR._replace(success_rate=None))) == conditioned
    CriticPrompt.read(name).check_vocabulary(TOKENIZER, "miniature")


def test_in_context_conditioning_asks_for_the_abilities_of_the_actor():
    """The paper's template has the critic infer them from the partial response, beside model size and success rate."""
    asked = {name: "Infer the model's abilities" in CriticPrompt.read(name).template for name in shipped()}
    assert [name for name, found in asked.items() if found] == ["genac"]


def test_no_gold_answer_can_be_in_the_question():
    """What is rendered comes from state and actor alone, and neither has a place for a solution."""
    assert State._fields == ("problem", "response", "tokens_used")
    assert Actor._fields == ("name", "token_limit", "success_rate")
    with pytest.raises(ValueError, match=r"has \{solution\}"):
        CriticPrompt("{problem} {solution} {response} <a>{score}</a>")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("It will work. <answer>7</answer>", 0.7),
        ("<answer>0</answer>", 0.0),
        ("<answer> 10 </answer>", 1.0),
        ("<answer>3</answer> no, <answer>4</answer>", 0.4),  # the last one
        ("<answer>11</answer>", None),
        ("<answer>7.5</answer>", None),
        ("<answer>-1</answer>", None),
        ("<answer>seven</answer>", None),
        ("<answer>٣</answer>", None),  # int() would read it
        ("<answer>7", None),
        ("7", None),
        ("", None),
    ],
)
def test_answers(answer, value):
    assert CriticPrompt.read("genac").parse(answer) == value


def test_what_is_written_is_read():
    prompt = CriticPrompt.read("miniature")
    assert prompt.tags == ("<", ">") and prompt.write(0.44) == "<4>"
    assert all(prompt.parse("30+8=38 " + prompt.write(i / 10)) == i / 10 for i in range(11))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{response} <a>{score}</a>", r"lacks \{problem\}: .*Mend the template, or take one of genac, "),
        ("", r"lacks \{problem\}, \{response\}, \{score\}"),
        ("{problem} {response} {score}", r"must have \{score\} once, between the tags"),
        ("{problem}{score}{response}", r"must have \{score\} once, between the tags"),
        ("{problem} {response} <{score}> or <{score}>", r"must have \{score\} once"),
        ("{problem} {response} <{score}> {name}", r"has \{name\}"),
    ],
)
def test_templates_that_are_none(tmp_path, template, message):
    (tmp_path / "template.txt").write_text(template)
    with pytest.raises(ValueError, match=message):
        CriticPrompt.read(str(tmp_path / "template.txt"))


@pytest.mark.parametrize("name", ["no/such/file.txt", "."])
def test_no_template_at_all(name):
    with pytest.raises(
        ValueError, match=rf"critic_prompt='{re.escape(name)}' is neither a text file .* nor one of genac"
    ):
        CriticPrompt.read(name)


def test_a_vocabulary_without_the_tags():
    class Digits:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [int(c) for c in text if c.isdigit()]}

        def decode(self, ids, skip_special_tokens):
            return "".join(map(str, ids))

    with pytest.raises(ValueError, match="The critic digits cannot write <answer>0</answer>"):
        CriticPrompt.read("genac").check_vocabulary(Digits(), "digits")

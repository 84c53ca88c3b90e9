"""The question to a generative critic, and how its answers are read."""

import pytest

from pacs_trl.experimental._critic import TEMPLATES, Actor, CriticPrompt, State


ACTOR = Actor("Qwen3-4B, 4.0B parameters", token_limit=8192, success_rate=0.37)
STATE = State("What is {problem} of $\\frac{1}{2}$?", "I think {score}", tokens_used=12)


@pytest.mark.parametrize("name", [path.stem for path in TEMPLATES.glob("*.txt")])
def test_shipped_templates_say_the_state_and_condition_or_not(name):
    text = CriticPrompt(name).render(STATE, ACTOR)
    assert STATE.problem in text and STATE.response in text  # braces of a user's text are left alone
    conditioned = "unconditioned" not in name
    assert all((word in text) == conditioned for word in ("37%", "8192"))
    assert ("Qwen3-4B" in text) == (name == "genac")
    assert ("unknown" in CriticPrompt(name).render(STATE, ACTOR._replace(success_rate=None))) == conditioned


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
    assert CriticPrompt("genac").parse(answer) == value


def test_what_is_written_is_read():
    prompt = CriticPrompt("miniature")
    assert prompt.tags == ("<", ">")
    assert all(prompt.parse(f"30+8=38 <{i}>") == i / 10 for i in range(11))

"""A generative critic: segments, prompts, answers, and rewards, weights and losses by hand and against loops."""

import math
import random

import pytest
import torch
from support.models import TOKENIZER
from support.problems import CRITIC_PROMPT
from support.seeds import shifted
from support.tolerances import rounding_atol

from pacs_trl.baselines.gae import generalized_advantages
from pacs_trl.errors import UserError
from pacs_trl.experimental._critic import (
    CRITIC_PROMPTS,
    Actor,
    CriticPrompt,
    State,
    answer_length,
    border_lambdas,
    critic_rewards,
    problem_text,
    reinforce_losses,
    reinforce_weights,
    segment_starts,
    token_values,
)
from pacs_trl.experimental.genac import GenACConfig


NAN = math.nan


def test_rewards_equal_those_worked_by_hand():
    critic = critic_rewards(torch.tensor([1.0, 0.0, 0.5, NAN]), torch.tensor([1.0, 1.0, 0.25, 0.0]))
    # 1 - 0, 1 - 1, 1 - 1/16, unread
    torch.testing.assert_close(critic, torch.tensor([1.0, 0.0, 0.9375, 0.0]))


def test_weights_equal_those_worked_by_hand():
    # right: 0.9 - (0.5 + 0.1) / 2 = 0.6, 0.5 - 1.0 / 2 = 0, 0.1 - 1.4 / 2 = -0.6; the only wrong one keeps its reward
    rewards, outcomes = torch.tensor([0.9, 0.5, 0.7, 0.1]), torch.tensor([1.0, 0.8, 0.5, 1.0])
    torch.testing.assert_close(reinforce_weights(rewards, outcomes), torch.tensor([0.6, 0.0, 0.7, -0.6]))


def test_weights_equal_a_loop_sum_to_zero_on_each_side_and_do_not_depend_on_processes():
    rewards, outcomes, totals = torch.rand(40), torch.rand(40).round(), []
    whole = reinforce_weights(rewards, outcomes)
    for i in range(40):
        others = [rewards[j].item() for j in range(40) if j != i and outcomes[j] == outcomes[i]]
        assert whole[i].item() == pytest.approx(rewards[i].item() - sum(others) / len(others), abs=1e-6)
    assert whole[outcomes == 1].sum().item() == pytest.approx(0.0, abs=1e-5)
    parts = [slice(0, 15), slice(15, 40)]
    for part in parts:
        reinforce_weights(rewards[part], outcomes[part], lambda local_sum: totals.append(local_sum) or local_sum)
    for part in parts:
        part_weights = reinforce_weights(rewards[part], outcomes[part], lambda local_sum: sum(totals))
        torch.testing.assert_close(part_weights, whole[part])


def test_losses_and_gradient_equal_those_worked_by_hand():
    logps = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    drawn = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(8), NAN])  # ratios 1, 1/2, 8 and unknown
    losses = reinforce_losses(logps, drawn, torch.tensor([0.5, -1.0, 1.0, 1.0]), cap=2.0)
    torch.testing.assert_close(losses, torch.tensor([0.5, -0.5, 2.0, 1.0]))
    losses.sum().backward()
    torch.testing.assert_close(logps.grad, torch.tensor([-0.5, 0.5, -2.0, -1.0]))


@pytest.mark.parametrize(
    ("probabilities", "rules", "starts"),
    [
        ([0.9, 0.1, 0.9, 0.9], (0.2, None, 16), [0, 2]),  # the unsure token ends its segment
        ([0.9, 0.2, 0.9], (0.2, None, 16), [0]),  # below, not at
        ([0.1, 0.1, 0.1], (0.2, None, 16), [0, 1, 2]),
        ([0.9, 0.9, 0.1], (0.2, None, 16), [0]),  # the last token ends one anyway
        ([0.9] * 5, (None, 2, 16), [0, 2, 4]),
        ([0.9] * 4, (None, 2, 16), [0, 2]),
        ([0.9, 0.1, 0.9, 0.9, 0.9], (0.2, 3, 16), [0, 2, 3]),
        ([0.9] * 4, (None, None, 16), [0]),
        ([0.1] * 8, (0.2, None, 4), [0, 2, 4, 6]),  # every second end is left
        ([0.1] * 8, (0.2, None, 3), [0, 2, 5]),  # ends 7/3, 16/3 and 8 of eight: tokens 1, 4 and 7
        ([0.1] * 8, (0.2, None, 1), [0]),
        ([0.1], (0.2, 512, 16), [0]),
        ([], (0.2, 512, 16), []),
    ],
)
def test_cuts_by_hand(probabilities, rules, starts):
    threshold, length, most = rules
    assert segment_starts(probabilities, threshold=threshold, length=length, max_segments=most) == starts


def test_thinning_is_even_and_keeps_the_last_token():
    starts = segment_starts([0.0] * 1000, threshold=0.2, length=None, max_segments=16)
    lengths = [end - start for start, end in zip(starts, [*starts[1:], 1000])]
    assert len(starts) == 16 and sum(lengths) == 1000 and set(lengths) <= {62, 63}


def test_no_value_knows_an_action_that_it_baselines():
    """A critic that reads off the actions of its prefix would give a segment away; asked before its first token, it
    cannot."""
    rng = random.Random(shifted(0))
    for _ in range(50):
        actions = list(range(rng.randrange(1, 40)))
        starts = segment_starts([rng.random() for _ in actions], threshold=0.5, length=7, max_segments=5)
        seen = [set(actions[:start]) for start in starts]
        places = token_values(range(len(starts)), starts, len(actions)).int().tolist()
        for action in actions:
            assert action not in seen[places[action]]
        leaking = [set(actions[:end]) for end in [*starts[1:], len(actions)]]  # asked at a segment's end
        assert all(action in leaking[places[action]] for action in actions)


def target_by_definition(t, starts, values, reward, length, gamma, lam):
    """What token `t` leads to: the reward, discounted by token, or with 1 - lambda at each border the value behind
    it."""
    if t == length - 1:
        return reward
    later = target_by_definition(t + 1, starts, values, reward, length, gamma, lam)
    if t + 1 in starts:
        later = (1 - lam) * values[starts.index(t + 1)] + lam * later
    return gamma * later


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.9), (0.97, 0.5), (0.9, 0.0)])
def test_advantages_equal_the_definition(gamma, lam):
    rng = random.Random(shifted(1))
    for length in (1, 2, 9, 30):
        starts = segment_starts([rng.random() for _ in range(length)], threshold=0.3, length=8, max_segments=6)
        values, reward = [rng.random() for _ in starts], rng.random()
        values_by_token = token_values(values, starts, length)[None]
        advantages, _ = generalized_advantages(
            torch.tensor([reward]),
            values_by_token,
            torch.ones(1, length, dtype=torch.bool),
            gamma=gamma,
            gae_lambda=border_lambdas(starts, length, lam)[None],
        )
        expected = [target_by_definition(t, starts, values, reward, length, gamma, lam) for t in range(length)]
        error = (advantages[0] - (torch.tensor(expected) - values_by_token[0])).abs().max()
        assert error <= rounding_atol(4 * length, 1.0)
        if gamma == lam == 1.0:  # R - V(segment of t)
            segment = [max(k for k, start in enumerate(starts) if start <= t) for t in range(length)]
            plain = torch.tensor([reward - values[k] for k in segment])
            assert (advantages[0] - plain).abs().max() <= rounding_atol(4 * length, 1.0)


ACTOR = Actor("Qwen3-4B, 4.0B parameters", token_limit=8192, success_rate=0.37)
STATE = State("What is {problem} of $\\frac{1}{2}$?", "I think {score}", tokens_used=12)


@pytest.mark.parametrize("name", [path.stem for path in CRITIC_PROMPTS.glob("*.txt")])
def test_shipped_templates_say_the_state_and_condition_or_not(name):
    text = CriticPrompt(name).render(STATE, ACTOR)
    assert STATE.problem in text and STATE.response in text  # braces of a user's text are left alone
    conditioned = "unconditioned" not in name
    assert all((word in text) == conditioned for word in ("37%", "8192"))
    assert ("Qwen3-4B" in text) == (name == "genac")
    assert ("unknown" in CriticPrompt(name).render(STATE, ACTOR._replace(success_rate=None))) == conditioned


def template(directory, text: str) -> str:
    """Write a template, and return its path."""
    path = directory / "template.txt"
    path.write_text(text)
    return str(path)


def test_braces_that_are_no_placeholder_stay_in_a_template(tmp_path):
    prompt = CriticPrompt(template(tmp_path, "{problem} \\boxed{n} {outcome} {response} <a>{score}</a>"))
    assert prompt.render(State("1+1", "2", 1), ACTOR) == "1+1 \\boxed{n} {outcome} 2 <a>integer</a>"
    assert prompt.parse("<a>7</a>") == 0.7


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("{problem} {response} Rate.", "{score}"),
        ("{problem} {response} Rate: {score}", "{score}"),  # without tags
        ("{problem} <a>{score}</a>", "{response}"),
        ("{response} <a>{score}</a>", "{problem}"),
        ("{problem} {respons} <a>{score}</a>", "{response}"),
    ],
)
def test_a_template_without_a_placeholder_is_refused(tmp_path, text, missing):
    path = template(tmp_path, text)
    with pytest.raises(ValueError, match=f"critic_prompt=.*{missing}"):
        GenACConfig(str(tmp_path), critic_prompt=path, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match=f"critic_prompt=.*{missing}"):
        CriticPrompt(path)


def test_a_problem_is_the_text_of_all_user_turns():
    system = {"role": "system", "content": "Be brief."}
    blocks = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]
    prompt = [system, {"role": "user", "content": "A question:"}, {"role": "user", "content": blocks}]
    assert problem_text(prompt) == "A question:\nWhat is\n1+1?"
    assert problem_text("1+1") == "1+1"


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
def test_the_last_valid_answer_is_parsed(answer, value):
    assert CriticPrompt("genac").parse(answer) == value


def test_what_is_written_is_read():
    prompt = CriticPrompt(CRITIC_PROMPT)
    assert prompt.tags == ("<", ">")
    assert all(prompt.parse(f"30+8=38 <{i}>") == i / 10 for i in range(11))


@pytest.mark.parametrize(
    "text", ["7</answer>", "7</answer> and </answer>.", "no tag", "", "late </answer>|more</answer>"]
)
def test_an_answer_ends_at_its_first_tag_or_end_token(text):
    """`|` stands for the end token."""
    ids = [TOKENIZER.eos_token_id if c == "|" else TOKENIZER(c)["input_ids"][0] for c in text]
    end = ids.index(TOKENIZER.eos_token_id) + 1 if TOKENIZER.eos_token_id in ids else len(ids)
    first = next((n for n in range(1, end) if "</answer>" in TOKENIZER.decode(ids[:n])), end)
    assert answer_length(TOKENIZER, ids, "</answer>", {TOKENIZER.eos_token_id}) == first
    assert answer_length(TOKENIZER, ids, None, {TOKENIZER.eos_token_id}) == end


@pytest.mark.parametrize("content", [None, "Réponse {problem} {response} <answer>{score}</answer>".encode("latin-1")])
def test_a_critic_prompt_that_cannot_be_read_is_an_error_of_the_user(tmp_path, content):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
        with pytest.raises(UserError, match="critic_prompt=.* cannot be read .*UTF-8"):
            GenACConfig(str(tmp_path), critic_prompt=str(path), report_to="none", use_cpu=True)
    with pytest.raises(UserError, match="critic_prompt=.* cannot be read .*UTF-8"):
        CriticPrompt(str(path))

"""The probability of reference answers as a label, and the filter of groups whose labels lie close together."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from support.models import TOKENIZER, tiny_model, trainable_weights
from support.rollouts import boxed
from support.runs import build_trainer, spy_on

from pacs_trl.data import build_prompt
from pacs_trl.experimental.rlpr import (
    EditedCompletion,
    RLPRTrainer,
    filter_by_spread,
    is_well_formed,
    probability_reward,
    reference_text,
    with_reference,
)
from pacs_trl.plan.check import check_recipe


REPOSITORY = Path(__file__).parents[2]
CASES = yaml.safe_load((REPOSITORY / "tests" / "data" / "answer_formats.yaml").read_text())


@pytest.mark.parametrize(("text", "expected", "well_formed"), CASES["texts"].values(), ids=CASES["texts"])
def test_the_reference_takes_the_place_of_the_answer(text, expected, well_formed):
    answer = with_reference(text, "six pm")
    assert (answer and answer[0]) == expected and is_well_formed(text) is well_formed
    if answer:
        assert answer[0][slice(*answer[1:])] == "six pm"


THINKING = [{"role": "user", "content": "Reason in <think> </think>, answer in <answer> </answer>. What is it?"}]
ANSWERING = "Put the answer between <answer> and </answer>. What is it?"


@pytest.mark.parametrize(("text", "thinking", "answering"), CASES["formats"].values(), ids=CASES["formats"])
def test_the_form_is_the_one_that_the_prompt_names(text, thinking, answering):
    """`format_mode` R1 (the authors' script for Qwen) and R1_nothink (Llama, Gemma)."""
    assert is_well_formed(text, THINKING) is thinking and is_well_formed(text, ANSWERING) is answering
    assert (with_reference(text, "c", THINKING) is None) == (text.count("<answer>") != 1)


def test_reference_answers_become_text():
    assert [reference_text(a) for a in ("  a b ", ["x", "y"], [], None, 7)] == ["a b", "x", "", "", "7"]


def test_labels_equal_those_worked_by_hand():
    probability_function = SimpleNamespace(
        after_reasoning=lambda prompts, texts, answers: [0.8, 0.3, 0.0, 1.0],
        without_reasoning=lambda prompts, answers: [0.2, 0.5, 0.1, 0.0],
    )
    # .9 (.8 - .2) + .1; .9 * 0 + .1, since reasoning has not helped; malformed: 0; .9 * 1 + 0, an answer that is not
    # closed
    completions, logged = ["<answer>a</answer>", "<answer>b</answer>", "c", "<answer>d"], {}
    labels = probability_reward(
        completions, ["q"] * 4, ["a"] * 4, reference_probability=probability_function, log_metric=logged.__setitem__
    )
    assert labels == pytest.approx([0.64, 0.1, 0.0, 0.9])
    assert logged == pytest.approx(
        {"probability/after_reasoning": 0.525, "probability/without_reasoning": 0.2, "probability/format": 0.5}
    )


SETTINGS = {"max_completion_length": 12, "steps_per_generation": 1, "max_steps": 3, "learning_rate": 0.5}
PROMPT = [{"role": "user", "content": "1+1"}]


def build(output_dir, **changed):
    settings = {"trainer_class": RLPRTrainer, "reward": probability_reward, "more": {"rollout_func": boxed}}
    return build_trainer(output_dir, **settings | SETTINGS | changed)


def by_hand(model, prompt, text, start, end):
    ids = [TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)]
    tokens = TOKENIZER(text, return_offsets_mapping=True)
    with torch.no_grad():
        logps = model(torch.tensor([ids[0] + tokens["input_ids"]])).logits[0].log_softmax(dim=-1)
    chosen = [
        math.exp(logps[len(ids[0]) - 1 + j, token])
        for j, (token, (a, b)) in enumerate(zip(tokens["input_ids"], tokens["offset_mapping"]))
        if a < end and b > start
    ]
    return sum(chosen) / len(chosen)


@pytest.mark.trains
def test_probabilities_are_those_of_the_policy_and_of_its_start(tmp_path):
    """Also after the policy has moved: s is of today, s0 of the start, each by a forward pass of its own."""
    trainer, kept = build(tmp_path), []
    for name in ("after_reasoning", "without_reasoning"):

        def keep(probabilities, *arguments, name=name):
            kept.append((name, arguments, probabilities, trainable_weights(trainer.model)))

        spy_on(trainer, name, keep)
    trainer.train()
    assert [name for name, *_ in kept] == ["after_reasoning", "without_reasoning"] * 3
    start = tiny_model()
    for name, arguments, probabilities, weights in kept:
        today = tiny_model()
        today.load_state_dict(weights, strict=False)
        for i in (0, 1, 5):
            prompt, answer = arguments[0][i], arguments[-1][i]
            if name == "without_reasoning":
                expected = by_hand(start, prompt, f" {answer} ", 1, 1 + len(answer))
            else:
                edited = with_reference(arguments[1][i], answer)
                expected = 0.0 if edited is None else by_hand(today, prompt, *edited)
            assert probabilities[i] == pytest.approx(expected, rel=1e-4), (name, i)
    assert len(trainer._without_reasoning) == 32  # the whole training set, once
    logged = trainer.state.log_history[0]
    assert 0 < logged["probability/format"] < 1 and logged["time/log_probs"] > 0


@pytest.mark.trains
def test_a_second_run_begins_with_its_own_policy(tmp_path):
    """The same trainer, whose weights have moved, and whose output directory holds what the first run knew. What is
    asked of other prompts is of today, too, and not remembered: an evaluation before a stop would be known to one run
    and not to its continuation."""
    trainer = build(tmp_path, save_steps=1)
    other_probabilities = []
    for _ in range(2):
        start = trainable_weights(trainer.model)
        other_probabilities += trainer.without_reasoning([PROMPT], ["22"])
        trainer.train()
        model = tiny_model()
        model.load_state_dict(start, strict=False)
        row = trainer.train_dataset[3]
        expected = by_hand(model, row["prompt"], f" {row['solution']} ", 1, 1 + len(row["solution"]))
        (probabilities,) = trainer.without_reasoning([row["prompt"]], [row["solution"]])
        assert probabilities == pytest.approx(expected, rel=1e-4)
    assert other_probabilities[0] != other_probabilities[1]


def test_answers_that_are_too_long_count_as_malformed(tmp_path):
    reference, texts = build(tmp_path), [r"\boxed{2}", None, r"\boxed{2}"]
    probabilities = reference.after_reasoning([PROMPT] * 3, texts, ["2", "2", "2" * 12])
    assert probabilities[0] > 0 and probabilities[1:] == [0.0, 0.0]
    assert reference._mean_probabilities([], [], None) == []
    assert reference._mean_probabilities([PROMPT], [EditedCompletion("ab", 1, 1)], None) == [
        0.0
    ]  # no token lies there


def test_spread_filter_drops_groups_as_worked_by_hand():
    """Spreads (unbiased): (0, 1) sqrt(1/2) = .707; (.4, .6) sqrt(.02) = .141. Five generations are ignored, five
    collected: their mean is (.707 + .141) / 2 = .424, and half of it masks the second group from the eleventh on."""
    labels, history = torch.tensor([0.0, 1.0, 0.4, 0.6]), [0.0]
    for _ in range(10):
        kept, metrics, history = filter_by_spread(labels, 2, 0.5, history)
        assert torch.equal(kept, labels) and metrics["spread_filter/dropped_fraction"] == 0.0
    average = (math.sqrt(0.5) + math.sqrt(0.02)) / 2
    assert history == pytest.approx([10, average])
    kept, metrics, history = filter_by_spread(torch.tensor([0.0, 1.0, 0.5, 0.5]), 2, 0.5, history)
    assert kept[:2].tolist() == [0, 1] and kept[2:].isnan().all()
    assert metrics["spread_filter/bound"] == pytest.approx(average / 2)
    assert metrics["spread_filter/dropped_fraction"] == 0.5
    assert history == pytest.approx([11, 0.99 * average + 0.01 * math.sqrt(0.5) / 2])


def test_groups_without_verdicts_have_no_spread():
    nan = math.nan
    labels = torch.tensor([0.0, 1.0, nan, 0.4, 0.6, nan, 1.0, nan, nan])
    kept, metrics, history = filter_by_spread(labels, 3, 1.0, [10, 0.5])
    assert kept[:2].tolist() == [0, 1] and kept[3:6].isnan().all()
    assert kept[6] == 1.0  # one completion has no spread; it is not scorable anyway
    assert metrics["spread_filter/dropped_fraction"] == 0.5
    _, metrics, history = filter_by_spread(torch.full((4,), nan), 2, 1.0, history)
    assert math.isnan(metrics["spread_filter/spread"]) and history[0] == 12


def test_rlpr_asks_for_the_tags_of_its_authors():
    """examples/RLPR/reproduce_qwen.sh, format_mode=R1: think and answer tags in a system turn, the problem alone
    behind it."""
    recipe, _ = check_recipe(str(REPOSITORY / "recipes" / "qwen2.5-7b" / "rlpr.yaml"), [], 8)
    prompt = build_prompt("Why?", instruction=recipe.data.prompt_instruction, system_prompt=recipe.data.system_prompt)
    assert [turn["role"] for turn in prompt] == ["system", "user"] and prompt[1]["content"] == "Why?"
    assert is_well_formed("<think> a </think> <answer> b </answer>", prompt)
    assert not is_well_formed("<answer> b </answer>", prompt)

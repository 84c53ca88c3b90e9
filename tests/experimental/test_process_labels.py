"""Labels inside of completions: a case on paper, autograd, one position against plain PACS, and a policy that can be
enumerated."""

import itertools
import math

import numpy as np
import pytest
import torch
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.seeds import shifted

from pacs_trl.experimental.process_labels import (
    Prefixes,
    ProcessLabelsTrainer,
    aligned_positions,
    checked_labels,
    token_coefficients,
)
from pacs_trl.update.groups import Groups


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def prefixes_of(labels, groups, class_weighting="balanced"):
    """`labels` of each completion, the last one the outcome."""
    return Prefixes(Groups(double([prefix_labels[-1] for prefix_labels in labels]), groups), labels, class_weighting)


def test_positions_are_spread_evenly_and_outcomes_aligned_with_outcomes():
    assert aligned_positions(4, 4).tolist() == [1, 2, 3, 4]
    assert aligned_positions(4, 2).tolist() == [1, 1, 1, 2]  # three steps with one, outcomes with outcomes
    assert aligned_positions(3, 5).tolist() == [2, 4, 5]
    assert aligned_positions(3, 1).tolist() == [0, 0, 1]
    assert aligned_positions(1, 7).tolist() == [7]


# Two completions of a prompt, with a step and without: prefix proxies 1, 3 and 2.
PROXIES, LABELS = double([1.0, 3.0, 2.0]), [[1.0, 1.0], [0.0]]


def test_loss_and_coefficients_equal_those_worked_by_hand():
    # The step finds no other, so it has no score; outcomes: 3 - 2 and 2 - 3, one of each class: weights 1, mean of
    # softplus(-1) twice
    prefixes = prefixes_of(LABELS, [0, 0])
    loss, scores = prefixes.loss(PROXIES)
    assert scores.tolist() == [0.0, 1.0, -1.0] and loss.item() == pytest.approx(math.log1p(math.exp(-1)))
    # e = (sigmoid(1) - 1) / 2 = -0.1345 and its opposite; each minus that of the other
    assert prefixes.coefficients(PROXIES).tolist() == pytest.approx([0.0, -0.26894, 0.26894], abs=1e-5)
    # with a step in both: half of the weight of a row for each position; step scores 1 - 0.5 and back, both labels 1:
    # weights 1
    loss, scores = prefixes_of([[1.0, 1.0], [1.0, 0.0]], [0, 0]).loss(double([1.0, 3.0, 0.5, 2.0]))
    assert scores.tolist() == [0.5, 1.0, -0.5, -1.0]
    softplus = [math.log1p(math.exp(x)) for x in (-0.5, -1.0, 0.5, -1.0)]
    assert loss.item() == pytest.approx(sum(softplus) / 4)


def random_case(seed):
    generator = torch.Generator().manual_seed(shifted(seed))
    numbers = torch.randint(1, 5, (12,), generator=generator).tolist()
    labels = [(torch.rand(n, generator=generator) > 0.5).double().tolist() for n in numbers]
    labels[3][-1] = math.nan  # no verdict
    proxies = torch.randn(sum(numbers), generator=generator, dtype=torch.float64)
    return proxies, labels, [0] * 5 + [1] * 6 + [2]


@pytest.mark.parametrize("class_weighting", ["balanced", "none", "only_positive"])
@pytest.mark.parametrize("seed", range(3))
def test_coefficients_are_the_total_derivative(seed, class_weighting):
    proxies, labels, groups = random_case(seed)
    prefixes, leaf = prefixes_of(labels, groups, class_weighting), proxies.clone().requires_grad_()
    loss, _ = prefixes.loss(leaf)
    (expected,) = torch.autograd.grad(loss, leaf)
    actual = prefixes.coefficients(proxies)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    assert actual.abs().max() > 1e-3
    assert (actual[(prefixes.row == 3) | (prefixes.row == 11)] == 0).all()  # without a verdict, alone in its group


@pytest.mark.parametrize("size", [3, 7, 11])
def test_equal_labels_and_proxies_have_no_gradient(size):
    """Exactly none, so that their rows are left out, where all completions have as many steps."""
    prefixes = prefixes_of([[0.0, 1.0, 1.0]] * size, [0] * size)
    proxies = torch.full((3 * size,), 0.1)
    assert (prefixes.coefficients(proxies) == 0).all() and (prefixes.scores(proxies) == 0).all()


def test_tokens_get_the_prefixes_that_contain_them():
    # prefixes end at tokens 1 and 3 of 5: tokens 0, 1 are in both, 2, 3 in the second, 4 in none; an empty prefix
    rows, ends = torch.tensor([0, 0, 1]), torch.tensor([1, 3, -1])
    by_token = token_coefficients(double([0.25, -1.0, 7.0]), rows, ends, torch.Size((2, 5)))
    assert by_token.tolist() == [[-0.75, -0.75, -1.0, -1.0, 0.0], [0.0] * 5]


def test_expected_gradient_is_the_policy_gradient_of_the_mean_label():
    """Two tokens of two kinds, labels after each: at proxy 0 without class weights, two completions drawn
    independently have the policy gradient of the mean label in expectation."""
    logits = double([0.3, -0.4, 0.9]).requires_grad_()  # of a 1 at first, after a 0, after a 1

    def logps(tokens):
        chosen = torch.stack([logits[0], logits[1 + tokens[0]]])
        return torch.nn.functional.logsigmoid(torch.where(torch.tensor(tokens) == 1, chosen, -chosen))

    step = {0: 0.2, 1: 0.9}
    outcome = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.3, (1, 1): 0.6}
    completions = list(itertools.product((0, 1), repeat=2))
    value = sum(logps(c).sum().exp() * (step[c[0]] + outcome[c]) / 2 for c in completions)
    (expected,) = torch.autograd.grad(value, logits)
    total = torch.zeros(3, dtype=torch.float64)
    for pair in itertools.product(completions, repeat=2):
        prefixes = prefixes_of([(step[c[0]], outcome[c]) for c in pair], [0, 0], "none")
        c = prefixes.coefficients(torch.zeros(4, dtype=torch.float64))
        chance = torch.stack([logps(each).sum() for each in pair]).sum().exp().item()
        by_token = token_coefficients(c, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.Size((2, 2)))
        surrogate = (by_token * torch.stack([logps(each) for each in pair])).sum()
        total += chance * torch.autograd.grad(surrogate, logits)[0]
    torch.testing.assert_close(total, -expected, rtol=1e-10, atol=0)


NO_PAIRS = {
    "not sorted": [(1, 1.0), (0, 1.0)],
    "twice": [(1, 1.0), (1, 1.0)],
    "outside": [(9, 1.0)],
    "negative": [(-1, 1.0)],
    "label": [(1, 1.5)],
    "NaN": [(1, math.nan)],
    "no whole number": [(1.5, 1.0)],
    "no pairs": [0.5, 1.0],
    "a number": 0.5,
    "empty": [],
}


@pytest.mark.parametrize("values", NO_PAIRS.values(), ids=NO_PAIRS)
def test_values_that_are_no_pairs_are_refused(values):
    with pytest.raises(ValueError, match="'steps'.* completion 4 of 9 tokens"):
        checked_labels("steps", 4, values, 9)
    assert checked_labels("steps", 4, [(0, 1), (8, 0.5)], 9) == ([0, 8], [1.0, 0.5])


def halves(completions, completion_ids, **kwargs):
    """Labels of the first token (three quarters) and of the last one (the outcome)."""
    outcomes = digit_reward(completions)
    return [[(0, 0.75)][: len(ids) - 1] + [(len(ids) - 1, y)] for ids, y in zip(completion_ids, outcomes, strict=True)]


@pytest.mark.trains
def test_labels_of_steps_and_numbers_of_another_function_are_combined(tmp_path):
    """Steps have the weight of their function, and a completion without pairs has the others' outcome; also in
    evaluation, and from a function that is waited for."""

    async def half_of_them(completions, **kwargs):
        return [None if i % 4 == 3 else pairs for i, pairs in enumerate(halves(completions, **kwargs))]

    def always(completions, **kwargs):
        return [1.0] * len(completions)

    settings = {"per_device_eval_batch_size": 4, "trainer_class": ProcessLabelsTrainer}
    settings |= {"reward_weights": [0.8, 0.2], "steps_per_generation": 2, "num_generations_eval": 4}
    trainer = build_trainer(
        tmp_path, reward=[half_of_them, always], more={"eval_dataset": addition_dataset(4)}, **settings
    )
    learned, schedule = [], trainer.update.schedule_minibatch
    trainer.update.schedule_minibatch = lambda rollouts, **how: learned.extend(rollouts) or schedule(rollouts, **how)
    trainer.train()
    labeled = [row for row in learned if row.extra]
    assert 0 < len(labeled) < len(learned)
    for row in labeled:
        last = len(row.completion_ids) - 1
        assert row.extra["positions"].tolist() == ([0, last] if last else [0]) and row.label in (np.float32(0.2), 1.0)
        assert row.extra["process_labels"].tolist() == [pytest.approx(0.6)][:last]
    assert trainer.state.log_history[0]["process/label_mean"] == pytest.approx(0.6)
    assert {row.label for row in learned if not row.extra} == {np.float32(0.2)}
    assert trainer.evaluate()["eval_process/label_mean"] == pytest.approx(0.6)


def mixed(completions, **kwargs):
    return [[(0, 1.0)], None, *[0.5] * (len(completions) - 2)]


def too_few(completions, **kwargs):
    return [[(0, 1.0)]]


def too_many(completions, **kwargs):
    return [[(0, 1.0)]] * (len(completions) + 1)


@pytest.mark.parametrize(
    ("reward", "settings", "words"),
    [
        (mixed, {"trainer_class": ProcessLabelsTrainer}, "completion 2"),
        (too_few, {"trainer_class": ProcessLabelsTrainer}, "1 entries for 8 completions"),
        (too_many, {"trainer_class": ProcessLabelsTrainer}, "9 entries for 8 completions"),
        ([halves, halves], {"trainer_class": ProcessLabelsTrainer, "reward_weights": [0.5, 0.5]}, "'halves_2'"),
        (halves, {}, "'halves'"),  # another method
    ],
)
def test_process_labels_that_make_no_sense(tmp_path, reward, settings, words):
    with pytest.raises(ValueError, match=words):
        build_trainer(tmp_path, reward=reward, **settings).train()

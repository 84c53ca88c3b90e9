"""Labels of a verifier that errs: a case on paper, every flip of a group, loops, autograd, and what is refused."""

import itertools
import math

import pytest
import torch

from pacs_trl.objective import (
    actor_coefficients,
    class_weights,
    loss_from_proxies,
    proxy_coefficients,
    unbiased_labels,
)


NOISE = (0.1, 0.2)  # a, b
LINEAR = ["none", "only_positive", "only_negative"]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def bce(score, label):
    return math.log1p(math.exp(score)) - label * score


def test_on_paper():
    # (1 - .1) / .7 = 9/7 and (0 - .1) / .7 = -1/7
    labels = double([1, 0])
    torch.testing.assert_close(unbiased_labels(labels, NOISE), double([9 / 7, -1 / 7]))
    # psi = 1, -1: (1.3133 - 9/7 + 0.3133 - 1/7) / 2 = 0.0990; class weights of one right and one wrong are 1
    loss, _ = loss_from_proxies(double([1, 0]), labels, num_generations=2, label_noise=NOISE)
    assert loss.item() == pytest.approx(0.09898, abs=1e-5)


def test_the_posterior_would_be_biased():
    """Truth 1, psi = 2, prior 1/2: P(right | 1) = .8 / .9, P(right | 0) = .2 / 1.1."""
    a, b = NOISE
    corrected = [float(unbiased_labels(double(v), NOISE)) for v in (1.0, 0.0)]
    expected = [sum(p * bce(2.0, y) for p, y in zip((1 - b, b), ys)) for ys in (corrected, (0.8 / 0.9, 0.2 / 1.1))]
    assert expected == [pytest.approx(0.127, abs=5e-4), pytest.approx(0.632, abs=5e-4)]
    assert expected[0] == pytest.approx(bce(2.0, 1.0), rel=1e-12)


@pytest.mark.parametrize("weighting", LINEAR)
@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_the_expectation_over_all_flips_is_that_of_the_truth(estimator, weighting):
    a, b = NOISE
    proxies = double([0.7, -1.3, 0.2])
    chance = {(1, 1): 1 - b, (1, 0): b, (0, 1): a, (0, 0): 1 - a}  # of a verdict, given the truth

    def values(labels, noise):
        kinds = {"num_generations": 3, "class_weighting": weighting, "label_noise": noise}
        loss, scores = loss_from_proxies(proxies, labels, score_estimator=estimator, **kinds)
        slopes = proxy_coefficients(proxies, labels, score_estimator=estimator, **kinds)
        return torch.cat([loss[None], slopes, actor_coefficients(scores, labels, **kinds)])

    outcomes = list(itertools.product((0, 1), repeat=3))
    for truth in outcomes:
        mean = sum(
            math.prod(chance[pair] for pair in zip(truth, verdicts)) * values(double(verdicts), NOISE)
            for verdicts in outcomes
        )
        torch.testing.assert_close(mean, values(double(truth), (0.0, 0.0)), rtol=0, atol=1e-7)  # weights are float32


@pytest.mark.parametrize("weighting", [*LINEAR, "balanced"])
@pytest.mark.parametrize("noise", [NOISE, (0.0, 0.3), (0.3, 0.0), (1 / 8, 0.0)])
def test_loops_and_autograd(weighting, noise):
    """Class weights are those of the verdicts, also where a row's weight comes to 0 (1/8 wrong verdicts, 7 of 8 right)."""
    generator = torch.Generator().manual_seed(0)
    labels = double([1, 0, 0, 1, 1, 1, 1, 1] + [0, 0, float("nan"), 1, 0, 0, 0, 0] + [1] * 8)
    proxies = torch.randn(24, generator=generator, dtype=torch.float64).requires_grad_()
    kinds = {"num_generations": 8, "class_weighting": weighting, "label_noise": noise}
    loss, scores = loss_from_proxies(proxies, labels, **kinds)
    total = 0.0
    for start in range(0, 24, 8):
        rows = [i for i in range(start, start + 8) if labels[i] == labels[i]]
        right = sum(labels[i].item() for i in rows)
        for i in rows:
            up = (labels[i].item() - noise[0]) / (1 - sum(noise))
            down = 1 - up
            if weighting == "balanced" and 0 < right < len(rows):
                up, down = up * len(rows) / 2 / right, down * len(rows) / 2 / (len(rows) - right)
            up, down = up * (weighting != "only_negative"), down * (weighting != "only_positive")
            psi = scores[i].item()
            total += up * math.log1p(math.exp(-psi)) + down * math.log1p(math.exp(psi))
    assert loss.item() == pytest.approx(total / 23, rel=1e-5)  # a weight near 0 is moved by up to 1e-6
    (expected,) = torch.autograd.grad(loss, proxies)
    torch.testing.assert_close(proxy_coefficients(proxies.detach(), labels, **kinds), expected, rtol=1e-9, atol=1e-12)


def test_a_weight_of_zero_keeps_its_target():
    # 1 of 4 right, a = 1/4: a wrong one has label -1/3, up -1/3 * 2, down 4/3 * 2/3 = 8/9; with b = 0 and a = 2/5 it is
    # label -2/3, up -4/3, down 10/9. At a = 1/3: label -1/2, up -1, down 1: the weight is 0, the push is not.
    labels = double([1, 0, 0, 0])
    weights, targets = class_weights(labels, num_generations=4, label_noise=(1 / 3, 0.0))
    assert (weights[1:].abs() < 1e-5).all()
    torch.testing.assert_close(weights[1:] * targets[1:], double([-1, -1, -1]), rtol=1e-6, atol=0)


def test_uniform_groups_are_still_left_out():
    coefficients = proxy_coefficients(
        torch.zeros(8), torch.tensor([1.0] * 4 + [0.0] * 4), num_generations=4, label_noise=NOISE
    )
    assert (coefficients == 0).all()

"""The losses of probability ratios by hand; `baselines/test_grpo_trainer.py` compares them with TRL's trainers."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from support.seeds import shifted

from pacs_trl.surrogate import LOSS_TYPES, RatioLoss, completion_scales, kl_terms, ratio_terms, with_derivative


DOUBLE = {"dtype": torch.float64}


def row(*values):
    return torch.tensor([values], **DOUBLE)


def test_weights_of_each_loss_equal_those_worked_by_hand():
    """Ratios 2, 1/2 and 1 with bounds 0.8 and 1.2: of a positive advantage the first is clipped, of a negative one the
    second; delta also clips the first of the negative one."""
    logps, old_logps, mask = row(math.log(2), -math.log(2), 0.0), row(0.0, 0.0, 0.0), row(1, 1, 1).bool()

    def weights(advantage, **settings):
        return ratio_terms(logps, old_logps, torch.tensor([advantage]), mask, RatioLoss(**settings))

    assert weights(1.0).logp_weights.tolist() == [[0.0, 0.5, 1.0]]
    assert weights(1.0).surrogate_sums.tolist() == pytest.approx([1.2 + 0.5 + 1])
    assert (weights(1.0).low_fraction.item(), weights(1.0).high_fraction.item()) == (0.0, pytest.approx(1 / 3))
    assert weights(-1.0).logp_weights.tolist() == [[2.0, 0.0, 1.0]]
    assert weights(-1.0, delta=1.5).logp_weights.tolist() == [[0.0, 0.0, 1.0]]
    assert weights(1.0, loss_type="cispo", upper_bound=1.5).logp_weights.tolist() == [[1.5, 0.5, 1.0]]
    # the geometric mean of the ratios is 1, and so is their product
    assert weights(1.0, importance_sampling_level="sequence").logp_weights.tolist() == [[1.0, 1.0, 1.0]]
    assert weights(1.0, loss_type="rloo", importance_sampling_level="completion").surrogate_sums.tolist() == [1.0]
    # SAPO at a ratio of 1 and temperature 1: f = 4 * 1/2, and 4 * 1/4 is its slope
    soft = weights(1.0, loss_type="sapo")
    assert soft.logp_weights[0, 2].item() == 1.0
    # VESPO: log w = 0, so that the weight is exp(3 + 0 - 3)
    assert weights(1.0, loss_type="vespo").logp_weights.tolist() == [[1.0, 1.0, 1.0]]


def test_scales_by_hand():
    number = torch.tensor([2, 0, 6])
    scales = {
        name: completion_scales(
            name, number, max_completion_length=10, generation_tokens=torch.tensor([16.0, 16.0, 4.0])
        ).tolist()
        for name in LOSS_TYPES
    }
    assert scales["grpo"] == scales["sapo"] == pytest.approx([1 / 6, 1 / 3, 1 / 18])
    assert scales["bnpo"] == pytest.approx([1 / 8] * 3) and scales["dr_grpo"] == pytest.approx([1 / 30] * 3)
    assert scales["dapo"] == scales["cispo"] == scales["vespo"] == [1 / 16, 1 / 16, 1 / 4]
    assert scales["luspo"] == scales["rloo"] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("loss_type", "level"), product(LOSS_TYPES, ("token", "sequence", "completion")))
def test_opposite_advantages_on_policy_give_opposite_gradients(loss_type, level):
    """At a ratio of 1 nothing is clipped: every weight is 1 whatever the advantage, and rows do not see each other."""
    generator = torch.Generator().manual_seed(shifted(9))
    old_logps, noise = -torch.rand(2, 8, 5, generator=generator, **DOUBLE)
    mask = torch.rand(8, 5, generator=generator) < 0.8
    advantages, pair = torch.randn(8, generator=generator, **DOUBLE), RatioLoss(loss_type, level)
    for signed in (advantages, -advantages):
        terms = ratio_terms(old_logps, old_logps, signed, mask, pair)
        torch.testing.assert_close(terms.logp_weights[mask], torch.ones_like(old_logps)[mask])
    rows = old_logps + noise, old_logps, advantages, mask
    one = ratio_terms(*(each[3:4] for each in rows), pair)
    torch.testing.assert_close(one.logp_weights, ratio_terms(*rows, pair).logp_weights[3:4], rtol=0, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence", "completion"])
def test_autograd_through_the_clipped_ratio_gives_the_stated_derivative(level):
    """`f = min(rho, 1.2)` for positive advantages and `max(rho, 0.8)` for negative ones is the default loss."""
    generator = torch.Generator().manual_seed(shifted(3))
    old_logps, noise, token_weights = -torch.rand(3, 8, 5, generator=generator, **DOUBLE)
    mask = torch.rand(8, 5, generator=generator) < 0.8
    rows = old_logps + 1 + 2 * noise, old_logps, torch.randn(8, generator=generator, **DOUBLE), mask
    loss = RatioLoss("dapo", level)

    def f(ratio, sign):
        return torch.where(sign > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))

    stated = ratio_terms(*rows, loss, token_weights=token_weights)
    terms = ratio_terms(*rows, loss, token_weights=token_weights, function=partial(with_derivative, f))
    torch.testing.assert_close(terms.logp_weights[mask], stated.logp_weights[mask], rtol=0, atol=0)
    torch.testing.assert_close(terms.surrogate_sums, stated.surrogate_sums, rtol=0, atol=0)


def test_a_token_that_does_not_count_has_no_kl_term_and_no_gradient_however_improbable():
    """exp(200 - 1) is infinite in float32, and 0 times infinity is no number."""
    logps = torch.tensor([[-1.0, -200.0, math.nan]], requires_grad=True)
    terms = kl_terms(logps, torch.tensor([[-1.5, -1.0, -1.0]]), torch.tensor([[True, False, False]]))
    terms.sum().backward()
    assert terms.tolist() == [[pytest.approx(math.exp(-0.5) + 0.5 - 1), 0.0, 0.0]]
    assert logps.grad.tolist() == [[pytest.approx(1 - math.exp(-0.5)), 0.0, 0.0]]

"""RLOO, MaxRL, REAL, and DisCO: paper arithmetic, the authors' numbers, TRL's advantages, properties."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.seeds import shifted

from pacs_trl.objective import (
    GROUP_LOSSES,
    disco_loss,
    loss_from_proxies,
    maxrl_advantages,
    real_loss,
    rloo_advantages,
    sequence_proxies,
)
from pacs_trl.update.groups import Groups


NAN = math.nan


def double(values):
    return torch.tensor(values, dtype=torch.float64)


AUTHORS = 1e-7  # their code reduces in float32 in between
OBJECTIVE_CASES = json.loads((Path(__file__).parent / "data" / "objective_vectors.json").read_text())


@pytest.mark.parametrize("case", OBJECTIVE_CASES, ids=range(len(OBJECTIVE_CASES)))
def test_real_and_maxrl_give_the_authors_numbers(case):
    logps = double(case["logps"]).requires_grad_()
    groups, mask = Groups(double(case["rewards"]), case["groups"]), torch.tensor(case["mask"]).bool()
    proxies = sequence_proxies(logps, double(case["old_logps"]), mask, proxy="mean_log_ratio")
    loss = groups.apply(GROUP_LOSSES["real"][0], proxies, tau=case["tau"])
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(case["real"]["loss"], abs=AUTHORS)
    assert (gradient - double(case["real"]["grad_logps"])).abs().max() < AUTHORS

    # their cross-entropy is PACS with mean log-ratios, without centering and class weights, at pacs_beta 1 / tau;
    # a mean over completions of mixed groups
    mixed = groups.expand(groups.mixed)
    proxies = sequence_proxies(
        logps, double(case["old_logps"]), mask, proxy="mean_log_ratio", pacs_beta=1 / case["tau"]
    )
    only = Groups(groups.labels[mixed], [g for g, m in zip(case["groups"], mixed) if m])
    loss, _ = only.apply(loss_from_proxies, proxies[mixed], score_estimator="none", class_weighting="none")
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(case["bce"]["loss"], abs=AUTHORS)
    assert (gradient - double(case["bce"]["grad_logps"])).abs().max() < AUTHORS
    expected = double(case["maxrl_advantages"])
    assert (groups.apply(maxrl_advantages) - expected).abs().max() < AUTHORS


def test_advantages_and_losses_equal_those_worked_by_hand():
    rewards = double([1.0, 0.0, 0.0, 0.0, NAN, 2.0, 1.0, NAN])
    assert rloo_advantages(rewards, num_generations=4).tolist() == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3, 0, 1, -1, 0]
    )
    maxrl = maxrl_advantages(rewards, num_generations=4, epsilon=0.0).tolist()
    assert maxrl == pytest.approx([3, -1, -1, -1, 0, 1 / 3, -1 / 3, 0])
    # right 1, wrong 0 and -1, all divided by tau = 1/2: log(1 + e^-2) + log(1 + 1 + e^-2), over two groups
    proxies, labels = double([1.0, 0.0, -1.0, 5.0, 7.0, 3.0]), double([1, 0, 0, 1, 1, 1])
    real = real_loss(proxies, labels, num_generations=3, tau=0.5).item()
    assert real == pytest.approx((math.log(1 + math.exp(-2)) + math.log(2 + math.exp(-2))) / 2)
    # the wrong ones weigh log(mean(1, e^-2)) / 2, the right one is 1
    disco = disco_loss(proxies, labels, num_generations=3, tau=0.5).item()
    assert disco == pytest.approx((0.5 * math.log((1 + math.exp(-2)) / 2) - 1) / 2)


@pytest.mark.parametrize("name", GROUP_LOSSES)
def test_a_uniform_group_has_no_gradient_and_a_small_step_raises_the_right_ones(name):
    torch.manual_seed(shifted(3))
    proxies, labels = torch.randn(12, dtype=torch.float64), double([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])
    proxies.requires_grad_()
    loss = GROUP_LOSSES[name][0](proxies, labels, num_generations=4, tau=0.5)
    (gradient,) = torch.autograd.grad(loss, proxies)
    assert (gradient[4:8] == 0).all()
    mixed = [*range(4), *range(8, 12)]
    assert ((gradient[mixed] < 0) == (labels[mixed] == 1)).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_is_what_trl_computes(normalize):
    torch.manual_seed(shifted(4))
    rewards = torch.randn(20, dtype=torch.float64)
    rewards[[1, 7, 8, 9, 10]] = NAN  # the second group has one reward
    grid = rewards.view(5, 4)
    baseline = (grid.nansum(dim=1, keepdim=True) - grid) / ((~grid.isnan()).sum(dim=1, keepdim=True) - 1)
    expected = (grid - baseline).view(-1)
    expected[torch.isinf(expected)] = NAN
    if normalize:
        known = expected[~expected.isnan()]
        expected = (expected - known.mean()) / (known.std() + 1e-4)
    advantages = rloo_advantages(rewards, num_generations=4, normalize=normalize)
    torch.testing.assert_close(advantages, expected.nan_to_num(nan=0.0), rtol=1e-12, atol=1e-12)

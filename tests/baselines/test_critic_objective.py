"""Rewards and weights of a critic's answers, and measures of any critic's values: by hand, and against loops."""

import itertools
import math
import random

import pytest
import torch

from pacs_trl.baselines.critic_objective import (
    critic_rewards,
    mean_ranking_accuracy,
    ranking_accuracy,
    reinforce_losses,
    reinforce_weights,
    value_scores,
)


NAN = math.nan


def test_rewards_by_hand():
    found = critic_rewards(torch.tensor([1.0, 0.0, 0.5, NAN]), torch.tensor([1.0, 1.0, 0.25, 0.0]))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 0.9375, 0.0]))  # 1 - 0, 1 - 1, 1 - 1/16, unread


class TestWeights:
    def test_by_hand(self):
        # right: 0.9 - (0.5 + 0.1) / 2 = 0.6, 0.5 - 1.0 / 2 = 0, 0.1 - 1.4 / 2 = -0.6; the only wrong one keeps its
        # reward
        rewards, outcomes = torch.tensor([0.9, 0.5, 0.7, 0.1]), torch.tensor([1.0, 0.8, 0.5, 1.0])
        found = reinforce_weights(rewards, outcomes, "outcome")
        torch.testing.assert_close(found, torch.tensor([0.6, 0.0, 0.7, -0.6]))
        assert torch.equal(reinforce_weights(rewards, outcomes, "none"), rewards)

    def test_equal_a_loop_and_sum_to_zero_on_each_side(self):
        rewards, outcomes = torch.rand(40), torch.rand(40).round()
        found = reinforce_weights(rewards, outcomes, "outcome")
        for i in range(40):
            others = [rewards[j].item() for j in range(40) if j != i and outcomes[j] == outcomes[i]]
            assert found[i].item() == pytest.approx(rewards[i].item() - sum(others) / len(others), abs=1e-6)
        assert found[outcomes == 1].sum().item() == pytest.approx(0.0, abs=1e-5)

    def test_over_processes(self):
        rewards, outcomes = torch.rand(12), torch.tensor([1.0, 0.0] * 6)
        whole = reinforce_weights(rewards, outcomes, "outcome")
        parts = [slice(0, 5), slice(5, 12)]
        totals: list[torch.Tensor] = []
        for part in parts:
            reinforce_weights(rewards[part], outcomes[part], "outcome", lambda own: totals.append(own) or own)
        for part in parts:
            found = reinforce_weights(rewards[part], outcomes[part], "outcome", lambda own: sum(totals))
            torch.testing.assert_close(found, whole[part])


def test_losses_by_hand_and_their_gradient():
    logps = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    drawn = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(8), NAN])  # ratios 1, 1/2, 8 and unknown
    losses = reinforce_losses(logps, drawn, torch.tensor([0.5, -1.0, 1.0, 1.0]), cap=2.0)
    torch.testing.assert_close(losses, torch.tensor([0.5, -0.5, 2.0, 1.0]))
    losses.sum().backward()
    torch.testing.assert_close(logps.grad, torch.tensor([-0.5, 0.5, -2.0, -1.0]))


def test_scores_by_hand():
    found = value_scores(torch.tensor([0.8, NAN, 0.2, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    # rewards 0.96, 0, 0.96, 0.75; squared errors 0.04, 1, 0.04, 0.25; residuals 0.2, 1, -0.2, -0.5 have variance
    # 0.316875
    expected = {"reward": 0.6675, "brier": 0.3325, "explained_variance": 1 - 0.316875 / 0.25, "unparsed": 0.25}
    assert found == pytest.approx(expected)
    assert all(math.isnan(value) for value in value_scores(torch.tensor([]), torch.tensor([])).values())
    assert math.isnan(value_scores(torch.tensor([0.3]), torch.tensor([1.0]))["explained_variance"])


class TestRanking:
    def test_by_hand(self):
        # pairs with one right and one wrong: (0.9, 0.4) and (0.4, 0.4), of which the tie counts half
        assert ranking_accuracy([0.9, 0.4, 0.4], [True, False, True], 2) == 0.75
        assert ranking_accuracy([0.1, 0.9], [True, False], 2) == 0.0
        assert math.isnan(ranking_accuracy([0.1, 0.9], [True, True], 2))
        assert math.isnan(ranking_accuracy([0.1, 0.9], [True, False], 4))
        assert mean_ranking_accuracy([([0.1, 0.9], [True, False]), ([1, 0], [True, False]), ([1], [True])], 2) == 0.5

    @pytest.mark.parametrize("candidates", [2, 4, 8])
    def test_equals_going_through_all_choices(self, candidates):
        rng = random.Random(candidates)
        for _ in range(20):
            values = [rng.randrange(4) / 4 for _ in range(8)]
            right = [rng.random() < 0.4 for _ in range(8)]
            hits = []
            for chosen in itertools.combinations(range(8), candidates):
                if len({right[i] for i in chosen}) == 2:
                    best = [i for i in chosen if values[i] == max(values[j] for j in chosen)]
                    hits.append(sum(right[i] for i in best) / len(best))
            expected = sum(hits) / len(hits) if hits else NAN
            assert ranking_accuracy(values, right, candidates) == pytest.approx(expected, nan_ok=True)

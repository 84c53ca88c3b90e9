"""Advantages and value loss against hand-worked cases, properties, and loops written independently in float64."""

import math

import pytest
import torch
from support.seeds import shifted

from pacs_trl.baselines.gae import (
    clipped_value_losses,
    explained_variance,
    generalized_advantages,
    masked_mean_and_variance,
    whiten,
)


def random_batch(seed: int = 0, rows: int = 7, width: int = 13):
    generator = torch.Generator().manual_seed(shifted(seed))
    rewards = torch.rand(rows, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    mask &= torch.rand(rows, width, generator=generator) < 0.7
    mask[0] = False  # a completion without any token that counts
    return rewards, values, mask


def advantages_by_definition(reward, values, gamma, gae_lambda):
    """Eq. 16 of the GAE paper as the sum it abbreviates, over the values of one completion's own tokens."""
    deltas = []
    for t, value in enumerate(values):
        last = t == len(values) - 1
        deltas.append((reward if last else gamma * values[t + 1]) - value)
    return [sum((gamma * gae_lambda) ** k * deltas[t + k] for k in range(len(values) - t)) for t in range(len(values))]


class TestGeneralizedAdvantages:
    def test_advantages_and_returns_equal_those_worked_by_hand(self):
        # delta = (0.5*0.4 - 0.2, 0.5*0.8 - 0.4, 1 - 0.8) = (0, 0, 0.2); A_2 = 0.2, A_1 = 0.05, A_0 = 0.0125
        advantages, returns = generalized_advantages(
            torch.tensor([1.0]),
            torch.tensor([[0.2, 0.4, 0.8]]),
            torch.ones(1, 3, dtype=torch.bool),
            gamma=0.5,
            gae_lambda=0.5,
        )
        torch.testing.assert_close(advantages, torch.tensor([[0.0125, 0.05, 0.2]]))
        torch.testing.assert_close(returns, torch.tensor([[0.2125, 0.45, 1.0]]))

    @pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.9, 0.0)])
    def test_equals_the_definition_on_own_tokens(self, gamma, gae_lambda):
        rewards, values, mask = random_batch()
        advantages, returns = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
        for i in range(len(rewards)):
            row_values = values[i][mask[i]].tolist()
            expected = advantages_by_definition(rewards[i].item(), row_values, gamma, gae_lambda)
            torch.testing.assert_close(advantages[i][mask[i]], torch.tensor(expected, dtype=torch.float64))
            torch.testing.assert_close(
                returns[i][mask[i]], torch.tensor([a + v for a, v in zip(expected, row_values)], dtype=torch.float64)
            )
        assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()

    def test_with_gamma_and_lambda_1_the_return_is_the_reward(self):
        rewards, values, mask = random_batch(seed=1)
        _, returns = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
        torch.testing.assert_close(returns, rewards[:, None].expand_as(returns).masked_fill(~mask, 0.0))

    def test_values_of_other_tokens_have_no_influence(self):
        rewards, values, mask = random_batch(seed=2)
        changed = torch.where(mask, values, torch.full_like(values, 99.0))
        before, after = (
            generalized_advantages(rewards, v, mask, gamma=0.9, gae_lambda=0.9)[0] for v in (values, changed)
        )
        assert torch.equal(before, after)


class TestWhitening:
    def test_whitened_values_equal_those_worked_by_hand(self):
        x = torch.tensor([[1.0, 3.0, 100.0]])
        mask = torch.tensor([[True, True, False]])  # mean 2, unbiased variance 2
        expected = torch.tensor([[-1 / math.sqrt(2), 1 / math.sqrt(2), 0.0]])
        torch.testing.assert_close(whiten(x, mask), expected)

    def test_two_processes_make_one_batch(self):
        _, values, mask = random_batch(seed=3, rows=8)
        whole = whiten(values, mask)
        halves = [(values[:4], mask[:4]), (values[4:], mask[4:])]

        # What each process contributes to each of the two sums, in the order in which they are asked for.
        mean = values[mask].mean()
        counts = [torch.stack([v[m].sum(), m.sum().double()]) for v, m in halves]
        squares = [(v[m] - mean).square().sum() for v, m in halves]
        for k, (v, m) in enumerate(halves):
            others = iter([counts[1 - k], squares[1 - k]])
            torch.testing.assert_close(whiten(v, m, lambda x, o=others: x + next(o)), whole[4 * k : 4 * k + 4])

    @pytest.mark.parametrize("valid", [0, 1])
    def test_one_value_or_none_is_finite(self, valid):
        mask = torch.zeros(2, 2, dtype=torch.bool)
        mask[0, :valid] = True
        assert torch.equal(whiten(torch.full((2, 2), 5.0), mask), torch.zeros(2, 2))

    def test_variance_equals_torch(self):
        _, values, mask = random_batch(seed=4)
        mean, variance = masked_mean_and_variance(values, mask)
        torch.testing.assert_close(mean, values[mask].mean())
        torch.testing.assert_close(variance, values[mask].var())


class TestExplainedVariance:
    def test_perfect_constant_and_harmful_critics_explain_all_none_and_less_than_nothing(self):
        returns = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
        mask = torch.ones(1, 4, dtype=torch.bool)
        assert explained_variance(returns, returns, mask).item() == 1.0
        assert explained_variance(torch.full_like(returns, 0.3), returns, mask).item() == pytest.approx(0.0, abs=1e-6)
        # residuals -1, 1, -1, 1 have four times the variance of the returns
        assert explained_variance(1 - returns, returns, mask).item() == pytest.approx(-3.0)

    def test_equal_returns_have_nothing_to_explain(self):
        returns = torch.ones(1, 4)
        assert explained_variance(returns, returns, torch.ones(1, 4, dtype=torch.bool)).isnan()

    @pytest.mark.parametrize("reward", [0.0, 1.0])
    @pytest.mark.parametrize("shape", [(64, 200), (2, 32768)])
    def test_returns_of_equal_rewards_are_equal_up_to_rounding(self, reward, shape):
        generator = torch.Generator().manual_seed(shifted(5))
        values = 0.3 * torch.randn(shape, generator=generator) + 0.4
        mask, rewards = torch.ones(shape, dtype=torch.bool), torch.full(shape[:1], reward)
        _, returns = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
        assert explained_variance(values, returns, mask).isnan()

        rewards[0] = 0.5
        _, returns = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
        expected = 1 - (returns - values).var() / returns.var()
        torch.testing.assert_close(explained_variance(values, returns, mask), expected, rtol=1e-3, atol=0)

    def test_one_wrong_token_among_a_million_has_a_variance(self):
        returns, values = torch.ones(1, 1_000_000), torch.full((1, 1_000_000), 0.9)
        returns[0, 0] = 0.0
        mask = torch.ones(1, 1_000_000, dtype=torch.bool)
        assert explained_variance(values, returns, mask).item() == pytest.approx(0.0, abs=1e-2)


class TestValueLoss:
    # old value 1.0, clip range 0.5: the clipped value stays within [0.5, 1.5]
    @pytest.mark.parametrize(
        ("value", "target", "loss", "is_clipped"),
        [
            (1.2, 2.0, 0.64, False),  # inside: (1.2 - 2)^2
            (1.9, 2.0, 0.25, True),  # went too far towards the target: (1.5 - 2)^2 instead of 0.01
            (0.2, 2.0, 3.24, False),  # went away from the target: its own, larger error
            (0.2, 0.0, 0.25, True),  # (0.5 - 0)^2 instead of 0.04
        ],
    )
    def test_clipped_losses_and_their_gradients_equal_those_worked_by_hand(self, value, target, loss, is_clipped):
        value = torch.tensor([[value]], requires_grad=True)
        losses, clipped = clipped_value_losses(value, torch.tensor([[1.0]]), torch.tensor([[target]]), 0.5)
        assert losses.item() == pytest.approx(loss, abs=1e-6)
        assert clipped.item() is is_clipped
        losses.sum().backward()
        expected_gradient = 0.0 if is_clipped else 2 * (value.item() - target)
        assert value.grad.item() == pytest.approx(expected_gradient, abs=1e-6)

    def test_without_a_range_nothing_is_clipped(self):
        losses, clipped = clipped_value_losses(
            torch.tensor([[1.9]]), torch.tensor([[1.0]]), torch.tensor([[2.0]]), None
        )
        assert losses.item() == pytest.approx(0.01, abs=1e-6) and not clipped.any()

    def test_rounding_is_not_clipping(self):
        old, values = 0.4 * torch.rand(2, 1000, generator=torch.Generator().manual_seed(shifted(0)))
        assert not clipped_value_losses(values, old, torch.zeros(1000), 0.5)[1].any()

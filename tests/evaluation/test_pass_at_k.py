"""pass@k against hand-worked cases, exact enumeration and exact rational arithmetic."""

import math
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from support.seeds import shifted
from support.tolerances import rounding_atol

from experiments.bootstrap import bootstrap_interval, paired_bootstrap
from pacs_trl.evaluation import paired_interval, pass_at_k, pass_interval


def exact(n, c, k):
    return Fraction(comb(n, k) - comb(n - c, k), comb(n, k))


def test_pass_at_k_equals_values_worked_by_hand():
    # 4 samples, 2 correct, draw 2: the only failing pair is the two wrong ones, 1 of 6.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6, rel=1e-15)
    # One draw is the mean; all draws find any correct sample.
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8, rel=1e-15)
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(8, 0, 8) == 0.0


def test_pass_at_k_equals_the_share_of_enumerated_subsets():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                atol = rounding_atol(2 * n, 1.0, torch.float64)  # a logarithm and an addition for each factor
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=atol)


def test_pass_at_k_is_exact_up_to_ten_thousand_samples():
    for n in (127, 128, 9_999, 10_000):
        for c in (0, 1, 2, n // 3, n - 1, n):
            for k in (1, 2, 64, n // 2, n - 1, n):
                value, truth = pass_at_k(n, c, k), exact(n, c, k)
                # log1p and expm1 keep full relative accuracy; a difference of log-factorials would lose five digits.
                assert abs(Fraction(value) - truth) <= Fraction(1, 10**13) * truth


def test_pass_at_k_is_unbiased():
    # The mean over all outcomes of n = 6 Bernoulli(p) samples is 1 - (1 - p)^k exactly.
    n, p = 6, 0.3
    for k in range(1, n + 1):
        mean = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-13)


def test_arrays_with_different_n_give_a_value_per_problem_and_k():
    n, c, ks = np.array([10, 10, 7]), np.array([0, 3, 7]), [1, 5, 7]
    values = pass_at_k(n, c, ks)
    assert values.shape == (3, 3)
    expected = [[float(exact(int(a), int(b), k)) for k in ks] for a, b in zip(n, c)]
    np.testing.assert_allclose(values, expected, rtol=1e-14)
    np.testing.assert_array_equal(pass_at_k(n, c, 5), values[:, 1])
    assert np.all(np.diff(values, axis=1) >= 0)


IMPOSSIBLE = [(4, 2, 5), (4, 2, 0), ([8, 3], [1, 1], 4), (4, 5, 1), (4, -1, 1), (0, 0, 1), (4, 2.0, 1), ([], [], 1)]


@pytest.mark.parametrize(("n", "c", "k"), IMPOSSIBLE)
def test_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def wilson(p, n, z=1.959964):
    centre, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p, (centre - width) / (1 + z * z / n), (centre + width) / (1 + z * z / n)


def test_pass_interval_by_hand():
    # Values 0, 0, 1 and half a problem of each kind: c = 1.5/4; squares 3 * 0.375^2 + 1 * 0.625^2 + half of the two
    # 0.2656, together 0.9375 = 4 c (1 - c). Var = 0.9375 / 9 and n_eff = c (1 - c) / Var = 9/4.
    assert pass_interval([0.0, 0.0, 1.0]) == pytest.approx(wilson(1 / 3, 9 / 4), abs=1e-6)
    # Values 1/4 and 1/2: c = 1.25/3 = 5/12; squares (2/12)^2 + (1/12)^2 + (5/12)^2 / 2 + (7/12)^2 / 2 = 42/144.
    # Var = 42/144 / 4 and n_eff = (35/144) / (42/576) = 10/3.
    assert pass_interval([0.25, 0.5]) == pytest.approx(wilson(3 / 8, 10 / 3), abs=1e-6)
    # Of two benchmarks of one problem each the variances add up to a quarter: twice the n_eff of one.
    one = pass_interval([0.0, 0.0, 1.0], confidence=0.9)
    two = pass_interval([0.0, 0.0, 1.0], [0.0, 1.0, 0.0], confidence=0.9)
    assert one == pytest.approx(wilson(1 / 3, 9 / 4, 1.644854), abs=1e-6)
    assert two == pytest.approx(wilson(1 / 3, 9 / 2, 1.644854), abs=1e-6)


@pytest.mark.parametrize("num_problems", [1, 10, 500])
def test_pass_interval_without_spread_is_plain_wilson(num_problems):
    n = num_problems**2 / (num_problems + 1)
    for value in (0.0, 1.0):
        interval = pass_interval(np.full(num_problems, value))
        assert interval == pytest.approx(wilson(value, n), abs=1e-6) and 0 <= interval.lower < interval.upper <= 1


def test_pass_interval_of_several_k_and_benchmarks():
    rng = np.random.default_rng(shifted(0))
    first, second = rng.random((20, 3)), rng.random((7, 3)) ** 4
    interval = pass_interval(first, second)
    for k in range(3):
        assert pass_interval(first[:, k], second[:, k]) == pytest.approx([part[k] for part in interval])
    # each benchmark weighs the same, whatever its number of problems
    np.testing.assert_allclose(interval.mean, (first.mean(0) + second.mean(0)) / 2)
    assert (interval.lower < interval.mean).all() and (interval.mean < interval.upper).all()


@pytest.mark.parametrize("values", [[], [0.5, 1.5], [0.5, np.nan]])
def test_pass_interval_refuses(values):
    with pytest.raises(ValueError):
        pass_interval(values)


@pytest.mark.parametrize(
    ("num_problems", "n", "k", "draw"),
    [
        (30, 128, 1, lambda rng, size: rng.beta(0.012, 0.488, size)),  # 2.4 %: most problems out of reach
        (30, 128, 1, lambda rng, size: rng.beta(0.048, 1.952, size)),  # 2.4 %, less extreme
        # one problem in twenty is solved half of the time
        (30, 128, 1, lambda rng, size: np.where(rng.random(size) < 0.05, 0.5, 0.001)),
        (10, 128, 1, lambda rng, size: rng.beta(0.1, 0.9, size)),
        (10, 16, 8, lambda rng, size: rng.beta(0.3, 0.7, size)),
        (10, 16, 1, lambda rng, size: np.full(size, 0.024)),
        (30, 128, 32, lambda rng, size: rng.beta(1.5, 3.5, size)),  # 97 % at k = 32: the other end
        (250, 16, 8, lambda rng, size: rng.beta(0.3, 0.7, size)),
    ],
)
def test_pass_interval_covers_the_truth(num_problems, n, k, draw):
    """Of 1,000 benchmarks drawn from a world of problems, 95 % should have an interval with the mean of that world in
    it; 93 % are three standard errors less."""
    rng = np.random.default_rng(shifted(0))
    truth = (1 - (1 - draw(rng, 2_000_000)) ** k).mean()
    counts = rng.binomial(n, np.clip(draw(rng, (1_000, num_problems)), 0, 1))
    intervals = pass_interval(pass_at_k(n, counts, k).T)  # a column is a benchmark
    assert ((intervals.lower <= truth) & (truth <= intervals.upper)).mean() > 0.93


def test_bootstrap_interval_of_two_problems_is_that_worked_by_hand():
    # Values 0 and 1: a resample mean is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4, so the 95 % interval is [0, 1] and the
    # 40 % interval is the single point 1/2.
    assert bootstrap_interval([0.0, 1.0]) == (0.5, 0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5, 0.5)
    assert bootstrap_interval([0.25]) == (0.25, 0.25, 0.25)
    base = np.linspace(0, 1, 50)
    assert paired_bootstrap(base, base + 0.01) == pytest.approx((0.01, 0.01, 0.01), abs=1e-12)


def test_bootstrap_equals_a_loop_over_resamples():
    values = np.random.default_rng(shifted(1)).random((40, 2))
    interval = bootstrap_interval(values, num_resamples=400, seed=shifted(3))
    draws = np.random.default_rng(shifted(3)).integers(0, 40, size=(400, 40))
    means = np.array([[np.mean([values[row, column] for row in draw]) for column in range(2)] for draw in draws])
    np.testing.assert_allclose(interval.lower, np.quantile(means, 0.025, axis=0), rtol=1e-12)
    np.testing.assert_allclose(interval.upper, np.quantile(means, 0.975, axis=0), rtol=1e-12)
    np.testing.assert_allclose(interval.mean, values.mean(axis=0), rtol=1e-14)


def test_paired_interval_equals_that_worked_by_hand():
    # Four problems that neither model solves: Wilson's upper end for n_eff = 16/5 is z^2 / (n_eff + z^2) = 0.545549,
    # and the two have no correlation. All solved is the same.
    for value in (0.0, 1.0):
        interval = paired_interval(([value] * 4, [value] * 4))
        assert interval == pytest.approx((0.0, -0.545549, 0.545549), abs=1e-6)
    # Values 0, 0, 1 and 1, 0, 1: deviations (-1, -1, 2) / 3 and (1, -2, 1) / 3, so r = (3/9) / (6/9) = 1/2. The second
    # interval is the first one mirrored, so both distances are equal, and with r = 1/2 the root is that distance.
    _, lower, upper = wilson(1 / 3, 9 / 4)
    interval = paired_interval(([0.0, 0.0, 1.0], [1.0, 0.0, 1.0]))
    assert interval == pytest.approx((1 / 3, 2 / 3 - upper, 2 / 3 - lower), abs=1e-6)
    with pytest.raises(ValueError):
        paired_interval(([0.0, 1.0], [0.0]))


def test_paired_interval_treats_each_k_alone_and_narrows_with_benchmarks():
    """Each k for itself; the other way round is the mirror image; two copies of a benchmark halve the variance."""
    rng = np.random.default_rng(shifted(0))
    pairs = [(rng.random((size, 3)), rng.random((size, 3)) ** 2) for size in (20, 7)]
    interval = paired_interval(*pairs)
    mirrored = paired_interval(*(pair[::-1] for pair in pairs))
    np.testing.assert_allclose(interval, [-mirrored.mean, -mirrored.upper, -mirrored.lower], rtol=1e-12)
    for k in range(3):
        one = paired_interval(*((x[:, k], y[:, k]) for x, y in pairs))
        assert one == pytest.approx([part[k] for part in interval]) and one.lower < one.mean < one.upper
    values = (np.repeat([0.0, 1.0], 500), np.tile([0.0, 1.0], 500))
    once, twice = paired_interval(values), paired_interval(values, values)
    assert (twice.upper - twice.lower) == pytest.approx((once.upper - once.lower) / math.sqrt(2), rel=1e-2)


@pytest.mark.parametrize(("num_problems", "mean", "concentration"), [(30, 0.024, 0.5), (10, 0.1, 1.0), (30, 0.9, 1.0)])
def test_paired_interval_covers_the_truth_where_a_bootstrap_does_not(num_problems, mean, concentration):
    """Few or hard problems, a second model that is better by about 0.5 in log-odds: the first two rows of the table in
    docs/evaluation.md, where the bootstrap has 61 and 76 %."""
    rng = np.random.default_rng(shifted(0))

    def draw(size):
        first = np.clip(rng.beta(mean * concentration, (1 - mean) * concentration, size), 1e-12, 1 - 1e-12)
        odds = first / (1 - first) * np.exp(0.5 + 0.5 * rng.standard_normal(size))
        return first, odds / (1 + odds)

    first, second = draw(1_000_000)
    truth = (second - first).mean()
    drawn = [rng.binomial(128, chance) / 128 for chance in draw((num_problems, 1_000))]
    interval, resampled = paired_interval(drawn), paired_bootstrap(*drawn, num_resamples=200)
    covered = [((i.lower <= truth) & (truth <= i.upper)).mean() for i in (interval, resampled)]
    assert covered[0] > 0.97 and covered[1] < covered[0]

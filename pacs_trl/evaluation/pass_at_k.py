"""Unbiased pass@k from counts (Chen et al. 2021, arXiv 2107.03374) and its intervals over problems; numpy only.

The spread of values over problems includes the sampling noise of each problem's n samples.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean over problems with an interval: floats or arrays `(K,)` in [0, 1], differences in [-1, 1]."""

    mean: float | np.ndarray
    lower: float | np.ndarray
    upper: float | np.ndarray


def pass_at_k(n, c, k):
    """
    Estimate the probability that at least one of `k` completions is correct, from `c` correct ones among `n`.

    The unbiased estimator `1 - C(n - c, k) / C(n, k)`, computed as `1 - prod_{i=n-c+1..n} (1 - k / i)` in log space
    without overflow; its relative error is near 1e-13 for n up to 10,000.

    Args:
        n (`int` or array of `int`): Samples per problem, at least 1; may differ between problems.
        c (`int` or array of `int`): Correct samples per problem, `0 <= c <= n`, broadcast against `n` to shape `S`.
        k (`int` or sequence of `int`): Values of k, `1 <= k <= min(n)`.

    Returns:
        `float` if all three are scalars, else a float64 array of shape `S` (scalar `k`) or `S + (K,)`. The value of
        one benchmark is the mean over its problems.

    Raises:
        `ValueError`: if a count is not an integer or lies outside the ranges above.
    """
    n, c, ks = _as_counts("n", n), _as_counts("c", c), _as_counts("k", k)
    n, c = np.broadcast_arrays(n, c)
    is_possible = n.size > 0 and n.min() >= 1 and (0 <= c).all() and (c <= n).all()
    if not is_possible or ks.min() < 1 or ks.max() > n.min():
        raise ValueError(
            f"pass@k needs problems with 0 <= c <= n and 1 <= k <= n; got n = {n!s:.80}, c = {c!s:.80}, k = {ks}."
        )

    values = np.empty(n.shape + (ks.size,))
    for num_samples in np.unique(n):
        problems = n == num_samples
        for column, each_k in enumerate(np.atleast_1d(ks)):
            values[problems, column] = _all_counts(int(num_samples), int(each_k))[c[problems]]
    if ks.ndim == 0:
        values = values[..., 0]
    return float(values) if values.ndim == 0 else values


def _all_counts(n: int, k: int) -> np.ndarray:
    """Return pass@k for c = 0..n, shape `(n + 1,)`. With i <= k every sample of k is correct: log 0."""
    i = np.arange(n, 0, -1, dtype=np.float64)
    with np.errstate(divide="ignore"):
        log_factors = np.log1p(-np.minimum(k / i, 1.0))
    return -np.expm1(np.concatenate([[0.0], np.cumsum(log_factors)]))


def pass_interval(*benchmarks, confidence: float = 0.95) -> Interval:
    """
    Return the mean of pass@k over problems with a Wilson interval; benchmarks are weighted equally.

    Wilson's interval (1927) for a proportion of `n_eff = p (1 - p) / Var(mean)` problems. Var includes one more,
    half-solved problem in each benchmark; otherwise the interval is far too short for few or hard problems (as that of
    a percentile bootstrap is).

    Args:
        benchmarks (arrays of shape `(P,)` or `(P, K)`): pass@k in [0, 1] of each problem (and k), per benchmark.
        confidence (`float`): Coverage of the interval, in (0, 1).

    Returns:
        [`Interval`] of floats, or of arrays of shape `(K,)`.

    Raises:
        `ValueError`: if a benchmark has no problem or a value lies outside [0, 1].
    """
    means, centres, variances = [], [], []
    for benchmark in benchmarks:
        values = np.asarray(benchmark, dtype=np.float64)
        num_problems = values.shape[0]
        if num_problems == 0 or not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(f"An interval needs at least one problem and pass@k in [0, 1], got {benchmark!r:.80}.")
        centre = (values.sum(axis=0) + 0.5) / (num_problems + 1)
        squares = ((values - centre) ** 2).sum(axis=0) + 0.5 * (centre**2 + (1 - centre) ** 2)
        means.append(values.mean(axis=0))
        centres.append(centre)
        # The variance of the mean: squares / P is that of one of the P + 1 values.
        variances.append(squares / num_problems**2)
    mean, centre = np.mean(means, axis=0), np.mean(centres, axis=0)
    variance = np.sum(variances, axis=0) / len(benchmarks) ** 2
    effective_problems = centre * (1 - centre) / variance
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    lower, upper = wilson(mean, effective_problems, z)
    lower, upper = np.clip(lower, 0, mean), np.clip(upper, mean, 1)  # against rounding
    return Interval(float(mean), float(lower), float(upper)) if mean.ndim == 0 else Interval(mean, lower, upper)


def wilson(p: np.ndarray, n: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the score interval for a proportion `p` of `n` trials: the values whose distance from `p` is
    `z` of their own standard deviations (Wilson 1927, Journal of the American Statistical Association 22, 209-212)."""
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return centre - half_width, centre + half_width


def paired_interval(*pairs, confidence: float = 0.95) -> Interval:
    """
    Return the mean difference in pass@k between two models on the same problems; benchmarks are weighted equally.

    The interval combines those of the two models ([`pass_interval`]) and the correlation r of their values over
    problems (Newcombe 1998, method 10; Zou and Donner 2008). With means p1, p2 and intervals [l1, u1], [l2, u2] the
    lower end is `d - sqrt((p2 - l2)^2 - 2 r (p2 - l2) (u1 - p1) + (u1 - p1)^2)` with `d = p2 - p1`; the upper end is
    analogous.

    Args:
        pairs (tuples of two arrays of shape `(P,)` or `(P, K)`): pass@k of the baseline and of the candidate for each
            problem (and k), per benchmark.
        confidence (`float`): Coverage of the interval.

    Returns and raises as [`pass_interval`]; raises a `ValueError` if the shapes of a pair differ.
    """
    arrays = [[np.asarray(values, dtype=np.float64) for values in pair] for pair in pairs]
    products = []  # of the deviations from the mean: of both, of the baseline, of the candidate
    for baseline, candidate in arrays:
        if baseline.shape != candidate.shape:
            raise ValueError(f"Pairs need the same problems, got shapes {baseline.shape} and {candidate.shape}.")
        x, y = (values - values.mean(axis=0) for values in (baseline, candidate))
        products.append([(a * b).sum(axis=0) / len(x) ** 2 for a, b in ((x, y), (x, x), (y, y))])
    first, second = (pass_interval(*which, confidence=confidence) for which in zip(*arrays, strict=True))
    covariance, first_variance, second_variance = np.sum(products, axis=0)
    spread = np.sqrt(first_variance * second_variance)
    # A smaller spread is rounding: the correlation is 0.
    r = np.divide(covariance, spread, out=np.zeros_like(covariance), where=spread > 1e-25)
    r = np.clip(r, -1, 1)

    def distance(a, b):
        return np.sqrt(np.maximum(a**2 - 2 * r * a * b + b**2, 0))

    mean = second.mean - first.mean
    lower = mean - distance(second.mean - second.lower, first.upper - first.mean)
    upper = mean + distance(second.upper - second.mean, first.mean - first.lower)
    return Interval(float(mean), float(lower), float(upper)) if np.ndim(mean) == 0 else Interval(mean, lower, upper)


def _as_counts(name: str, counts) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.size and not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"{name} counts samples and must be integers, got dtype {counts.dtype}.")
    return counts.astype(np.int64)

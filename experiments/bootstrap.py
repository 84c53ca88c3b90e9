"""Percentile bootstrap intervals over problems, for values that are not shares, such as distances.

Their coverage is too low with few problems (docs/evaluation.md): use `pass_interval` and `paired_interval` of
`pacs_trl.evaluation` for pass@k.
"""

import numpy as np

from pacs_trl.evaluation import Interval
from pacs_trl.report.tables import Measured


def bootstrap_interval(values, *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0) -> Interval:
    """
    Mean over problems with a percentile bootstrap interval over problems.

    Args:
        values (array of shape `(P,)` or `(P, K)`): One value per problem (and per k).
        confidence (`float`): Coverage of the interval, in (0, 1).
        num_resamples (`int`), seed (`int`): Of the resampling; the same seed draws the same problems for every column.

    Returns:
        [`Interval`] of floats, or of arrays of shape `(K,)`. With one problem the interval has no width.
    """
    values = np.asarray(values, dtype=np.float64)
    num_problems = values.shape[0]
    draws = np.random.default_rng(seed).integers(0, num_problems, size=(num_resamples, num_problems))
    # as multiplicities, so that memory is num_resamples * P and one matrix product does the rest
    flat = draws + num_problems * np.arange(num_resamples)[:, None]
    multiplicities = np.bincount(flat.ravel(), minlength=num_resamples * num_problems)
    means = multiplicities.reshape(num_resamples, num_problems) @ values / num_problems
    lower, upper = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    mean = values.mean(axis=0)
    return Interval(float(mean), float(lower), float(upper)) if values.ndim == 1 else Interval(mean, lower, upper)


def bounds(cell: Measured) -> tuple[float, float]:
    """Return the bounds of a value that has an interval."""
    assert cell.lower is not None and cell.upper is not None
    return cell.lower, cell.upper


def paired_bootstrap(baseline, candidate, **options) -> Interval:
    """Return the [`bootstrap_interval`] of `mean(candidate) - mean(baseline)` on the same problems."""
    return bootstrap_interval(np.subtract(candidate, baseline), **options)

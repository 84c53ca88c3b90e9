"""Support measures of "The Invisible Leash" (arXiv 2507.14843): problems that tuning keeps, gains and loses.

A problem is in the empirical support of a model if at least one of n samples is correct; with n samples an answer of
probability above -ln(0.05)/n is found with 95 % certainty, so both models need the same n.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


# Chance of missing an answer that lies exactly on the support threshold (zeta of the paper).
MISS_PROBABILITY = 0.05


class Support(NamedTuple):
    """
    Problems by support in the base and the tuned model, and the ratios of the paper; a ratio without a denominator is
    nan.

    - `preserved` (P), `expanded` (E, tuned only), `shrunk` (S, base only), `out_of_support` (O): counts of problems.
    - `retention`: support retention rate P / (P + S).
    - `discovery`: net discovery rate E / (P + E).
    - `discovery_score`: support dynamic score, the harmonic mean of the two.
    - `net_change`: net support change rate (E - S) / (P + E + S), in [-1, 1].
    - `threshold`: answers at least this probable count as supported with 95 % certainty.
    """

    preserved: int
    expanded: int
    shrunk: int
    out_of_support: int
    retention: float
    discovery: float
    discovery_score: float
    net_change: float
    threshold: float


def support(base_correct, tuned_correct, num_samples: int) -> Support:
    """
    Compare two models problem by problem: their correct samples per problem, int `(P,)` in the same order, of
    `num_samples` each.
    """
    base, tuned = np.asarray(base_correct) > 0, np.asarray(tuned_correct) > 0
    p, e = int((base & tuned).sum()), int((~base & tuned).sum())
    s, o = int((base & ~tuned).sum()), int((~base & ~tuned).sum())
    retention, discovery = _ratio(p, p + s), _ratio(e, p + e)
    return Support(
        preserved=p,
        expanded=e,
        shrunk=s,
        out_of_support=o,
        retention=retention,
        discovery=discovery,
        discovery_score=_ratio(2 * p * e, p * p + 2 * p * e + e * s),
        net_change=_ratio(e - s, p + e + s),
        threshold=-math.log(MISS_PROBABILITY) / num_samples,
    )


def answer_entropy(answers: Sequence[Hashable]) -> float:
    """
    Entropy in nats of the final answers of one problem (at least one), `-sum_j f_j/N ln(f_j/N)`, in [0, ln N]; a
    missing one (`None`) counts as an answer of its own.
    """
    # In one order, or the last digit would tell which sample an engine has finished first.
    shares = np.array(sorted(Counter(answers).values())) / len(answers)
    return float(-(shares * np.log(shares)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan

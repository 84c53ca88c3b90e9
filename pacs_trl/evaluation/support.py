"""Answer entropy, and the support measures of "The Invisible Leash" (arXiv 2507.14843).

A problem is in the empirical support of a model if at least one of its n samples is correct.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Support(NamedTuple):
    """
    Numbers of problems by support in the base and the tuned model, and the ratios of the paper, nan without a
    denominator.

    - `preserved` (P) in both, `expanded` (E) in the tuned model only, `shrunk` (S) in the base model only,
      `out_of_support` in neither.
    - `retention`: support retention rate P / (P + S).
    - `discovery`: net discovery rate E / (P + E).
    - `discovery_score`: support dynamic score, the harmonic mean of the two.
    - `net_change`: net support change rate (E - S) / (P + E + S), in [-1, 1].
    """

    preserved: int
    expanded: int
    shrunk: int
    out_of_support: int
    retention: float
    discovery: float
    discovery_score: float
    net_change: float


def support(base_correct, tuned_correct) -> Support:
    """Compare the numbers of correct samples of two models, int `(P,)` on the same problems with equal n."""
    base, tuned = np.asarray(base_correct) > 0, np.asarray(tuned_correct) > 0
    p, e = int((base & tuned).sum()), int((~base & tuned).sum())
    s, o = int((base & ~tuned).sum()), int((~base & ~tuned).sum())

    def ratio(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator else math.nan

    score = ratio(2 * p * e, p * p + 2 * p * e + e * s)
    return Support(p, e, s, o, ratio(p, p + s), ratio(e, p + e), score, ratio(e - s, p + e + s))


def answer_entropy(answers: Sequence[Hashable]) -> float:
    """Return the entropy in nats of the final answers of one problem (at least one), in [0, ln N]; a missing answer
    (`None`) counts as an answer."""
    # sorted, so that the last digit does not depend on the order in which samples finish
    shares = np.array(sorted(Counter(answers).values())) / len(answers)
    return float(-(shares * np.log(shares)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0

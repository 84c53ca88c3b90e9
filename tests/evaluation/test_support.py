"""Support measures and answer entropies against the published table and hand-worked cases."""

import math

import pytest

from pacs_trl.evaluation.support import answer_entropy, support


def from_counts(preserved, expanded, shrunk, out):
    base = [1] * preserved + [0] * expanded + [2] * shrunk + [0] * out
    tuned = [3] * preserved + [1] * expanded + [0] * shrunk + [0] * out
    return support(base, tuned)


def test_worked_by_hand():
    # Five problems: two kept, one gained, one lost, one never solved.
    result = support([4, 1, 0, 2, 0], [8, 2, 1, 0, 0])
    assert result[:4] == (2, 1, 1, 1)
    assert result.retention == pytest.approx(2 / 3)
    assert result.discovery == pytest.approx(1 / 3)
    assert result.discovery_score == pytest.approx(2 / (3 / 2 + 3))  # harmonic mean of 2/3 and 1/3
    assert result.net_change == 0.0
    # Four kept, three gained, one lost.
    result = from_counts(4, 3, 1, 2)
    assert result[4:8] == pytest.approx((4 / 5, 3 / 7, 2 / (5 / 4 + 7 / 3), 2 / 8))


@pytest.mark.parametrize(
    ("counts", "retention", "discovery", "net_change"),
    [
        # ProRL-1.5B-v1, v2, Nemotron-7B and Skywork-OR1-7B of arXiv 2507.14843, to the digits printed there.
        ((2400, 36, 163, 805), 0.94, 0.01, -0.05),
        ((2388, 48, 175, 793), 0.93, 0.02, -0.05),
        ((2715, 28, 56, 605), 0.98, 0.01, -0.01),
        ((2685, 26, 86, 607), 0.97, 0.01, -0.02),
    ],
)
def test_published_table(counts, retention, discovery, net_change):
    result = from_counts(*counts)
    assert result[:4] == counts
    printed = tuple(round(value, 2) for value in (result.retention, result.discovery, result.net_change))
    assert printed == (retention, discovery, net_change)
    p, e, s, _ = counts
    assert result.discovery_score == pytest.approx(2 * p * e / (p * p + 2 * p * e + e * s), rel=1e-12)


def test_ratios_without_a_denominator_are_nan():
    result = support([0, 0], [0, 0])
    assert result.out_of_support == 2
    assert all(math.isnan(value) for value in result[4:8])


def test_answer_entropy():
    assert answer_entropy(["7"] * 5) == 0.0
    # Shares 1/2, 1/4, 1/4; a missing answer is an answer.
    assert answer_entropy(["7", "7", "8", None]) == pytest.approx(1.5 * math.log(2))
    assert answer_entropy(list(range(32))) == pytest.approx(math.log(32))
    answers = ["7", "8", *["9"] * 5]  # whose sum has another last digit in another order
    assert len({answer_entropy(order) for order in (answers, answers[::-1], answers[1:] + answers[:1])}) == 1

"""Schedules of DARS: the authors' vectors, cases on paper, soft labels, budgets."""

import json
import math
from pathlib import Path

import pytest

from pacs_trl.experimental.dars import additional_completions, within_budget


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "dars_vectors.json").read_text())
NAMES = {"ET": "equal_treatment", "HW": "hardness_weighted"}
EQUAL = {"schedule": "equal_treatment", "max_generations": 32}
WEIGHTED = {"schedule": "hardness_weighted", "max_generations": 64}


def test_numbers_equal_those_of_the_authors_code():
    for vector in VECTORS:
        kinds = {"max_generations": vector["max_generations"], "use_std": vector["use_std"]}
        additional = [
            additional_completions(k, vector["num_generations"], schedule=NAMES[vector["schedule"]], **kinds)
            for k in range(vector["num_generations"] + 1)
        ]
        assert additional == vector["additional"], vector
    assert len(VECTORS) == 16


def test_numbers_equal_those_worked_by_hand():
    # N = 8, one right: u = 1/8, S = 2 * 1/8 * 7/8 = 7/32, N S = 7/4, P = 4: (4 - 7/4) / (7/32) = 10.3
    assert additional_completions(1, 8, **EQUAL) == 11
    # 2 (1 - u) P = 7: (7 - 7/4) / (7/32) = 24, exactly
    assert additional_completions(1, 8, **WEIGHTED) == 24
    # N = 12, one right, hardness weighted: N (1 / (2 u) - 1) = 12 * 5 = 60, whatever rounding makes of it
    assert additional_completions(1, 12, schedule="hardness_weighted", max_generations=100) == 60
    assert [additional_completions(k, 6, schedule="hardness_weighted", max_generations=99) for k in (1, 2)] == [12, 3]


@pytest.mark.parametrize("schedule", [EQUAL, WEIGHTED], ids=["ET", "HW"])
def test_soft_labels_ask_for_less_the_higher_their_sum(schedule):
    sums = [0.0, 1e-7, 1e-3, 0.3, 0.5, 0.9, 1.0, 1.7, 2.0, 3.99, 4.0, 7.5]
    additional = [additional_completions(total, 8, **schedule) for total in sums]
    assert additional == sorted(additional, reverse=True) and additional[-2:] == [0, 0]
    # a sum below one half counts as one half, which is what the authors' code takes for 0
    assert len(set(additional[:5])) == 1


@pytest.mark.parametrize("num_correct", [-0.1, 8.5, math.nan])
def test_impossible_numbers_of_correct_completions_are_refused(num_correct):
    with pytest.raises(ValueError, match="num_correct"):
        additional_completions(num_correct, 8, **EQUAL)


def test_budget_goes_to_the_hardest_first():
    wanted, hardness = [3, 24, 0, 24, 11], [6, 8, 0, 8, 7]
    assert within_budget(wanted, hardness, None) == wanted
    assert within_budget(wanted, hardness, 30) == [0, 24, 0, 6, 0]
    assert within_budget(wanted, hardness, 60) == [1, 24, 0, 24, 11]
    assert within_budget(wanted, hardness, 1000) == wanted
    assert within_budget([], [], 5) == []

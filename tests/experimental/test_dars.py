"""Schedules of DARS: the authors' vectors, cases on paper, soft labels, budgets."""

import json
import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from pacs_trl.experimental.dars import additional_completions, within_budget
from pacs_trl.objective import proxy_coefficients


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "dars_vectors.json").read_text())
NAMES = {"ET": "equal_treatment", "HW": "hardness_weighted"}
EQUAL = {"schedule": "equal_treatment", "max_generations": 32}
WEIGHTED = {"schedule": "hardness_weighted", "max_generations": 64}


def test_vectors_of_the_authors_code():
    for vector in VECTORS:
        kinds = {"max_generations": vector["max_generations"], "use_std": vector["use_std"]}
        found = [
            additional_completions(k, vector["num_generations"], schedule=NAMES[vector["schedule"]], **kinds)
            for k in range(vector["num_generations"] + 1)
        ]
        assert found == vector["additional"], vector
    assert len(VECTORS) == 16


def test_on_paper():
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
    found = [additional_completions(total, 8, **schedule) for total in sums]
    assert found == sorted(found, reverse=True) and found[-2:] == [0, 0]
    # a sum below one half counts as one half, which is what the authors' code takes for 0
    assert len(set(found[:5])) == 1


@pytest.mark.parametrize("num_correct", [-0.1, 8.5, math.nan])
def test_more_right_ones_than_completions(num_correct):
    with pytest.raises(ValueError, match="num_correct"):
        additional_completions(num_correct, 8, **EQUAL)


def test_budget_goes_to_the_hardest_first():
    wanted, hardness = [3, 24, 0, 24, 11], [6, 8, 0, 8, 7]
    assert within_budget(wanted, hardness, None) == wanted
    assert within_budget(wanted, hardness, 30) == [0, 24, 0, 6, 0]
    assert within_budget(wanted, hardness, 60) == [1, 24, 0, 24, 11]
    assert within_budget(wanted, hardness, 1000) == wanted
    assert within_budget([], [], 5) == []


@lru_cache
def group_weight(right: int, size: int, weighting: str) -> float:
    """Sum of the absolute coefficients of a group at proxy 0, times the number of completions that the loss is divided
    by."""
    labels = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    found = proxy_coefficients(0 * labels, labels, num_generations=size, class_weighting=weighting)
    return size * found.abs().sum().item()


def expectations(rate: float, schedule: dict | None) -> dict[str, float]:
    """Of a prompt with a success rate, exactly: completions, share of mixed groups, mean label, weight of its
    group."""
    found = dict.fromkeys(("completions", "mixed", "label", "none", "balanced"), 0.0)
    for first in range(9):
        more = additional_completions(first, 8, **schedule) if schedule else 0
        for second in range(more + 1):
            right, size = first + second, 8 + more
            ways = math.comb(8, first) * math.comb(more, second)
            chance = ways * rate**right * (1 - rate) ** (size - right)
            found["completions"] += chance * size
            found["mixed"] += chance * (0 < right < size)
            found["label"] += chance * right / size
            for weighting in ("none", "balanced"):
                found[weighting] += chance * group_weight(right, size, weighting)
    return found


def test_the_table_of_the_docs():
    """Group sizes that depend on the first outcomes: what they cost, what they find, and their bias."""
    text = (Path(__file__).parents[2] / "docs" / "adaptive_rollouts.md").read_text()
    for denominator in (64, 8, 2):
        rate = 1 / denominator
        for name, schedule in (("off", None), ("equal_treatment", EQUAL), ("hardness_weighted", WEIGHTED)):
            found = expectations(rate, schedule)
            same = round(found["completions"])
            fixed = 1 - (1 - rate) ** same - rate**same
            cells = [f"1/{denominator}", name, f"{found['completions']:.1f}", f"{found['mixed']:.0%}", f"{fixed:.0%}"]
            cells += [f"{found['label'] / rate:.2f}", f"{found['none']:.2f}", f"{found['balanced']:.2f}"]
            assert f"| {' | '.join(cells).replace('%', ' %')} |" in text, cells
    rates = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
    for weighting in ("none", "balanced"):
        cells = [f"{expectations(rate, EQUAL)[weighting]:.2f}" for rate in rates]
        assert f"| `equal_treatment`, `{weighting}` | {' | '.join(cells)} |" in text
    plain = [expectations(rate, None)["none"] for rate in rates]
    assert plain == pytest.approx([0.9375, 1.75, 3.0, 4.0], rel=1e-6)  # 2 N p (1 - p)
    evenly = [expectations((i + 0.5) / 500, schedule) for schedule in (None, EQUAL) for i in range(500)]
    plain, equal = evenly[:500], evenly[500:]
    ratio = sum(each["completions"] for each in equal) / sum(each["completions"] for each in plain)
    mixed = [sum(each["mixed"] for each in half) / 500 for half in (plain, equal)]
    assert (f"{ratio:.2f}", [f"{share:.2f}" for share in mixed]) == ("1.54", ["0.78", "0.86"])
    assert "54 % more" in text and "86 % instead of 78 %" in " ".join(text.split())

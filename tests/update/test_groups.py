"""Groups of different sizes: results of rows equal those of each group computed alone, wherever its rows lie."""

import math

import pytest
import torch
from support.seeds import shifted

from pacs_trl.objective import actor_coefficients, class_weights, group_scores, loss_from_proxies, proxy_coefficients
from pacs_trl.update.groups import Groups
from pacs_trl.update.minibatch import split_into_minibatches
from pacs_trl.update.rollout import Rollout


NAN = math.nan
SIZES = [4, 1, 9, 2, 3, 5, 8, 6, 7, 2]


def ragged_case(seed: int = 0):
    """Proxies, labels and groups of rows in random order: all sizes from 1 to 9, a group of one class, one without
    verdicts."""
    generator = torch.Generator().manual_seed(shifted(seed))
    group_of_rollout = [group for group, size in enumerate(SIZES) for _ in range(size)]
    shuffled = torch.randperm(len(group_of_rollout), generator=generator).tolist()
    group_of_rollout = [100 + group_of_rollout[i] for i in shuffled]  # numbers need not begin at 0
    proxies = torch.randn(len(group_of_rollout), generator=generator, dtype=torch.float64)
    labels = (torch.rand(len(group_of_rollout), generator=generator) < 0.5).double()
    labels[torch.rand(len(group_of_rollout), generator=generator) < 0.2] = NAN
    groups = torch.tensor(group_of_rollout)
    labels[groups == 102] = 1.0
    labels[groups == 104] = NAN
    return proxies, labels, group_of_rollout


def test_groups_of_any_order_are_scored_as_worked_by_hand():
    """Group 7 has rows 0, 2 and 4, group 3 has row 1, group 9 has rows 3 and 5, and row 4 has no verdict."""
    groups = Groups(torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0]), [7, 3, 7, 9, 7, 9])
    assert groups.members == [[0, 2, 4], [1], [3, 5]] and groups.size == 3
    assert groups.scorable.tolist() == [True, False, True, True, False, True]
    assert groups.has_scorable.tolist() == [True, False, True] and groups.mixed.tolist() == [True, False, False]
    assert groups.expand(groups.mixed).tolist() == [True, False, True, False, True, False]
    # group 7: 3 - 1 and back; group 3 has nothing to compare with; group 9: 6 - 4 and back
    scores = groups.apply(group_scores, torch.tensor([3.0, 9.0, 1.0, 6.0, 50.0, 4.0]), score_estimator="rloo")
    assert scores.tolist() == [2.0, 0.0, -2.0, 2.0, 0.0, -2.0]
    weights, targets = groups.apply(class_weights, class_weighting="balanced")
    assert weights.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0] and targets.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("labels", [[1.0], [NAN, NAN], []])
def test_groups_with_nothing_to_compare_have_no_loss(labels):
    labels = torch.tensor(labels)
    groups = Groups(labels, range(len(labels)))
    loss, scores = groups.apply(loss_from_proxies, torch.ones(len(labels)))
    assert (
        loss == 0 and scores.tolist() == [0.0] * len(labels) and not groups.scorable.any() and not groups.mixed.any()
    )


KINDS = [
    {"score_estimator": estimator, "class_weighting": weighting}
    for estimator in ("rloo", "dr_grpo", "grpo", "none")
    for weighting in ("balanced", "none", "only_positive", "only_negative")
]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_every_row_gets_what_its_group_alone_would_give_it(kinds):
    proxies, labels, group_of_rollout = ragged_case()
    groups = Groups(labels, group_of_rollout)
    assert [len(rows) for rows in groups.members] != SIZES  # the groups lie mixed up
    coefficients = groups.apply(proxy_coefficients, proxies, **kinds)
    loss, scores = groups.apply(loss_from_proxies, proxies, **kinds)
    weighting = {"class_weighting": kinds["class_weighting"]}
    actor = groups.apply(actor_coefficients, scores, **weighting)
    total, num_completions = 0.0, groups.scorable.sum().item()
    for rows in groups.members:
        counted = [row for row in rows if not labels[row].isnan()]
        missing = [row for row in rows if row not in counted]
        if len(counted) < 2:
            missing, counted = rows, []
        assert (coefficients[missing] == 0).all() and (scores[missing] == 0).all() and (actor[missing] == 0).all()
        if not counted:
            continue
        alone = {"num_generations": len(counted), **kinds}
        share = len(counted) / num_completions
        group_loss, scores_of_group = loss_from_proxies(proxies[counted], labels[counted], **alone)
        total += group_loss.item() * share
        expected = proxy_coefficients(proxies[counted], labels[counted], **alone) * share
        torch.testing.assert_close(coefficients[counted], expected)
        torch.testing.assert_close(scores[counted], scores_of_group)
        group_actor = actor_coefficients(scores_of_group, labels[counted], num_generations=len(counted), **weighting)
        torch.testing.assert_close(actor[counted], group_actor * share)
    assert loss.item() == pytest.approx(total, rel=1e-9)


def test_equal_sizes_change_no_bit():
    generator = torch.Generator().manual_seed(shifted(0))
    proxies, labels = torch.randn(24, generator=generator), (torch.rand(24, generator=generator) < 0.5).float()
    labels[5] = NAN
    groups = Groups(labels, [row // 4 for row in range(24)])
    for kinds in KINDS:
        plain = {"num_generations": 4, **kinds}
        loss_and_scores = groups.apply(loss_from_proxies, proxies, **kinds)
        assert all(map(torch.equal, loss_and_scores, loss_from_proxies(proxies, labels, **plain)))
        coefficients = groups.apply(proxy_coefficients, proxies, **kinds)
        assert torch.equal(coefficients, proxy_coefficients(proxies, labels, **plain))


def test_optimizer_steps_get_whole_groups():
    def steps_of(groups, num_steps):
        rows = [Rollout(None, None, None, 1.0, group) for group in groups]
        return [[row.group for row in step] for step in split_into_minibatches(rows, num_steps)]

    assert steps_of([4, 4, 5, 5, 6, 6, 7, 7], 2) == [[4, 4, 5, 5], [6, 6, 7, 7]]
    assert steps_of([1, 2, 2, 2, 3, 4, 4, 5], 2) == [[1, 2, 2, 2, 3], [4, 4, 5]]
    assert steps_of([1, 2, 1, 3, 1], 3) == [[1, 1, 1], [2], [3]]  # also rows that were drawn later


def test_shuffled_optimizer_steps_get_every_completion_once():
    def steps_of(seed):
        rows = [Rollout(None, None, None, float(i), i // 4) for i in range(16)]
        return [[int(row.label) for row in step] for step in split_into_minibatches(rows, 3, seed)]

    seed = shifted(0)
    steps = steps_of(seed)
    assert sorted(sum(steps, [])) == list(range(16)) and sorted(map(len, steps)) == [5, 5, 6]
    assert steps == steps_of(seed) and all(step == sorted(step) for step in steps)
    assert any(steps_of(seed + i) != steps for i in range(1, 9))

"""Rows without padding: nothing is lost on the way from TRL's tensors to a micro-batch and to a checkpoint."""

import math

import numpy as np
import torch

from pacs_trl.update.minibatch import collate, rollout_lengths
from pacs_trl.update.packing import PackedRollouts
from pacs_trl.update.rollout import Rollout, unpad_rollouts


def scored_batch(**more):
    return {
        "prompt_ids": torch.tensor([[0, 0, 5], [6, 7, 8]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[20, 21, 0], [30, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "labels": torch.tensor([1.0, float("nan")]),
        "groups": torch.tensor([7, 8]),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(3),
        **more,
    }


def test_padding_is_removed_on_both_sides():
    first, second = unpad_rollouts(scored_batch())
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([5], [20, 21])
    assert (second.prompt_ids.tolist(), second.completion_ids.tolist()) == ([6, 7, 8], [30])
    assert first.label == 1.0 and math.isnan(second.label)
    assert (first.group, second.group) == (7, 8)
    assert (first.advantage, second.advantage, first.generation_tokens) == (0.5, -0.5, 3.0)
    assert first.loss_mask.tolist() == [True, True] and first.loss_mask.dtype == bool
    assert first.prompt_ids.dtype == first.completion_ids.dtype == np.int32
    assert first.old_logps is None and first.ref_logps is None
    assert rollout_lengths([first, second, first], 0.5) == ([1, 3, 1], [2, 1, 2], [0, 1, 0], 0.5)


def test_tool_results_and_log_probabilities_of_the_engine():
    masked = {"tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}
    logps = torch.tensor([[-0.5, -2.0, 9.0], [-3.0, 9.0, 9.0]])
    rows = unpad_rollouts(scored_batch(sampling_per_token_logps=logps, **masked))
    assert rows[0].completion_ids.tolist() == [20, 21] and rows[0].loss_mask.tolist() == [True, False]
    assert [row.sampling_logps.tolist() for row in rows] == [[-0.5, -2.0], [-3.0]]
    assert collate(rows, [0, 1], torch.device("cpu")).sampling_logps[0].tolist() == [-0.5, -2.0]
    (without,) = collate(unpad_rollouts(scored_batch()), [0], torch.device("cpu")).sampling_logps.tolist()
    assert all(map(math.isnan, without))


def test_rows_of_a_prompt_share_it_however_they_were_drawn():
    """Plain, guided, and of several turns with tool results in between."""
    ids = lambda *numbers: np.array(numbers, dtype=np.int32)  # noqa: E731
    drawn = [(ids(5, 6), {}), (ids(5, 6), {"weight": 0.5}), (ids(5, 6), {"group": 1}), (ids(5, 7), {})]
    masks = [[True, True], [True, True], [True, False], [True, True]]
    rows = [Rollout(p, ids(8, 9), np.array(m), 1.0, **more) for (p, more), m in zip(drawn, masks, strict=True)]
    assert rollout_lengths(rows).prompt_numbers == [0, 0, 0, 1]
    packed = PackedRollouts([r.prompt_ids for r in rows], [r.completion_ids for r in rows])
    assert packed.blocks == [[2, 1, 1, 1], [3]]
